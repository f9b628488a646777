"""The HTTP port in front of scripted workers: routes, errors, streams, credentials, hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.exceptions import RequestValidationError
from support.credentials import credential, write_credentials
from support.fake_workers import Chunk, Generate, blocks, chunks, fails, until
from support.http import Http, adapters_of, http_cluster

from loraplex_contracts.errors import (
    AdapterNotFound,
    EngineLost,
    InvalidArgument,
    LoraplexError,
    Overloaded,
    QueueFull,
    Unimplemented,
    adapter_not_found,
)
from loraplex_proto.status import abort
from loraplex_proto.v1 import adapter_pb2, inference_pb2
from loraplex_router.config import HttpOptions, RouterConfig
from loraplex_router.http import app as app_module
from loraplex_router.http import middleware as http_middleware
from loraplex_router.http import server as http_server
from loraplex_router.http import streaming as http_streaming
from loraplex_router.http.admin import LoadRequest, UnloadRequest
from loraplex_router.http.fields import Fields
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.openai.answers import Answer
from loraplex_router.http.openai.fields import (
    REFUSED,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from loraplex_router.http.openai.responses import ResponsesRequest
from loraplex_router.http.router_calls import RouterCalls
from loraplex_router.server import start_router

CHAT = [{"role": "user", "content": "hi"}]
COMPLETIONS = "/v1/completions"


def events(response: httpx2.Response) -> list[Any]:
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# --- routes ---------------------------------------------------------------------------------------------------------


async def test_a_completion() -> None:
    async with http_cluster() as (c, http):
        answer = await http.complete(model="sql", foo=1, user="me", request_id="mine")
        assert answer.status_code == 200
        body = answer.json()
        assert body["choices"][0]["text"] == "t0 t1 t2 "
        assert body["model"] == "sql"
        assert body["loraplex"]["adapter_id"] == "sql"
        assert body["id"] == "cmpl-mine"
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-loraplex-ignored"] == "foo"
        (request,) = c.workers[0].requests
        assert (request.adapter_id, request.sampling.temperature, request.request_id) == ("sql", 1.0, "mine")


async def test_a_slash_at_the_end_is_another_path() -> None:
    """No redirect, whose address would be without TLS behind a proxy that has it."""
    async with http_cluster() as (c, http):
        for slashes in ("/", "//"):
            answer = await http.post(COMPLETIONS + slashes, json={"prompt": "hi"})
            assert (answer.status_code, "location" in answer.headers) == (404, False)
            assert answer.json()["error"]["message"] == (
                f"there is no such route; there is {COMPLETIONS}, without the slash at the end"
            )
        for path in ("/nothing/", "/nothing"):
            assert (await http.get(path)).json()["error"]["message"] == "there is no such route", path
        assert c.num_requests == [0]


async def test_several_prompts_are_one_answer_or_one_error() -> None:
    async with http_cluster(2) as (c, http):
        body = (await http.complete(prompt=["a", "b", "c"])).json()
        assert [one["index"] for one in body["choices"]] == [0, 1, 2]
        assert sum(c.num_requests) == 3

        async def second_fails(request: Generate, context: Any) -> bytes:
            if request.text == "b":
                await abort(context, Overloaded("busy", retry_after_s=1.5))
            await asyncio.Event().wait()
            return b""

        for worker in c.workers:
            worker.unary = second_fails
        answer = await http.complete(prompt=["a", "b", "c"])
        assert answer.status_code == 429
        assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("2", "1500")
        await until(lambda: len(c.router.calls) == 0)


async def test_streams() -> None:
    async with http_cluster() as (_, http):
        found = events(await http.complete(stream=True, stream_options={"include_usage": True}))
        assert "".join(one["choices"][0]["text"] for one in found[:-1]) == "t0 t1 t2 "
        assert found[-2]["choices"][0]["finish_reason"] == "length"
        assert found[-1]["choices"] == []
        assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        answer = await http.post("/v1/chat/completions", json={"messages": CHAT, "stream": True})
        found = events(answer)
        assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == "t0 t1 t2 "
        assert found[-1]["loraplex"]["adapter_id"] is None
        assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/generate_stream", {"inputs": "hi"}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_an_event_is_one_line_by_any_end_of_a_line(path: str, body: dict[str, Any]) -> None:
    text = "a\u2028b\x85c\u2029d\x0be\x1cf\r\ng"

    async def lines(request: Generate, context: Any) -> AsyncIterator[bytes]:
        chunk = Chunk(text_delta=text, token_ids=[1], finish_reason=inference_pb2.FINISH_REASON_LENGTH)
        chunk.deltas.add(content=text)
        chunk.logprobs.add(token_id=1, text=text, bytes=text.encode())
        yield chunk.SerializeToString()

    async with http_cluster() as (c, http):
        c.workers[0].stream = lines
        answer = await http.post(path, json={**body, "stream": True})
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        assert any(json.dumps(text) in json.dumps(json.loads(one)) for one in data)


async def test_a_chat() -> None:
    async with http_cluster() as (c, http):
        body = (await http.post("/v1/chat/completions", json={"messages": CHAT, "model": "tiny:sql"})).json()
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"]["content"] == "t0 t1 t2 "
        assert c.workers[0].requests[0].chat.messages[0].content == "hi"
        assert c.workers[0].requests[0].adapter_id == "sql"


async def test_a_response() -> None:
    async with http_cluster() as (c, http):
        refused = await http.post("/v1/responses", json={"input": "hi", "text": {"format": {}}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format.type")
        c.workers[0].unary = bad_schema
        schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
        refused = await http.post("/v1/responses", json={"input": "hi", "text": {"format": schema}})
        error = refused.json()["error"]
        assert (error["param"], error["message"]) == ("text.format", "`text.format` is wrong")
        c.workers[0].unary = no_tokens
        asked = {"input": "hi", "model": "sql", "instructions": "be brief", "store": True}
        body = (await http.post("/v1/responses", json=asked)).json()
        assert (body["object"], body["status"], body["model"]) == ("response", "completed", "sql")
        assert body["output"][0]["content"][0]["text"] == "hello"
        assert [one.content for one in c.workers[0].requests[-1].chat.messages] == ["be brief", "hi"]
        unread: dict[str, Any] = {"reasoning": {"effort": None, "summary": "auto"}, "text": {"foo": 1}}
        unread |= {"include": ["x y"], "tools": [{"type": "web_search"}]}
        answer = await http.post("/v1/responses", json={**asked, **unread})
        assert answer.headers["x-loraplex-ignored"] == "text.foo,reasoning.summary,tools.web_search,include.x?y"
        answer = await http.post("/v1/responses", json={**asked, "stream": True})
        parts = [part.split("\n") for part in answer.text.split("\n\n") if part]
        found = [json.loads(data.removeprefix("data: ")) for _, data in parts]
        assert [name.removeprefix("event: ") for name, _ in parts] == [one["type"] for one in found]
        assert [one["type"].removeprefix("response.") for one in found] == [
            "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * 3,
            "output_text.done", "content_part.done", "output_item.done", "incomplete",
        ]  # fmt: skip
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "t0 t1 t2 "
        assert found[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        c.workers[0].stream = fails(EngineLost("the engine ended"), after=1)
        text = (await http.post("/v1/responses", json={**asked, "stream": True})).text
        assert json.loads(text.split("data: ")[-1])["code"] == "unavailable"
        for wrong in (
            {"previous_response_id": "x"},
            {"background": True},
            {"n": 2},
            {"tool_choice": {"type": "web_search"}},
        ):
            answer = await http.post("/v1/responses", json={**asked, **wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, *wrong), wrong
        for stream in (False, True):
            c.workers[0].stream = fails(AdapterNotFound("no", resource="x"))
            c.workers[0].unary = missing
            answer = await http.post("/v1/responses", json={**asked, "stream": stream})
            assert answer.status_code == 404


async def no_tokens(request: Generate, context: Any) -> bytes:
    answer = inference_pb2.GenerateResponse()
    answer.completions.add(text="hello", finish_reason=inference_pb2.FINISH_REASON_EOS)
    return answer.SerializeToString()


async def test_an_unknown_adapter_is_named_as_it_was_asked_for() -> None:
    async with http_cluster() as (c, http):
        c.workers[0].unary = missing
        asked: list[tuple[dict[str, str], str]] = [
            ({"model": "nope"}, "nope"),
            ({"model": "tiny:nope"}, "tiny:nope"),
            ({"model": "tiny", "lora_path": "nope"}, "nope"),
        ]
        for fields, name in asked:
            answer = await http.complete(**fields)
            assert answer.status_code == 404
            assert answer.json()["error"]["message"] == f"The model `{name}` does not exist."


async def bad_schema(request: Generate, context: Any) -> bytes:
    await abort(context, InvalidArgument("`grammar.json_schema` is wrong", field="grammar.json_schema"))
    return b""


async def missing(request: Generate, context: Any) -> bytes:
    await abort(context, AdapterNotFound("no such adapter", resource=request.adapter_id))
    return b""


async def test_models_begin_with_the_base() -> None:
    async with http_cluster(2) as (c, http):
        adapters_of(c, "json", "sql")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["parent"]) for one in cards] == [("tiny", None), ("json", "tiny"), ("sql", "tiny")]
        assert cards[1]["root"] == cards[1]["loraplex"]["digest"] == "j" * 64
        assert (await http.get("/v1/models/sql")).json()["parent"] == "tiny"
        assert (await http.get("/v1/models/tiny")).json()["parent"] is None
        for missing in ("nothing", "a/b", "../x", "a/b/c", "other:sql", ""):
            answer = await http.get(f"/v1/models/{missing}")
            assert (answer.status_code, "error" in answer.json()) == (404, True), missing


async def test_models_tell_of_an_adapter_what_a_worker_that_has_loaded_it_tells() -> None:
    """Wherever that worker stands among those that only know the name."""
    async with http_cluster(3) as (c, http):
        adapters_of(c, "json", "sql")
        for one in (0, 2):
            c.workers[one].adapters["json"] = adapter_pb2.Adapter(adapter_id="json")
        for one in (1, 2):
            c.workers[one].adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql")
        cards = (await http.get("/v1/models")).json()["data"]
        assert [(one["id"], one["root"]) for one in cards] == [("tiny", "tiny"), ("json", "j" * 64), ("sql", "s" * 64)]
        for card in cards[1:]:
            assert (await http.get(f"/v1/models/{card['id']}")).json() == card


async def test_names_of_the_base_model() -> None:
    async with http_cluster(served_model_names=("prod", "prod-v2")) as (c, http):
        for name in ("prod", "prod-v2", "prod:sql"):
            assert (await http.complete(model=name)).status_code == 200
        assert [one.adapter_id for one in c.workers[0].requests] == ["", "", "sql"]
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "prod"


async def test_aliases_of_the_base_model() -> None:
    """An adapter that has such a name wins."""
    async with http_cluster() as (c, http):
        adapters_of(c, "dummy")
        for model in (None, "", "tgi", "dummy", "tiny"):
            assert (await http.complete(model=model)).status_code == 200
        assert [one.adapter_id for one in c.workers[0].requests] == ["", "", "", "dummy", ""]
        assert (await http.complete(model="")).json()["model"] == "tiny"
        assert (await http.complete(model="tgi")).json()["model"] == "tgi"
        assert (await http.get("/v1/models/tgi")).json()["parent"] is None
        for url in ("http://127.0.0.1:8000", "https://api.example/v1"):
            assert (await http.complete(model=url)).json()["model"] == url
            assert c.workers[0].requests.pop().adapter_id == ""
    async with http_cluster(http=HttpOptions(base_aliases=False)) as (c, http):
        for name in ("", "http://127.0.0.1:8000"):
            assert (await http.complete(model=name)).status_code == 404
        assert (await http.complete()).status_code == (await http.complete(model="tgi")).status_code == 200
        assert [one.adapter_id for one in c.workers[0].requests] == ["", "tgi"]


async def test_the_adapter_in_other_servers_fields() -> None:
    async with http_cluster() as (c, http):
        for fields in (
            {"lora_path": "sql"},
            {"adapter_id": "sql", "model": "tiny"},
            {"model": "sql", "lora_path": "sql"},
        ):
            assert (await http.complete(**fields)).status_code == 200
        assert [one.adapter_id for one in c.workers[0].requests] == ["sql"] * 3
        answer = await http.complete(model="sql", lora_path="json")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_path")


async def test_unknown_fields_are_counted_or_refused() -> None:
    async with http_cluster() as (_, http):
        answer = await http.complete(user="me", foo=1, bar=2)
        assert answer.headers["x-loraplex-ignored"] == "foo,bar"
        page = (await http.get("/metrics")).text
        assert 'loraplex:http_ignored_fields_total{field="user"} 1.0' in page
        assert 'loraplex:http_ignored_fields_total{field="other"} 2.0' in page
    async with http_cluster(http=HttpOptions(strict=True)) as (_, http):
        assert (await http.complete(user="me")).status_code == 200
        answer = await http.complete(foo=1)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "foo")
        assert (await http.post("/tokenize", json={"prompt": "a", "foo": 1})).status_code == 400


async def test_what_browsers_are_told() -> None:
    async with http_cluster() as (_, http):
        answers = [await http.get(path) for path in ("/health", "/load", "/metrics", "/v1/models", "/info", "/version")]
        answers += [await http.complete(), await http.complete(stream=True), await http.get("/nothing")]
        assert {answer.headers["cache-control"] for answer in answers} == {"no-store"}
        for answer in answers:
            assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert not [name for name in answer.headers if name.startswith("access-control")]
        preflight = {"origin": "http://evil.example", "access-control-request-method": "POST"}
        assert (await http.options(COMPLETIONS, headers=preflight)).status_code == 405
        for host in ("evil.example", "evil.example:80"):
            for answer in (
                await http.get("/v1/models", headers={"host": host}),
                await http.get("/health", headers={"host": host}),
            ):
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "host")
    async with http_cluster(http=HttpOptions(allowed_hosts=("api.example",))) as (_, http):
        assert (await http.get("/v1/models", headers={"host": "API.example:80"})).status_code == 200
        assert (await http.get("/v1/models")).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/", "GET, HEAD, POST"),
        ("OPTIONS", "/v1/models", "GET, HEAD"),
        ("HEAD", COMPLETIONS, "POST"),
        ("DELETE", "/v1/models/org/name", "GET, HEAD"),
        ("POST", "/status", "GET, HEAD"),
        ("POST", "/page/page.js", "GET, HEAD"),
        ("POST", "/openapi.json", "GET, HEAD"),
        ("PUT", "/generate", "POST"),
    ],
)
async def test_a_method_that_a_path_does_not_take_is_answered_with_those_that_it_does(
    method: str, path: str, allowed: str
) -> None:
    async with http_cluster() as (_, http):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert (await http.request(method, "/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("/version HTTP/1.1", 400),
        ("/version HTTP/1.1\r\nhost: localhost\r\nhost: localhost", 400),
        ("/version HTTP/1.0\r\nhost: localhost\r\nhost: localhost", 400),
        ("/version HTTP/1.1\r\nhost: localhost", 200),
        ("/version HTTP/1.0", 200),
        ("/generate HTTP/1.1", 400),
        ("/generate HTTP/1.1\r\nhost: localhost\r\nhost: localhost", 400),
    ],
)
async def test_a_request_has_one_host(head: str, status: int) -> None:
    async with http_cluster() as (c, _):
        assert c.router.http is not None
        reader, writer = await asyncio.open_connection(*c.router.http.address.split(":"))
        writer.write(f"GET {head}\r\nconnection: close\r\n\r\n".encode())
        async with asyncio.timeout(10.0):
            answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert (b"send one `Host` header" in answer) == (status == 400)


async def test_pages_of_other_origins(tmp_path: Path) -> None:
    mine, other = "https://app.example", "https://evil.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    options = HttpOptions(cors_origins=(mine, "http://localhost:3000"))
    async with http_cluster(http=options, auth_file=auth_file(tmp_path), worker_token="w") as (_, http):
        answer = await http.options(COMPLETIONS, headers={"origin": mine, **asked})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, mine)
        assert "x-stainless-os" in answer.headers["access-control-allow-headers"]
        answer = await http.options(COMPLETIONS, headers={"origin": other, **asked})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (400, False)
        headers = {"origin": mine, "authorization": "Bearer alice"}
        answer = await http.post(COMPLETIONS, json={"prompt": "hi", "foo": 1}, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, mine)
        exposed = answer.headers["access-control-expose-headers"]
        assert {"x-request-id", "x-loraplex-ignored", "retry-after"} <= {*exposed.split(", ")}
        answer = await http.post(COMPLETIONS, json={"prompt": "hi"}, headers={"origin": mine})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, mine)
        answer = await http.get("/health", headers={"origin": other})
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (200, False)
    async with http_cluster(http=HttpOptions(cors_origins=("*",))) as (_, http):
        answer = await http.get("/v1/models", headers={"origin": other})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")


async def test_tokenize_health_version_metrics() -> None:
    async with http_cluster(metrics_port=0) as (c, http):
        adapters_of(c, "sql")
        answer = await http.post("/tokenize", json={"prompt": "ab", "model": "sql"})
        assert answer.json() == {"count": 2, "max_model_len": 2048, "tokens": [97, 98], "token_strs": None}
        assert (await http.post("/tokenize", json={"prompt": "ab", "model": "nothing"})).status_code == 404
        assert (await http.post("/v1/tokenize", json={"prompt": "ab"})).json()["count"] == 2
        for path in ("/detokenize", "/v1/detokenize"):
            answer = await http.post(path, json={"tokens": [97, 98]})
            assert answer.json() == {"prompt": "ab", "text": "ab"}
        assert (await http.post("/detokenize", json={"tokens": [97], "model": "nothing"})).status_code == 404
        info = (await http.get("/tokenizer_info")).json()
        assert (info["chat_template"], info["eos_token"]) == ("{{ x }}", None)
        assert (await http.get("/load")).json() == {"server_load": 0}
        for path in ("/health", "/ping"):
            answer = await http.get(path)
            assert (answer.status_code, answer.content) == (200, b"")
        for path in ("/health", "/v1/models", "/version", "/metrics", "/openapi.json", "/page/status.js"):
            answer = await http.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
        assert (await http.head(COMPLETIONS)).status_code == 405
        assert set((await http.get("/version")).json()) == {"version"}
        assert "loraplex:router_requests_total" in (await http.get("/metrics")).text
        paths = (await http.get("/openapi.json")).json()["paths"]
        assert paths[COMPLETIONS]["post"]["responses"].keys() == {"200", "default"}
        await c.workers[0].stop()
        await until(lambda: c.router.replicas.num_routable == 0)
        assert (await http.get("/health")).status_code == 503
        answer = await http.complete()
        assert (answer.status_code, "retry-after" in answer.headers) == (503, True)
    async with http_cluster(http=HttpOptions(shows_metrics=False)) as (_, http):
        assert (await http.get("/metrics")).status_code == 404


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    "model", ["nothing", "tiny:nothing", "../x", "a\0b", "x" * 500, "é", "other:tiny", "https://x/y"]
)
async def test_an_unknown_adapter_is_404_before_the_first_byte(model: str, is_streamed: bool) -> None:
    async def unary(request: Generate, context: Any) -> bytes:
        await abort(context, AdapterNotFound("no such adapter", resource=request.adapter_id))
        return b""

    async with http_cluster() as (c, http):
        c.workers[0].stream = fails(AdapterNotFound("no such adapter", resource="x"))
        c.workers[0].unary = unary
        for path, more in ((COMPLETIONS, {"prompt": "hi"}), ("/v1/chat/completions", {"messages": CHAT})):
            answer = await http.post(path, json={"model": model, "stream": is_streamed, **more})
            assert answer.status_code == 404
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", "model_not_found")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_missing_heads_are_named_as_such(is_streamed: bool) -> None:
    async def unary(request: Generate, context: Any) -> bytes:
        await abort(context, adapter_not_found(request.speculation.medusa.adapter_id))
        return b""

    async with http_cluster() as (c, http):
        adapters_of(c, "sql")
        c.workers[0].stream = fails(adapter_not_found("nosuch"))
        c.workers[0].unary = unary
        more = {"stream": is_streamed, "speculation": {"kind": "medusa", "adapter_id": "nosuch"}}
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses"):
            for model in ("tiny", "sql"):
                answer = await http.post(path, json={"model": model, **BODIES[path][0], **more})
                assert answer.status_code == 404
                error = answer.json()["error"]
                assert error["message"] == "The Medusa heads `nosuch` do not exist."
                assert (error["param"], error["code"]) == ("speculation.adapter_id", "model_not_found")


async def test_errors_before_and_after_the_first_token() -> None:
    lost = EngineLost("the engine ended", retry_after_s=2.0)
    async with http_cluster() as (c, http):
        c.workers[0].stream = fails(lost)
        before = await http.complete(stream=True)
        assert (before.status_code, before.headers["retry-after"]) == (503, "2")
        c.workers[0].stream = fails(lost, after=1)
        after = await http.complete(stream=True)
        assert after.status_code == 200
        first, last = events(after)
        assert first["choices"][0]["text"] == "t0 "
        assert last["error"]["code"] == "unavailable"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/generate", {"text": "hi"}),
    ],
)
async def test_an_error_after_a_long_wait_is_an_event_as_behind_a_token(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def waits(request: Generate, context: Any) -> AsyncIterator[bytes]:
        await asyncio.sleep(0.3)
        async for message in fails(full)(request, context):
            yield message

    full = QueueFull("no place for 60 s", retry_after_s=2.0)
    async with http_cluster() as (c, http):
        c.workers[0].stream = fails(full, after=1)
        after_a_token = (await http.post(path, json={**body, "stream": True})).text
        monkeypatch.setattr(http_streaming, "KEEP_ALIVE_S", 0.1)
        c.workers[0].stream = waits
        answer = await http.post(path, json={**body, "stream": True})
    assert answer.status_code == 200
    assert answer.text.startswith(": keep-alive\n\n")
    said, expected = (
        re.sub(r'"sequence_number":\d+', "", text[text.rindex("\n\n", 0, text.index("no place")) :])
        for text in (answer.text, after_a_token)
    )
    assert said == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"cache_salt": "a b"}, "cache_salt"),
        ({"request_id": "a b"}, "request_id"),
        ({"response_format": {"type": "frog"}}, "response_format.type"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"max_tokens": 0, "echo": True, "temperature": -1}, "temperature"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"adapters": [{"id": "sql"}, {"weight": 1}]}, "adapters[1].id"),
    ],
)
async def test_wrong_fields_are_400_by_name(body: dict[str, Any], param: str) -> None:
    async with http_cluster() as (_, http):
        answer = await http.post(
            COMPLETIONS, content=json.dumps({"prompt": "hi", **body}), headers={"content-type": "application/json"}
        )
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param)
        assert param in error["message"]


async def test_what_workers_of_an_older_release_do_not_know_is_501() -> None:
    async with http_cluster() as (c, http):

        async def older(request: Generate, context: Any) -> bytes:
            await abort(context, Unimplemented("`output.#8` is not known; leave it out", field="output.#8"))

        c.workers[0].unary = older
        answer = await http.complete()
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (501, None, "not_implemented")
        assert "#8" not in error["message"]
        assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (json.dumps({"prompt": "hi", "stop": ["x"] * 17}), "`stop` is not valid: list should have at most 16 items"),
        ('{"prompt": "hi", "seed": ' + "9" * 5000 + "}", "a number of more digits than can be read"),
        (b'{"prompt": "\xff"}', "it is not UTF-8"),
        (
            '{"prompt": "hi", "grammar": {"type": "json", "value": {"maximum": 1e400}}}',
            "a number that is too large: 1e400",
        ),
    ],
    ids=["too many", "digits", "bytes", "infinite"],
)
async def test_refusals_say_what_is_wrong(content: str | bytes, words: str) -> None:
    async with http_cluster() as (_, http):
        answer = await http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]


MANY = 100_000


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "hi", "stop_token_ids": [""] * MANY}),
        (COMPLETIONS, {"prompt": "hi", "bad_words": [0] * MANY}),
        (COMPLETIONS, {"prompt": "hi", "logit_bias": dict.fromkeys(map(str, range(MANY)), "")}),
        (COMPLETIONS, {"prompt": "hi", "adapters": [0] * MANY}),
        (COMPLETIONS, {"prompt": "hi", "merged_adapters": {"ids": [0] * MANY, "weights": [""] * MANY}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "tool_calls": [0] * 128}] * (MANY // 128)}),
        ("/v1/chat/completions", {"messages": CHAT, "tools": [0] * MANY}),
        ("/v1/chat/completions", {"messages": CHAT, "documents": [0] * MANY}),
        ("/v1/responses", {"input": "hi", "include": [0] * MANY}),
        ("/v1/responses", {"input": "hi", "tools": [0] * MANY}),
        ("/detokenize", {"tokens": [""] * MANY}),
        ("/generate", {"text": "hi", "lora_path": [0] * MANY}),
        ("/generate", {"text": "hi", "rid": [0] * MANY}),
        ("/generate", {"text": "hi", "sampling_params": {"stop": [0] * MANY}}),
    ],
)
async def test_a_body_has_one_fault(path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one ends the check: faults without number would hold up all other requests for seconds."""
    num_faults: list[int] = []
    real = app_module._invalid  # pyright: ignore[reportPrivateUsage]

    def counting(error: RequestValidationError) -> InvalidArgument:
        num_faults.append(len(error.errors()))
        return real(error)

    monkeypatch.setattr(app_module, "_invalid", counting)
    async with http_cluster() as (_, http):
        answer = await http.post(path, json=fields)
        assert answer.status_code == 400
        assert sum(num_faults) < 1000


