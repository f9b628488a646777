"""One line of the router's log for each request that ends, however it ends."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fake_workers import Chunk, Cluster, Generate, blocks, cluster, error_of, fails, until
from support.http import http_cluster

from loraplex_contracts.errors import AdapterNotFound, Overloaded, WorkerLost
from loraplex_proto.status import abort
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2
from loraplex_router.config import HttpOptions
from loraplex_runtime.auth import token_digest
from loraplex_runtime.quotas import TokenBucket
from loraplex_runtime.request_record import log

SECRET = "nobody may read this"
STREAM = "/loraplex.v1.InferenceService/GenerateStream"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert SECRET not in str(vars(record))
        self.records.append(record)

    def fields(self, *names: str) -> list[tuple[object, ...]]:
        return [tuple(getattr(record, name, None) for name in names) for record in self.records]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, level = Lines(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


def request(**fields: Any) -> bytes:
    return Generate(text=SECRET, **fields).SerializeToString()


async def test_streams_that_end_fail_and_are_cancelled(lines: Lines) -> None:
    async with cluster(1) as own:
        method = own.channel.unary_stream(STREAM)
        async for _ in method(request(request_id="good", adapter_id="sql")):
            pass
        own.workers[0].stream = fails(AdapterNotFound("there is no adapter 'nobody'"))
        await error_of(method(request(request_id="bad", adapter_id="nobody")))
        own.workers[0].stream = blocks(1)
        call = method(request(request_id="gone"))
        await call.read()
        call.cancel()
        await until(lambda: len(lines.records) == 3)
    assert lines.fields("request_id", "method", "adapter", "code", "reason", "tenant") == [
        ("good", "GenerateStream", "sql", "OK", None, "default"),
        ("bad", "GenerateStream", "nobody", "NOT_FOUND", "ADAPTER_NOT_FOUND", "default"),
        ("gone", "GenerateStream", None, "CANCELLED", None, "default"),
    ]
    assert [one[0] for one in lines.fields("tokens")] == [3, 0, 1]


def prompt_tokens(own: Cluster) -> dict[str, int]:
    """Those that the router has counted, by adapter."""
    return {name: usage.prompt_tokens for name, usage in own.router.calls.metrics.usage.adapters.items()}


async def test_the_prompt_of_a_request_that_was_cut_off_counts(lines: Lines) -> None:
    """By the router's estimate, a token for four bytes; that of a refused one does not count."""
    async with cluster(1) as own:
        own.workers[0].stream = blocks(1)
        stream = own.channel.unary_stream(STREAM)(request())
        await stream.read()
        stream.cancel()
        await until(lambda: len(lines.records) == 1)
        own.workers[0].stream = fails(Overloaded("busy", retry_after_s=1.0))
        await error_of(own.channel.unary_stream(STREAM)(request()))
        assert prompt_tokens(own) == {"(base)": 6}
        own.workers[0].stream = fails(Overloaded("busy", retry_after_s=1.0), after=1)
        await error_of(own.channel.unary_stream(STREAM)(request()))
        assert prompt_tokens(own) == {"(base)": 12}
    assert lines.fields("prompt_tokens") == [(6,)] * 3


@pytest.mark.parametrize("new_tokens", [2, 0], ids=["counted", "of an older worker"])
async def test_a_stream_without_token_ids_that_breaks_off_is_no_refusal(lines: Lines, new_tokens: int) -> None:
    async def hidden(request: Generate, context: Any) -> AsyncIterator[bytes]:
        yield Chunk(text_delta="t", new_tokens=new_tokens).SerializeToString()
        await abort(context, WorkerLost("gone"))

    async with cluster(1) as own:
        own.workers[0].stream = hidden
        await error_of(own.channel.unary_stream(STREAM)(request(output={"omit_token_ids": True})))
        ((_, usage),) = own.router.calls.metrics.usage.tenants.items()
    assert (usage.refusals.total(), usage.requests["UNAVAILABLE"]) == (0, 1)
    assert usage.output_tokens == new_tokens
    assert lines.fields("tokens", "reason") == [(new_tokens, "WORKER_LOST")]


