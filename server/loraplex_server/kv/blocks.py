"""A pool of KV blocks: reference counts, free lists, prefix cache.

Knows nothing of requests or tensors: a block is a number. Block 0 is never handed out: kernels let padding write there.

A block without references is *clean* (not cached) or *idle* (cached, for prompts with the same beginning). Clean ones
are allocated first, the last released before the others, because its memory is warm. Then idle ones are evicted, the
least recently used first, and of one sequence the deepest first, because a block is found through the ones before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

TRASH_BLOCK_ID = 0


class BlockPool:
    """Owner of all blocks. Every holder takes one reference per block and releases exactly that."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"a KV cache of {num_blocks} blocks has none to give: block 0 is for padding")
        if block_size < 1:
            raise ValueError("a KV block holds at least one token")
        self.num_blocks = num_blocks - 1  # that can be handed out: ids 1 to num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_evictions = 0
        self._refs = [0] * num_blocks
        self._key_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._clean = list(range(num_blocks - 1, 0, -1))  # taken from the end
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out now, idle ones included."""
        return len(self._clean) + len(self._idle)

    @property
    def num_clean(self) -> int:
        """Free blocks that are not cached: taking them evicts nothing."""
        return len(self._clean)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """How many of these have no reference: sharing them takes that many off `num_free`."""
        refs = self._refs
        return sum(1 for block_id in block_ids if not refs[block_id])

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes `num_blocks` blocks with one reference each. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks wanted, {self.num_free} free"
        taken: list[int] = []
        for _ in range(num_blocks):
            if self._clean:
                block_id = self._clean.pop()
            else:
                block_id, _none = self._idle.popitem(last=False)
                self._forget(block_id)
                self.num_evictions += 1
            self._refs[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Sequence[int]) -> None:
        """Takes one more reference on each: blocks that someone holds, or that `find` has just returned."""
        for block_id in block_ids:
            if not self._refs[block_id]:
                del self._idle[block_id]
            self._refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives one reference on each back. In the order of the sequence, first block first."""
        for block_id in reversed(block_ids):
            refs = self._refs[block_id] - 1
            assert refs >= 0, f"block {block_id} was given back more often than taken"
            self._refs[block_id] = refs
            if refs == 0:
                if self._key_of[block_id] is None:
                    self._clean.append(block_id)
                else:
                    self._idle[block_id] = None

    def find(self, key: bytes) -> int | None:
        """The block with this content. Takes no reference: `share` it before anything else is allocated."""
        return self._block_of.get(key)

    def publish(self, block_id: int, key: bytes) -> None:
        """Lets a held, full block of committed tokens be found by its content. The first of two equal ones stays."""
        assert self._refs[block_id] > 0, f"block {block_id} is published by nobody"
        if self.prefix_caching and key not in self._block_of and self._key_of[block_id] is None:
            self._block_of[key] = block_id
            self._key_of[block_id] = key

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless every block is accounted for. `held`: references by block (None: nobody's)."""
        held = held or {}
        clean, idle = set(self._clean), set(self._idle)
        assert len(clean) == len(self._clean), "a block is in the free list twice"
        for block_id in range(1, self.num_blocks + 1):
            refs = self._refs[block_id]
            assert refs == held.get(block_id, 0), f"block {block_id}: {refs} references, {held.get(block_id, 0)} known"
            is_cached = self._key_of[block_id] is not None
            assert (block_id in clean) == (refs == 0 and not is_cached), f"block {block_id} leaked"
            assert (block_id in idle) == (refs == 0 and is_cached), f"cached block {block_id} leaked"
        assert TRASH_BLOCK_ID not in clean | idle, "the padding block was handed out"
        keys = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        assert {block_id: key for key, block_id in self._block_of.items()} == keys, "the prefix cache lost a block"

    def _forget(self, block_id: int) -> None:
        key = self._key_of[block_id]
        assert key is not None
        del self._block_of[key]
        self._key_of[block_id] = None
