"""Middleware of the worker's handlers: parsing, identity, quotas, refusal while draining, typed errors, metrics.

Owns the flags of draining and the counts of calls.
"""

from __future__ import annotations

import contextlib
import copy
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, Final, TypeVar, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from loraplex_contracts.errors import InvalidArgument, LoraplexError, QuotaExceeded, as_typed, draining
from loraplex_proto import status
from loraplex_proto.validate import parse
from loraplex_runtime import auth
from loraplex_runtime.listener import Drain
from loraplex_runtime.logs import bind_request_id
from loraplex_runtime.metrics import RequestMetrics
from loraplex_runtime.near_names import with_near_names
from loraplex_runtime.quotas import TenantQuotas, Ticket
from loraplex_runtime.request_record import RequestRecord, log_end
from loraplex_runtime.tracing import RequestSpan, Tracing

Context = Any
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


# Calls that the client ends. A drain does not wait for them.
WATCHES: Final = frozenset({"WatchLoad"})


class RequestGate:
    """Admission, quotas and metrics of the calls of one server, shared by its services."""

    def __init__(
        self,
        metrics: RequestMetrics | None = None,
        quotas: TenantQuotas | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.is_leaving = False  # reported to routers, so that they send no more
        self._quotas = quotas or TenantQuotas()
        self.tracing = tracing
        self.metrics = metrics or RequestMetrics(None, "worker")
        # Sorted names of adapters, to suggest in errors.
        self.adapter_names: Callable[[], Iterable[Sequence[str]]] = lambda: ()
        self._num_active = 0
        self._drain = Drain(lambda: self._num_active)

    async def drain(self, timeout_s: float) -> None:
        """Refuses new calls from now on; returns when those under way have ended, or after `timeout_s`."""
        await self._drain.wait(timeout_s)

    @contextlib.contextmanager
    def call(self, method: str, context: Context = None) -> Generator[_Call]:
        """Tracks one call, from its arrival to its end."""
        record = RequestRecord(method, auth.current_identity().tenant)
        span: RequestSpan | None = None
        if self.tracing is not None and record.computes:
            span = self.tracing.begin(record, context.invocation_metadata())
        call = _Call(self.metrics, record, self._suggesting, span)
        _current_call.set(call)
        self._num_active += method not in WATCHES
        try:
            yield call
            call.code = "OK"
        finally:
            call.ended()
            self._num_active -= method not in WATCHES
            self._drain.note_end()

    def _suggesting(self, error: LoraplexError) -> LoraplexError:
        identity = auth.current_identity()
        if auth.ROUTER in identity.roles and identity is not auth.EVERYBODY:
            return error  # the router knows what its client may see
        return with_near_names(error, identity, self.adapter_names())

    def admit(self, *adapter_ids: str) -> auth.Identity:
        """The caller's identity. Raises Draining, and AdapterNotFound for an adapter that is not the caller's."""
        if self._drain.has_begun:
            raise draining()
        identity = auth.current_identity()
        identity.check_adapters(adapter_ids)
        return identity

    def take_quota(self, num_requests: int = 1, **tokens: Any) -> Ticket:
        """Takes quota for the call that this task answers, by `TenantQuotas.take`; it is given back at the call's
        end."""
        return self._take(partial(self._quotas.take, num_requests=num_requests, **tokens))

    def take_pooling_quota(self, num_inputs: int, num_prompt_tokens: int) -> Ticket:
        """Takes quota by `TenantQuotas.take_pooling`. A call that asks the engine again, because it refused, pays
        once."""
        return self._take(
            partial(self._quotas.take_pooling, num_inputs=num_inputs, num_prompt_tokens=num_prompt_tokens)
        )

    @staticmethod
    def _take(take: Callable[[auth.Identity], Ticket]) -> Ticket:
        call = _current_call.get()
        if call.ticket is not None:
            call.ticket.set_prompt(0)
            call.ticket.close()
        call.ticket = take(auth.current_identity())
        call.ticket.add_tokens(0)  # here all tokens are counted as they come
        return call.ticket


def current_record() -> RequestRecord:
    """The record of the call that this task answers."""
    return _current_call.get().record


def begin_request(given: str, adapter: str) -> str:
    """The client's request id, or one of ours. Later log lines and the error of this call carry it. `adapter`: the name
    that it asks for."""
    request_id = given or uuid.uuid4().hex
    record = current_record()
    record.ask_for(request_id, adapter)
    bind_request_id(record.request_id)
    return request_id


def service_handler(service: ServiceDescriptor, servicer: object) -> grpc.GenericRpcHandler:
    """Answers calls of `service` by the methods of `servicer`, each decorated with `handles_errors` or
    `handles_stream_errors`.

    Unlike the generated function's handlers, these also answer a request that cannot be parsed with a typed error.
    """
    handlers: dict[str, Any] = {}
    for method in service.methods:
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=partial(_parsed_or_error, GetMessageClass(method.input_type)),
            response_serializer=_serialized,
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _parsed_or_error(cls: type[Message], raw: bytes) -> Message | InvalidArgument:
    """The parsed request, or the error of one that cannot be parsed: the handler raises it."""
    try:
        return parse(cls, raw)
    except InvalidArgument as error:
        return error


def _serialized(response: Message | bytes) -> bytes:
    """The bytes of an answer, which the handler may have serialized itself."""
    return response if isinstance(response, bytes) else response.SerializeToString()


def handles_errors(handler: _Handler) -> _Handler:
    """Makes errors of a unary handler leave as typed status, unknown ones as INTERNAL with an opaque id; calls are
    counted.

    The handler's `self` has a RequestGate in `_gate`.
    """

    @wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> Any:
        with self._gate.call(handler.__name__, context) as call:
            try:
                return await handler(self, _checked(request), context)
            except Exception as error:
                await status.abort(context, call.failed(error))

    return cast(_Handler, wrapped)


def handles_stream_errors(handler: _Handler) -> _Handler:
    """Does what `handles_errors` does, for a handler that streams."""

    @wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        with self._gate.call(handler.__name__, context) as call:
            try:
                async for message in handler(self, _checked(request), context):
                    call.has_message()
                    yield message
            except Exception as error:
                await status.abort(context, call.failed(error))

    return cast(_Handler, wrapped)


def _checked(request: Any) -> Any:
    if isinstance(request, InvalidArgument):
        raise request
    return request


class _Call:
    """Metrics of one call. A call that neither failed nor ended was cancelled."""

    def __init__(
        self,
        metrics: RequestMetrics,
        record: RequestRecord,
        suggesting: Callable[[LoraplexError], LoraplexError],
        span: RequestSpan | None,
    ) -> None:
        self._metrics = metrics
        self._span = span
        self._suggesting = suggesting
        self.record = record
        self._has_message = False
        self._error: LoraplexError | None = None
        self.code = "CANCELLED"
        self.ticket: Ticket | None = None  # its tenant's quotas

    def has_message(self) -> None:
        if not self._has_message:
            self._has_message = True
            self._metrics.first_message(self.record.method, self.record.elapsed_s())

    def failed(self, error: Exception) -> LoraplexError:
        # One error may end many requests; the id is that of this one only.
        typed = self._suggesting(copy.copy(as_typed(error, "answering a call")))
        self._error = typed
        self.record.fail(typed)
        self.record.request_id = self.record.request_id or uuid.uuid4().hex
        if isinstance(typed, QuotaExceeded):
            self._metrics.quota_refused(typed.metadata.get("quota", ""))
        typed.metadata.setdefault("request_id", self.record.request_id)
        return typed

    def ended(self) -> None:
        if self.ticket is not None:
            self.ticket.close(self._error)
        self.record.end(self.code)
        self._metrics.ended(self.record)
        log_end(self.record)
        if self._span is not None:
            self._span.end(self.record)


_current_call: ContextVar[_Call] = ContextVar("loraplex_call")  # that this task answers
