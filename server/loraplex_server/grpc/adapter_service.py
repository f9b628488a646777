"""AdapterService of a worker."""

from __future__ import annotations

from typing import Any

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import AdapterNotFound
from loraplex_proto import validate
from loraplex_proto.v1 import adapter_pb2, adapter_pb2_grpc
from loraplex_server.engine.client import EngineClient
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.adapter_listing import AdapterListing
from loraplex_server.grpc.middleware import RequestGate, handles_errors

Context = Any


class AdapterServicer(adapter_pb2_grpc.AdapterServiceServicer):
    """Stateless: the engine owns the adapters."""

    def __init__(self, engine: EngineClient, gate: RequestGate, listing: AdapterListing) -> None:
        self._engine = engine
        self._listing = listing
        self._gate = gate

    @handles_errors
    async def LoadAdapter(
        self, request: adapter_pb2.LoadAdapterRequest, context: Context
    ) -> adapter_pb2.LoadAdapterResponse:
        adapter_id = self._admit(request)
        infos = await self._engine.adapters("load", adapter_id, pin=request.pin)
        return adapter_pb2.LoadAdapterResponse(adapters=map(protobuf.adapter_to_pb, infos))

    @handles_errors
    async def UnloadAdapter(
        self, request: adapter_pb2.UnloadAdapterRequest, context: Context
    ) -> adapter_pb2.UnloadAdapterResponse:
        adapter_id = self._admit(request)
        infos = await self._engine.adapters("unload", adapter_id)
        return adapter_pb2.UnloadAdapterResponse(adapters=map(protobuf.adapter_to_pb, infos))

    @handles_errors
    async def GetAdapter(
        self, request: adapter_pb2.GetAdapterRequest, context: Context
    ) -> adapter_pb2.GetAdapterResponse:
        adapter_id = self._admit(request)
        try:
            infos = await self._engine.adapters("get", adapter_id)
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
        adapter_id = validate.check_adapter_request(request)
        self._gate.admit(adapter_id)
        return adapter_id
