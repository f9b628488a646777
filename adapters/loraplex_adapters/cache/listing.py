"""A cache's listing, kept up to date elsewhere by what changes: with thousands of adapters, the whole of it takes as
long as a step."""

from __future__ import annotations

from itertools import chain

from loraplex_adapters.cache.api import AdapterInfo, ListingChanges


def listing_order(row: AdapterInfo) -> tuple[str, bool, str]:
    """By name; what drains comes behind what has taken its name."""
    return row.adapter_id, row.state == "draining", row.digest


class Listing:
    """Owns the rows."""

    def __init__(self) -> None:
        self._rows: dict[object, tuple[AdapterInfo, ...]] = {}
        self._ordered: tuple[AdapterInfo, ...] | None = ()  # None: not since the last change

    def take(self, changes: ListingChanges) -> None:
        for about, rows in changes.items():
            if rows:
                self._rows[about] = rows
            else:
                self._rows.pop(about, None)
        self._ordered = None

    def rows(self) -> tuple[AdapterInfo, ...]:
        if self._ordered is None:
            self._ordered = tuple(sorted(chain.from_iterable(self._rows.values()), key=listing_order))
        return self._ordered
