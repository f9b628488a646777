"""Hostile clients on every HTTP route and in every dialect."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import logging
import queue
import socket
import struct
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.routing import Route
from support.credentials import credential, write_credentials
from support.engine_fakes import FakeRunner, make_engine
from support.fake_workers import Chunk, Cluster, Generate, blocks, fails, router_for, until
from support.http import Http, http_cluster
from support.inline_worker import inline_worker
from support.light_worker import light_worker
from support.world import TinyWorld

from loraplex_contracts.errors import EngineLost
from loraplex_contracts.plan import StepPlan
from loraplex_proto.v1 import adapter_pb2
from loraplex_router.config import HttpOptions
from loraplex_router.http import app as http_app
from loraplex_router.http import middleware as http_middleware
from loraplex_router.http import server as http_server
from loraplex_router.http.admin import LoadRequest, UnloadRequest
from loraplex_router.http.fields import Fields
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.openai import fields as openai
from loraplex_router.http.openai.responses import ResponsesRequest
from loraplex_router.http.pooling import fields as pooling
from loraplex_router.http.sglang import fields as sglang
from loraplex_router.http.tgi import fields as tgi
from loraplex_runtime.auth import token_digest
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig
from loraplex_server.engine import process
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.pipe import Cancel, Command

JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "hi"}]
OPEN_PATHS = {"/health", "/ping", "/health_generate", "/version", "/metrics"}


@dataclass(frozen=True)
class Request:
    """A request that is answered."""

    path: str
    body: dict[str, Any]
    model: type[Fields]
    is_tgi: bool = False

    def names(self) -> list[str]:
        """Fields that name the adapter; a dot stands for an object."""
        if IS_ADMIN in self.path:
            return ["lora_name"]
        found = [name for name in ("model", "lora_path", "adapter_id") if name in self.model.model_fields]
        if "parameters" in self.model.model_fields:
            found.append("parameters.adapter_id")
        return found

    def naming(self, field: str, name: str) -> dict[str, Any]:
        body, (*outer, last) = copy.deepcopy(self.body), field.split(".")
        inner = body
        for one in outer:
            inner = inner.setdefault(one, {})
        inner[last] = name
        if field == "lora_name" and "lora_path" in body:
            body["lora_path"] = name
        return body


IS_ADMIN = "lora_adapter"
INPUTS = {"inputs": "hi"}
LOAD = {"lora_name": "sql", "lora_path": "sql"}
# Every route that takes a body, in every dialect.
REQUESTS = [
    Request("/v1/completions", {"prompt": "hi"}, openai.CompletionRequest),
    Request("/v1/chat/completions", {"messages": CHAT}, openai.ChatCompletionRequest),
    Request("/v1/responses", {"input": "hi"}, ResponsesRequest),
    Request("/tokenize", {"prompt": "hi"}, openai.TokenizeRequest),
    Request("/v1/tokenize", {"prompt": "hi"}, openai.TokenizeRequest),
    Request("/detokenize", {"tokens": [97]}, openai.DetokenizeRequest),
    Request("/v1/detokenize", {"tokens": [97]}, openai.DetokenizeRequest),
    Request("/v1/embeddings", {"input": "hi"}, pooling.EmbeddingsRequest),
    Request("/classify", {"input": "hi"}, pooling.ClassifyBody),
    *(Request(path, {"text_1": "a", "text_2": "b"}, pooling.ScoreBody) for path in ("/score", "/v1/score")),
    *(
        Request(path, {"query": "a", "documents": ["b"]}, pooling.RerankBody)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
    Request("/generate", {"text": "hi"}, sglang.GenerateRequest),
    *(Request(path, INPUTS, tgi.GenerateRequest, True) for path in ("/", "/generate", "/generate_stream")),
    Request("/tokenize", INPUTS, tgi.TokenizeRequest, True),
    Request("/chat_tokenize", {"messages": CHAT}, openai.ChatCompletionRequest, True),
    Request("/embed", INPUTS, pooling.EmbedBody, True),
    Request("/classify", INPUTS, pooling.ClassifyBody, True),
    Request("/classify_batch", {"inputs": ["hi"]}, pooling.ClassifyBody, True),
    *(Request(path, LOAD, LoadRequest) for path in ("/v1/load_lora_adapter", "/load_lora_adapter")),
    *(Request(path, LOAD, UnloadRequest) for path in ("/v1/unload_lora_adapter", "/unload_lora_adapter")),
]


def status_of(request: Request, answer: httpx2.Response) -> int:
    """The status, with the answer in the form of the request's dialect. SGLang's admin routes say 400 for 404."""
    content = answer.json()
    if request.path in ("/load_lora_adapter", "/unload_lora_adapter") and "success" in content:
        assert (answer.status_code, content["success"]) == (400, False)
        return 404 if "cannot be found" in content["error_message"] else 400
    assert set(content) == ({"error", "error_type"} if request.is_tgi else {"error"}), content
    return answer.status_code


@contextlib.asynccontextmanager
async def open_cluster(**options: Any) -> AsyncGenerator[tuple[Cluster, Http]]:
    async with http_cluster(http=HttpOptions(admin=True), **options) as (c, http):
        c.workers[0].adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="s" * 64, kind="lora", rank=8)
        yield c, http


@pytest.fixture
def apps(monkeypatch: pytest.MonkeyPatch) -> list[FastAPI]:
    """The FastAPI applications that are made."""
    found: list[FastAPI] = []
    inner = http_app.Middleware

    def make(app: Any, *rest: Any) -> Any:
        found.append(app)
        return inner(app, *rest)

    monkeypatch.setattr(http_app, "Middleware", make)
    return found


async def post(http: Http, path: str, body: Any, **headers: str) -> httpx2.Response:
    """Lone surrogates are written as JSON writes them."""
    return await http.post(path, content=json.dumps(body), headers={**JSON, **headers})


# --- routes ---------------------------------------------------------------------------------------------------------


async def test_every_route_and_dialect_is_here(apps: list[FastAPI]) -> None:
    async with open_cluster() as (c, http):
        (app,) = apps
        takes_body: dict[str, set[type]] = {}
        for route in app.routes:
            if isinstance(route, APIRoute) and route.body_field is not None:
                takes_body[route.path] = members(route.body_field.field_info.annotation)
        of_tests: dict[str, set[type]] = {}
        for request in REQUESTS:
            of_tests.setdefault(request.path, set()).add(request.model)
        assert of_tests == takes_body
        for request in REQUESTS:
            c.workers[0].adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="s" * 64)
            more = {"load_inplace": True} if request.path == "/v1/load_lora_adapter" else {}
            if request.path == "/load_lora_adapter":
                c.workers[0].adapters.clear()
            answer = await post(http, request.path, {**request.body, **more})
            assert answer.status_code == 200, (request.path, answer.text)


def members(annotation: Any) -> set[type]:
    """The classes of a union."""
    if isinstance(annotation, type):
        return {annotation}
    return set().union(*(members(one) for one in getattr(annotation, "__args__", ())))


async def test_no_route_answers_without_a_key(apps: list[FastAPI], tmp_path: Path) -> None:
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        (app,) = apps
        routes = [(method, one.path) for one in app.routes if isinstance(one, Route) for method in one.methods or ()]
        assert {("GET", "/openapi.json"), ("POST", "/v1/responses"), ("GET", "/v1/models")} <= set(routes)
        assert OPEN_PATHS <= {path for _, path in routes}
        for method, path in routes:
            for headers in ({}, {"authorization": "Bearer nobody"}, {"authorization": "Basic alice"}):
                answer = await http.request(method, path.replace("{model_id:path}", "sql"), headers=headers)
                assert (answer.status_code == 401) != (path in OPEN_PATHS), (method, path)
        for request in REQUESTS:
            for tail in ("?token=alice", "?api_key=alice", "?access_token=alice"):
                assert (await post(http, request.path + tail, request.body)).status_code == 401
        assert not c.workers[0].raw_requests
        assert not c.workers[0].pooling
        assert not {"Tokenize", "LoadAdapter", "UnloadAdapter"} & set(c.workers[0].calls)


def auth_file(folder: Path) -> Path:
    rows = (credential("alice", "acme", "acme/*"), credential("root", "ops", "acme/*", roles=("admin",)))
    return write_credentials(folder / "auth.json", *rows)


# --- adapters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "../sql", "..", "a/../sql", "a\0b", "/etc/passwd", "x" * 500, "other:sql"])
async def test_an_unknown_adapter_is_404(name: str) -> None:
    async with open_cluster() as (c, http):
        c.workers[0].unknown = frozenset({"nothing"})
        for request in REQUESTS:
            for field in request.names():
                for is_streamed in {False, "stream" in request.model.model_fields}:
                    body = request.naming(field, name) | ({"stream": True} if is_streamed else {})
                    c.workers[0].adapters.pop(name, None)
                    answer = await post(http, request.path, body)
                    if IS_ADMIN not in request.path:
                        assert status_of(request, answer) == 404, (request.path, field, answer.text)
                    elif name == "nothing" and request.model is LoadRequest:
                        assert answer.status_code == 200  # the worker looks for its files
                    else:
                        assert status_of(request, answer) == (404 if name == "nothing" else 400), request.path
        assert (await http.get("/v1/models/nothing")).status_code == 404
        assert not c.workers[0].pooling


async def test_another_tenants_adapter_looks_like_an_unknown_one(tmp_path: Path) -> None:
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        for name in ("acme/sql", "other/sql"):
            c.workers[0].adapters[name] = adapter_pb2.Adapter(adapter_id=name, digest="s" * 64)
        for request in REQUESTS:
            key = "Bearer root" if IS_ADMIN in request.path else "Bearer alice"
            for field in request.names():
                answers = [
                    await post(http, request.path, request.naming(field, name), authorization=key)
                    for name in ("other/sql", "other/nil", "acme/sql")
                ]
                theirs, unknown, own = answers
                assert status_of(request, theirs) == 404, (request.path, field, theirs.text)
                assert theirs.text.replace("other/sql", "other/nil") == unknown.text
                assert theirs.headers.keys() == unknown.headers.keys()
                if IS_ADMIN not in request.path:
                    assert own.status_code == 200, (request.path, field, own.text)
        seen = {one.adapter_id for one in (*c.workers[0].requests, *c.workers[0].pooling)}
        assert seen == {"acme/sql"}


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "..", "../sql", "{root}/../sql", "a\0b", "{root}/sql\0", "~/sql", "file:///sql"],
)
async def test_paths_outside_the_roots_reach_no_worker(path: str, tmp_path: Path) -> None:
    async with http_cluster(http=HttpOptions(admin=True, adapter_root=tmp_path)) as (c, http):
        for request in REQUESTS:
            if request.model is LoadRequest:
                body = {"lora_name": "sql", "lora_path": path.replace("{root}", str(tmp_path))}
                assert status_of(request, await post(http, request.path, body)) == 400, request.path
        assert "LoadAdapter" not in c.workers[0].calls


# --- bodies ---------------------------------------------------------------------------------------------------------


async def test_bodies_that_no_route_takes() -> None:
    """Keys twice, on top and within; nested 10,000 deep; cut off; no JSON."""
    async with open_cluster() as (c, http):
        for request in REQUESTS:
            whole = json.dumps(request.body)[:-1]
            last = json.dumps(next(iter(request.body)))
            within = whole + ', "metadata": '
            bad = [
                f"{whole}, {last}: 1}}",
                within + '{"a": 1, "a": 2}}',
                within + "[" * 10_000 + "]" * 10_000 + "}",
                within + '{"a":' * 10_000 + "1" + "}" * 10_000 + "}",
                within + "NaN}",
                whole,
                "",
                "[]",
                "null",
                "\0",
            ]
            for content in bad:
                answer = await http.post(request.path, content=content, headers=JSON)
                assert answer.status_code in (400, 422), (request.path, content[:60], answer.text)
                if "[[" in content or content.count("{") > 99:
                    assert "nested too deeply" in answer.text, request.path
            answer = await http.post(request.path, content=whole + ', "\\ud800": 1}', headers=JSON)
            assert answer.status_code in (400, 422)
            assert "surrogate" in answer.text, answer.text
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                answer = await http.post(request.path, content=whole + "}", headers={"content-type": kind})
                assert answer.status_code in (400, 422), (request.path, kind)
        assert not c.workers[0].raw_requests


ODD: list[Any] = [0, -1, 1.5, 1 << 70, True, "", "x", "\0", "\ud800", [], [None], [[]], {}, {"a": {}}, {"type": 1}]


INNER = {"parameters": tgi.Parameters, "sampling_params": sglang.SamplingParams}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.nightly)])
async def test_values_of_wrong_types_in_each_field(every: int) -> None:
    """Each field gets every so many-th value, and the next field those behind them."""
    async with open_cluster() as (_, http):
        for request in REQUESTS:
            names = sorted({*request.model.model_fields, *openai.REFUSED, *sglang.REFUSED, *GRAMMAR_FIELDS})
            for idx, name in enumerate(names):
                for value in ODD[idx % every :: every]:
                    await check_odd(http, request, {**request.body, name: value})
            for outer in INNER.keys() & request.model.model_fields.keys():
                for idx, name in enumerate(INNER[outer].model_fields):
                    for value in ODD[idx % every :: every]:
                        await check_odd(http, request, {**request.body, outer: {name: value}})


@pytest.mark.parametrize("value", [1, "a", [1], {"a": 1}, [CHAT]])
async def test_messages_are_no_field_of_other_routes(value: Any) -> None:
    async with open_cluster() as (_, http):
        for request in REQUESTS:
            if "messages" not in request.model.model_fields:
                await check_odd(http, request, {**request.body, "messages": value})
        answer = await post(http, "/score", {"text_1": "a", "text_2": "b", "messages": value})
        assert (answer.status_code, answer.headers["x-loraplex-ignored"]) == (200, "messages")


async def check_odd(http: Http, request: Request, body: Any) -> None:
    answer = await post(http, request.path, body)
    # 424 is a bug in the forms of LoRAX and TGI.
    assert answer.status_code < 500, (request.path, body, answer.text)
    assert answer.status_code != 424, (request.path, body, answer.text)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[asyncio.Runner, Http]]:
    """One cluster for all examples of a property."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        _, http = runner.run(stack.enter_async_context(open_cluster()))
        yield runner, http
        runner.run(stack.aclose())


