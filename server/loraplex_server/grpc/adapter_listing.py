"""Listing of adapters: the engine's rows and the source's names.

Reads neither engine nor files. A listing is made in slices, and other tasks of the event loop run between two of them.
Listings without pages are made one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from loraplex_adapters.cache.listing import Listing, is_bound, names_after
from loraplex_adapters.sources.watch import SourceWatch
from loraplex_contracts.errors import SourceUnavailable
from loraplex_proto.enums import ADAPTER_STATES
from loraplex_proto.paging import ListQuery, Page, visible_part
from loraplex_proto.v1 import adapter_pb2
from loraplex_runtime.auth import Identity
from loraplex_server.grpc import protobuf

SLICE = 256  # adapters; one or two milliseconds
FIRST_SCAN_S = 10.0
_SCAN_PAUSE_S = 0.02
_OF_SOURCE = frozenset({adapter_pb2.ADAPTER_STATE_UNSPECIFIED, adapter_pb2.ADAPTER_STATE_KNOWN})

Rows = Sequence[adapter_pb2.Adapter]


class AdapterListing:
    """Reads the engine's listing and the source's names; `own` are the names that come with the model."""

    def __init__(self, listing: Callable[[], Listing], source: SourceWatch, own: Sequence[str] = ()) -> None:
        self._listing = listing
        self._source = source
        self._own = own
        self._found: tuple[Sequence[str], Sequence[str]] = ((), ())  # the source's names, and the same with our own
        self._one_at_a_time = asyncio.Semaphore()

    async def page(self, query: ListQuery, identity: Identity) -> adapter_pb2.ListAdaptersResponse:
        """Raises ListingTooLarge, and SourceUnavailable until the source has been scanned once."""
        if query.include_unloaded:
            await self._first_scan()
        if query.page_size:
            return await self._page(query, identity)
        async with self._one_at_a_time:
            return await self._page(query, identity)

    def unloaded(self, adapter_id: str) -> adapter_pb2.Adapter | None:
        """The row of a name that the engine does not know; None where the source does not have it either."""
        found = names_after(self._available(), "", adapter_id, 1)
        return protobuf.unloaded_to_pb(adapter_id) if found and found[0] == adapter_id else None

    async def _page(self, query: ListQuery, identity: Identity) -> adapter_pb2.ListAdaptersResponse:
        page = Page(query)
        part = visible_part(query, identity.adapters)
        while part is not None:
            held, found = self._slice(part)
            names = sorted(held.union(found))[:SLICE]
            if not names:
                break
            for adapter_id in filter(identity.may_use, names):
                rows = self._rows(adapter_id, query, is_found=adapter_id in found)
                if rows and not page.add(adapter_id, rows):
                    return page.response
            part = replace(part, after=names[-1])
            await asyncio.sleep(0)
        return page.response

    def _slice(self, query: ListQuery) -> tuple[set[str], set[str]]:
        """The next names that the engine holds, and the next ones in the source where they are asked for."""
        held = set(self._listing().names_after(query.after, query.prefix, SLICE))
        if not query.include_unloaded or query.state not in _OF_SOURCE:
            return held, set()
        return held, set(names_after(self._available(), query.after, query.prefix, SLICE))

    def _rows(self, adapter_id: str, query: ListQuery, *, is_found: bool) -> Rows:
        held = self._listing().rows_of(adapter_id)
        if not held:
            return (protobuf.unloaded_to_pb(adapter_id),)
        rows = [protobuf.adapter_to_pb(info) for info in held if query.state in (0, ADAPTER_STATES[info.state])]
        if is_found and not is_bound(held):
            rows.insert(0, protobuf.unloaded_to_pb(adapter_id))
        return rows

    def _available(self) -> Sequence[str]:
        names = self._source.names
        if not self._own:
            return names
        if names is not self._found[0]:
            self._found = names, sorted({*names, *self._own})
        return self._found[1]

    async def _first_scan(self) -> None:
        clock = asyncio.get_running_loop().time
        until_s = clock() + FIRST_SCAN_S
        while not self._source.has_looked:
            if clock() > until_s:
                raise SourceUnavailable(
                    "the server has not finished its first look at the adapters that it could load; try again, or list "
                    "only those that are loaded",
                    retry_after_s=5.0,
                )
            await asyncio.sleep(_SCAN_PAUSE_S)