async def test_a_missing_part_is_named_where_it_is_missing() -> None:
    async with http_cluster() as (_, http):
        answer = await http.post("/v1/chat/completions", json={"messages": [*CHAT, {"content": "hi"}]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "messages[1].role")
        assert error["message"] == "`messages[1].role` is missing"
        answer = await http.post("/v1/chat/completions", json={"messages": CHAT, "tool_choice": {"function": {}}})
        assert answer.json()["error"]["param"] == "tool_choice.function.name"


@pytest.mark.parametrize("value", [b"\xff\xfe", "a=\u00e9".encode(), b"a\tb", b"x" * 20_000, b""])
@pytest.mark.parametrize("name", ["traceparent", "tracestate"])
async def test_a_traces_context_that_is_none_is_not_forwarded(name: str, value: bytes) -> None:
    async with http_cluster() as (c, http):
        for is_streamed in (False, True):
            answer = await http.post(
                COMPLETIONS, json={"prompt": "hi", "stream": is_streamed}, headers=[(name.encode(), value)]
            )
            assert answer.status_code == 200
            assert name not in c.workers[0].metadata[-1]


async def test_a_parameter_of_the_query_is_named() -> None:
    async with http_cluster() as (_, http):
        answer = await http.get("/v1/status?adapters=many")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapters")


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 400), ("br, gzip", 400), ("identity", 200), ("", 200)])
async def test_compressed_bodies_are_refused_by_the_header(encoding: str, status: int) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    body = json.dumps({"prompt": "hi"}).encode()
    async with http_cluster() as (c, http):
        sent = gzip.compress(body) if status == 400 else body
        answer = await http.post(COMPLETIONS, content=sent, headers=headers)
        assert answer.status_code == status
        if status == 400:
            assert answer.json()["error"]["param"] == "content-encoding"
            assert not c.workers[0].requests


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "name", "status"),
    [
        (COMPLETIONS, {"prompt": "a"}, "max_tokens", 400),
        ("/v1/chat/completions", {"messages": CHAT}, "max_completion_tokens", 400),
        ("/v1/responses", {"input": "a"}, "max_output_tokens", 400),
        ("/generate", {"text": "a", "sampling_params": {}}, "max_new_tokens", 400),
        ("/generate", {"inputs": "a", "parameters": {}}, "max_new_tokens", 422),
        ("/", {"inputs": "a", "parameters": {}}, "max_new_tokens", 422),
    ],
)
async def test_more_new_tokens_than_the_context_has(
    path: str, body: dict[str, Any], name: str, status: int, is_streamed: bool
) -> None:
    async with http_cluster() as (c, http):
        inner = next((key for key in ("sampling_params", "parameters") if key in body), None)
        for most, wanted in ((2048, 200), (2049, status)):  # the workers' context has 2048
            limit = {name: most}
            asked = {**body, inner: limit} if inner else {**body, **limit}
            url = "/generate_stream" if is_streamed and "inputs" in body and path == "/generate" else path
            answer = await http.post(url, json=asked if url != path else {**asked, "stream": is_streamed})
            assert answer.status_code == wanted, answer.text
        assert f"`{name}` is 2049" in answer.text
        assert sum(c.num_requests) == 1