@settings(max_examples=60, deadline=None, suppress_health_check=cast("list[HealthCheck]", list(HealthCheck)))
@given(st.data(), st.sampled_from(REQUESTS))
def test_no_body_is_a_server_error(shared: tuple[asyncio.Runner, Http], data: st.DataObject, request: Request) -> None:
    """Values of any kind in any fields: the request is answered, or refused with 4xx."""
    known = {*request.model.model_fields, *openai.ChatCompletionRequest.model_fields}
    names = st.sampled_from(sorted({*known, *openai.REFUSED, *GRAMMAR_FIELDS})) | st.text(max_size=9)
    inner = st.sampled_from(sorted({*tgi.Parameters.model_fields, *sglang.SamplingParams.model_fields}))
    options = st.dictionaries(inner, ANYTHING, max_size=3)
    body = {**request.body, **data.draw(st.dictionaries(names, ANYTHING | options, max_size=4))}
    runner, http = shared
    runner.run(check_odd(http, request, body))


async def test_bodies_of_100_mb_are_refused_before_they_have_come() -> None:
    async with open_cluster() as (c, http):
        for path in sorted({request.path for request in REQUESTS}):
            reader, writer = await connect(http)
            writer.write(head(path, f"content-length: {100 << 20}"))
            status = (await reader.readline()).split()[1]
            writer.close()
            assert status == b"413", path
        num_sent = 0
        reader, writer = await connect(http)
        writer.write(head("/v1/completions", "transfer-encoding: chunked"))
        with contextlib.suppress(ConnectionError):
            while num_sent < 100:
                num_sent += 1
                writer.write(b"100000\r\n" + b" " * (1 << 20) + b"\r\n")
                async with asyncio.timeout(5):
                    await writer.drain()
        assert num_sent < 60
        writer.close()
        assert (await http.complete()).status_code == 200
        assert c.num_requests == [1]


