"""WorkerService: what a router reads to choose between workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from loraplex_proto import validate
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_server.engine.client import EngineClient
from loraplex_server.grpc import convert
from loraplex_server.grpc.edge import Edge, handles_errors, handles_stream_errors

Context = Any
DEFAULT_INTERVAL_S = 0.2
MIN_INTERVAL_S = 0.02
HEARTBEAT_INTERVALS = 10


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Reads what the engine last said of itself; never asks the engine."""

    def __init__(self, engine: EngineClient, edge: Edge) -> None:
        self._engine = engine
        self._edge = edge

    @handles_errors
    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Context) -> worker_pb2.GetLoadResponse:
        validate.check_bare(request)
        return worker_pb2.GetLoadResponse(load=self._load())

    @handles_stream_errors
    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        validate.check_watch_load(request)
        interval_s = max(MIN_INTERVAL_S, request.min_interval_s or DEFAULT_INTERVAL_S)
        last, num_silent = None, 0
        while not self._engine.lost.is_set():
            load = self._load()
            if load.draining and not load.running_requests and not load.queued_requests:
                yield worker_pb2.WatchLoadResponse(load=load)
                return  # an open watch would hold the server for its whole grace period
            num_silent += 1
            if load != last or num_silent >= HEARTBEAT_INTERVALS:
                yield worker_pb2.WatchLoadResponse(load=load)
                last, num_silent = load, 0
            await asyncio.sleep(interval_s)

    def _load(self) -> worker_pb2.Load:
        state = self._engine.state
        return convert.load_to_pb(state.load, state.listing.rows(), state.usage, self._edge.is_leaving)
