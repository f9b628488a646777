"""Calls on the router's port: limit, typed errors, metrics, drain."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as MetricCounter

from loraplex_contracts.errors import (
    AdapterNotFound,
    Code,
    DeadlineExceeded,
    Draining,
    LoraplexError,
    QueueFull,
    QuotaExceeded,
    as_typed,
)
from loraplex_contracts.load import has_place
from loraplex_proto.status import abort, abort_with, answer_within_s
from loraplex_router.activity import MAX_MESSAGE_CHARS, Activity, FailedCall
from loraplex_router.policy import DECISIONS, Choice, Decision
from loraplex_router.upstream import RETRY_CAUSES, Metadata, Upstream, UpstreamFailure
from loraplex_runtime.auth import current_identity
from loraplex_runtime.listener import Drain
from loraplex_runtime.metrics import PREFIX, RequestMetrics, new_registry
from loraplex_runtime.near_names import with_near_names
from loraplex_runtime.quotas import Ticket
from loraplex_runtime.request_record import RequestRecord, log_end
from loraplex_runtime.tracing import RequestSpan, Tracing

T = TypeVar("T")

RETRY_S: Final = 1.0  # when full or draining
RETRIED: Final = "retried"
# The longest deadline that a worker gets, a year: gRPC's client in Python takes one of centuries for one in the past.
MAX_DEADLINE_S: Final = 365.0 * 86400


class RouterMetrics(RequestMetrics):
    """Counters and histograms, written as things happen."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        registry = new_registry() if registry is None else registry
        super().__init__(registry, "router")
        self._retries = MetricCounter(
            f"{PREFIX}router_retries",
            "Requests sent to another worker, by what the first one did.",
            ["cause"],
            registry=registry,
        )
        self._relayed = MetricCounter(
            f"{PREFIX}router_relayed_messages", "Messages of streams relayed.", registry=registry
        )

        self._decisions = MetricCounter(
            f"{PREFIX}router_decisions",
            "Requests sent to a worker, by why it was chosen; retried: another worker had declined or lost it.",
            ["decision"],
            registry=registry,
        )
        # Shown from the start, as zero: a rate needs the value before.
        for decision in (*DECISIONS, RETRIED):
            self._decisions.labels(decision)
        for cause in RETRY_CAUSES:
            self._retries.labels(cause.value)
        self._ignored_fields = MetricCounter(
            f"{PREFIX}http_ignored_fields",
            "Fields of HTTP requests that were ignored, by name where it is a known one.",
            ["field"],
            registry=registry,
        )

    def ignored_field(self, name: str) -> None:
        self._ignored_fields.labels(name).inc()

    def decided(self, decision: Decision, *, is_retry: bool) -> None:
        self._decisions.labels(RETRIED if is_retry else decision).inc()

    def retried(self, cause: str) -> None:
        self._retries.labels(cause).inc()

    def relayed(self, num_messages: int) -> None:
        """Counts the messages that one stream relayed, at its end."""
        self._relayed.inc(num_messages)


class CallContext(Protocol):
    """A call's client: gRPC's `ServicerContext`, or the HTTP port's."""

    def time_remaining(self) -> float | None: ...
    def invocation_metadata(self) -> Any: ...
    async def send_initial_metadata(self, metadata: Any) -> None: ...
    def write(self, message: bytes, /) -> Awaitable[None]: ...
    def set_trailing_metadata(self, metadata: Any) -> None: ...
    async def abort(self, code: Any, details: str = "", trailing_metadata: Any = ()) -> NoReturn: ...