# --- connections ----------------------------------------------------------------------------------------------------


def head(path: str, *lines: str) -> bytes:
    return "\r\n".join(
        (f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *lines, "", "")
    ).encode()


async def connect(http: Http) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(http.base_url.host, http.base_url.port)


STREAMS = [
    Request("/v1/completions", {"prompt": "hi", "stream": True}, openai.CompletionRequest),
    Request("/v1/chat/completions", {"messages": CHAT, "stream": True}, openai.ChatCompletionRequest),
    Request("/v1/responses", {"input": "hi", "stream": True}, ResponsesRequest),
    Request("/generate", {"text": "hi", "stream": True}, sglang.GenerateRequest),
    Request("/", {**INPUTS, "stream": True}, tgi.GenerateRequest, True),
    Request("/generate_stream", INPUTS, tgi.GenerateRequest, True),
]


@pytest.mark.parametrize("request_", STREAMS, ids=lambda one: one.path)
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_connection_that_is_cut_in_mid_stream_ends_the_call(request_: Request, is_reset: bool) -> None:
    async with open_cluster() as (c, http):
        (worker,) = c.workers
        worker.stream = with_logprobs(blocks(after=2))
        reader, writer = await connect(http)
        body = json.dumps(request_.body).encode()
        writer.write(head(request_.path, f"content-length: {len(body)}") + body)
        await reader.readuntil(b"t0 ")
        if is_reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        writer.close()
        async with asyncio.timeout(5):
            await worker.ended.wait()
        await until(lambda: len(c.router.calls) == 0)
        # A worker that is lost in mid-stream is the last event.
        worker.stream = with_logprobs(fails(EngineLost("the engine ended"), after=1))
        answer = await post(http, request_.path, request_.body)
        assert answer.status_code == 200
        events = [part for part in answer.text.split("\n\n") if part and part != "data: [DONE]"]
        assert "the engine ended" in events[-1]
        assert "the engine ended" not in "".join(events[:-1])


