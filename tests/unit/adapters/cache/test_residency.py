"""The residency table, case by case (tests/property/test_adapter_table.py has the general laws)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.residency import bring_up, key_of, make_table, run_round

from loraplex_adapters.cache.residency import RESERVED_ROUNDS, ResidencyTable
from loraplex_adapters.cache.states import DropDevice, DropHost, KeyState, Promote, Refetch, Stage
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterMemoryFull,
    AdapterVersionNotFound,
    DiskFull,
    FailedPrecondition,
    LoraplexError,
    SourceUnavailable,
    adapter_not_found,
)

A, B, C, D = key_of(1), key_of(2), key_of(3), key_of(4)


def held(table: ResidencyTable, key: AdapterKey, num_bytes: int = 100) -> AdapterKey:
    """A key that is bound to a name and held by one request."""
    table.bind(key, f"name-{key.digest[-1]}", num_bytes, rank=4)
    table.hold(key)
    return key


def test_a_want_is_promoted_and_then_hit() -> None:
    table = make_table()
    held(table, A)
    assert table.acquire(A) is None
    assert table.is_due
    table.advance(0.0)
    assert table.moves == [Promote(A, 0)]
    assert table.acquire(A) is None  # still on its way; not wanted twice
    table.moves.clear()
    table.promoted(A)
    assert table.acquire(A) == 0
    assert (table.host_used, table.device_used) == (100, 100)


def with_a_want_that_waits() -> ResidencyTable:
    """A is on the device, and B, which does not fit beside it, is wanted."""
    table = make_table(device=300, num_slots=3)
    held(table, A, 200)
    bring_up(table, A)
    held(table, B, 250)
    assert table.acquire(B) is None
    return table


def test_wants_that_are_put_first_are_served_first() -> None:
    table = make_table(num_slots=1)
    for key in (A, B, C):
        held(table, key)
        assert table.acquire(key) is None
    table.put_first([C, B, key_of(9)])
    assert list(table.wants) == [C, A, B], "one slot: no more than one at a time"
    table.set_pinned(B, "name-2", True)
    table.put_first([C])
    assert list(table.wants) == [B, C, A]
    table.check_integrity()


def test_one_that_is_put_before_a_want_that_waits_is_served_at_once() -> None:
    table = with_a_want_that_waits()
    held(table, C, 50)
    assert table.acquire(C) is None
    table.advance(0.0)
    assert table.moves == [Stage(B)]  # under way
    table.moves.clear()
    table.put_first([B])
    assert not table.is_due
    table.put_first([C])
    assert table.is_due
    table.advance(0.0)
    assert table.moves == [Promote(C, 1)]


def test_a_want_that_is_put_before_a_mixture_is_served_at_once() -> None:
    """The first want is on its way; the mixture, which waits for it, keeps the slot of its other member."""
    table = make_table(num_slots=2)
    for key in (A, B, C):
        held(table, key)
    bring_up(table, A)
    table.release(A)
    assert table.acquire_all((A, B)) is None
    assert table.acquire(B) is None
    assert table.acquire(C) is None
    table.put_first([B])
    table.advance(0.0)
    assert table.moves == [Promote(B, 1), Stage(C)]
    table.moves.clear()
    table.staged(C)
    table.advance(0.0)
    assert not table.moves
    table.put_first([B, (A, B)])
    assert not table.is_due
    table.put_first([B, C])
    assert table.is_due
    table.advance(0.0)
    assert table.moves == [DropDevice(A, 0), Promote(C, 0)]


def test_a_mixture_is_leased_as_a_whole() -> None:
    table = make_table(num_slots=2)
    for key in (A, B, C):
        held(table, key)
    bring_up(table, C)
    assert table.acquire_all((A, B)) is None
    run_round(table)
    assert table.acquire_all((A, B)) is None, "one slot is leased"
    assert table.records[A].num_leases == table.records[B].num_leases == 0
    table.check_integrity()
    table.release(C)
    run_round(table)
    assert table.acquire_all((A, B)) == (table.records[A].slot, table.records[B].slot)
    assert not table.wants
    table.check_integrity()


def test_members_that_are_there_stay_for_the_others() -> None:
    table = make_table(num_slots=2)
    for key in (A, B, C):
        held(table, key)
    bring_up(table, A)
    bring_up(table, C)
    table.release(A)
    assert table.acquire_all((A, B)) is None
    held(table, D)
    assert table.acquire(D) is None  # behind the mixture: it takes no slot of a member
    run_round(table)
    assert table.records[A].state is KeyState.ON_DEVICE
    table.release(C)
    run_round(table)
    assert table.acquire_all((A, B)) is not None
    table.release(A)
    table.release(B)
    for key in (A, B, C, D):
        table.drop_hold(key)
    assert not table.wants
    table.check_integrity()


def test_a_mixture_that_never_fits() -> None:
    table = make_table(num_slots=2)
    for key in (A, B, C):
        held(table, key)
    assert isinstance(table.failure(A, B, C), AdapterMemoryFull)
    assert table.acquire_all((A, B, C)) is None
    assert not table.wants
    assert table.failure(A, B) is None
    table.set_pinned(C, "name-3", True)
    error = table.failure(A, B)
    assert isinstance(error, AdapterMemoryFull)
    assert "and slots for 1; unload one of these" in error.message, "not bytes are missing"
    assert table.failure(A, C) is None


def test_the_least_recently_used_goes_and_its_host_copy_stays() -> None:
    table = make_table()
    for key in (A, B):
        held(table, key)
        bring_up(table, key)
        table.release(key)
    bring_slot = table.acquire(A)  # A is used again: B is older now
    assert bring_slot is not None
    table.release(A)
    held(table, C)
    assert table.acquire(C) is None
    moves = run_round(table)
    assert [type(move) for move in moves] == [DropDevice, Promote]
    assert moves[0] == DropDevice(B, 1)
    assert table.records[B].state is KeyState.ON_HOST
    assert table.device_evictions == 1
    # Coming back needs no disk.
    table.drop_hold(C)
    assert table.acquire(B) is None
    assert [type(move) for move in run_round(table)] == [DropDevice, Promote]
    assert table.acquire(B) is not None


def test_referenced_weights_stay_and_wants_keep_their_order() -> None:
    table = make_table(num_slots=1)
    held(table, A)
    bring_up(table, A)
    held(table, B)
    held(table, C)
    assert table.acquire(B) is None
    assert table.acquire(C) is None
    for _ in range(5):
        moves = run_round(table)
        assert not any(isinstance(move, Promote | DropDevice) for move in moves)
    assert list(table.wants) == [B, C]
    table.release(A)
    assert table.is_due  # an idle engine must look again
    assert run_round(table)[:2] == [DropDevice(A, 0), Promote(B, 0)]
    assert table.acquire(C) is None
    assert table.acquire(B) == 0


def test_a_want_that_waits_is_staged_meanwhile() -> None:
    table = make_table(num_slots=1)
    held(table, A)
    bring_up(table, A)
    held(table, B)
    assert table.acquire(B) is None
    assert run_round(table) == [Stage(B)]
    assert table.records[B].state is KeyState.ON_HOST


def test_nobody_overtakes_a_large_want() -> None:
    table = make_table(device=300, num_slots=3)
    held(table, A, 200)
    bring_up(table, A)
    held(table, B, 250)
    held(table, C, 50)
    assert table.acquire(B) is None
    assert table.acquire(C) is None  # would fit beside A, but came later
    assert not any(isinstance(move, Promote) for move in run_round(table))
    table.release(A)
    assert [m for m in run_round(table) if isinstance(m, Promote)] == [Promote(B, 0), Promote(C, 1)]


def test_nobody_overtakes_a_want_while_it_is_staged() -> None:
    table = make_table(device=300, num_slots=3)
    held(table, A, 200)
    bring_up(table, A)
    held(table, B, 250)
    held(table, C, 50)
    assert table.acquire(B) is None
    table.advance(0.0)
    assert table.moves == [Stage(B)]  # under way
    table.moves.clear()
    assert table.acquire(C) is None
    table.advance(0.0)
    assert table.moves == []
    assert not table.is_due  # its end will wake the engine
    table.release(A)
    table.staged(B)
    table.advance(0.0)
    assert [m for m in table.moves if isinstance(m, Promote)] == [Promote(B, 0), Promote(C, 1)]


def test_a_withdrawn_want_frees_the_queue() -> None:
    table = with_a_want_that_waits()
    held(table, C, 50)
    assert table.acquire(C) is None
    table.drop_hold(B)
    assert [m for m in run_round(table) if isinstance(m, Promote)] == [Promote(C, 1)]


def test_a_withdrawn_want_lets_prefetches_go_on() -> None:
    table = with_a_want_that_waits()
    table.bind(C, "c", 50, 4)
    table.prefetch(C)
    table.advance(0.0)
    assert table.moves == [Stage(B)]  # under way
    table.moves.clear()
    assert not table.is_due
    table.drop_hold(B)
    assert table.is_due
    table.advance(0.0)
    assert table.moves == [Promote(C, 1)]


def test_two_wants_for_one_slot_do_not_push_each_other_out() -> None:
    table = make_table(num_slots=1)
    held(table, A)
    held(table, B)
    assert table.acquire(A) is None
    assert table.acquire(B) is None
    run_round(table)
    for _ in range(3):
        run_round(table)
        assert table.records[A].state is KeyState.ON_DEVICE
    assert table.is_due  # the engine keeps turning while an offer runs
    assert table.acquire(A) == 0


def test_an_offer_that_nobody_takes_ends() -> None:
    table = make_table(num_slots=1)
    held(table, A)
    held(table, B)
    assert table.acquire(A) is None
    assert table.acquire(B) is None
    for _ in range(RESERVED_ROUNDS + 2):
        run_round(table)
    assert table.records[B].state is KeyState.ON_DEVICE
    assert table.records[A].state is KeyState.ON_HOST


def test_what_later_wants_staged_does_not_block_the_first() -> None:
    table = make_table(host=100, num_slots=1)
    held(table, A)
    assert table.acquire(A) is None
    table.advance(0.0)
    table.moves.clear()
    table.lost(A, 0.0)  # the disk had dropped it
    [fetch] = table.refetches
    assert (fetch.key, fetch.name) == (A, "name-1")
    held(table, C)
    bring_up(table, C)
    held(table, B)
    assert table.acquire(B) is None
    assert Stage(B) in run_round(table)  # waits for the slot; its copy fills the host
    table.refetched(fetch, A, 0.0)
    table.release(C)
    assert Promote(A, 0) in run_round(table)


def test_larger_than_the_device_is_a_failure_and_never_a_want() -> None:
    table = make_table(device=300)
    held(table, A, 301)
    assert isinstance(table.failure(A), AdapterMemoryFull)
    assert table.acquire(A) is None
    assert run_round(table) == []
    held(table, B, 300)
    assert table.failure(B) is None


def test_larger_than_the_host_is_a_failure_too() -> None:
    table = make_table(host=100, device=300)
    held(table, A, 101)
    assert isinstance(table.failure(A), AdapterMemoryFull)


def test_pinned_adapters_stay_and_their_room_is_gone_for_others() -> None:
    table = make_table(device=300, num_slots=2)
    table.bind(A, "a", 200, 4)
    table.set_pinned(A, "a", True)
    assert run_round(table) == [Promote(A, 0)]
    assert not table.can_pin(B, 101)
    assert table.can_pin(B, 100)
    held(table, B, 101)
    error = table.failure(B)
    assert isinstance(error, AdapterMemoryFull)
    assert "pinned adapters leave 100 bytes and slots for 1" in error.message
    assert error.resource is None, "each of its names may be another tenant's"
    held(table, C, 100)
    assert table.failure(C) is None
    bring_up(table, C)
    assert table.records[A].state is KeyState.ON_DEVICE
    table.set_pinned(A, "a", False)
    assert table.failure(B) is None


def test_unloading_frees_at_once_when_nobody_holds_it() -> None:
    table = make_table()
    table.bind(A, "a", 100, 4)
    table.prefetch(A)
    run_round(table)
    table.unbind(A, "a")
    assert table.moves == [DropDevice(A, 0), DropHost(A)]
    assert A not in table.records
    assert (table.host_used, table.device_used) == (0, 0)
    table.check_integrity()


def test_unloading_while_in_use_drains() -> None:
    table = make_table()
    held(table, A)
    bring_up(table, A)
    table.unbind(A, "name-1")
    assert table.records[A].state is KeyState.ON_DEVICE
    table.release(A)
    assert A in table.records  # the request still holds it
    table.drop_hold(A)
    assert A not in table.records
    assert table.device_used == 0


def test_a_prefetch_pushes_nobody_out() -> None:
    table = make_table(num_slots=1)
    held(table, A)
    bring_up(table, A)
    table.release(A)
    table.bind(B, "b", 100, 4)
    table.prefetch(B)
    assert run_round(table) == [Stage(B)]
    assert table.is_settled(B)
    assert table.records[A].state is KeyState.ON_DEVICE


def test_a_failed_move_gives_everything_back_and_is_forgotten_in_time() -> None:
    table = make_table()
    held(table, A)
    assert table.acquire(A) is None
    table.advance(0.0)
    table.moves.clear()
    error = SourceUnavailable("no")
    table.failed(A, error, now=5.0)
    table.check_integrity()
    assert table.failure(A) is error
    assert (table.host_used, table.device_used) == (0, 0)
    assert table.moves == [DropHost(A)]
    assert table.acquire(A) is None
    assert not list(table.wants)
    run_round(table, now=14.9)
    assert table.failure(A) is error
    run_round(table, now=15.0)
    assert table.failure(A) is None
    bring_up(table, A)


def test_a_failed_move_is_tried_again_when_it_says_so() -> None:
    table = make_table()
    held(table, A)
    table.acquire(A)
    table.advance(0.0)
    table.moves.clear()
    table.failed(A, AdapterMemoryFull("no memory", retry_after_s=5.0), now=0.0)
    run_round(table, now=4.9)
    assert table.failure(A) is not None
    run_round(table, now=5.0)
    assert table.failure(A) is None


def test_lost_bytes_come_back_from_the_source_only_if_they_are_the_same() -> None:
    table = make_table()
    table.bind(A, "mine", 100, rank=4)
    table.hold(A, name="mine")
    assert table.acquire(A) is None
    table.advance(0.0)
    table.lost(A, 0.0)
    table.refetched(table.refetches.pop(), B, 0.0)
    error = table.failure(A)
    assert isinstance(error, FailedPrecondition)
    assert "LoadAdapter" in str(error)


def test_lost_bytes_are_looked_for_under_every_name() -> None:
    table = make_table()
    held(table, A)
    table.bind(A, "other", 100, rank=1)
    assert table.acquire(A) is None
    table.advance(0.0)
    table.lost(A, 0.0)
    first = table.refetches.pop()
    table.refetched(first, B, 0.0)  # the files of this name were replaced
    assert table.failure(A) is None
    second = table.refetches.pop()
    assert {first.name, second.name} == {"name-1", "other"}
    table.refetched(second, A, 0.0)
    assert table.records[A].state is KeyState.KNOWN
    assert not table.refetches


def test_bytes_lost_under_every_name_fail_without_naming_one() -> None:
    """The names may be those of several tenants."""
    table = make_table()
    held(table, A)
    table.bind(A, "other", 100, rank=1)
    assert table.acquire(A) is None
    table.advance(0.0)
    table.lost(A, 0.0)
    table.refetch_failed(table.refetches.pop(), SourceUnavailable("adapter 'name-1': no such bucket"), 0.0)
    table.refetch_failed(table.refetches.pop(), SourceUnavailable("adapter 'other': no such bucket"), 0.0)
    error = table.failure(A)
    assert isinstance(error, SourceUnavailable)
    assert "name-1" not in str(error)
    assert "other" not in str(error)


def lose(table: ResidencyTable, key: AdapterKey) -> Refetch:
    """Loses the bytes of a key that is wanted. Returns the fetch that follows."""
    assert table.acquire(key) is None
    table.advance(0.0)
    table.moves.clear()
    table.lost(key, 0.0)
    return table.refetches.pop()


def test_an_error_is_for_requests_of_the_name_that_it_is_about() -> None:
    """A request may hold a content that its own name has left; the names that are there may be other tenants'."""
    table = make_table()
    table.bind(A, "acme/x", 100, rank=4)
    table.bind(A, "globex/secret", 100, rank=4)
    table.hold(A, name="acme/x")
    table.unbind(A, "acme/x")
    cut = AdapterInvalid("adapter 'globex/secret': adapter_model.safetensors is cut short", resource="globex/secret")
    table.refetch_failed(lose(table, A), cut, 0.0)
    error = table.failure(A)
    assert isinstance(error, SourceUnavailable)
    assert (error.resource, "globex" in str(error)) == (None, False)