@pytest.mark.parametrize("new_tokens", [2, 0], ids=["counted", "of an older worker"])
async def test_a_stream_without_token_ids_that_ends_well_is_charged_once(
    lines: Lines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, new_tokens: int
) -> None:
    """An older worker says the number of its tokens at the end only, a newer one with each message as well."""
    charges: list[float] = []
    monkeypatch.setattr(TokenBucket, "take", lambda _, num_tokens: charges.append(num_tokens))
    monkeypatch.setattr(TokenBucket, "give_back", lambda _, num_tokens: charges.append(-num_tokens))
    row = {"sha256": token_digest("t"), "tenant": "acme"}
    auth_file = tmp_path / "auth.json"
    limits = {"acme": {"tokens_per_minute": 100_000}}
    auth_file.write_text(json.dumps({"credentials": [row], "tenants": limits}))

    async def hidden(request: Generate, context: Any) -> AsyncIterator[bytes]:
        yield Chunk(text_delta="t", new_tokens=new_tokens).SerializeToString()
        yield Chunk(
            text_delta="t",
            new_tokens=new_tokens,
            finish_reason=inference_pb2.FINISH_REASON_STOP,
            usage=inference_pb2.Usage(prompt_tokens=6, completion_tokens=4),
        ).SerializeToString()

    async with cluster(1, auth_file=auth_file, worker_token="w") as own:
        own.workers[0].stream = hidden
        call = own.channel.unary_stream(STREAM)(
            request(output={"omit_token_ids": True}), metadata=(("authorization", "Bearer t"),)
        )
        assert len([message async for message in call]) == 2
        await until(lambda: bool(lines.records))
        ((_, usage),) = own.router.calls.metrics.usage.tenants.items()
    assert (usage.output_tokens, usage.requests["OK"]) == (4, 1)
    assert lines.fields("tokens", "code") == [(4, "OK")]
    assert sum(charges) == 10


async def test_names_that_the_router_refuses_are_not_counted_as_the_base_model(lines: Lines) -> None:
    async with cluster(1) as own:
        for fields in (
            {"adapter_id": "../etc", "request_id": "mine"},
            {"adapters": [{"id": "../b", "weight": 1}, {"id": "a", "weight": 1}]},
            {"adapters": [{"id": "m", "weight": 1}] * 1000},
        ):
            await error_of(own.channel.unary_stream(STREAM)(request(**fields)))
        embed = own.channel.unary_unary("/loraplex.v1.PoolingService/Embed")
        await error_of(embed(pooling_pb2.EmbedRequest(adapter_id="../etc").SerializeToString()))
        (counted,) = own.router.calls.metrics.usage.adapters.items()
    assert (counted[0], counted[1].requests.total()) == ("(other)", 4)
    assert lines.fields("adapter") == [("../etc",), ("../b+a",), ("m",), ("../etc",)]
    assert lines.fields("request_id")[0] == ("mine",)


async def test_loads_and_unloads_have_a_line(lines: Lines) -> None:
    async with cluster(1) as own:
        for method in ("LoadAdapter", "GetAdapter", "UnloadAdapter"):
            ask = own.channel.unary_unary(f"/loraplex.v1.AdapterService/{method}")
            await ask(adapter_pb2.GetAdapterRequest(adapter_id="sql").SerializeToString())
    assert lines.fields("method", "code", "tenant", "adapter") == [
        ("LoadAdapter", "OK", "default", "sql"),
        ("UnloadAdapter", "OK", "default", "sql"),
    ]
    ids = {one[0] for one in lines.fields("request_id")}
    assert len(ids) == 2
    assert all(ids)


async def test_a_load_over_http_has_the_id_of_its_request(lines: Lines) -> None:
    async with http_cluster(http=HttpOptions(admin=True)) as (_, http):
        body = {"lora_name": "sql", "lora_path": "sql"}
        answer = await http.post("/v1/load_lora_adapter", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
    assert ("mine", "LoadAdapter", "OK") in lines.fields("request_id", "method", "code")


async def test_a_refusal_before_the_request_is_read_has_an_id(lines: Lines) -> None:
    async with cluster(1, max_in_flight=1) as own:
        own.workers[0].stream = blocks(1)
        running = own.channel.unary_stream(STREAM)(request())
        await running.read()
        error = await error_of(own.channel.unary_stream(STREAM)(request(request_id="mine")))
        running.cancel()
    assert error.reason == "QUEUE_FULL"
    assert error.request_id
    assert (error.request_id, "QUEUE_FULL") in lines.fields("request_id", "reason")


async def test_refusals_without_a_handler_have_an_id(lines: Lines, tmp_path: Path) -> None:
    auth_file, token_file = tmp_path / "auth.json", tmp_path / "token"
    auth_file.write_text('{"credentials": []}')
    token_file.write_text("t")
    async with cluster(1, auth_file=auth_file, worker_token_file=token_file) as own:
        denied = await error_of(own.channel.unary_stream(STREAM)(request()))
        await error_of(own.channel.unary_unary("/loraplex.v1.Other/Method")(b""))
    assert denied.request_id
    fields = ("request_id", "method", "code")
    assert lines.fields(*fields)[0] == (denied.request_id, "GenerateStream", "UNAUTHENTICATED")
    assert len(lines.records) == 2


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": "sql", "prompt": SECRET}, 200, "OK"),
        ({"model": "sql", "prompt": SECRET, "stream": True}, 200, "OK"),
        ({"model": "sql", "prompt": SECRET, "max_tokens": "many"}, 400, "INVALID_ARGUMENT"),
        ({"model": "base:other:sql", "prompt": SECRET}, 404, "NOT_FOUND"),
    ],
)
async def test_a_request_over_http_has_one_line(lines: Lines, body: dict[str, object], status: int, code: str) -> None:
    async with http_cluster() as (_, http):
        answer = await http.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == status
        await until(lambda: bool(lines.records))
    assert lines.fields("request_id", "code") == [("mine", code)]


