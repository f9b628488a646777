"""WorkerService: the load of a worker, for its routers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from loraplex_adapters.cache.listing import Resident
from loraplex_proto import validate
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_runtime.auth import ROUTER, Identity, current_identity, recheck_identity
from loraplex_server.engine.client import EngineClient
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.middleware import RequestGate, handles_errors, handles_stream_errors

Context = Any
# Every step changes the number of pending tokens, and on a CPU each message takes time from the steps. A change of less
# than this number, or than this share of the number sent last, waits for the heartbeat.
MIN_CHANGED_TOKENS = 512
MIN_CHANGED_SHARE = 1 / 8


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves the load of a worker. Reads the engine's last report; never asks the engine."""

    def __init__(self, engine: EngineClient, gate: RequestGate) -> None:
        self._engine = engine
        self._gate = gate
        # The nearest adapters as they were last, and their messages.
        self._nearest: Sequence[Resident] = ()
        self._adapters: list[worker_pb2.ResidentAdapter] = []

    @handles_errors
    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Context) -> worker_pb2.GetLoadResponse:
        validate.refuse_unhandled(request)
        return worker_pb2.GetLoadResponse(load=self._load())

    @handles_stream_errors
    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Sends the load when the engine's report changes, `min_interval_s` apart or more, and at each heartbeat. Ends
        when the caller's credential does."""
        validate.check_watch_load(request)
        interval_s = validate.watch_interval_s(request)
        clock = asyncio.get_running_loop().time
        sent: worker_pb2.Load | None = None
        due_s = 0.0
        while not self._engine.lost.is_set():
            recheck_identity()
            change, looked_s = self._engine.changes.next(), clock()
            load = self._load()
            is_last = load.draining and not load.running_requests and not load.queued_requests
            if sent is None or is_last or looked_s >= due_s or is_worth_sending(load, sent):
                yield worker_pb2.WatchLoadResponse(load=load)
                # A router that sent or ended a request just now cannot know which came first. Of the next it can.
                num_intervals = validate.HEARTBEAT_INTERVALS if sent is None or has_same_requests(load, sent) else 1
                sent, due_s = load, looked_s + num_intervals * interval_s
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
        fetching = state.listing.fetching()
        load = protobuf.load_to_pb(state.load, self._adapters, state.usage, self._gate.is_leaving, fetching)
        load.stalled = bool(self._engine.stalled)
        caller = current_identity()
        if ROUTER not in caller.roles and "*" not in caller.adapters:
            leave_out_others(load, caller)
        return load


def leave_out_others(load: worker_pb2.Load, caller: Identity) -> None:
    """Removes from `load` adapters that the caller may not use, and how long requests of other tenants wait."""
    adapters = [one for one in load.adapters if caller.may_use(one.adapter_id)]
    waiting = [name for name in load.waiting_adapter_ids if caller.may_use(name)]
    waits = [one for one in load.forecast.waits if one.tenant == caller.tenant]
    load.ClearField("adapters")
    load.ClearField("waiting_adapter_ids")
    load.adapters.extend(adapters)
    load.waiting_adapter_ids.extend(waiting)
    if load.HasField("forecast"):
        load.forecast.ClearField("waits")
        load.forecast.waits.extend(waits)


def is_worth_sending(load: worker_pb2.Load, sent: worker_pb2.Load) -> bool:
    """True where a router might choose differently with `load` than with the one sent last."""
    if abs(load.pending_tokens - sent.pending_tokens) > max(
        MIN_CHANGED_TOKENS, MIN_CHANGED_SHARE * sent.pending_tokens
    ):
        return True
    if (load.draining, load.stalled) != (sent.draining, sent.stalled):
        return True
    same_adapters = load.adapters == sent.adapters and load.waiting_adapter_ids == sent.waiting_adapter_ids
    return not has_same_requests(load, sent) or not same_adapters


def has_same_requests(load: worker_pb2.Load, sent: worker_pb2.Load) -> bool:
    """True if the numbers of requests are equal."""
    return (load.running_requests, load.queued_requests) == (sent.running_requests, sent.queued_requests)