FULL = DiskFull("there is no room for 'a'", resource="a", retry_after_s=5.0, metadata={"can_ever_fit": "true"})
HICCUP = SourceUnavailable("the Hub did not give out 'a'", resource="a", retry_after_s=3.0)


@pytest.mark.parametrize("passing", [FULL, HICCUP])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_passes_keeps_its_kind_and_its_hint_where_several_names_are_left(
    passing: LoraplexError, is_first: bool
) -> None:
    table = make_table()
    for name in ("a", "b"):
        table.bind(A, name, 100, rank=4)
    table.hold(A, name="a")
    absent = adapter_not_found("a")
    table.refetch_failed(lose(table, A), passing if is_first else absent, 0.0)
    table.refetch_failed(table.refetches.pop(), absent if is_first else passing, 0.0)
    error = table.failure(A)
    assert error is not None
    assert (type(error), error.retry_after_s) == (type(passing), passing.retry_after_s)
    assert (error.resource, "'a'" in str(error), "LoadAdapter" in str(error)) == (None, False, False)
    run_round(table, now=passing.retry_after_s or 0.0)
    assert table.failure(A) is None, "tried again as soon as it says"


def test_a_name_and_its_version_are_one_name_to_an_error() -> None:
    table = make_table()
    for name in ("a", "a@1234"):
        table.bind(A, name, 100, rank=4)
    table.hold(A, name="a")
    table.refetch_failed(lose(table, A), FULL, 0.0)
    table.refetch_failed(replace(table.refetches.pop(), name="a"), FULL, 0.0)
    assert table.failure(A) is FULL


