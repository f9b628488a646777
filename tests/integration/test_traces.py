"""One trace through client, router, worker and engine."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable

import httpx2
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from support.fake_workers import Generate, cluster, fails, router_for, until
from support.light_worker import scripted_worker
from support.traces import recording_provider

from loraplex import AsyncClient, Client
from loraplex_contracts.errors import LoraplexError, WorkerLost
from loraplex_router.server import Router
from loraplex_runtime.tracing import Tracing
from loraplex_server.grpc.server import Worker

Spans = Callable[[], tuple[ReadableSpan, ...]]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    """The program's own provider; router and worker of the tests get it too."""
    provider, exporter = recording_provider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter.get_finished_spans


def traced() -> Tracing:
    return Tracing(trace.get_tracer_provider())  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def stack(**settings: object) -> AsyncGenerator[tuple[Router, Worker]]:
    async with scripted_worker("some text") as worker, router_for([worker.address], **settings) as (router, _):
        worker.gate.tracing = router.calls.tracing = traced()
        yield router, worker


def tree(found: tuple[ReadableSpan, ...]) -> dict[str, str]:
    """Name of each span -> name of its parent; all of one trace."""
    assert len({one.context.trace_id for one in found if one.context is not None}) == 1
    names = {one.context.span_id: label(one) for one in found if one.context is not None}
    return {label(one): "" if one.parent is None else names[one.parent.span_id] for one in found}


def label(span: ReadableSpan) -> str:
    """The router's and the worker's span of a method have the same name."""
    is_router = span.kind is trace.SpanKind.SERVER and "loraplex.worker" in (span.attributes or {})
    return f"router {span.name}" if is_router else span.name


EXPECTED = {
    "worker call": "router GenerateStream",
    "GenerateStream": "worker call",
    "queue": "GenerateStream",
    "prefill": "GenerateStream",
    "decode": "GenerateStream",
}


async def test_a_stream_of_the_sdk_is_one_trace(spans: Spans) -> None:
    async with stack() as (router, _), AsyncClient(router.address) as client:
        async for _ in client.stream("hello", max_tokens=6):
            pass
        await until(lambda: len(spans()) >= 7, 3.0)
    method = "loraplex.v1.InferenceService/GenerateStream"
    assert tree(spans()) == {method: "", "router GenerateStream": method, **EXPECTED}
    for one in spans():
        for value in (one.attributes or {}).values():
            assert "hello" not in str(value)


async def test_a_call_of_the_sdk_that_fails(spans: Spans) -> None:
    async with stack() as (router, _), AsyncClient(router.address) as client:
        with pytest.raises(LoraplexError):
            await client.generate("hello", adapter_id="nobody")
        await until(lambda: len(spans()) == 4)
    root = next(one for one in spans() if one.parent is None)
    assert root.attributes is not None
    assert root.attributes["rpc.response.status_code"] == "NOT_FOUND"


async def test_headers_of_http_are_continued(spans: Spans) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with stack(http_port=0) as (router, _):
        assert router.http is not None
        async with httpx2.AsyncClient(base_url=f"http://{router.http.address}") as client:
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "stream": True}
            body["model"] = (await client.get("/v1/models")).json()["data"][0]["id"]
            answer = await client.post("/v1/completions", json=body, headers={"traceparent": parent})
        assert answer.status_code == 200, answer.text
        await until(lambda: len(spans()) >= 6, 3.0)
    root = next(one for one in spans() if label(one) == "router GenerateStream")
    assert root.parent is not None
    assert f"{root.parent.trace_id:032x}" == parent[3:35]
    assert f"{root.parent.span_id:016x}" == parent[36:52]


async def test_a_retry_is_a_second_attempt(spans: Spans) -> None:
    async with cluster(2) as own:
        workers, router = own.workers, own.router
        for worker in workers:
            worker.stream = fails(WorkerLost("gone", retry_after_s=0.0))
        router.calls.tracing = traced()
        async with AsyncClient(router.address) as client:
            with pytest.raises(LoraplexError):
                async for _ in client.stream("hello"):
                    pass
        await until(lambda: len(spans()) == 4)
        attempts = [one for one in spans() if one.name == "worker call"]
        assert len(attempts) == 2
        assert all(one.status.status_code is trace.StatusCode.ERROR for one in attempts)
        sent = [str(worker.metadata[-1]["traceparent"]) for worker in workers]
        assert {one[36:52] for one in sent} == {f"{one.context.span_id:016x}" for one in attempts if one.context}


async def test_without_traces_the_clients_context_is_passed_on() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with cluster(1) as own:
        call = own.channel.unary_stream("/loraplex.v1.InferenceService/GenerateStream")
        request = Generate(text="hello").SerializeToString()
        assert await call(request, metadata=(("traceparent", parent),)).read()
        assert own.workers[0].metadata[-1]["traceparent"] == parent


def test_the_blocking_client_ends_its_spans(spans: Spans) -> None:
    with Client("127.0.0.1:1", timeout_s=2) as client, pytest.raises(LoraplexError):
        client.generate("hello")
    (root,) = spans()
    assert root.status.status_code is trace.StatusCode.ERROR
    with Client("127.0.0.1:1", timeout_s=2) as client, pytest.raises(LoraplexError):
        list(client.stream("hello"))
    assert len(spans()) == 2
