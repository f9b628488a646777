"""A cache's listing, kept in order elsewhere by what changes: with thousands of adapters, sorting all of it takes as
long as a step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from loraplex_contracts.adapters import AdapterInfo, AdapterTier, ListingChanges

MAX_NEAREST = 1024
# The nearest to the device first, without what is in the source only.
_NEAREST_FIRST: tuple[AdapterTier, ...] = ("device", "host", "disk")
_AFTER_ALL = "\x7f"  # behind every character of an adapter id


def listing_order(row: AdapterInfo) -> tuple[str, bool, str]:
    """By name; what drains comes behind what has taken its name."""
    return row.adapter_id, row.state == "draining", row.digest


def names_after(names: Sequence[str], after: str, prefix: str, limit: int) -> Sequence[str]:
    """Of sorted `names`, the first ones behind `after` that begin with `prefix`."""
    begin = max(bisect_right(names, after), bisect_left(names, prefix))
    end = bisect_left(names, prefix + _AFTER_ALL)
    return names[begin : min(end, begin + limit)]


class Resident(NamedTuple):
    """A row that is at least on disk, as routers are told."""

    tier: AdapterTier
    adapter_id: str
    digest: str


class Listing:
    """Owns the rows."""

    def __init__(self) -> None:
        self._changes: dict[object, tuple[AdapterInfo, ...]] = {}  # the rows by what they are about
        self._rows: dict[str, list[AdapterInfo]] = {}  # by name, each in order
        self._names: list[str] = []  # sorted
        self._tiers: dict[AdapterTier, list[tuple[str, bool, str]]] = {tier: [] for tier in _NEAREST_FIRST}
        self._nearest: tuple[Resident, ...] | None = None  # None: not since the last change

    def take(self, changes: ListingChanges) -> None:
        for about, rows in changes.items():
            before = self._changes.pop(about, ())
            if rows:
                self._changes[about] = rows
            # In this order, because a name that goes and comes again costs more.
            for row in rows:
                self._add(row)
            for row in before:
                self._remove(row)
            if set(map(_place, before)) != set(map(_place, rows)):
                self._nearest = None

    def names_after(self, after: str, prefix: str, limit: int) -> Sequence[str]:
        return names_after(self._names, after, prefix, limit)

    def of(self, adapter_id: str) -> Sequence[AdapterInfo]:
        """Its rows, in order; none where the cache has nothing to say of it."""
        return self._rows.get(adapter_id, ())

    def rows(self) -> Iterator[AdapterInfo]:
        """All of them, in order."""
        return chain.from_iterable(map(self._rows.__getitem__, self._names))

    def nearest(self) -> Sequence[Resident]:
        """The nearest to the device first, MAX_NEAREST at most. The same object until one of them changes."""
        if self._nearest is None:
            found: list[Resident] = []
            for tier in _NEAREST_FIRST:
                found += [
                    Resident(tier, name, digest) for name, _, digest in self._tiers[tier][: MAX_NEAREST - len(found)]
                ]
            self._nearest = tuple(found)
        return self._nearest

    def _add(self, row: AdapterInfo) -> None:
        rows = self._rows.get(row.adapter_id)
        if rows is None:
            self._rows[row.adapter_id] = [row]
            insort(self._names, row.adapter_id)
        else:
            insort(rows, row, key=listing_order)
        if row.tier != "source":
            insort(self._tiers[row.tier], listing_order(row))

    def _remove(self, row: AdapterInfo) -> None:
        rows = self._rows[row.adapter_id]
        rows.remove(row)
        if not rows:
            del self._rows[row.adapter_id]
            del self._names[bisect_left(self._names, row.adapter_id)]
        if row.tier != "source":
            places = self._tiers[row.tier]
            del places[bisect_left(places, listing_order(row))]


def _place(row: AdapterInfo) -> tuple[AdapterTier, tuple[str, bool, str]]:
    return row.tier, listing_order(row)


def is_bound(rows: Sequence[AdapterInfo]) -> bool:
    """Whether one of a name's rows is the name's own; the others drain."""
    return any(row.state != "draining" for row in rows)