@pytest.mark.parametrize("is_first", [True, False])
def test_what_passes_is_the_error_of_a_name_and_its_version(is_first: bool) -> None:
    table = make_table()
    for name in ("a", "a@1234"):
        table.bind(A, name, 100, rank=4)
    table.hold(A, name="a")
    errors = [HICCUP, adapter_not_found("a")]
    first, second = errors if is_first else reversed(errors)
    table.refetch_failed(lose(table, A), first, 0.0)
    table.refetch_failed(table.refetches.pop(), second, 0.0)
    assert table.failure(A) is HICCUP
    run_round(table, now=3.0)
    assert table.failure(A) is None, "tried again as soon as it says"


def test_what_passes_names_no_name_that_has_left() -> None:
    table = make_table()
    for name in ("a", "b"):
        table.bind(A, name, 100, rank=4)
    table.hold(A, name="b")
    table.refetch_failed(lose(table, A), HICCUP, 0.0)
    table.unbind(A, "a")
    table.refetch_failed(table.refetches.pop(), adapter_not_found("b"), 0.0)
    error = table.failure(A)
    assert isinstance(error, SourceUnavailable)
    assert (error.resource, "'a'" in str(error), error.retry_after_s) == (None, False, 3.0)


def test_a_version_that_is_gone_is_named_to_requests_of_its_name_only() -> None:
    for held_by, is_own in (("globex/secret", True), ("acme/x", False)):
        table = make_table()
        table.bind(A, "globex/secret@1234", 100, rank=4)
        table.hold(A, name=held_by)
        fetch = lose(table, A)
        table.refetched(replace(fetch, name="globex/secret"), B, 0.0)
        error = table.failure(A)
        assert isinstance(error, AdapterVersionNotFound) is is_own
        assert ("globex/secret@1234" in str(error)) is is_own


def test_lost_bytes_of_an_unloaded_adapter_are_a_failure() -> None:
    table = make_table()
    held(table, A)
    table.unbind(A, "name-1")
    assert table.acquire(A) is None
    table.advance(0.0)
    table.lost(A, 0.0)
    assert isinstance(table.failure(A), SourceUnavailable)
    table.drop_hold(A)
    assert not table.records


@pytest.mark.parametrize("num_adapters", [50])
def test_many_more_than_fit(num_adapters: int) -> None:
    table = make_table(host=1000, device=300, num_slots=3)
    keys = [held(table, key_of(10 + i)) for i in range(num_adapters)]
    for _ in range(3):
        for key in keys:
            for _ in range(4):
                if table.acquire(key) is not None:
                    table.release(key)
                    break
                run_round(table)
            else:
                raise AssertionError(f"{key} was not served")
    assert table.device_evictions > num_adapters
    assert table.host_evictions > num_adapters
