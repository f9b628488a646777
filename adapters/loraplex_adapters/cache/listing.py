"""Listings of adapters: rows, and a mirror that takes in changes.

With thousands of adapters, sorting all rows takes as long as a step; so the front end's mirror only takes in changes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from loraplex_adapters.cache.states import KeyRecord, KeyState, NameRecord, NameState
from loraplex_contracts.adapters import AdapterInfo, AdapterKey, AdapterState, AdapterTier, ListingChanges, name_in
from loraplex_contracts.errors import LoraplexError

MAX_NEAREST = 1024  # residents that a router is told of; bounds its messages
MAX_SOURCED = 1024  # further ones, of a source of their own
MAX_FETCHING = 100  # likewise
# The tiers of residents, the nearest to the device first.
_NEAREST_FIRST: tuple[AdapterTier, ...] = ("device", "host", "disk")
_AFTER_ALL = "\x7f"  # behind every character of an adapter id
_STATES: dict[KeyState, AdapterState] = {
    KeyState.KNOWN: "known",
    KeyState.STAGING: "fetching",
    KeyState.REFETCHING: "fetching",
    KeyState.ON_HOST: "on_host",
    KeyState.PROMOTING: "on_host",
    KeyState.ON_DEVICE: "on_device",
    KeyState.FAILED: "failed",
}
_TIERS: dict[KeyState, AdapterTier] = {
    KeyState.REFETCHING: "source",
    KeyState.FAILED: "source",
    KeyState.ON_HOST: "host",
    KeyState.ON_DEVICE: "device",
}


def key_row(record: KeyRecord, adapter_id: str, named: NameRecord | None = None) -> AdapterInfo:
    """The row of one content under one name, whose record is `named`. Without a name of its own it is draining."""
    if named is not None and named.key != record.key:
        named = None
    tier = _TIERS.get(record.state, "host" if record.state is KeyState.PROMOTING else "disk")
    return AdapterInfo(
        adapter_id=adapter_id,
        kind=record.key.kind,
        digest=record.key.digest,
        state=_STATES[record.state] if adapter_id in record.names else "draining",
        tier=tier,
        num_bytes=record.num_bytes,
        rank=record.rank,
        num_heads=record.traits.num_heads,
        classifier=record.traits.classifier,
        num_running=record.num_running(adapter_id),
        pinned=adapter_id in record.pinned_names,
        error=str(record.error or ""),
        error_reason=_reason(record.error),
        num_uses=record.uses[name_in(adapter_id)],
        source="" if named is None else named.origin.source,
        base="" if named is None else named.base,
        last_error="" if named is None else str(named.error or ""),
        last_error_reason="" if named is None else _reason(named.error),
        is_sourced=named is not None and named.is_sourced,
    )


def unbound_row(record: NameRecord) -> AdapterInfo:
    """The row of a name that is fetched, or whose failure is remembered."""
    is_failed = record.state is NameState.FAILED
    error, reason = str(record.error or ""), _reason(record.error)
    return AdapterInfo(
        adapter_id=record.name, kind="", digest="", state="failed" if is_failed else "fetching", tier="source",
        num_bytes=0, rank=0, num_running=0, pinned=False, error=error if is_failed else "",
        error_reason=reason if is_failed else "", source=record.fetched_from.source, last_error=error,
        last_error_reason=reason,
    )  # fmt: skip


def version_row(name: str, key: AdapterKey) -> AdapterInfo:
    """The row of a version that is in the store, if anywhere."""
    return AdapterInfo(
        adapter_id=name, kind=key.kind, digest=key.digest, state="known", tier="disk", num_bytes=0, rank=0,
        num_running=0, pinned=False,
    )  # fmt: skip


def _reason(error: LoraplexError | None) -> str:
    return "" if error is None else error.reason


def listing_order(row: AdapterInfo) -> tuple[str, bool, str]:
    """Sort key of a listing: by name; a content that drains comes behind the one that has taken its name."""
    return row.adapter_id, row.state == "draining", row.digest


def names_after(names: Sequence[str], after: str, prefix: str, limit: int) -> Sequence[str]:
    """The first `limit` of the sorted `names` that come behind `after` and begin with `prefix`."""
    begin = max(bisect_right(names, after), bisect_left(names, prefix))
    end = bisect_left(names, prefix + _AFTER_ALL)
    return names[begin : min(end, begin + limit)]


class Resident(NamedTuple):
    """An adapter that is at least on disk, or bound to another source than its own, as routers are told."""

    tier: AdapterTier
    adapter_id: str
    digest: str
    has_source: bool = False


class Listing:
    """Mirror of the listing. Owns its rows."""

    def __init__(self) -> None:
        self._changes: dict[object, tuple[AdapterInfo, ...]] = {}  # rows by the key or name that they are about
        self._rows: dict[str, list[AdapterInfo]] = {}  # by name, each in order
        self._names: list[str] = []  # sorted
        self._tiers: dict[AdapterTier, list[tuple[str, bool, str]]] = {tier: [] for tier in _NEAREST_FIRST}
        self._sourced: list[tuple[str, AdapterTier, str]] = []  # of rows that have a source of their own, sorted
        self._nearest: tuple[Resident, ...] | None = None  # None: to be made again
        self._fetching: list[str] = []  # names of the rows in that state, sorted

    def apply_changes(self, changes: ListingChanges) -> None:
        for about, rows in changes.items():
            before = self._changes.pop(about, ())
            if rows:
                self._changes[about] = rows
            # Added before removed, because a name that goes and comes again costs more.
            for row in rows:
                self._add(row)
            for row in before:
                self._remove(row)
            if set(map(_place, before)) != set(map(_place, rows)):
                self._nearest = None

    def names_after(self, after: str, prefix: str, limit: int) -> Sequence[str]:
        return names_after(self._names, after, prefix, limit)

    def rows_of(self, adapter_id: str) -> Sequence[AdapterInfo]:
        """The rows of an adapter id, in order; none where the cache does not know it."""
        return self._rows.get(adapter_id, ())

    def rows(self) -> Iterator[AdapterInfo]:
        """All rows, in order."""
        return chain.from_iterable(map(self._rows.__getitem__, self._names))

    def nearest(self) -> Sequence[Resident]:
        """MAX_NEAREST residents at most, the nearest to the device first; behind them MAX_SOURCED others at most that
        have a source of their own. The same object until one of them changes."""
        if self._nearest is None:
            found: list[Resident] = []
            for tier in _NEAREST_FIRST:
                found += [
                    Resident(tier, name, digest, self._is_sourced(name, digest))
                    for name, _, digest in self._tiers[tier][: MAX_NEAREST - len(found)]
                ]
            nearest = {(one.adapter_id, one.digest) for one in found}
            others = (Resident(tier, name, digest, True) for name, tier, digest in self._sourced)
            found += islice((one for one in others if (one.adapter_id, one.digest) not in nearest), MAX_SOURCED)
            self._nearest = tuple(found)
        return self._nearest

    def _is_sourced(self, adapter_id: str, digest: str) -> bool:
        return any(row.is_sourced and row.digest == digest for row in self._rows[adapter_id])

    def fetching(self) -> Sequence[str]:
        """Names that are being fetched, MAX_FETCHING at most."""
        return tuple(dict.fromkeys(self._fetching[:MAX_FETCHING]))

    def _add(self, row: AdapterInfo) -> None:
        rows = self._rows.get(row.adapter_id)
        if rows is None:
            self._rows[row.adapter_id] = [row]
            insort(self._names, row.adapter_id)
        else:
            insort(rows, row, key=listing_order)
        if row.state == "fetching":
            insort(self._fetching, row.adapter_id)
        if row.tier != "source":
            insort(self._tiers[row.tier], listing_order(row))
        if row.is_sourced:
            insort(self._sourced, (row.adapter_id, row.tier, row.digest))

    def _remove(self, row: AdapterInfo) -> None:
        rows = self._rows[row.adapter_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.adapter_id]
            del self._names[bisect_left(self._names, row.adapter_id)]
        if row.state == "fetching":
            del self._fetching[bisect_left(self._fetching, row.adapter_id)]
        if row.tier != "source":
            places = self._tiers[row.tier]
            del places[bisect_left(places, listing_order(row))]
        if row.is_sourced:
            del self._sourced[bisect_left(self._sourced, (row.adapter_id, row.tier, row.digest))]


def _place(row: AdapterInfo) -> tuple[AdapterTier, tuple[str, bool, str], bool]:
    return row.tier, listing_order(row), row.is_sourced


def has_binding(rows: Sequence[AdapterInfo]) -> bool:
    """True if one of a name's rows is its present content; the others drain."""
    return any(row.state != "draining" for row in rows)
