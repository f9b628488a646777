"""Borrowed device slots for Medusa heads in the residency table.

They never keep anybody waiting.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.adapter_files import Engine, write_adapter
from support.medusa_files import medusa_config, sequential_tensors, write_heads
from support.residency import bring_up, key_of, make_table, run_round

from loraplex_adapters.cache.eviction import RECENT_ROUNDS
from loraplex_adapters.cache.residency import ResidencyTable
from loraplex_adapters.cache.states import (
    AdapterTraits,
    DropDevice,
    DropHost,
    KeyState,
    Promote,
    Stage,
)
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import IllegalTransition, SourceUnavailable

HEADS = [key_of(idx, "medusa") for idx in range(1, 7)]
LORA, OTHER = key_of(11, "lora"), key_of(12, "lora")


def held(table: ResidencyTable, key: AdapterKey, num_bytes: int = 100) -> AdapterKey:
    """A key that is bound to a name and held by one request."""
    table.bind(key, f"name-{key.kind}-{key.digest[-2:]}", num_bytes, rank=0, traits=AdapterTraits(num_heads=3))
    table.hold(key)
    return key


def test_wanted_for_a_round_and_then_lent_without_a_reference() -> None:
    table = make_table()
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    assert table.is_due  # an idle engine must come round
    table.check_integrity()
    assert run_round(table) == [Promote(key, 0)]
    assert table.borrow(key) == 0
    record = table.records[key]
    assert (record.num_leases, record.reserved_rounds, record.traits.num_heads) == (0, 0, 3)
    table.drop_hold(key)
    assert table.records[key].num_holds == 0


def test_on_its_way_it_is_not_wanted_again() -> None:
    table = make_table()
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    table.advance(0.0)
    assert table.moves == [Promote(key, 0)]
    assert table.borrow(key) is None
    assert not list(table.borrows)
    assert not table.is_due


def test_unknown_keys_are_a_bug() -> None:
    with pytest.raises(IllegalTransition):
        make_table().borrow(HEADS[0])


def test_lending_is_a_use() -> None:
    table = make_table()
    for key in HEADS[:2]:
        held(table, key)
        assert table.borrow(key) is None
        run_round(table)
    assert table.borrow(HEADS[0]) == 0  # now the other one is older
    held(table, LORA)
    assert table.acquire(LORA) is None
    assert run_round(table) == [DropDevice(HEADS[1], 1), Promote(LORA, 1)]


def test_a_want_that_is_not_repeated_ends_with_the_round() -> None:
    table = make_table(num_slots=1)
    held(table, LORA)
    bring_up(table, LORA)
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    assert run_round(table) == [Stage(key)]  # no slot, but the host has room
    assert not table.is_due  # nobody turns an idle engine for it
    table.release(LORA)
    for _ in range(RECENT_ROUNDS + 1):
        assert run_round(table) == []
    assert table.borrow(key) is None
    assert run_round(table) == [DropDevice(LORA, 0), Promote(key, 0)]


def test_nobody_is_wanted_for_requests_that_are_gone() -> None:
    table = make_table()
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    table.drop_hold(key)
    assert not list(table.borrows)
    assert run_round(table) == []
    assert table.borrow(key) is None  # the name is there, but nobody's request
    assert run_round(table) == []
    assert not table.is_due


def test_wants_of_lora_come_first_and_take_the_slot_away() -> None:
    table = make_table(num_slots=1)
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    held(table, LORA)
    assert table.acquire(LORA) is None  # after it, and yet before it
    assert run_round(table) == [Promote(LORA, 0), Stage(key)]
    assert table.acquire(LORA) == 0
    table.release(LORA)
    for _ in range(RECENT_ROUNDS):
        run_round(table)
    assert table.borrow(key) is None
    run_round(table)
    assert table.borrow(key) == 0
    # Lent this very turn, and still no reason to wait.
    held(table, OTHER)
    assert table.acquire(OTHER) is None
    assert run_round(table) == [DropDevice(key, 0), Promote(OTHER, 0)]


def test_borrowed_in_every_step_it_starves_nobody() -> None:
    """One slot; heads are asked for in every step, and adapters come one after the other."""
    table = make_table(num_slots=1)
    heads = held(table, HEADS[0])
    for content in range(20, 40):
        lora = held(table, key_of(content, "lora"))
        for _ in range(3):
            table.borrow(heads)
            slot = table.acquire(lora)
            if slot is not None:
                break
            run_round(table)
        else:
            raise AssertionError(f"{lora} waited for heads")
        run_round(table)
        table.release(lora)
        table.drop_hold(lora)


def test_heads_in_use_do_not_push_each_other_out() -> None:
    table = make_table(num_slots=2)
    for key in HEADS[:4]:
        held(table, key)
    for _ in range(3 * RECENT_ROUNDS):
        for key in HEADS[:4]:
            table.borrow(key)
        run_round(table)
    assert [table.borrow(key) for key in HEADS[:4]] == [0, 1, None, None]
    assert table.device_evictions == 0
    # Two requests have ended, and their heads make way in time.
    for key in HEADS[:2]:
        table.drop_hold(key)
    for _ in range(RECENT_ROUNDS + 2):
        for key in HEADS[2:4]:
            table.borrow(key)
        run_round(table)
    assert {table.borrow(key) for key in HEADS[2:4]} == {0, 1}


def test_an_adapter_between_two_requests_stays() -> None:
    table = make_table(num_slots=1)
    held(table, LORA)
    bring_up(table, LORA)
    table.release(LORA)
    heads = held(table, HEADS[0])
    for _ in range(RECENT_ROUNDS - 1):
        assert table.borrow(heads) is None
        assert not any(isinstance(move, Promote) for move in run_round(table))
    assert table.acquire(LORA) == 0


def test_a_blocked_want_lets_no_borrower_past() -> None:
    table = make_table(device=300, num_slots=3)
    held(table, LORA, 200)
    bring_up(table, LORA)
    held(table, OTHER, 250)
    heads = held(table, HEADS[0], 50)
    assert table.acquire(OTHER) is None
    assert table.borrow(heads) is None  # would fit beside LORA; OTHER would wait longer for it
    assert not any(isinstance(move, Promote) for move in run_round(table))
    table.release(LORA)
    assert [m for m in run_round(table) if isinstance(m, Promote)] == [Promote(OTHER, 0)]


def test_a_large_set_does_not_keep_a_small_one_waiting() -> None:
    table = make_table(device=300, num_slots=3)
    held(table, LORA, 200)
    bring_up(table, LORA)
    large, small = held(table, HEADS[0], 200), held(table, HEADS[1], 100)
    assert table.borrow(large) is None
    assert table.borrow(small) is None
    assert [m for m in run_round(table) if isinstance(m, Promote)] == [Promote(small, 1)]


def test_too_large_for_ever_is_not_wanted() -> None:
    table = make_table(device=300)
    key = held(table, HEADS[0], 301)
    assert table.borrow(key) is None
    assert not list(table.borrows)
    assert run_round(table) == []
    assert table.failure(key) is not None


def test_acquired_while_only_borrowed_it_becomes_a_want() -> None:
    """A combined adapter: its LoRA is waited for, its heads are borrowed."""
    table = make_table(num_slots=1)
    held(table, LORA)
    bring_up(table, LORA)
    key = held(table, key_of(21, "combined"))
    assert table.borrow(key) is None
    assert table.acquire(key) is None
    run_round(table)
    assert list(table.wants) == [key]
    assert table.borrow(key) is None
    assert not list(table.borrows)
    table.release(LORA)
    run_round(table)
    slot = table.acquire(key)
    assert slot is not None
    assert table.borrow(key) == slot
    assert table.records[key].num_leases == 1


def test_a_failed_move_is_remembered() -> None:
    table = make_table()
    key = held(table, HEADS[0])
    assert table.borrow(key) is None
    table.advance(0.0)
    table.moves.clear()
    table.failed(key, SourceUnavailable("no"), now=0.0)
    table.check_integrity()
    assert table.borrow(key) is None
    assert not list(table.borrows)
    assert run_round(table, now=9.0) == [DropHost(key)]
    assert run_round(table, now=10.0) == []
    assert table.records[key].state is KeyState.KNOWN
    assert table.borrow(key) is None
    assert run_round(table, now=10.0) == [Promote(key, 0)]


def test_through_the_manager_heads_come_up_for_whoever_borrows(tmp_path: Path) -> None:
    """Names, tiers, slots and listings as for any adapter; an idle engine is woken for them."""
    write_heads(tmp_path / "heads", sequential_tensors(4), medusa_config(4))
    write_adapter(tmp_path / "sql")
    engine = Engine(DirectorySource(tmp_path), num_device_slots=1)
    sql = engine.resolve("sql")
    lora_slot = engine.acquire(sql)
    heads = engine.resolve("heads")
    assert heads.kind == "medusa"
    row = engine.cache.get("heads")
    assert (row.kind, row.rank, row.num_heads, row.digest) == ("medusa", 0, 4, heads.digest)
    assert engine.cache.get("sql").num_heads == 0
    for _ in range(3):
        assert engine.cache.borrow(heads) is None  # the slot is taken
        engine.turn(0.02)
    engine.cache.release(sql)
    engine.cache.drop_hold(sql, name="sql")
    for _ in range(RECENT_ROUNDS):
        engine.turn(0.0)
    slot = engine.until(lambda: engine.cache.borrow(heads))
    assert slot == lora_slot
    installed = engine.slots.installed[slot]
    assert installed.key == heads
    assert len(installed.heads) == 4
    assert not installed.factors
    assert engine.cache.get("heads").tier == "device"
    assert engine.cache.get("heads").num_running == 0
    gone = engine.cache.unload("heads")
    assert (gone.state, gone.num_heads) == ("draining", 4)
    assert engine.cache.borrow(heads) == slot  # the request goes on
    engine.cache.drop_hold(heads, name="heads")
    engine.settle()
    assert not engine.slots.installed
    engine.close()


def test_unloading_idle_heads_says_what_they_were(tmp_path: Path) -> None:
    write_heads(tmp_path / "heads", sequential_tensors(4), medusa_config(4))
    engine = Engine(DirectorySource(tmp_path))
    assert engine.load("heads", pin=True).num_heads == 4
    gone = engine.cache.unload("heads")
    assert (gone.state, gone.kind, gone.rank, gone.num_heads) == ("known", "medusa", 0, 4)
    engine.close()
