"""One line of the router's log for each request that ends, however it ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.fake_workers import Generate, blocks, cluster, error_of, fails, until
from support.http import http_cluster

from loraplex_contracts.errors import AdapterNotFound, Overloaded
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
    assert lines.fields("request_id", "code")[0] == (denied.request_id, "UNAUTHENTICATED")
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


async def test_a_workers_refusal_over_http_has_one_line(lines: Lines) -> None:
    async with http_cluster() as (own, http):
        own.workers[0].stream = fails(Overloaded("busy", retry_after_s=1.0))
        body = {"model": "sql", "prompt": SECRET, "stream": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 429
    assert lines.fields("request_id", "reason") == [(answer.headers["x-request-id"], "OVERLOADED")]