@dataclass(eq=False, slots=True)
class Call:
    """One call of a client, from its arrival to its end."""

    record: RequestRecord
    context: CallContext
    task: asyncio.Task[Any]
    num_messages_sent: int = 0
    num_tokens_sent: int | None = 0  # None where the answer does not say it
    is_cut_off: bool = False
    ticket: Ticket | None = None  # its tenant's quotas
    span: RequestSpan | None = None
    attempt: RequestSpan | None = None  # to have a worker answer

    @property
    def method(self) -> str:
        return self.record.method

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @property
    def request_id(self) -> str:
        return self.record.request_id

    def metadata_for(self, upstream: Upstream) -> Metadata:
        """The metadata that a worker gets with this call's request."""
        context = self.context.invocation_metadata() if self.attempt is None else self.attempt.headers()
        return upstream.credentials.metadata(current_identity(), context)

    def begin_attempt(self, choice: Choice) -> None:
        self.record.worker_id = choice.worker_id
        if self.span is not None:
            self.attempt = self.span.attempt(choice.worker_id, choice.decision)

    def end_attempt(self, error: str = "") -> None:
        if self.attempt is not None:
            self.attempt.end_attempt(error)
            self.attempt = None

    async def ask(self, upstream: Upstream, path: str, raw: bytes) -> bytes:
        """One unary call to a worker, within this call's deadline. Raises UpstreamFailure."""
        return await upstream.ask(path, raw, self.remaining_s(), self.metadata_for(upstream))

    def error_metadata(self) -> Iterator[tuple[str, str]]:
        """Metadata of every error of this call: the request's id, and how much of the answer was sent."""
        if self.request_id:
            yield "request_id", self.request_id
        if self.num_messages_sent:
            yield "messages_sent", str(self.num_messages_sent)
            if self.num_tokens_sent is not None:
                yield "tokens_sent", str(self.num_tokens_sent)

    def remaining_s(self) -> float | None:
        """The part of the client's deadline that a worker gets, None without one. Raises DeadlineExceeded when nothing
        is left."""
        left: float | None = self.context.time_remaining()
        if left is not None and left <= 0:
            raise DeadlineExceeded("the deadline had passed before the request could be sent to a worker")
        return None if left is None else answer_within_s(min(left, MAX_DEADLINE_S))


