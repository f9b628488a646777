"""WorkerService: what a router reads to choose between workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from loraplex_adapters.cache.listing import Resident
from loraplex_proto import validate
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_runtime.auth import recheck_identity
from loraplex_server.engine.client import EngineClient
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.middleware import RequestGate, handles_errors, handles_stream_errors

Context = Any
DEFAULT_INTERVAL_S = 0.2
MIN_INTERVAL_S = 0.02
HEARTBEAT_INTERVALS = 10
# With every step there is a little less to do, and where the engine computes on a CPU, telling it takes time from the
# steps. Less than this, or than this part of what was told, can wait for the heartbeat.
TOLD_TOKENS = 512
TOLD_PART = 1 / 8


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Reads what the engine last said of itself; never asks the engine."""

    def __init__(self, engine: EngineClient, gate: RequestGate) -> None:
        self._engine = engine
        self._gate = gate
        # The nearest adapters as they were last, and how they are told.
        self._nearest: Sequence[Resident] = ()
        self._adapters: list[worker_pb2.ResidentAdapter] = []

    @handles_errors
    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Context) -> worker_pb2.GetLoadResponse:
        validate.check_bare(request)
        return worker_pb2.GetLoadResponse(load=self._load())

    @handles_stream_errors
    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Looks when the engine says something, after `min_interval_s` at the earliest; an idle worker is woken for the
        heartbeat only. Ends with the credential that it was opened with."""
        validate.check_watch_load(request)
        interval_s = max(MIN_INTERVAL_S, request.min_interval_s or DEFAULT_INTERVAL_S)
        clock = asyncio.get_running_loop().time
        told: worker_pb2.Load | None = None
        due_s = 0.0
        while not self._engine.lost.is_set():
            recheck_identity()
            change, looked_s = self._engine.changes.next(), clock()
            load = self._load()
            is_last = load.draining and not load.running_requests and not load.queued_requests
            if told is None or is_last or looked_s >= due_s or is_worth_telling(load, told):
                yield worker_pb2.WatchLoadResponse(load=load)
                # A router that sent or ended a request just now cannot know which came first. The next message it can.
                num_intervals = HEARTBEAT_INTERVALS if told is None or has_same_requests(load, told) else 1
                told, due_s = load, looked_s + num_intervals * interval_s
            if is_last:
                return  # an open watch would hold the server for its whole grace period
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await change.wait()
            await asyncio.sleep(looked_s + interval_s - clock())

    def _load(self) -> worker_pb2.Load:
        state = self._engine.state
        nearest = state.listing.nearest()
        if nearest is not self._nearest:
            self._nearest, self._adapters = nearest, protobuf.residents_to_pb(nearest)
        load = protobuf.load_to_pb(state.load, self._adapters, state.usage, self._gate.is_leaving)
        load.stalled = bool(self._engine.stalled)
        return load


def is_worth_telling(load: worker_pb2.Load, told: worker_pb2.Load) -> bool:
    """Whether a router would choose otherwise if it knew this instead of what it was told."""
    if abs(load.pending_tokens - told.pending_tokens) > max(TOLD_TOKENS, TOLD_PART * told.pending_tokens):
        return True
    if (load.draining, load.stalled) != (told.draining, told.stalled):
        return True
    return not has_same_requests(load, told) or load.adapters != told.adapters


def has_same_requests(load: worker_pb2.Load, told: worker_pb2.Load) -> bool:
    """As many, that is."""
    return (load.running_requests, load.queued_requests) == (told.running_requests, told.queued_requests)
