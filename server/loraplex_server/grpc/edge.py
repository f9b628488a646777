"""What every handler of the worker does first and last: who calls, are we draining, which error leaves.

Owns the draining flag and the counts of calls.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import AsyncIterator, Callable, Generator
from typing import Any, TypeVar, cast

from loraplex_proto import auth, status, telemetry
from loraplex_proto.errors import Draining, LoraplexError

Context = Any
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Edge:
    """Shared by the services of one server."""

    def __init__(self, metrics: telemetry.RequestMetrics | None = None) -> None:
        self.is_draining = False
        self.metrics = metrics or telemetry.RequestMetrics(None, "worker")

    def admit(self, *adapter_ids: str) -> auth.Identity:
        """The caller's identity. Raises Draining, and AdapterNotFound for an adapter that is not the caller's."""
        if self.is_draining:
            raise Draining("this worker is shutting down; send the request to another one", retry_after_s=1.0)
        identity = auth.current_identity()
        identity.check_adapters(adapter_ids)
        return identity


def new_request_id(given: str) -> str:
    """The client's request id, or one of ours."""
    return given or uuid.uuid4().hex


def handles_errors(handler: _Handler) -> _Handler:
    """Errors of a unary handler leave as typed status, unknown ones as INTERNAL with an opaque id; calls are counted.

    The handler's `self` has an Edge in `_edge`."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> Any:
        with _counted(self._edge.metrics, handler.__name__) as call:
            try:
                return await handler(self, request, context)
            except Exception as error:
                await status.abort(context, call.failed(error))

    return cast(_Handler, wrapped)


def handles_stream_errors(handler: _Handler) -> _Handler:
    """The same for a handler that streams."""

    @functools.wraps(handler)
    async def wrapped(self: Any, request: Any, context: Context) -> AsyncIterator[Any]:
        with _counted(self._edge.metrics, handler.__name__) as call:
            try:
                async for message in handler(self, request, context):
                    call.has_message()
                    yield message
            except Exception as error:
                await status.abort(context, call.failed(error))

    return cast(_Handler, wrapped)


class _Call:
    """One call's metrics. A call that neither failed nor ended was cancelled."""

    def __init__(self, metrics: telemetry.RequestMetrics, method: str) -> None:
        self._metrics = metrics
        self._method = method
        self._started_s = time.monotonic()
        self._has_message = False
        self.code = "CANCELLED"

    def has_message(self) -> None:
        if not self._has_message:
            self._has_message = True
            self._metrics.first_message(self._method, time.monotonic() - self._started_s)

    def failed(self, error: Exception) -> LoraplexError:
        typed = status.as_typed(error)
        self.code = typed.code.name
        return typed

    def ended(self) -> None:
        self._metrics.ended(self._method, self.code, time.monotonic() - self._started_s)


@contextlib.contextmanager
def _counted(metrics: telemetry.RequestMetrics, method: str) -> Generator[_Call]:
    call = _Call(metrics, method)
    try:
        yield call
        call.code = "OK"
    finally:
        call.ended()
