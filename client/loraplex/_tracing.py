"""Spans of the SDK's calls, in programs that use OpenTelemetry themselves.

A program that has not loaded OpenTelemetry has no spans, imports nothing, and pays one look into a dictionary.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable
from typing import Any, Final

import grpc

_TRACE: Final = "opentelemetry.trace"


def client_span(path: str, request_id: str | None) -> ClientSpan | None:
    """The span of a call of `path`, "/package.Service/Method", that begins now; None where nobody records it."""
    trace = sys.modules.get(_TRACE)
    if trace is None:
        return None
    span = trace.get_tracer("loraplex").start_span(path.lstrip("/"), kind=trace.SpanKind.CLIENT)
    if not span.get_span_context().is_valid:
        return None
    from opentelemetry import propagate  # what the program has chosen; W3C's headers unless it did

    if request_id:
        span.set_attribute("loraplex.request_id", request_id)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, context=trace.set_span_in_context(span))
    return ClientSpan(span, tuple(carrier.items()), trace)


class ClientSpan:
    """One call, from its start to its end."""

    def __init__(self, span: Any, headers: tuple[tuple[str, str], ...], trace: Any) -> None:
        self.headers = headers
        self._span = span
        self._trace = trace

    def run(self, start: Callable[[], Any]) -> Any:
        """Returns an answer, or gRPC's call, as `start` does; the span ends with it."""
        try:
            made = start()
        except BaseException as error:
            call: Any = error  # gRPC's errors are the call, too
            status = call.code() if isinstance(error, grpc.RpcError) else None
            self._end(type(error).__name__ if status is None else status.name)
            raise
        if hasattr(made, "add_done_callback"):
            made.add_done_callback(self._on_done)
        else:
            self._end("OK")
        return made

    def _on_done(self, call: Any) -> None:
        code = call.code()
        if inspect.isawaitable(code):  # of grpc.aio; it is known, so that this takes one turn of the loop
            asyncio.ensure_future(code).add_done_callback(self._on_code)
        else:
            self._end(code.name)

    def _on_code(self, code: asyncio.Future[Any]) -> None:
        self._end("CANCELLED" if code.cancelled() else code.result().name)

    def _end(self, code: str) -> None:
        """`code`: name of gRPC's, or of the exception that came before."""
        self._span.set_attribute("rpc.response.status_code", code)
        if code != "OK":
            self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, code))
        self._span.end()
