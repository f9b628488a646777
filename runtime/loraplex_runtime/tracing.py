"""OpenTelemetry traces of requests: spans, their context in headers, export.

A span is made at a request's arrival and ended with its record, whose times become its children: they cost nothing
while the request runs. OpenTelemetry is imported where traces are switched on, and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import loraplex_proto
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_runtime.request_record import RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, SpanKind

FLAG: Final = "--otlp-traces-endpoint"
# The context of a trace (W3C), in gRPC's metadata and in HTTP's headers.
CONTEXT_KEYS: Final = frozenset({"traceparent", "tracestate"})
EXPORT_TIMEOUT_S: Final = 2.0  # of a batch of spans
_OTLP_PATH: Final = "/v1/traces"

# Attributes of a span by the fields of a record; names as OpenTelemetry's conventions have them, where they do.
_ATTRIBUTES: Final = {
    "code": "rpc.response.status_code",
    "reason": "error.type",
    "tenant": "loraplex.tenant",
    "adapter": "loraplex.adapter",
    "digest": "loraplex.adapter_digest",
    "worker": "loraplex.worker",
    "retries": "loraplex.retries",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "queue_s": "loraplex.queue_s",
    "ttft_s": "loraplex.time_to_first_token_s",
}
# Codes for which a server is to blame; others are answers.
_SERVER_FAULTS: Final = frozenset({"UNKNOWN", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNIMPLEMENTED"})


class Tracing:
    """Owns the provider of spans."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("loraplex", loraplex_proto.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, record: RequestRecord, metadata: Iterable[tuple[str, Any]] | None) -> RequestSpan:
        """Begins the span of a request; `metadata`: its headers, which may name the span that it is part of."""
        from opentelemetry.trace import SpanKind

        carrier = {key: value for key, value in metadata or () if key in CONTEXT_KEYS and isinstance(value, str)}
        return RequestSpan(self, record.method, SpanKind.SERVER, self._propagator.extract(carrier))

    def start(self, name: str, kind: SpanKind, context: Any, start_ns: int) -> Span:
        return self._tracer.start_span(name, context=context, kind=kind, start_time=start_ns)

    def headers_of(self, context: Any) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, context=context)
        return tuple(carrier.items())

    def close(self) -> None:
        """Sends what is left, in `EXPORT_TIMEOUT_S` for each batch where nobody listens."""
        self._provider.shutdown()


class RequestSpan:
    """One span, and what is part of it."""

    def __init__(self, tracing: Tracing, name: str, kind: SpanKind, context: Any) -> None:
        from opentelemetry.trace import set_span_in_context

        self._tracing = tracing
        self._start_ns = time.time_ns()
        self._span = tracing.start(name, kind, context, self._start_ns)
        self._context = set_span_in_context(self._span, context)

    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of calls that are part of this span."""
        return self._tracing.headers_of(self._context)

    def attempt(self, worker_id: str, decision: str) -> RequestSpan:
        """Begins the span of a call to a worker; `end_attempt` ends it."""
        from opentelemetry.trace import SpanKind

        made = RequestSpan(self._tracing, "worker call", SpanKind.CLIENT, self._context)
        made._span.set_attributes({"loraplex.worker": worker_id, "loraplex.decision": decision})
        return made

    def end_attempt(self, error: str = "") -> None:
        """Ends the span of an attempt. `error`: why another worker is asked, or the request fails."""
        if error:
            self._fail(error)
        self._span.end()

    def end(self, record: RequestRecord) -> None:
        """Ends the span, with the record's facts as attributes; in a worker its times become spans of the engine."""
        self._span.set_attribute("loraplex.request_id", record.request_id)
        for name, value in record.fields().items():
            if name in _ATTRIBUTES:
                self._span.set_attribute(_ATTRIBUTES[name], value)
        if record.code in _SERVER_FAULTS:
            self._fail(record.reason or record.code)
        if not record.worker_id:  # a router has a span of the worker for these times
            for name, start_s, end_s in _phases(record):
                self._add(name, start_s, end_s)
        self._span.end(self._start_ns + _ns(record.total_s))

    def _fail(self, reason: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_status(Status(StatusCode.ERROR, reason))

    def _add(self, name: str, start_s: float, end_s: float) -> None:
        from opentelemetry.trace import SpanKind

        start_ns = self._start_ns + _ns(start_s)
        span = self._tracing.start(name, SpanKind.INTERNAL, self._context, start_ns)
        span.end(max(start_ns, self._start_ns + _ns(end_s)))


def _phases(record: RequestRecord) -> Iterator[tuple[str, float, float]]:
    """Seconds from the arrival at which each part of the work began and ended. The wait for an adapter is shown as the
    end of the queue: what comes behind it, a row or blocks, is waited for at the same time."""
    queue_s = record.queue_s
    if queue_s is None:
        return
    first_s = record.total_s if record.first_token_s is None else record.first_token_s
    yield "queue", 0.0, queue_s
    if record.adapter_wait_s:
        yield "adapter wait", max(0.0, queue_s - record.adapter_wait_s), queue_s
    yield "prefill", queue_s, first_s
    if record.first_token_s is not None:
        yield "decode", first_s, record.total_s


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def open_tracing(endpoint: str | None, role: str) -> Tracing | None:
    """Sends spans to an OTLP collector over HTTP; None without an endpoint. Sampling and headers are OpenTelemetry's to
    read from the environment (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS). Raises FailedPrecondition."""
    if not endpoint:
        return None
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise InvalidArgument(f"{FLAG} takes an address such as http://HOST:4318, not {endpoint!a}", field=FLAG)
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise FailedPrecondition(
            f"traces need OpenTelemetry: pip install 'loraplex[otel]', or leave {FLAG} out", field=FLAG
        ) from error
    address = endpoint.rstrip("/") + ("" if "/" in rest.rstrip("/") else _OTLP_PATH)
    resource = Resource.create({"service.name": f"loraplex-{role}", "service.version": loraplex_proto.__version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=EXPORT_TIMEOUT_S)))
    return Tracing(provider)