def with_logprobs(stream: Any) -> Any:
    """LoRAX's and TGI's events are made of these."""

    async def made(request: Generate, context: Any) -> AsyncIterator[bytes]:
        async for raw in stream(request, context):
            chunk = Chunk.FromString(raw)
            for token_id in chunk.token_ids if request.output.logprobs else ():
                chunk.logprobs.add(token_id=token_id, text=chunk.text_delta, bytes=chunk.text_delta.encode())
            yield chunk.SerializeToString()

    return made


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_leaves_frees_its_kv_at_once(tiny_world: TinyWorld, is_streamed: bool) -> None:
    """A live worker ends eight texts of 400 tokens within some steps after their client has left."""
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), dtype="float32"),
        KvConfig(memory_bytes=4 << 20),
        BatchConfig(max_running=8, max_step_tokens=16),
        AdaptersConfig(root=tiny_world.adapters),
    )
    with inline_worker(WorkerConfig(engine, port=0)) as worker:
        async with router_for([worker.address], http_port=0) as (router, _):
            assert router.http is not None
            await until(lambda: router.replicas.num_routable == 1)
            host, _, port = router.http.address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
            asked = {"prompt": "hi", "n": 8, "max_tokens": 400, "ignore_eos": True, "stream": is_streamed}
            body = json.dumps(asked).encode()
            writer.write(head("/v1/completions", f"content-length: {len(body)}") + body)
            await until(lambda: worker.engine.state.load.num_running > 0)
            writer.transport.abort()
            await until(lambda: worker.engine.state.load.num_running == 0)
            load = worker.engine.state.load
            assert load.num_free_blocks == load.num_blocks > 0
            assert load.num_steps < 200
            assert len(router.calls) == 0


