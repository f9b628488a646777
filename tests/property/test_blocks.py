"""The block pool against a model that keeps everything in plain sight."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loraplex_server.kv.blocks import BlockPool


class Pool(RuleBasedStateMachine):
    """Holders take chains of blocks, share what they find, publish what they filled, and leave."""

    @initialize(num_blocks=st.integers(2, 9), prefix_caching=st.booleans())
    def start(self, num_blocks: int, prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks, 4, prefix_caching=prefix_caching)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}  # what the block's last writer put there

    @rule(text=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def enter(self, text: list[int]) -> None:
        """Enters as a sequence does: takes over the longest known beginning, allocates and fills the rest."""
        keys = [bytes(text[: at + 1]) for at in range(len(text))]
        found: list[int] = []
        for key in keys:
            block_id = self.pool.find(key)
            if block_id is None:
                break
            assert self.content[block_id] == key, "a cached block was overwritten"
            found.append(block_id)
        num_new = len(keys) - len(found)
        if num_new + self.pool.num_unheld(found) > self.pool.num_free:
            return
        self.pool.share(found)
        new = self.pool.allocate(num_new)
        in_use = set().union(*self.holders)
        assert in_use.isdisjoint(new), "a block that is in use was handed out"
        for block_id, key in zip(new, keys[len(found) :], strict=True):
            self.content[block_id] = key
            self.pool.publish(block_id, key)
        self.holders.append(found + new)

    @precondition(lambda self: self.holders)
    @rule(at=st.integers(0, 99))
    def leave(self, at: int) -> None:
        self.pool.release(self.holders.pop(at % len(self.holders)))

    @invariant()
    def everything_is_accounted_for(self) -> None:
        if hasattr(self, "pool"):
            held = Counter(block_id for blocks in self.holders for block_id in blocks)
            self.pool.check_integrity(held)
            assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
