"""Who gives way: records in the order of use, and the choice of those whose room somebody else gets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from loraplex_adapters.cache.states import KeyRecord
from loraplex_adapters.key import AdapterKey

Lru = OrderedDict[AdapterKey, KeyRecord]  # least recently used first


def may_leave_device(record: KeyRecord) -> bool:
    """Nobody runs on it, keeps it or is about to take it."""
    return record.num_refs == 0 and not record.pinned_names and record.num_offers == 0


def choose_victims(
    lru: Lru, excess_bytes: int, excess_slots: int, may_go: Callable[[KeyRecord], bool]
) -> list[KeyRecord] | None:
    """The least recently used that make the room, or None when there are not enough of them."""
    victims: list[KeyRecord] = []
    candidates: Iterator[KeyRecord] = (record for record in lru.values() if may_go(record))
    while excess_bytes > 0 or excess_slots > 0:
        victim = next(candidates, None)
        if victim is None:
            return None
        victims.append(victim)
        excess_bytes -= victim.num_bytes
        excess_slots -= 1
    return victims
