"""Spans of requests, their context in headers, their export."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode
from support.traces import recorded

from loraplex_contracts.errors import AdapterNotFound, FailedPrecondition, Internal, InvalidArgument
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.tracing import EXPORT_TIMEOUT_S, open_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def seconds(span: ReadableSpan, first: ReadableSpan) -> tuple[float, float]:
    """Beginning and end of a span, from the beginning of another."""
    assert span.start_time is not None
    assert span.end_time is not None
    assert first.start_time is not None
    return (span.start_time - first.start_time) / 1e9, (span.end_time - first.start_time) / 1e9


def ended(worker_id: str = "", **fields: Any) -> RequestRecord:
    record = RequestRecord("GenerateStream", "acme", request_id="r1", adapter="sql", worker_id=worker_id, code="OK")
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def test_a_request_is_a_span_with_the_engines_times_below_it() -> None:
    tracing, spans = recorded()
    span = tracing.begin(ended(), [("x-adapter-id", "sql"), ("traceparent", PARENT)])
    span.end(
        ended(queue_s=0.3, adapter_wait_s=0.2, first_token_s=0.5, total_s=2.0, num_prompt_tokens=8, num_output_tokens=4)
    )
    by_name = {one.name: one for one in spans()}
    root = by_name["GenerateStream"]
    assert root.kind is SpanKind.SERVER
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}-{root.parent.span_id:016x}" == PARENT[3:-3]
    assert root.attributes is not None
    assert {name: root.attributes[name] for name in ("loraplex.request_id", "loraplex.adapter", "loraplex.tenant")} == {
        "loraplex.request_id": "r1",
        "loraplex.adapter": "sql",
        "loraplex.tenant": "acme",
    }
    assert (root.attributes["gen_ai.usage.input_tokens"], root.attributes["gen_ai.usage.output_tokens"]) == (8, 4)
    found = {name: seconds(one, root) for name, one in by_name.items()}
    assert found == {
        "GenerateStream": (0.0, 2.0),
        "queue": (0.0, 0.3),
        "adapter wait": (pytest.approx(0.1), 0.3),
        "prefill": (0.3, 0.5),
        "decode": (0.5, 2.0),
    }
    assert all(one.parent == root.context for one in by_name.values() if one is not root)


def test_a_router_has_attempts_in_the_place_of_phases() -> None:
    tracing, spans = recorded()
    span = tracing.begin(ended(), [])
    lost = span.attempt("w0", "home")
    lost.end_attempt("lost")
    attempt = span.attempt("w1", "overflow")
    (header,) = attempt.headers()
    attempt.end_attempt()
    span.end(ended("w1", queue_s=0.1, first_token_s=0.2, total_s=0.3))
    first, second, root = spans()
    assert [one.name for one in (first, second, root)] == ["worker call", "worker call", "GenerateStream"]
    assert first.status.status_code is StatusCode.ERROR
    assert second.parent == root.context
    assert second.context is not None
    assert second.attributes == {"loraplex.worker": "w1", "loraplex.decision": "overflow"}
    assert header[0] == "traceparent"
    assert header[1].startswith(f"00-{second.context.trace_id:032x}-{second.context.span_id:016x}-")


@pytest.mark.parametrize(
    ("error", "status"), [(AdapterNotFound("no"), StatusCode.UNSET), (Internal("bug"), StatusCode.ERROR)]
)
def test_only_faults_of_the_server_are_errors(error: Any, status: StatusCode) -> None:
    tracing, spans = recorded()
    record = RequestRecord("Generate")
    span = tracing.begin(record, None)
    record.fail(error)
    record.end()
    span.end(record)
    (root,) = spans()
    assert root.status.status_code is status
    assert root.attributes is not None
    assert root.attributes["error.type"] == error.reason


def test_headers_that_are_no_context_begin_a_trace() -> None:
    tracing, spans = recorded()
    for metadata in ([("traceparent", "nonsense")], [("traceparent", b"\xff")], [("traceparent", "")]):
        record = ended()
        tracing.begin(record, metadata).end(record)
    assert [one.parent for one in spans()] == [None] * 3


# --- on and off -------------------------------------------------------------------------------------------------------


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP and remembers the paths and bodies."""

    received: ClassVar[list[tuple[str, bytes]]] = []

    def do_POST(self) -> None:
        self.received.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_spans_reach_a_collector() -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        tracing = open_tracing(f"http://127.0.0.1:{server.server_port}", "router")
        assert tracing is not None
        record = ended("w0", total_s=0.1)
        tracing.begin(record, []).end(record)
        tracing.close()
    finally:
        server.shutdown()
        server.server_close()
    ((path, body),) = Collector.received
    assert path == "/v1/traces"
    (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    names = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert names["service.name"] == "loraplex-router"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["GenerateStream"]


def test_an_end_does_not_wait_long_for_a_collector_that_is_gone() -> None:
    tracing = open_tracing("http://127.0.0.1:9", "worker")
    assert tracing is not None
    for _ in range(100):
        record = ended()
        tracing.begin(record, []).end(record)
    began_s = time.monotonic()
    tracing.close()
    assert time.monotonic() - began_s < 4 * EXPORT_TIMEOUT_S


@pytest.mark.parametrize("endpoint", ["localhost:4317", "ftp://x", "http://"])
def test_an_address_that_is_none(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="--otlp-traces-endpoint"):
        open_tracing(endpoint, "worker")


def test_without_the_extra_a_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(FailedPrecondition, match=r"loraplex\[otel\]"):
        open_tracing("http://127.0.0.1:1", "worker")


def imported_by(modules: Sequence[str]) -> str:
    """The modules of OpenTelemetry that come with these."""
    program = f"import sys, {', '.join(modules)}; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_nothing_is_imported_while_traces_are_off() -> None:
    assert open_tracing(None, "router") is None
    assert imported_by(["loraplex", "loraplex.aio", "loraplex_router.server", "loraplex_runtime.tracing"]) == "[]"
