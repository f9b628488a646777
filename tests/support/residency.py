"""Rounds of the adapter cache's tables, their moves carried out at once."""

from __future__ import annotations

from loraplex_adapters.cache.names import AdapterTable
from loraplex_adapters.cache.residency import ResidencyTable
from loraplex_adapters.cache.states import FetchName, Move, Promote, Stage
from loraplex_contracts.adapters import AdapterKey, AdapterKind


def key_of(content: int, kind: AdapterKind = "lora") -> AdapterKey:
    return AdapterKey(kind, f"{content:064x}")


def make_table(host: int = 1000, device: int = 1000, num_slots: int = 2) -> ResidencyTable:
    """Budgets in bytes."""
    return ResidencyTable(host, device, num_slots, failure_ttl_s=10.0)


def run_round(table: ResidencyTable, now: float = 0.0) -> list[Move]:
    """Returns the moves."""
    table.advance(now)
    moves = list(table.moves)
    table.moves.clear()
    for move in moves:
        if isinstance(move, Promote):
            table.promoted(move.key)
        elif isinstance(move, Stage):
            table.staged(move.key)
    table.check_integrity()
    return moves


def bring_up(table: ResidencyTable, key: AdapterKey) -> int:
    """Leases the key after a round; returns its slot."""
    assert table.acquire(key) is None
    run_round(table)
    slot = table.acquire(key)
    assert slot is not None
    return slot


def fetch_of(table: AdapterTable) -> FetchName:
    """The one fetch that the table asks for."""
    (fetch,) = table.take_fetches()
    assert isinstance(fetch, FetchName)
    return fetch


def turn(table: AdapterTable, now: float = 0.0) -> None:
    """One round of both tables."""
    table.advance(now)
    for move in table.take_moves():
        if isinstance(move, Promote):
            table.residency.promoted(move.key)
        elif isinstance(move, Stage):
            table.residency.staged(move.key)
    table.check_integrity()
