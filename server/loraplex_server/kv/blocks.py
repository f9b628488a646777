"""Pool of KV blocks with a prefix cache, and the blocks' content keys.

The pool knows nothing of requests or tensors: a block is a number. Block 0 is never handed out: kernels let padding
write there. A block without references is *clean* (not cached) or *idle* (cached, for prompts with the same beginning).
Clean ones are allocated first, the last released before the others, because its memory is warm. Then idle ones are
evicted, the least recently used first, and of one sequence the deepest first, because a block is found through the ones
before it.

Equal keys mean equal keys and values. A key is a SHA-256 chain over everything that a block's content depends on: the
tokens before it, its own tokens, the base model, the adapters in effect, and their tenant. Every field is
length-prefixed or of fixed width: two different inputs never have the same encoding.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loraplex_contracts.adapters import AdapterKey

TRASH_BLOCK_ID = 0
_LENGTH = struct.Struct("<Q")
_WEIGHT = struct.Struct("<d")


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
        """Number of blocks that `allocate` could hand out now, idle ones included."""
        return len(self._clean) + len(self._idle)

    @property
    def num_clean(self) -> int:
        """Number of free blocks that are not cached: taking them evicts nothing."""
        return len(self._clean)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_unheld(self, block_ids: Sequence[int]) -> int:
        """Number of these blocks without a reference: sharing them takes that many off `num_free`."""
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


@dataclass(frozen=True, slots=True)
class Namespace:
    """The part of a block's key besides tokens: whatever changes its content, and who may see it.

    `adapters` are those that change K or V at these tokens, with their weight in a mixture, in the order in which they
    are added up, from position `adapted_from` on. The salt is the client's own: prompts with different salts never
    share.
    """

    model_digest: str
    adapters: tuple[tuple[AdapterKey, float], ...] = ()
    tenant: str = ""
    cache_salt: str = ""
    adapted_from: int = 0
    rope: int = 0  # see RopeScaling.key

    def digest(self) -> bytes:
        parts = [b"loraplex kv namespace\x01", _field(self.model_digest), _LENGTH.pack(len(self.adapters))]
        for key, weight in self.adapters:
            parts += (_field(key.kind), _field(key.digest), _WEIGHT.pack(weight))
        parts += (_field(self.tenant), _field(self.cache_salt), _LENGTH.pack(self.adapted_from))
        if self.rope:
            parts.append(_LENGTH.pack(self.rope))
        return hashlib.sha256(b"".join(parts)).digest()


def _field(text: str) -> bytes:
    # surrogatepass: no string of a client's, however odd, may raise in here.
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data


class KeyChain:
    """The keys of one sequence's full blocks, made on demand and kept. The sequence owns it.

    The first `num_before` blocks, which an activated LoRA does not change, are in a namespace of their own.
    """

    __slots__ = ("_before", "_namespace", "_num_before", "_pack", "keys")

    def __init__(self, namespace: bytes, block_size: int, before: bytes = b"", num_before: int = 0) -> None:
        assert len(namespace) == 32
        assert len(before) == 32 or not num_before
        self._namespace = namespace
        self._before, self._num_before = before, num_before
        # Four bytes a token: a vocabulary beyond 2**32 does not exist, and fixed width leaves nothing to confuse.
        self._pack = struct.Struct(f"<{block_size}I")
        self.keys: list[bytes] = []

    def key(self, block_idx: int, token_ids: Sequence[int]) -> bytes:
        """The key of block `block_idx`, which `token_ids` (the sequence from its beginning) must fill."""
        keys, size = self.keys, self._pack.size // 4
        while len(keys) <= block_idx:
            start = len(keys) * size
            # The first block's parent is its block size: the same tokens in larger blocks are another content.
            parent = keys[-1] if keys else size.to_bytes(32, "little")
            namespace = self._before if len(keys) < self._num_before else self._namespace
            keys.append(block_key(parent, namespace, self._pack.pack(*token_ids[start : start + size])))
        return keys[block_idx]

    def fork(self, num_blocks: int) -> KeyChain:
        """A chain of its own that begins with the same `num_blocks` keys."""
        chain = KeyChain.__new__(KeyChain)
        chain._namespace, chain._pack, chain.keys = self._namespace, self._pack, self.keys[:num_blocks]
        chain._before, chain._num_before = self._before, self._num_before
        return chain


def block_key(parent: bytes, namespace: bytes, packed_tokens: bytes) -> bytes:
    """The key of a block behind `parent`. Parent and namespace are 32 bytes each, so the rest is the tokens."""
    return hashlib.sha256(parent + namespace + packed_tokens).digest()
