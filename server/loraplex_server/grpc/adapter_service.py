"""AdapterService of a worker, and its listing of the engine's and the source's adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from loraplex_adapters.cache.listing import Listing, has_binding, names_after
from loraplex_adapters.sources.watch import SourceWatch
from loraplex_contracts.adapters import AdapterId, AdapterOrigin, LoadOptions
from loraplex_contracts.errors import AdapterNotFound, SourceUnavailable
from loraplex_proto import validate
from loraplex_proto.enums import ADAPTER_STATES
from loraplex_proto.paging import ListQuery, Page, visible_part
from loraplex_proto.v1 import adapter_pb2, adapter_pb2_grpc
from loraplex_runtime.auth import Identity
from loraplex_server.engine.client import EngineClient
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.middleware import RequestGate, begin_request, handles_errors

Context = Any
SLICE = 256  # adapters; one or two milliseconds
FIRST_SCAN_S = 10.0
_SCAN_PAUSE_S = 0.02
_OF_SOURCE = frozenset({adapter_pb2.ADAPTER_STATE_UNSPECIFIED, adapter_pb2.ADAPTER_STATE_KNOWN})

Rows = Sequence[adapter_pb2.Adapter]


class AdapterListing:
    """Listing from the engine's last report and the source's names. `own` are names that come with the model.

    Made in slices, between which other tasks of the event loop run. Listings without pages are made one at a time.
    """

    def __init__(self, listing: Callable[[], Listing], source: SourceWatch, own: Sequence[str]) -> None:
        self._listing = listing
        self._source = source
        self._own = own
        self._found: tuple[Sequence[str], Sequence[str]] = ((), ())  # the source's names, and the same with our own
        self._one_at_a_time = asyncio.Semaphore()

    async def page(self, query: ListQuery, identity: Identity) -> adapter_pb2.ListAdaptersResponse:
        """One page of the listing. Raises ListingTooLarge, and SourceUnavailable until the source has been scanned
        once."""
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

    def names(self) -> tuple[Sequence[str], Sequence[str]]:
        """Sorted names of the source, and of the residents; failed ones are in neither."""
        return self._available(), sorted(resident.adapter_id for resident in self._listing().nearest())

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
        if is_found and not has_binding(held):
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


class AdapterServicer(adapter_pb2_grpc.AdapterServiceServicer):
    """Serves AdapterService. Stateless: the engine owns the adapters."""

    def __init__(self, engine: EngineClient, gate: RequestGate, listing: AdapterListing) -> None:
        self._engine = engine
        self._listing = listing
        self._gate = gate

    @handles_errors
    async def LoadAdapter(
        self, request: adapter_pb2.LoadAdapterRequest, context: Context
    ) -> adapter_pb2.LoadAdapterResponse:
        adapter_id = self._admit(request)
        options = LoadOptions(
            AdapterOrigin(request.source, request.revision, request.token), request.expected_digest, request.if_absent
        )
        infos = await self._engine.load_adapter(adapter_id, pin=request.pin, options=options)
        return adapter_pb2.LoadAdapterResponse(adapters=map(protobuf.adapter_to_pb, infos))

    @handles_errors
    async def UnloadAdapter(
        self, request: adapter_pb2.UnloadAdapterRequest, context: Context
    ) -> adapter_pb2.UnloadAdapterResponse:
        adapter_id = self._admit(request)
        infos = await self._engine.unload_adapter(adapter_id, if_unused=request.if_unused)
        return adapter_pb2.UnloadAdapterResponse(adapters=map(protobuf.adapter_to_pb, infos))

    @handles_errors
    async def GetAdapter(
        self, request: adapter_pb2.GetAdapterRequest, context: Context
    ) -> adapter_pb2.GetAdapterResponse:
        adapter_id = self._admit(request)
        try:
            infos = await self._engine.get_adapter(adapter_id)
        except AdapterNotFound:
            unloaded = self._listing.unloaded(adapter_id)
            if unloaded is None:
                raise
            return adapter_pb2.GetAdapterResponse(adapters=[unloaded])
        return adapter_pb2.GetAdapterResponse(adapters=map(protobuf.adapter_to_pb, infos))

    @handles_errors
    async def ListAdapters(
        self, request: adapter_pb2.ListAdaptersRequest, context: Context
    ) -> adapter_pb2.ListAdaptersResponse:
        query = validate.check_list_adapters(request)
        return await self._listing.page(query, self._gate.admit())

    def _admit(self, request: validate.AdapterRequest) -> AdapterId:
        begin_request("", request.adapter_id)
        adapter_id = validate.check_adapter_request(request)
        identity = self._gate.admit(adapter_id)
        if isinstance(request, adapter_pb2.LoadAdapterRequest):
            identity.check_source(request.source, adapter_id)
        return adapter_id
