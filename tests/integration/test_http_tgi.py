"""LoRAX's and TGI's routes in front of scripted workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.credentials import credential, write_credentials
from support.fake_workers import Chunk, Generate, fails
from support.http import Http, adapters_of, http_cluster

from loraplex_contracts.errors import AdapterNotFound, EngineLost, Overloaded
from loraplex_proto.status import abort
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.config import HttpOptions
from loraplex_router.http import streaming as http_streaming

GENERATE = ("/", "/generate", "/generate_stream")


def row(number: int) -> pb.TokenLogprob:
    text = f"t{number} "
    return pb.TokenLogprob(token_id=number + 1, text=text, logprob=-1.0, bytes=text.encode())


async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
    """Three tokens, the last two in one message."""
    yield Chunk(text_delta="t0 ", token_ids=[1], logprobs=[row(0)]).SerializeToString()
    end = Chunk(text_delta="t1 t2 ", token_ids=[2, 3], logprobs=[row(1), row(2)], finish_reason=pb.FINISH_REASON_EOS)
    end.usage.CopyFrom(pb.Usage(prompt_tokens=2, completion_tokens=3))
    yield end.SerializeToString()


async def unary(request: Generate, context: Any) -> bytes:
    usage = pb.Usage(prompt_tokens=2, completion_tokens=3)
    answer = pb.GenerateResponse(usage=usage)
    answer.completions.add(text="t0 t1 t2 ", logprobs=[row(i) for i in range(3)], usage=usage)
    return answer.SerializeToString()


def events(response: httpx2.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = [part for part in response.text.split("\n\n") if part]
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


async def ask(http: Http, path: str = "/generate", body: Any = None, **parameters: Any) -> httpx2.Response:
    text = json.dumps({"inputs": "hi", "parameters": parameters} if body is None else body)
    return await http.post(path, content=text, headers={"content-type": "application/json"})


async def test_an_answer_with_details_and_headers() -> None:
    async with http_cluster() as (c, http):
        c.workers[0].unary = unary
        answer = await ask(http, adapter_id="sql", details=True, foo=1)
        body = answer.json()
        assert body["generated_text"] == "t0 t1 t2 "
        assert [one["text"] for one in body["details"]["tokens"]] == ["t0 ", "t1 ", "t2 "]
        assert body["details"]["prompt_tokens"] == body["details"]["input_length"] == 2
        assert answer.headers["x-adapter-id"] == c.workers[0].requests[0].adapter_id == "sql"
        assert (answer.headers["x-model-id"], answer.headers["x-generated-tokens"]) == ("tiny", "3")
        assert answer.headers["x-loraplex-ignored"] == "parameters.foo"
        assert int(answer.headers["x-total-time"]) >= 0
        answer = await ask(http, body={"inputs": "hi", "stream": True})
        assert (answer.json()["generated_text"], answer.headers["x-loraplex-ignored"]) == ("t0 t1 t2 ", "stream")
        (listed,) = (await ask(http, "/")).json()
        assert listed == {"generated_text": "t0 t1 t2 "}


async def test_streams_have_an_event_for_each_token_and_no_done() -> None:
    async with http_cluster() as (c, http):
        c.workers[0].stream = stream
        for path, body in (
            ("/generate_stream", {"inputs": "hi", "parameters": {"details": True}}),
            ("/", {"inputs": "hi", "stream": True, "parameters": {"details": True}}),
        ):
            answer = await ask(http, path, body)
            found = events(answer)
            assert [one["token"]["text"] for one in found] == ["t0 ", "t1 ", "t2 "]
            assert [one["generated_text"] for one in found] == [None, None, "t0 t1 t2 "]
            assert found[-1]["details"]["generated_tokens"] == 3
            assert answer.headers["x-accel-buffering"] == "no"
            assert answer.headers["x-compute-characters"] == "2"


async def test_what_sglangs_clients_ask_first() -> None:
    async with http_cluster(served_model_names=("prod",)) as (_, http):
        for path in ("/model_info", "/get_model_info"):
            found = (await http.get(path)).json()
            assert (found["model_path"], found["is_generation"]) == ("tiny", True)
        for path in ("/server_info", "/get_server_info"):
            found = (await http.get(path)).json()
            assert (found["served_model_name"], found["context_length"]) == ("prod", 2048)
        assert ((await http.get("/health_generate")).status_code, (await http.head("/model_info")).status_code) == (
            200,
            200,
        )


async def test_tokenize_by_the_keys_of_the_body() -> None:
    async with http_cluster() as (c, http):
        adapters_of(c, "sql")
        answer = await ask(http, "/tokenize", {"inputs": "ab", "parameters": {"adapter_id": "sql"}})
        assert answer.json() == [
            {"id": 97, "text": "a", "start": 0, "stop": 1},
            {"id": 98, "text": "b", "start": 1, "stop": 2},
        ]
        assert (await ask(http, "/tokenize", {"prompt": "ab"})).json()["tokens"] == [97, 98]
        wrong = await ask(http, "/tokenize", {"inputs": 5})
        assert (wrong.status_code, wrong.json()["error_type"]) == (422, "validation")
        wrong = await ask(http, "/tokenize", {"prompt": 5})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
        missing = await ask(http, "/tokenize", {"inputs": "ab", "parameters": {"adapter_id": "nothing"}})
        assert (missing.status_code, missing.json()["error_type"]) == (404, "adapter_not_found")


async def test_tokenize_checks_all_its_fields() -> None:
    async with http_cluster() as (c, http):
        adapters_of(c, "sql", "json")
        for fields in ({"model": "sql"}, {"model": "tiny"}, {"model": "tgi", "parameters": {"adapter_id": "sql"}}):
            assert (await ask(http, "/tokenize", {"inputs": "ab", **fields})).status_code == 200
        answer = await ask(http, "/tokenize", {"inputs": "ab", "foo": 1, "parameters": {"bar": 2}})
        assert answer.headers["x-loraplex-ignored"] == "foo,parameters.bar"
        assert (await ask(http, "/tokenize", {"inputs": "ab", "model": "nothing"})).status_code == 404
        for fields in ({"model": "sql", "parameters": {"adapter_id": "json"}}, {"lora_path": "sql"}):
            assert (await ask(http, "/tokenize", {"inputs": "ab", **fields})).status_code == 422
    async with http_cluster(http=HttpOptions(strict=True)) as (_, http):
        answer = await ask(http, "/tokenize", {"inputs": "ab", "foo": 1})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


async def test_chat_tokenize_takes_aliases_of_the_base_model() -> None:
    messages = [{"role": "user", "content": "hi"}]
    async with http_cluster() as (_, http):
        assert (await ask(http, "/chat_tokenize", {"model": "tgi", "messages": messages})).status_code == 200
        assert (await ask(http, "/chat_tokenize", {"model": "nothing", "messages": messages})).status_code == 404


async def test_sglang_by_the_keys_of_the_body() -> None:
    async with http_cluster() as (c, http):
        answer = await ask(http, body={"text": ["a", "b"], "lora_path": ["sql", None], "foo": 1})
        assert [one["text"] for one in answer.json()] == ["t0 t1 t2 "] * 2
        assert answer.headers["x-loraplex-ignored"] == "foo"
        assert {(one.text, one.adapter_id) for one in c.workers[0].requests} == {("a", "sql"), ("b", "")}
        answer = await ask(http, body={"input_ids": [1], "stream": True})
        *parts, done = [part.removeprefix("data: ") for part in answer.text.split("\n\n") if part]
        assert [json.loads(part)["text"] for part in parts] == ["t0 ", "t0 t1 ", "t0 t1 t2 "]
        assert done == "[DONE]"
        wrong = await ask(http, body={"text": "hi", "sampling_params": {"top_p": "x"}})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_p")
        for is_streamed in (False, True):
            c.workers[0].stream = fails(AdapterNotFound("no such adapter", resource="x"))
            wrong = await ask(http, body={"text": "hi", "lora_path": "a:b", "stream": is_streamed})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "lora_path")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_an_unknown_adapter_among_others_is_404_before_the_first_byte(is_streamed: bool) -> None:
    """Although the calls of the others have a token at once."""

    async def known_only(request: Generate, context: Any) -> AsyncIterator[bytes]:
        if request.adapter_id == "nothing":
            await asyncio.sleep(0.05)
            await abort(context, AdapterNotFound("no such adapter", resource=request.adapter_id))
        async for one in stream(request, context):
            yield one

    async def unknown(request: Generate, context: Any) -> bytes:
        await abort(context, AdapterNotFound("no such adapter", resource="nothing"))

    async with http_cluster() as (c, http):
        adapters_of(c, "sql")
        c.workers[0].stream, c.workers[0].unary = known_only, unknown
        for names in (["sql", "nothing"], [None, "nothing"], ["nothing", "sql"]):
            body = {"text": ["a", "b"], "lora_path": names, "stream": is_streamed}
            answer = await ask(http, body=body)
            assert answer.status_code == 404, answer.text
            assert "`nothing`" in answer.json()["error"]["message"]
        answer = await ask(http, body={"text": ["a", "b"], "lora_path": ["sql", None], "stream": True})
        assert answer.status_code == 200


async def test_info() -> None:
    async with http_cluster() as (_, http):
        for path in ("/", "/info"):
            found = (await http.get(path)).json()
            assert (found["model_id"], found["router"]) == ("tiny", "loraplex")
            assert found["max_input_length"] == found["max_input_tokens"] == 2047


async def test_info_has_a_name_that_requests_may_have() -> None:
    async with http_cluster(served_model_names=("shown", "other")) as (c, http):
        name = (await http.get("/info")).json()["model_id"]
        assert name == "shown"
        for one in (name, "tiny"):  # the worker's own name is an adapter's here
            assert (await http.complete(model=one)).status_code == 200
        assert [one.adapter_id for one in c.workers[0].requests] == ["", "tiny"]


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize("name", ["nothing", "../x", "a\0b", "x" * 500, "é", "other:sql", "https://x/y"])
async def test_an_unknown_adapter_is_404_before_the_first_byte(path: str, name: str) -> None:
    async def missing(request: Generate, context: Any) -> bytes:
        await abort(context, AdapterNotFound("no such adapter", resource=request.adapter_id))
        return b""

    async with http_cluster() as (c, http):
        c.workers[0].stream = fails(AdapterNotFound("no such adapter", resource="x"))
        c.workers[0].unary = missing
        answer = await ask(http, path, adapter_id=name)
        assert answer.status_code == 404
        assert answer.json()["error_type"] == "adapter_not_found"
        assert set(answer.json()) == {"error", "error_type"}


@pytest.mark.parametrize("path", GENERATE)
@pytest.mark.parametrize(
    ("body", "name"),
    [
        ({"inputs": 5}, "inputs"),
        ({}, "inputs"),
        ({"inputs": "hi", "parameters": 5}, "parameters"),
        ({"inputs": "hi", "parameters": {"best_of": "x"}}, "best_of"),
        ({"inputs": "hi", "parameters": {"temperature": -1}}, "temperature"),
        ({"inputs": "hi", "parameters": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"inputs": "hi", "parameters": {"stop": ["x" * 300]}}, "stop"),
        ({"inputs": "hi", "parameters": {"frequency_penalty": 3}}, "frequency_penalty"),
        ({"inputs": "hi", "parameters": {"merged_adapters": {"ids": []}}}, "merged_adapters"),
        ({"inputs": "hi", "parameters": {"truncate": 1 << 31}}, "truncate"),
    ],
)
async def test_wrong_fields_are_422_by_name(path: str, body: dict[str, Any], name: str) -> None:
    async with http_cluster() as (_, http):
        answer = await ask(http, path, body)
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
        assert f"`{name}`" in answer.json()["error"]


async def test_other_methods_and_bodies_that_are_not_json() -> None:
    async with http_cluster() as (_, http):
        answer = await http.get("/generate")
        assert (answer.status_code, answer.json()["error_type"]) == (405, "validation")
        answer = await http.post("/generate", content=b"{", headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


async def test_errors_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(request: Generate, context: Any) -> bytes:
        await abort(context, Overloaded("busy", retry_after_s=1.5))
        return b""

    async def breaks(request: Generate, context: Any) -> AsyncIterator[bytes]:
        async for chunk in stream(request, context):
            yield chunk
            await abort(context, lost)

    async def fails_late(request: Generate, context: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        async for chunk in fails(lost)(request, context):
            yield chunk

    lost = EngineLost("the engine ended", retry_after_s=2.0)
    async with http_cluster() as (c, http):
        c.workers[0].unary = busy
        answer = await ask(http)
        assert (answer.status_code, answer.json()["error_type"]) == (429, "overloaded")
        assert answer.headers["retry-after"] == "2"
        c.workers[0].stream = breaks
        first, last = events(await ask(http, "/generate_stream"))
        assert first["token"]["text"] == "t0 "
        assert (set(last), last["error_type"]) == ({"error", "error_type"}, "unavailable")
        c.workers[0].stream = fails(lost)
        assert (await ask(http, "/generate_stream")).status_code == 503
        # So late that a comment has begun the stream.
        monkeypatch.setattr(http_streaming, "KEEP_ALIVE_S", 0.1)
        c.workers[0].stream = fails_late
        answer = await ask(http, "/generate_stream")
        *comments, late = answer.text.split("\n\n")[:-1]
        assert set(comments) == {": keep-alive"}
        assert json.loads(late.removeprefix("data: ")) == last


async def test_credentials_hold_on_every_route(tmp_path: Path) -> None:
    path = write_credentials(tmp_path / "auth.json", credential("alice", "acme", "acme/*"))
    alice = {"authorization": "Bearer alice", "content-type": "application/json"}
    async with http_cluster(auth_file=path, worker_token="w") as (c, http):
        adapters_of(c, "acme/sql", "other/sql")
        for route in (*GENERATE, "/tokenize", "/chat_tokenize", "/embed", "/classify", "/classify_batch"):
            assert (await ask(http, route)).status_code == 401, route
        answer = await ask(http)
        assert answer.json()["error_type"] == "unauthenticated"
        for route in ("/", "/info"):
            assert (await http.get(route)).status_code == 401
        for route in GENERATE:
            body = {"inputs": "hi", "parameters": {"adapter_id": "other/sql"}}
            answer = await http.post(route, json=body, headers=alice)
            assert (answer.status_code, answer.json()["error_type"]) == (404, "adapter_not_found")
            body["parameters"] = {"adapter_id": "acme/sql"}
            assert (await http.post(route, json=body, headers=alice)).status_code == 200
