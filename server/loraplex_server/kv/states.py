"""State slots: places for the recurrent and convolution states of sequences.

A slot holds the states of all such layers after some number of tokens. It is accounted for as a KV block is: every
holder takes a reference, and what has a key and no holder (a snapshot, found by the key of the KV block that ends
where it was taken) is evicted when a slot is wanted, the least recently used first. Slot 0 is never handed out: it is
the state before a text, and stays zero. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

from loraplex_server.kv.blocks import BlockPool

NO_STATE = 0


class StatePool:
    """Owner of all state slots."""

    def __init__(self, num_slots: int) -> None:
        """`num_slots`: that can be handed out, numbered from 1. Raises ValueError below 1."""
        self.num_slots = num_slots
        self._slots = BlockPool(num_slots + 1, 1)

    @property
    def num_free(self) -> int:
        """Number of slots that `take` could hand out now, snapshots included."""
        return self._slots.num_free

    @property
    def num_snapshots(self) -> int:
        """Number of free slots that are snapshots, kept for prompts that begin alike."""
        return self._slots.num_free - self._slots.num_clean

    @property
    def num_evictions(self) -> int:
        return self._slots.num_evictions

    def num_unheld(self, slot: int) -> int:
        """1 for a snapshot without a holder: sharing it takes that off `num_free`; else 0."""
        return self._slots.num_unheld((slot,))

    def take(self) -> int:
        """A slot with one reference. The caller has checked `num_free`."""
        return self._slots.allocate(1)[0]

    def share(self, slot: int) -> None:
        """Takes one more reference: on a slot that has a holder, or that `find` has just returned."""
        self._slots.share((slot,))

    def release(self, slot: int) -> None:
        """Gives one reference back."""
        self._slots.release((slot,))

    def find(self, key: bytes) -> int | None:
        """The snapshot behind the block with this key. Takes no reference."""
        return self._slots.find(key)

    def publish(self, slot: int, key: bytes) -> None:
        """Makes a held slot, which nobody writes from here on, a snapshot. The first of two with one key stays."""
        self._slots.publish(slot, key)

    def check_integrity(self, held: Mapping[int, int] | None = None) -> None:
        """Raises AssertionError unless every slot is accounted for. `held`: references by slot (None: nobody's)."""
        self._slots.check_integrity(held)