async def test_bodies_that_are_not_json_objects() -> None:
    deep = b"[" * 100_000
    twice = b'{"prompt": "hi", "model": "sql", "model": "tiny"}'
    async with http_cluster() as (_, http):
        for body in (
            b"",
            b"{",
            b"[]",
            b"5",
            b"null",
            deep,
            b'{"prompt":' + b"9" * 9999 + b"}",
            b"\xff",
            b'{"n": NaN}',
            twice,
        ):
            answer = await http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
            assert (answer.status_code, "error" in answer.json()) == (400, True), body[:20]
        answer = await http.post(COMPLETIONS, content=b'{"prompt": "hi"}', headers={"content-type": "text/plain"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "body")
        assert (await http.get("/nothing")).status_code == 404
        assert (await http.get(COMPLETIONS)).status_code == 405


# Of each route that reads a body: fields that make a request, and the model of the others.
BODIES: dict[str, tuple[dict[str, Any], type[Fields]]] = {
    COMPLETIONS: ({"prompt": "hi"}, CompletionRequest),
    "/v1/chat/completions": ({"messages": CHAT}, ChatCompletionRequest),
    "/v1/responses": ({"input": "hi"}, ResponsesRequest),
    "/tokenize": ({"prompt": "hi"}, TokenizeRequest),
    "/detokenize": ({"tokens": [97]}, DetokenizeRequest),
    "/v1/load_lora_adapter": ({"lora_name": "sql", "lora_path": "sql"}, LoadRequest),
    "/v1/unload_lora_adapter": ({"lora_name": "sql"}, UnloadRequest),
    "/load_lora_adapter": ({"lora_name": "sql", "lora_path": "sql"}, LoadRequest),
    "/unload_lora_adapter": ({"lora_name": "sql"}, UnloadRequest),
}


DEEP = (
    (400, '{"a":' * 400 + "1" + "}" * 400),
    (900, "[" * 900 + "]" * 900),
    (10_000, '{"a":' * 10_000 + "1" + "}" * 10_000),
)


def test_depth_is_no_server_error() -> None:
    """A value nested as deep as JSON's reader takes it, or deeper, in any field of any route is no server error."""

    async def ask() -> None:
        for path, (least, model) in BODIES.items():
            for name in {*model.model_fields, "unheard_of", *REFUSED, *GRAMMAR_FIELDS}:
                for depth, value in DEEP:
                    text = json.dumps({**least, name: None})[:-5] + value + "}"
                    if name in least:
                        text = f'{{"{name}": {value}}}'
                    answer = await SHARED["http"].post(path, content=text, headers={"content-type": "application/json"})
                    assert answer.status_code < 500, (path, name, depth, answer.text)

    SHARED["runner"].run(ask())


SHARED: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def shared(request: pytest.FixtureRequest) -> Any:
    """One cluster for all bodies."""
    if request.function is not test_depth_is_no_server_error:
        yield
        return
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()
        SHARED["runner"] = runner
        _, SHARED["http"] = runner.run(stack.enter_async_context(http_cluster(http=HttpOptions(admin=True))))
        yield
        runner.run(stack.aclose())


# --- credentials ----------------------------------------------------------------------------------------------------


def auth_file(folder: Path) -> Path:
    rows = (credential("alice", "acme", "acme/*"), credential("root", "ops", roles=("admin",)))
    return write_credentials(folder / "auth.json", *rows)


async def test_credentials_hold_on_every_route(tmp_path: Path) -> None:
    tenants: list[Any] = []

    async def unary(request: Generate, context: Any) -> bytes:
        tenants.append(dict(context.invocation_metadata()).get("x-loraplex-tenant"))
        return inference_pb2.GenerateResponse().SerializeToString()

    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        adapters_of(c, "acme/sql", "other/sql")
        c.workers[0].unary = unary
        for path in (
            "/v1/models",
            "/v1/models/acme/sql",
            "/model_info",
            "/get_server_info",
            "/openapi.json",
            "/nothing",
            "//health",
        ):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/tokenizer_info")).status_code == (await http.get("/load")).status_code == 401
        for path in (*BODIES, "/v1/tokenize", "/v1/detokenize"):
            answer = await http.post(path, json={"prompt": "hi"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), path
            answer = await http.post(path, content=b"{", headers={"authorization": "Bearer nobody"})
            assert answer.status_code == 401
        for path, status in (
            ("/health", 200),
            ("/ping", 200),
            ("/health_generate", 200),
            ("/version", 200),
            ("/metrics", 200),
        ):
            assert (await http.get(path)).status_code == status
        alice, root = ({"authorization": f"Bearer {token}"} for token in ("alice", "root"))
        cards = (await http.get("/v1/models", headers=alice)).json()["data"]
        assert [one["id"] for one in cards] == ["tiny", "acme/sql"]
        for model, status in (("acme/sql", 200), ("other/sql", 404), ("tiny", 200), ("tiny:other/sql", 404)):
            body = {"prompt": "hi", "model": model}
            assert (await http.post(COMPLETIONS, json=body, headers=alice)).status_code == status
            assert (await http.get(f"/v1/models/{model}", headers=alice)).status_code == status
        assert tenants == ["acme", "acme"]
        metrics = (await http.get("/metrics")).text
        assert 'adapter="acme/sql"' in metrics
        assert 'tenant="acme"' not in metrics
        answer = await http.post(COMPLETIONS, json={"prompt": "hi"}, headers=root)
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            403,
            "this call asks for the role user, which this credential lacks; send one that has it",
        )
        twice = [("authorization", "Bearer alice"), ("authorization", "Bearer root")]
        assert (await http.get("/v1/models", headers=twice)).status_code == 401


async def test_refusals_of_credentials_name_the_header(tmp_path: Path) -> None:
    token, router = ("authorization", "Bearer w"), ("x-loraplex-tenant", "acme")
    rows = (credential("w", "ops", roles=("router",)),)
    path = write_credentials(tmp_path / "auth.json", *rows)
    refused: list[tuple[list[tuple[str, str]], int, str]] = [
        ([], 401, "this server wants a credential: send `authorization: Bearer TOKEN`"),
        ([("authorization", "Basic YTpi")], 401, "`authorization` must read `Bearer TOKEN`"),
        ([token, token], 401, "`authorization` is given 2 times; send it once"),
        ([token, router, router], 400, "`x-loraplex-tenant` is given 2 times; send it once"),
    ]
    async with http_cluster(auth_file=path, worker_token="w") as (_, http):
        for headers, status, message in refused:
            answer = await http.get("/v1/models", headers=headers)
            assert (answer.status_code, answer.json()["error"]["message"]) == (status, message)


async def test_a_line_end_behind_a_path_changes_no_role(tmp_path: Path) -> None:
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        adapters_of(c, "acme/sql")
        for token, path in (("alice", "/v1/unload_lora_adapter"), ("root", COMPLETIONS)):
            body = {"lora_name": "acme/sql", "prompt": "hi"}
            for end, status in (("", 403), ("%0A", 400), ("%0D%0A", 400)):
                answer = await http.post(path + end, json=body, headers={"authorization": f"Bearer {token}"})
                assert answer.status_code == status, (path, end)
        assert c.workers[0].adapters
        assert c.num_requests == [0]


# --- hostile and absent clients -------------------------------------------------------------------------------------


async def connect(http: Http) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(http.base_url.host, http.base_url.port)


def raw_request(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "hi", **fields}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(("num_behind", "num_chars"), [(0, 0), (1, 2), (5, 2), (5, 1_000_000)])
async def test_a_client_that_leaves_frees_its_request(
    is_streamed: bool, has_begun: bool, num_behind: int, num_chars: int
) -> None:
    """So does one that has sent further requests behind it, which are not begun."""

    async def unary(request: Generate, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with http_cluster() as (c, http):
        (worker,) = c.workers
        worker.stream, worker.unary = blocks(after=int(has_begun)), unary
        reader, writer = await connect(http)
        writer.write(raw_request(stream=is_streamed))
        await worker.started.wait()
        if is_streamed and has_begun:
            await reader.readuntil(b"t0 ")
        for _ in range(num_behind):
            writer.write(raw_request(prompt="x" * num_chars))
            await writer.drain()
            await asyncio.sleep(0.01)  # each comes by itself
        writer.close()
        async with asyncio.timeout(5):
            await worker.ended.wait()
        await until(lambda: len(c.router.calls) == 0)
        assert len(worker.raw_requests) == 1


async def test_a_client_that_leaves_with_its_body_unsent_has_made_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with http_cluster() as (_, http):
        _, writer = await connect(http)
        writer.write(raw_request()[:-1])
        await writer.drain()
        writer.close()
        await until(lambda: f"POST {COMPLETIONS} failed: CANCELLED" in caplog.text)


async def test_a_slow_reader_holds_back_only_itself() -> None:
    num_sent = 0

    async def endless(request: Generate, context: Any) -> AsyncIterator[bytes]:
        nonlocal num_sent
        while request.text == "slow":
            num_sent += 1
            yield Chunk(text_delta="x" * 10_000, token_ids=[1]).SerializeToString()
        for chunk in chunks():
            yield chunk

    async with http_cluster() as (c, http):
        c.workers[0].stream = endless
        _, writer = await connect(http)
        writer.write(raw_request(prompt="slow", stream=True))
        await until(lambda: num_sent > 50)
        before = -1
        while num_sent != before:  # until all buffers are full
            before = num_sent
            await asyncio.sleep(0.3)
        assert len(events(await http.complete(stream=True))) == 3
        assert num_sent == before
        writer.close()
        await until(lambda: len(c.router.calls) == 0)


async def test_bodies_are_bounded() -> None:
    async with http_cluster() as (c, http):
        big = b"x" * (9 << 20)
        with contextlib.suppress(httpx2.TransportError):  # the answer may come while the client still sends
            answer = await http.post(COMPLETIONS, content=big, headers={"content-type": "application/json"})
            assert answer.status_code == 413

        async def parts() -> AsyncIterator[bytes]:
            for _ in range(9):
                yield big[: 1 << 20]

        with contextlib.suppress(httpx2.TransportError):
            answer = await http.post(COMPLETIONS, content=parts(), headers={"content-type": "application/json"})
            assert answer.status_code == 413
        assert (await http.complete()).status_code == 200
        assert c.num_requests == [1]
        reader, writer = await connect(http)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"413"
        writer.close()


def ask_and_send(address: str, request: bytes) -> bytes:
    """The answer as a client gets it that sends the whole request before it reads."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=20.0) as client:
        client.sendall(request)
        answer = b""
        while part := client.recv(1 << 16):
            answer += part
    return answer


async def test_an_answer_without_the_body_reaches_a_client_that_still_sends(tmp_path: Path) -> None:
    """Also where the connection is closed behind it."""
    async with http_cluster(auth_file=auth_file(tmp_path), worker_token="w") as (c, http):
        assert c.router.http is not None
        address = c.router.http.address
        for path, token, num_bytes, status in (
            (COMPLETIONS, "nobody", 7 << 20, b"401"),
            ("/nothing", "alice", 7 << 20, b"404"),
            (COMPLETIONS, "alice", 25 << 20, b"413"),
        ):
            for line in ("HTTP/1.0", "HTTP/1.1\r\nconnection: close"):
                head = f"POST {path} {line}\r\nhost: localhost\r\nauthorization: Bearer {token}\r\n"
                head += f"content-length: {num_bytes}\r\n\r\n"
                answer = await asyncio.to_thread(ask_and_send, address, head.encode() + b"x" * num_bytes)
                assert answer[9:12] == status
                assert answer.endswith(b"}")
        assert (await http.get("/health")).status_code == 200


async def test_a_slow_body_holds_neither_its_answer_nor_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_middleware, "DROP_S", 1.0)
    async with http_cluster() as (_, http):
        reader, writer = await connect(http)
        async with asyncio.timeout(0.9):
            writer.write(b"POST /nothing HTTP/1.0\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n")
            assert (await reader.readuntil(b"}}")).split()[1] == b"404"
        async with asyncio.timeout(5):
            assert await reader.read() == b""
        writer.close()


async def test_heads_are_bounded_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.2)
    monkeypatch.setattr(http_middleware, "BODY_TIMEOUT_S", 0.2)
    async with http_cluster() as (_, http):
        for sent in (b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\n", b"GET /" + b"x" * 200_000, b"G\r\n\r\n"):
            reader, writer = await connect(http)
            with contextlib.suppress(ConnectionError):
                writer.write(sent)
                await writer.drain()
                async with asyncio.timeout(5):
                    await reader.read()  # to the end, which the server makes
            writer.close()
        reader, writer = await connect(http)
        writer.write(raw_request()[:-3])
        assert (await reader.readline()).split()[1] == b"408"
        writer.close()
        assert (await http.get("/health")).status_code == 200


async def test_trailers_are_dropped_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_REQUEST_BYTES", 1 << 20)
    async with http_cluster() as (_, http):
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        chunked = f"{head}transfer-encoding: chunked\r\n\r\n10\r\n{json.dumps({'prompt': 'hi'})}\r\n0\r\n".encode()
        reader, writer = await connect(http)
        writer.write(chunked + b"x-request-id: late\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"200"
        writer.close()
        reader, writer = await connect(http)
        with contextlib.suppress(ConnectionError):
            writer.write(chunked)
            async with asyncio.timeout(10):
                for _ in range(300):
                    writer.write(b"x: " + b"a" * 10_000 + b"\r\n")
                    await writer.drain()
                await reader.read()
        writer.close()


async def test_answers_of_one_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_streaming, "MAX_ANSWER_BYTES", 100)
    async with http_cluster() as (_, http):
        assert (await http.complete()).status_code == 200
        assert (await http.complete(prompt=["hi"] * 20)).status_code == 413


async def test_a_fault_while_streaming_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("bug")

    monkeypatch.setattr(Answer, "events", fail)
    async with http_cluster() as (_, http):
        answer = await http.complete(stream=True)
        (event,) = events(answer)
        assert event["error"]["type"] == "server_error"
        assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/embed"])
async def test_a_bug_is_answered_in_the_dialects_form(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> Any:
        raise RuntimeError("bug")

    monkeypatch.setattr(RouterCalls, "names_for", fail)
    async with http_cluster() as (_, http):
        answer = await http.post(path, json={"prompt": "hi"} if path.startswith("/v1") else {"inputs": "hi"})
    error = answer.json()
    if path.startswith("/v1"):
        assert (answer.status_code, error["error"]["code"]) == (500, "internal_error")
    else:
        assert (answer.status_code, error["error_type"]) == (424, "generation")
    assert "the server's log says more" in answer.text
    assert (answer.headers["x-should-retry"], "x-request-id" in answer.headers) == ("false", True)
    (traced,) = (one for one in caplog.records if one.exc_info)  # uvicorn writes no second one
    assert "while answering an HTTP request" in traced.getMessage()


async def test_a_drain_refuses_new_requests_and_cuts_off_old_ones() -> None:
    async with http_cluster() as (c, http):
        c.workers[0].stream = blocks(after=1)
        async with http.stream("POST", COMPLETIONS, json={"prompt": "hi", "stream": True}) as running:
            lines = running.aiter_lines()
            assert "t0" in await anext(lines)
            draining = asyncio.create_task(c.router.drain(0.5))
            await until(lambda: not c.router.listener.health.is_ready)
            assert (await http.get("/health")).status_code == 503
            answer = await http.complete()
            assert (answer.status_code, answer.json()["error"]["reason"]) == (503, "DRAINING")
            rest = [line async for line in lines if line]
            assert json.loads(rest[0].removeprefix("data: "))["error"]["reason"] == "DRAINING"
            assert rest[1:] == ["data: [DONE]"]
            await draining
    with pytest.raises(httpx2.TransportError):
        await http_get(http, "/health")


async def http_get(http: Http, path: str) -> httpx2.Response:
    async with httpx2.AsyncClient(base_url=http.base_url, trust_env=False) as other:
        return await other.get(path)


async def test_a_taken_port_is_a_typed_error() -> None:
    async with http_cluster() as (_, http):
        with pytest.raises(LoraplexError, match="--http-port"):
            await start_router(RouterConfig(workers=("127.0.0.1:1",), port=0, http_port=http.base_url.port))
