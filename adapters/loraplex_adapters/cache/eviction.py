"""Eviction of adapters from the device and the host."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection

from loraplex_adapters.cache.states import KeyRecord, KeyState
from loraplex_contracts.adapters import AdapterKey

Lru = OrderedDict[AdapterKey, KeyRecord]  # least recently used first

# Weights that were used within so many rounds are not evicted for a borrower. Otherwise five sets of heads in four
# slots would evict each other in every step, and an adapter would have to come back for its next request.
RECENT_ROUNDS = 64


def choose_device_evictions(
    residents: Lru,
    excess_bytes: int,
    excess_slots: int,
    now_round: int,
    is_borrow: bool,
    spared: Collection[AdapterKey],
) -> list[KeyRecord] | None:
    """The least recently used adapters that make room on the device for another one: as few as it takes.

    Never one that a running sequence uses, that the operator has pinned, or that is reserved for a request which
    waited for it, and none of the `spared`: members of mixtures that came before. For one that is only borrowed, never
    one used within the last RECENT_ROUNDS rounds either.
    None when all that may leave would not make the room; then nothing leaves, and the other one waits.
    """

    def may_leave(record: KeyRecord) -> bool:
        is_held = record.num_leases > 0 or bool(record.pinned_names) or record.reserved_rounds > 0
        is_held = is_held or record.key in spared
        return not is_held and (not is_borrow or now_round - record.used_round >= RECENT_ROUNDS)

    return _least_recently_used(residents, excess_bytes, excess_slots, may_leave)


def choose_host_evictions(hosted: Lru, excess_bytes: int, spared: Collection[object]) -> list[KeyRecord] | None:
    """The copies on the host that make room for another one. One that moves stays, and so do the `spared`: those that
    are wanted next."""

    def may_leave(record: KeyRecord) -> bool:
        return record.state in (KeyState.ON_HOST, KeyState.ON_DEVICE) and record.key not in spared

    return _least_recently_used(hosted, excess_bytes, 0, may_leave)


def _least_recently_used(
    lru: Lru, excess_bytes: int, excess_slots: int, may_leave: Callable[[KeyRecord], bool]
) -> list[KeyRecord] | None:
    chosen: list[KeyRecord] = []
    candidates = (record for record in lru.values() if may_leave(record))
    while excess_bytes > 0 or excess_slots > 0:
        record = next(candidates, None)
        if record is None:
            return None
        chosen.append(record)
        excess_bytes -= record.num_bytes
        excess_slots -= 1
    return chosen