@dataclass(slots=True)
class Calls:
    """Owns the calls that are under way, with their limit and drain."""

    max_in_flight: int
    metrics: RouterMetrics
    adapter_names: Callable[[], Sequence[str]] = lambda: ()  # sorted, to suggest in errors
    activity: Activity = field(default_factory=lambda: Activity(time.monotonic()))
    tracing: Tracing | None = None
    _active: set[Call] = field(default_factory=set[Call])
    _tenants: Counter[str] = field(default_factory=Counter[str])  # of those calls
    _drain: Drain = field(init=False)

    def __post_init__(self) -> None:
        self._drain = Drain(self.__len__)

    def __len__(self) -> int:
        return len(self._active)

    def handler(
        self, method: str, body: Callable[[Call, bytes], Awaitable[T]]
    ) -> Callable[[bytes, CallContext], Awaitable[T]]:
        """`body` as gRPC calls it, and the HTTP port: every exception becomes the call's status."""

        async def handle(raw: bytes, context: CallContext) -> T:
            task = asyncio.current_task()
            assert task is not None, "handlers run in tasks"
            # Over HTTP a request has an id before it is read; its own replaces it.
            record = RequestRecord(method, current_identity().tenant, request_id=getattr(context, "request_id", ""))
            call = Call(record, context, task)
            if self.tracing is not None and record.computes:
                call.span = self.tracing.begin(record, context.invocation_metadata())
            return await self._run(call, raw, body)

        return handle

    async def _run(self, call: Call, raw: bytes, body: Callable[[Call, bytes], Awaitable[T]]) -> T:
        error: LoraplexError | UpstreamFailure | None = None
        try:
            self._enter(call)
            result = await body(call, raw)
            self._count(call, Code.OK)
            return result
        except asyncio.CancelledError:
            if not call.is_cut_off:
                self._count(call, Code.DEADLINE_EXCEEDED if call.context.time_remaining() == 0 else Code.CANCELLED)
                raise
            call.task.uncancel()
            error = _draining()
        except UpstreamFailure as failure:
            error = failure.for_client(call.num_tokens_sent, call.num_messages_sent) or failure
        except grpc.aio.BaseError:
            # The client's side of the call is gone, which gRPC knows already.
            self._count(call, Code.CANCELLED)
            raise
        except Exception as exception:
            error = as_typed(exception, "answering a call")
        finally:
            self._leave(call)
            if call.ticket is not None:
                call.ticket.close(None if error is None or call.num_messages_sent else _typed(error))
        assert error is not None, "whatever else ends a call is raised above"
        return await self._fail(call, error)

    async def _fail(self, call: Call, error: LoraplexError | UpstreamFailure) -> NoReturn:
        """Ends the call: with the worker's status unchanged, or with an error of our own. Names that are like an
        unknown one are ours: a worker does not know which of them the caller may see."""
        worker_id = error.worker_id if isinstance(error, UpstreamFailure) else ""
        if isinstance(typed := _typed(error), AdapterNotFound):
            suggesting = with_near_names(typed, current_identity(), [self.adapter_names()])
            error = error if suggesting is typed else suggesting
        if isinstance(typed := _typed(error), QuotaExceeded):
            self.metrics.quota_refused(typed.metadata.get("quota", ""))
        upstream_id = "" if typed is None else typed.metadata.get("request_id", "")
        call.record.request_id = call.request_id or upstream_id or uuid.uuid4().hex
        if typed is not None:
            call.record.fail(typed)
        code = error.code if isinstance(error, LoraplexError) else Code(error.code.value[0])
        self._count(call, code)
        self.activity.failed(_failed_call(call.record, error, worker_id))
        if isinstance(error, UpstreamFailure):
            await abort_with(call.context, error.code, error.details, error.trailing_metadata)
        for key, value in call.error_metadata():
            error.metadata.setdefault(key, value)
        await abort(cast("Any", call.context), error)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new calls from now on; returns when those under way have ended, or after `timeout_s`."""
        await self._drain.wait(timeout_s)

    def cut_off(self) -> int:
        """Ends every call with Draining; returns how many there were."""
        active = list(self._active)
        for call in active:
            call.is_cut_off = True
            call.task.cancel()
        return len(active)

    def _enter(self, call: Call) -> None:
        if self._drain.has_begun:
            raise _draining()
        num_own, num_tenants = self._tenants[call.tenant], len(self._tenants) + (call.tenant not in self._tenants)
        if not has_place(len(self._active), num_own, num_tenants, self.max_in_flight):
            raise QueueFull(
                f"the router relays {len(self._active)} requests already; try again later",
                retry_after_s=RETRY_S,
            )
        self._active.add(call)
        self._tenants[call.tenant] += 1

    def _leave(self, call: Call) -> None:
        if call in self._active:
            self._active.discard(call)
            self._tenants[call.tenant] -= 1
            if not self._tenants[call.tenant]:
                del self._tenants[call.tenant]
        self._drain.note_end()

    def _count(self, call: Call, code: Code) -> None:
        call.record.end(code.name)
        self.metrics.ended(call.record)
        if call.record.computes:
            is_failed = code not in (Code.OK, Code.CANCELLED)
            self.activity.ended(call.record.worker_id, is_failed, time.monotonic())
        log_end(call.record)
        if call.span is not None:
            call.span.end(call.record)


def _typed(error: LoraplexError | UpstreamFailure) -> LoraplexError | None:
    return error if isinstance(error, LoraplexError) else error.typed


def _failed_call(record: RequestRecord, error: LoraplexError | UpstreamFailure, worker_id: str) -> FailedCall:
    typed = _typed(error)
    return FailedCall(
        ended_s=time.monotonic(),
        method=record.method,
        code=record.code,
        reason=record.reason,
        message=(str(error) if typed is None else typed.message)[:MAX_MESSAGE_CHARS],
        request_id=record.request_id,
        tenant=record.tenant,
        worker_id=worker_id,
    )


def _draining() -> Draining:
    # Behind a balancer the next try reaches another router; without one, this router's successor.
    return Draining("the router is shutting down; send the request again", retry_after_s=RETRY_S)
