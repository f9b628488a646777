"""State slots: references, snapshots and their eviction."""

from __future__ import annotations

from collections import Counter

import pytest

from loraplex_server.kv.states import NO_STATE, StatePool


def test_slots_are_counted() -> None:
    pool = StatePool(2)
    first, second = pool.take(), pool.take()
    assert {first, second} == {1, 2}
    assert NO_STATE not in (first, second)
    assert pool.num_free == 0
    pool.share(first)
    pool.release(first)
    assert pool.num_free == 0
    pool.release(first)
    assert pool.num_free == 1
    pool.check_integrity(Counter([second]))
    with pytest.raises(AssertionError, match="0 known"):
        pool.check_integrity()


def test_snapshots_go_when_a_slot_is_wanted() -> None:
    pool = StatePool(2)
    for key in (b"a", b"b"):
        slot = pool.take()
        pool.publish(slot, key)
        pool.release(slot)
    assert (pool.num_free, pool.num_snapshots) == (2, 2)
    found = pool.find(b"a")
    assert found is not None
    assert pool.num_unheld(found) == 1
    pool.share(found)
    assert pool.num_unheld(found) == 0
    assert pool.num_snapshots == 1
    taken = pool.take()
    assert taken != found
    assert pool.find(b"b") is None
    assert pool.find(b"a") == found
    assert pool.num_evictions == 1
    pool.check_integrity({found: 1, taken: 1})


def test_the_first_of_two_snapshots_stays() -> None:
    pool = StatePool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"a")
    pool.publish(second, b"a")
    assert pool.find(b"a") == first
    pool.release(second)
    pool.release(first)
    assert pool.take() == second, "what has no key goes first"


def test_at_least_one_slot() -> None:
    with pytest.raises(ValueError, match="none to give"):
        StatePool(0)