async def test_what_http_refuses_by_itself_is_counted(lines: Lines, tmp_path: Path) -> None:
    auth_file = tmp_path / "auth.json"
    row = {"sha256": token_digest("t"), "tenant": "acme"}
    auth_file.write_text(json.dumps({"credentials": [row]}))
    async with http_cluster(auth_file=auth_file, worker_token="w") as (_, http):
        known = {"authorization": "Bearer t"}
        answers = [
            await http.post("/v1/completions", json={"prompt": SECRET}),
            await http.post("/v1/completions", json={"prompt": SECRET}, headers={"authorization": "Bearer guess"}),
            await http.post("/v1/load_lora_adapter", json={}, headers=known),
            await http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": "x"}, headers=known),
            await http.get("/nowhere", headers=known),
            await http.get("/v1/completions", headers=known),
            await http.post("/health"),
        ]
        assert [answer.status_code for answer in answers] == [401, 401, 403, 400, 404, 405, 405]
        page = (await http.get("/metrics")).text
    for code, count in (
        ("UNAUTHENTICATED", 2),
        ("PERMISSION_DENIED", 1),
        ("INVALID_ARGUMENT", 1),
        ("UNIMPLEMENTED", 3),
    ):
        labels = f'{{code="{code}",reason="{code}"}}'
        assert f"loraplex:router_requests_refused_total{labels} {count}.0" in page
    assert lines.fields("method", "code", "tenant") == [
        ("POST /v1/completions", "UNAUTHENTICATED", None),
        ("POST /v1/completions", "UNAUTHENTICATED", None),
        ("POST /v1/load_lora_adapter", "PERMISSION_DENIED", "acme"),
        ("POST /v1/completions", "INVALID_ARGUMENT", "acme"),
        ("GET /nowhere", "UNIMPLEMENTED", "acme"),
        ("GET /v1/completions", "UNIMPLEMENTED", "acme"),
        ("POST /health", "UNIMPLEMENTED", None),
    ]
    assert [one[0] for one in lines.fields("request_id")] == [answer.headers["x-request-id"] for answer in answers]
    assert all(str(peer).startswith("127.0.0.1:") for (peer,) in lines.fields("peer"))


async def test_a_client_that_leaves_and_an_adapter_that_is_missing_are_no_refusals(lines: Lines) -> None:
    async def waits(request: Generate, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with http_cluster() as (own, http):
        own.workers[0].unary = waits
        with pytest.raises(httpx2.ReadTimeout):
            await http.post("/v1/completions", json={"model": "sql", "prompt": SECRET}, timeout=0.2)
        await until(lambda: len(lines.records) == 1)
        own.workers[0].adapters["json"] = adapter_pb2.Adapter(adapter_id="json")
        body = {"text": [SECRET, SECRET], "lora_path": ["json", "nope"], "stream": True}
        assert (await http.post("/generate", json=body)).status_code == 404
        page = (await http.get("/metrics")).text
    assert lines.fields("method", "code") == [("Generate", "CANCELLED"), ("GetAdapter", "NOT_FOUND")]
    refused = [line for line in page.splitlines() if line.startswith("loraplex:router_requests_refused_total{")]
    assert refused
    assert all(line.endswith(" 0.0") for line in refused)


async def test_a_workers_refusal_over_http_has_one_line(lines: Lines) -> None:
    async with http_cluster() as (own, http):
        own.workers[0].stream = fails(Overloaded("busy", retry_after_s=1.0))
        body = {"model": "sql", "prompt": SECRET, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 429
    assert lines.fields("request_id", "reason") == [(answer.headers["x-request-id"], "OVERLOADED")]
