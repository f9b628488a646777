"""WorkerService of a router: the load of all its workers together."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterable
from heapq import nlargest
from typing import Any, Final

import grpc

from loraplex_contracts.errors import LoraplexError
from loraplex_proto import validate
from loraplex_proto.status import abort
from loraplex_proto.v1 import worker_pb2
from loraplex_router.replicas import TIER_SOURCE, Replica, Replicas, nearest_tiers
from loraplex_runtime.auth import Identity, current_identity, recheck_identity

MAX_ADAPTERS: Final = 1024  # of a message; those nearest to a device
MAX_SOURCED: Final = 1024  # further ones, of a source of their own
MAX_WAITING: Final = 100


def total_load(
    replicas: Iterable[Replica], *, draining: bool, may_see: Callable[[str], bool] = lambda _: True
) -> worker_pb2.Load:
    """The workers as one: sums over those that can take requests, and the nearest tier of each adapter that the caller
    may see. No forecast: this router refuses by its workers' own."""
    workers = [replica for replica in replicas if replica.is_routable]
    tiers = nearest_tiers(workers)
    nearest = nlargest(MAX_ADAPTERS, (item for item in tiers.items() if may_see(item[0])), key=lambda item: item[1])
    sourced = {name for worker in workers for name in worker.sourced if may_see(name)}
    others = sorted(sourced.difference(name for name, _ in nearest))[:MAX_SOURCED]
    listed = [*nearest, *((name, tiers.get(name, TIER_SOURCE)) for name in others)]
    waiting = {name for worker in workers for name in worker.waiting_adapters if may_see(name)}
    loads = [worker.load for worker in workers]
    return worker_pb2.Load(
        running_requests=sum(load.num_running for load in loads),
        queued_requests=sum(load.num_queued for load in loads),
        pending_tokens=sum(worker.work_tokens for worker in workers),
        total_kv_blocks=sum(load.num_blocks for load in loads),
        free_kv_blocks=sum(load.num_free_blocks for load in loads),
        kv_block_tokens=max((load.block_tokens for load in loads), default=0),
        total_state_slots=sum(load.num_state_slots for load in loads),
        free_state_slots=sum(load.num_free_state_slots for load in loads),
        state_snapshots=sum(load.num_state_snapshots for load in loads),
        max_running_requests=sum(load.max_running for load in loads),
        max_device_adapters=sum(worker.max_device_adapters for worker in workers),
        waiting_adapter_ids=sorted(waiting)[:MAX_WAITING],
        adapters=[
            worker_pb2.ResidentAdapter(adapter_id=name, tier=tier, has_source=name in sourced) for name, tier in listed
        ],
        draining=draining,
        stalled=not workers,
    )


class LoadService:
    """The handlers of loraplex.v1.WorkerService in a router."""

    def __init__(self, replicas: Replicas, clock: Callable[[], float] = time.monotonic) -> None:
        self._replicas = replicas
        self._clock = clock
        self._draining = asyncio.Event()
        # The last message of watches, and when it was made, by the adapters that their callers may see: they share it.
        self._shared: dict[tuple[str, ...], tuple[float, bytes]] = {}

    def begin_drain(self) -> None:
        """Begins the drain. Watches say so and end: an open one would hold the server for its whole grace period."""
        self._draining.set()

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {
            "GetLoad": grpc.unary_unary_rpc_method_handler(self.get_load),
            "WatchLoad": grpc.unary_stream_rpc_method_handler(self.watch_load),
        }

    async def get_load(self, raw: bytes, context: Any) -> bytes:
        await checked_request(worker_pb2.GetLoadRequest, validate.refuse_unhandled, raw, context)
        return worker_pb2.GetLoadResponse(load=self._load(current_identity())).SerializeToString()

    async def watch_load(self, raw: bytes, context: Any) -> None:
        """The load at once, then at each change, `min_interval_s` apart or more, and at each heartbeat. Ends when the
        caller's credential does."""
        request = await checked_request(worker_pb2.WatchLoadRequest, validate.check_watch_load, raw, context)
        interval_s = validate.watch_interval_s(request)
        sent, num_silent = b"", 0
        while True:
            try:
                recheck_identity()
            except LoraplexError as error:
                await abort(context, error)
            is_last = self._draining.is_set()
            message = self.shared_load(current_identity(), interval_s)
            num_silent += 1
            if message != sent or num_silent >= validate.HEARTBEAT_INTERVALS:
                await context.write(message)
                sent, num_silent = message, 0
            if is_last:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._draining.wait(), interval_s)

    def shared_load(self, caller: Identity, interval_s: float) -> bytes:
        """A message of WatchLoad that is younger than the interval, for all callers that may see the same adapters."""
        now, visible = self._clock(), caller.adapters
        made_s, message = self._shared.get(visible, (-math.inf, b""))
        if self._draining.is_set() or now - made_s >= interval_s:
            message = worker_pb2.WatchLoadResponse(load=self._load(caller)).SerializeToString(deterministic=True)
            self._shared = {
                key: shared for key, shared in self._shared.items() if now - shared[0] < validate.MAX_WATCH_INTERVAL_S
            }
            self._shared[visible] = now, message
        return message

    def _load(self, caller: Identity) -> worker_pb2.Load:
        return total_load(self._replicas.all(), draining=self._draining.is_set(), may_see=caller.may_use)


async def checked_request(cls: Any, check: Callable[[Any], None], raw: bytes, context: Any) -> Any:
    """The request. Ends the call where it is not valid."""
    try:
        request = validate.parse(cls, raw)
        check(request)
    except LoraplexError as error:
        await abort(context, error)
    return request