@dataclass
class NotingInbox:
    """The engine's inbox; tells when a cancellation lies in it."""

    inbox: queue.SimpleQueue[Command]
    cancelled: threading.Event

    def put(self, command: Command) -> None:
        self.inbox.put(command)
        if isinstance(command, Cancel):
            self.cancelled.set()


@pytest.mark.parametrize("overlaps", [False, True], ids=["one by one", "overlapping"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "streamed"])
async def test_no_step_computes_for_a_client_that_left(
    monkeypatch: pytest.MonkeyPatch, is_streamed: bool, overlaps: bool
) -> None:
    """Counted step by step: behind the step under way there is none."""
    go_on, cancelled = threading.Semaphore(0), threading.Event()

    def wait(plan: StepPlan) -> None:
        assert go_on.acquire(timeout=20), "no step goes on by itself"

    runner = FakeRunner(wait, overlaps=overlaps)

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        return make_engine(runner, clock=time.monotonic)

    read: Callable[..., None] = vars(process)["_read"]

    def read_noting(conn: Any, inbox: queue.SimpleQueue[Command], kill_after: Callable[[float], None]) -> None:
        read(conn, NotingInbox(inbox, cancelled), kill_after)

    monkeypatch.setattr(process, "_read", read_noting)
    async with light_worker(build, inline=True) as worker, router_for([worker.address], http_port=0) as (router, _):
        assert router.http is not None
        await until(lambda: router.replicas.num_routable == 1)
        host, _, port = router.http.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        asked = {"prompt": "hi", "n": 4, "max_tokens": 200, "ignore_eos": True, "stream": is_streamed}
        body = json.dumps(asked).encode()
        writer.write(head("/v1/completions", f"content-length: {len(body)}") + body)
        for num_steps in range(1, 6):
            go_on.release()
            await until(lambda wanted=num_steps: len(runner.plans) == wanted)
        await until(lambda: worker.engine.state.load.num_running > 0)
        writer.transport.abort()
        await until(cancelled.is_set)
        for _ in range(200):
            go_on.release()
        await until(lambda: worker.engine.state.load.num_running == 0)
        load = worker.engine.state.load
        assert load.num_free_blocks == load.num_blocks > 0
        assert len(runner.plans) == 6, "five, and the one that waited when the client left"
        assert len(router.calls) == 0


