"""Who gives way: records in the order of use, and the choice of those whose room somebody else gets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from loraplex_adapters.cache.states import KeyRecord
from loraplex_contracts.adapters import AdapterKey

Lru = OrderedDict[AdapterKey, KeyRecord]  # least recently used first


# What was used within so many rounds makes no way for what is only borrowed. Otherwise five sets of heads in four slots
# would push each other out in every step, and an adapter would have to come back for its next request.
LENDING_ROUNDS = 64


def may_leave_device(record: KeyRecord) -> bool:
    """Nobody runs on it, keeps it or is about to take it."""
    return record.num_refs == 0 and not record.pinned_names and record.num_offers == 0


def may_make_way(record: KeyRecord, now_round: int) -> bool:
    """For what is only borrowed."""
    return may_leave_device(record) and now_round - record.used_round >= LENDING_ROUNDS


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
