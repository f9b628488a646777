"""StatusService of a router: workers, places of adapters, recent activity and errors."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from heapq import nsmallest
from typing import Any, Final

import grpc

from loraplex_proto import __version__, validate
from loraplex_proto.v1 import adapter_pb2, status_pb2
from loraplex_router.activity import FailedCall
from loraplex_router.calls import Calls
from loraplex_router.load_service import checked_request
from loraplex_router.replicas import Replica, Replicas, State, nearest_tiers
from loraplex_runtime.auth import Identity, current_identity

MAX_ERRORS: Final = 30
STATES: Final[dict[State, status_pb2.WorkerState.ValueType]] = {
    "serving": status_pb2.WORKER_STATE_SERVING,
    "starting": status_pb2.WORKER_STATE_STARTING,
    "draining": status_pb2.WORKER_STATE_DRAINING,
    "stalled": status_pb2.WORKER_STATE_STALLED,
    "leaving": status_pb2.WORKER_STATE_LEAVING,
    "unreachable": status_pb2.WORKER_STATE_UNREACHABLE,
}
# An answer is shared for so long by those who look: what it takes is the same for ten as for one.
SHARED_S: Final = 0.5


class StatusService:
    """The handler of loraplex.v1.StatusService, and what HTTP's route shows."""

    def __init__(
        self,
        replicas: Replicas,
        calls: Calls,
        *,
        served_names: Sequence[str] = (),
        is_draining: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = replicas
        self._calls = calls
        self._served_names = served_names
        self._is_draining = is_draining
        self._clock = clock
        self._router_id = f"{platform.node()}:{os.getpid()}"
        # The last answers with when they were made, by who may see what and by question.
        self._shared: dict[tuple[Any, ...], tuple[float, status_pb2.GetStatusResponse]] = {}

    def handlers(self) -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
        return {"GetStatus": grpc.unary_unary_rpc_method_handler(self.get_status)}

    async def get_status(self, raw: bytes, context: Any) -> bytes:
        request = await checked_request(status_pb2.GetStatusRequest, validate.check_status, raw, context)
        return self.status(request, current_identity()).SerializeToString()

    def status(self, request: status_pb2.GetStatusRequest, caller: Identity) -> status_pb2.GetStatusResponse:
        """The part that this caller may see: adapters that it may use, and errors of its tenant; with `*`, all."""
        now = self._clock()
        question = caller.tenant, caller.adapters, request.max_adapters, request.adapter_prefix
        self._shared = {key: one for key, one in self._shared.items() if now - one[0] < SHARED_S}
        if question not in self._shared:
            self._shared[question] = now, self._made(request, caller, now)
        return self._shared[question][1]

    def _made(self, request: status_pb2.GetStatusRequest, caller: Identity, now: float) -> status_pb2.GetStatusResponse:
        replicas, activity = self._replicas.all(), self._calls.activity
        sees_all = "*" in caller.adapters
        may_see = (lambda _: True) if sees_all else caller.may_use
        rows, num_rows = adapter_rows(
            replicas,
            self._replicas.work_by_adapter(),
            lambda name: name.startswith(request.adapter_prefix) and may_see(name),
            request.max_adapters or validate.DEFAULT_STATUS_ADAPTERS,
        )
        errors = (error for error in activity.errors() if sees_all or error.tenant == caller.tenant)
        return status_pb2.GetStatusResponse(
            router_id=self._router_id,
            version=__version__,
            model_id=next(iter(self._served_names), self._replicas.model_id or ""),
            uptime_s=now - activity.started_s,
            draining=self._is_draining(),
            requests_in_flight=len(self._calls),
            workers=[self._worker_row(replica, now) for replica in replicas],
            adapters=rows,
            total_adapters=num_rows,
            activity=activity.summary(now),
            tokens_by_second=activity.tokens_by_second(now),
            errors=[_error_row(error, now) for error, _ in zip(errors, range(MAX_ERRORS), strict=False)],
        )

    def _worker_row(self, replica: Replica, now: float) -> status_pb2.WorkerStatus:
        load = replica.load
        return status_pb2.WorkerStatus(
            worker_id=replica.worker_id,
            state=STATES[self._replicas.state_of(replica, now)],
            error=replica.last_error,
            running_requests=load.num_running,
            queued_requests=load.num_queued,
            max_running_requests=load.max_running,
            pending_tokens=replica.work_tokens,
            total_kv_blocks=load.num_blocks,
            free_kv_blocks=load.num_free_blocks,
            requests_in_flight=replica.num_in_flight,
            adapters=len(replica.tiers),
            device_adapters=sum(tier == adapter_pb2.ADAPTER_TIER_DEVICE for tier in replica.tiers.values()),
            max_device_adapters=replica.max_device_adapters,
            activity=self._calls.activity.summary(now, replica.worker_id),
        )


def adapter_rows(
    replicas: Sequence[Replica], work: dict[str, int], is_wanted: Callable[[str], bool], most: int
) -> tuple[list[status_pb2.AdapterStatus], int]:
    """The `most` adapters that an operator looks for first, and of how many: those with work, those that are waited
    for, those nearest to a device. A report names 1,024 of its worker at most."""
    nearest = nearest_tiers(replicas)
    waiting = {name for replica in replicas for name in replica.waiting_adapters}
    found = [name for name in {**nearest, **dict.fromkeys(waiting), **work} if name and is_wanted(name)]

    def order(name: str) -> tuple[int, bool, int, str]:
        return -work.get(name, 0), name not in waiting, -nearest.get(name, 0), name

    rows = [
        status_pb2.AdapterStatus(
            adapter_id=name,
            tiers="".join(str(min(replica.tiers.get(name, 0), 9)) for replica in replicas),
            work_tokens=work.get(name, 0),
            waiting=name in waiting,
        )
        for name in nsmallest(most, found, key=order)
    ]
    return rows, len(found)


def _error_row(error: FailedCall, now: float) -> status_pb2.ErrorStatus:
    return status_pb2.ErrorStatus(
        age_s=now - error.ended_s,
        method=error.method,
        code=error.code,
        reason=error.reason,
        message=error.message,
        request_id=error.request_id,
        tenant=error.tenant,
        worker_id=error.worker_id,
    )