async def read_into(said: bytearray, reader: asyncio.StreamReader) -> None:
    """Reads into `said` to the end of the connection, whatever ends it."""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            said += part


async def test_heads_and_bodies_that_drip_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_middleware, "BODY_TIMEOUT_S", 0.3)
    monkeypatch.setattr(http_middleware, "DROP_S", 0.3)
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", 0.3)
    async with open_cluster() as (c, http):
        get = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
        for begin, drop, status in (
            (get, b"a: b\r\n", None),
            (head("/", "content-length: 99999"), b" ", b"408"),
            (head("/nothing", "content-length: 99999"), b" ", b"404"),
            (head("/", "content-length: 99999999999"), b" ", b"413"),
            (get + b"\r\n", b"\r\n", b"200"),
        ):
            reader, writer = await connect(http)
            writer.write(begin)
            said = bytearray()
            ended = asyncio.create_task(read_into(said, reader))
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    while not ended.done():
                        writer.write(drop)
                        await writer.drain()
                        await asyncio.sleep(0.02)
                await ended
            writer.close()
            assert said[9:12] == (status or b"")
        assert (await http.get("/health")).status_code == 200
        assert not c.workers[0].raw_requests


# --- secrets --------------------------------------------------------------------------------------------------------


async def test_tokens_are_shown_nowhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in answers, nor in logs: of good tokens, of bad ones, and of those in a wrong place."""
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    def note(answer: httpx2.Response) -> None:
        said.append(answer.text + repr(answer.headers.raw))

    secrets = ("alice", "s3cr3t")
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w0rker-t0ken") as (c, http):
        c.workers[0].stream = fails(EngineLost("the engine ended"), after=1)
        for secret in secrets:
            keys = {"authorization": f"Bearer {secret}"}
            for request in REQUESTS:
                note(await post(http, request.path, request.body, **keys))
                note(await post(http, request.path, {**request.body, "stream": True, "foo": 1}, **keys))
                hidden = {**request.body, "api_key": secret, "parameters": {"api_token": secret}, "metadata": secret}
                note(await post(http, request.path, hidden, **keys))
                of_hub = {"adapter_id": "acme/sql", "adapter_source": "hub", "api_token": secret}
                note(await post(http, request.path, {**request.body, **of_hub}, **keys))
                note(await post(http, request.path, {**request.body, "parameters": of_hub}, **keys))
                note(await post(http, request.path, {**request.body, **of_hub, "api_token": [secret]}, **keys))
                note(await post(http, request.path, {**request.body, **of_hub, "api_token": f"{secret} x"}, **keys))
            for path in ("/", "/page/page.js", "/openapi.json", "/metrics", "/info", "/v1/models", "/nothing"):
                for accept in ("text/html", "*/*"):
                    note(await http.get(path, headers={**keys, "accept": accept}))
                    note(await http.get(f"{path}?token={secret}", headers={"accept": accept}))
        metadata = str(c.workers[0].metadata)
    # The client of the tests logs its own URLs.
    logs = [one.getMessage() for one in caplog.records if not one.name.startswith(("httpx", "httpcore", "httpx2"))]
    for text in (*said, *logs, metadata):
        assert not [secret for secret in (*secrets, token_digest("alice")) if secret in text], text[:300]
    assert not [text for text in (*said, *logs) if "w0rker-t0ken" in text]
