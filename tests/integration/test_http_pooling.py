"""Routes of PoolingService in front of scripted workers: dialects, errors, credentials."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.credentials import credential, write_credentials
from support.fake_workers import Cluster, cluster, until

from loraplex_proto.v1 import pooling_pb2
from loraplex_router.config import HttpOptions
from loraplex_router.http.pooling.routes import METHODS


@contextlib.asynccontextmanager
async def http_cluster(**options: Any) -> AsyncGenerator[tuple[Cluster, httpx2.AsyncClient]]:
    async with cluster(1, http_port=0, **options) as c:
        assert c.router.http is not None
        await until(lambda: c.router.replicas.num_routable == 1)
        address = f"http://{c.router.http.address}"
        async with httpx2.AsyncClient(base_url=address, timeout=20, trust_env=False) as client:
            yield c, client


@pytest.mark.parametrize(
    ("given", "lengths"),
    [("abc", [3]), ([5, 6], [2]), (["a", "bc"], [1, 2]), ([[5], [6, 7, 8]], [1, 3]), (["a", [5, 6]], [1, 2])],
)
async def test_every_form_of_input(given: Any, lengths: list[int]) -> None:
    async with http_cluster() as (c, http):
        answer = await http.post("/v1/embeddings", json={"model": "sql", "input": given, "user": "me", "foo": 1})
        assert answer.status_code == 200
        body = answer.json()
        assert [one["embedding"] for one in body["data"]] == [[float(num), 0.5] for num in lengths]
        assert [one["index"] for one in body["data"]] == list(range(len(lengths)))
        assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == sum(lengths)
        assert (body["object"], body["model"], body["loraplex"]["adapter_id"]) == ("list", "sql", "sql")
        assert answer.headers["x-loraplex-ignored"] == "foo"
        assert answer.headers["x-request-id"] == c.workers[0].pooling[0].request_id


async def test_fields_and_base64() -> None:
    async with http_cluster() as (c, http):
        fields = {"dimensions": 1, "truncate_prompt_tokens": 7, "priority": 3, "cache_salt": "s", "normalize": False}
        fields |= {"encoding_format": "base64", "pooling": "mean", "add_special_tokens": False, "request_id": "mine"}
        answer = await http.post("/v1/embeddings", json={"input": "abc", **fields})
        (one,) = answer.json()["data"]
        assert struct.unpack("<2f", base64.b64decode(one["embedding"])) == (3.0, 0.5)
        (request,) = c.workers[0].pooling
        assert (request.dimensions, request.truncate_prompt.max_tokens, request.priority) == (1, 7, -3)
        assert (request.cache_salt, request.omit_normalization, request.omit_special_tokens) == ("s", True, True)
        assert (request.pooling, request.request_id) == (pooling_pb2.POOLING_MEAN, "mine")
        assert answer.json()["model"] == "tiny"


@pytest.mark.parametrize(
    ("fields", "expected", "adapter_id"),
    [
        ({"inputs": "abc", "parameters": None, "stream": False}, {"embeddings": [3.0, 0.5]}, ""),
        ({"inputs": "abc", "parameters": {"adapter_id": "sql"}}, {"embeddings": [3.0, 0.5]}, "sql"),
        ({"inputs": "abc", "parameters": {"adapter_id": "__base_model__"}}, {"embeddings": [3.0, 0.5]}, ""),
        ({"inputs": "abc"}, [[3.0, 0.5]], ""),
        ({"inputs": "abc", "model": "sql"}, [[3.0, 0.5]], "sql"),
        ({"inputs": ["abc", "a"]}, [[3.0, 0.5], [1.0, 0.5]], ""),
        ({"inputs": "abc", "normalize": True, "truncate": True}, [[3.0, 0.5]], ""),
    ],
)
async def test_lorax_and_tei(fields: dict[str, Any], expected: Any, adapter_id: str) -> None:
    async with http_cluster() as (c, http):
        answer = await http.post("/embed", json=fields)
        assert (answer.status_code, answer.json()) == (200, expected)
        (request,) = c.workers[0].pooling
        assert request.adapter_id == adapter_id
        assert request.truncate_prompt.keep_start is bool(fields.get("truncate"))


_INPUTS: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "abc"},
    "/embed": {"inputs": "abc"},
    "/score": {"text_1": "q", "text_2": "a"},
    "/rerank": {"query": "q", "documents": ["a"]},
    "/classify": {"input": "x"},
    "/classify_batch": {"inputs": ["x"]},
}


async def test_the_adapter_in_other_servers_fields() -> None:
    async with http_cluster() as (c, http):
        for path, given in _INPUTS.items():
            name = "cls" if path.startswith("/classify") else "sql"
            for fields in ({"lora_path": name}, {"adapter_id": name, "model": "tiny"}, {"model": name}):
                answer = await http.post(path, json={**given, **fields})
                assert (answer.status_code, c.workers[0].pooling.pop().adapter_id) == (200, name), (path, fields)
            answer = await http.post(path, json={**given, "model": name, "lora_path": "json"})
            assert (answer.status_code, len(c.workers[0].pooling)) in ((400, 0), (422, 0)), path


@pytest.mark.parametrize("path", ["/embed", "/classify", "/classify_batch"])
async def test_parameters_and_model_agree(path: str) -> None:
    async with http_cluster() as (c, http):
        for parameters in ({}, {"adapter_id": None}, {"adapter_id": "cls"}):
            answer = await http.post(path, json={**_INPUTS[path], "model": "cls", "parameters": parameters})
            assert (answer.status_code, c.workers[0].pooling.pop().adapter_id) == (200, "cls")
        answer = await http.post(path, json={**_INPUTS[path], "model": "cls", "parameters": {"adapter_id": "sql"}})
        assert (answer.status_code, c.workers[0].pooling) == (400 if path == "/classify" else 422, [])
        assert "name two adapters" in answer.text


async def test_vectors_of_chats() -> None:
    async with http_cluster() as (c, http):
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
        for more in ({}, {"add_generation_prompt": True, "chat_template_kwargs": {"a": 1}}):
            answer = await http.post("/v1/embeddings", json={"messages": chat, "model": "sql", **more})
            assert answer.status_code == 200
        first, second = (one.inputs[0].chat for one in c.workers[0].pooling)
        assert [one.content for one in first.messages] == ["hi", "yes"]
        assert (first.omit_generation_prompt, second.omit_generation_prompt) == (True, False)
        assert second.template_kwargs_json == '{"a":1}'
        answer = await http.post("/v1/embeddings", json={"messages": chat, "input": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_truncation_from_either_side() -> None:
    async with http_cluster() as (c, http):
        for path, given in (("/v1/embeddings", {"input": "a"}), ("/classify", {"model": "cls", "input": "a"})):
            for side in ("left", "right"):
                fields = {**given, "truncate_prompt_tokens": 3, "truncation_side": side}
                answer = await http.post(path, json=fields)
                assert (answer.status_code, "x-loraplex-ignored" in answer.headers) == (200, False)
                cut = c.workers[0].pooling.pop().truncate_prompt
                assert (cut.max_tokens, cut.keep_start) == (3, side == "right")


async def test_labels_of_a_chat() -> None:
    async with http_cluster() as (c, http):
        chat = [{"role": "user", "content": "hi"}]
        answer = await http.post("/classify", json={"messages": chat, "model": "cls"})
        assert [one["label"] for one in answer.json()["data"]] == ["b"]
        (request,) = c.workers[0].pooling
        assert request.inputs[0].chat.messages[0].content == "hi"
        assert request.inputs[0].chat.omit_generation_prompt


async def test_labels_of_texts() -> None:
    async with http_cluster() as (c, http):
        answer = await http.post("/classify", json={"model": "cls", "input": ["x", "y"]})
        body = answer.json()
        assert [(one["index"], one["label"], one["num_classes"]) for one in body["data"]] == [(0, "b", 3), (1, "b", 3)]
        assert body["data"][0]["probs"] == [0.25, 0.5, 0.25]
        assert body["loraplex"]["labels"] == ["a", "b", "c"]
        lorax = {"inputs": "text", "parameters": {"adapter_id": "cls"}}
        row = {"entity_group": "b", "score": 0.5, "word": "text", "start": 0, "end": 4}
        assert (await http.post("/classify", json=lorax)).json() == [row]
        assert [one.adapter_id for one in c.workers[0].pooling] == ["cls", "cls"]
        await http.post("/classify", json={"input": "x", "use_activation": False})
        assert c.workers[0].pooling[-1].logits


async def test_entities_of_tokens() -> None:
    def row(word: str, start: int, end: int) -> dict[str, Any]:
        return {"entity_group": "PER", "score": pytest.approx(0.8), "word": word, "start": start, "end": end}

    async with http_cluster() as (_, http):
        lorax = {"inputs": "as ADA and BO", "parameters": {"adapter_id": "ner"}}
        rows = [row("ADA", 3, 6), row("BO", 11, 13)]
        assert (await http.post("/classify", json=lorax)).json() == rows
        many = {**lorax, "inputs": ["as ADA and BO", "nobody"]}
        assert (await http.post("/classify_batch", json=many)).json() == [rows, []]
        answer = await http.post("/classify", json={"model": "ner", "input": "x"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("inputs", [[72, 73], [[72, 73]], ["as ADA", [72]]])
async def test_token_ids_have_no_entities(inputs: Any) -> None:
    async with http_cluster() as (c, http):
        body = {"inputs": inputs, "parameters": {"adapter_id": "ner"}}
        answer = await http.post("/classify_batch", json=body)
        content = answer.json()
        assert (answer.status_code, content["error_type"]) == (422, "validation")
        assert "send texts as `inputs`, not token ids" in content["error"]
        assert (await http.post("/classify", json={"model": "ner", "input": inputs})).status_code == 400
        body["parameters"] = {"adapter_id": "cls"}  # of a text's classifier each is one row
        answer = await http.post("/classify_batch", json=body)
        assert [len(rows) for rows in answer.json()] == [1] * len(c.workers[0].pooling[-1].inputs)
        page = (await http.get("/metrics")).text  # the calls went well: they have been counted
        refused = 'loraplex:router_requests_refused_total{code="INVALID_ARGUMENT",reason="INVALID_ARGUMENT"}'
        assert f"{refused} 0.0" in page


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_scores(path: str) -> None:
    async with http_cluster() as (c, http):
        for fields in ({"text_1": "q", "text_2": ["a", "abc"]}, {"queries": "q", "documents": ["a", "abc"]}):
            body = (await http.post(path, json={"model": "rank", **fields})).json()
            assert [(one["index"], one["object"], one["score"]) for one in body["data"]] == [
                (0, "score", 1001.0),
                (1, "score", 1003.0),
            ]
        body = (await http.post(path, json={"text_1": ["q", "qq"], "text_2": ["a", "abc"]})).json()
        assert [one["score"] for one in body["data"]] == [1001.0, 2003.0]
        how = {"method": "next_token", "true_token": "ja", "false_token": "nein", "template": "{query}|{document}"}
        await http.post(path, json={"text_1": "q", "text_2": "a", "activation": False, **how})
        request = c.workers[0].pooling[-1]
        assert (request.method, request.true_token, request.false_token) == (3, "ja", "nein")
        assert (request.template, request.logits) == ("{query}|{document}", True)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_reranking(path: str) -> None:
    async with http_cluster() as (c, http):
        documents = ["a", {"text": "abc"}, "ab"]
        body = (await http.post(path, json={"query": "q", "documents": documents, "top_n": 2})).json()
        assert [(one["index"], one["relevance_score"]) for one in body["results"]] == [(1, 1003.0), (2, 1002.0)]
        assert body["results"][0]["document"] == {"text": "abc"}
        fields = {"query": "q", "documents": documents, "return_documents": False}
        assert "document" not in (await http.post(path, json=fields)).json()["results"][0]
        tei = {"query": "q", "texts": ["a", "abc"], "raw_scores": True, "truncate": True}
        assert (await http.post(path, json=tei)).json() == [
            {"index": 1, "score": 1003.0},
            {"index": 0, "score": 1001.0},
        ]
        request = c.workers[0].pooling[-1]
        assert (request.logits, request.truncate_prompt.keep_start) == (True, True)
        tei = {"query": "q", "texts": ["a"], "return_text": True}
        assert (await http.post(path, json=tei)).json() == [{"index": 0, "score": 1001.0, "text": "a"}]


@pytest.mark.parametrize(
    ("path", "inputs"), [("/embed", "abc"), ("/classify", "abc"), ("/classify_batch", ["abc", "a"])]
)
async def test_parameters_of_generation_are_ignored_by_name(path: str, inputs: Any) -> None:
    async with http_cluster() as (c, http):
        parameters = {"adapter_id": "sql", "max_new_tokens": 5, "foo": 1, "seed": None, "truncate": 2}
        answer = await http.post(path, json={"inputs": inputs, "parameters": parameters})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-loraplex-ignored"] == "parameters.max_new_tokens,parameters.foo"
        (request,) = c.workers[0].pooling
        assert (request.adapter_id, request.truncate_prompt.max_tokens) == ("sql", 2)
    async with http_cluster(http=HttpOptions(strict=True)) as (_, http):
        answer = await http.post(path, json={"inputs": inputs, "parameters": parameters})
        assert (answer.status_code, "`parameters.max_new_tokens`" in answer.json()["error"]) == (422, True)


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/v1/embeddings", {}, 400, "input"),
        ("/v1/embeddings", {"input": []}, 400, "input"),
        ("/v1/embeddings", {"input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"input": ["a", 5]}, 400, "input"),
        ("/v1/embeddings", {"input": [-1]}, 400, "input"),
        ("/v1/embeddings", {"input": "\ud800"}, 400, "input"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "model": "../x"}, 404, "model"),
        ("/v1/embeddings", {"input": "a", "model": "\ud800"}, 400, "model"),
        ("/embed", {"inputs": "a", "parameters": {"adapter_id": "\ud800"}}, 422, "adapter_id"),
        ("/v1/embeddings", {"input": "a", "cache_salt": "a b"}, 400, "cache_salt"),
        ("/v1/embeddings", {"input": "a", "prompt_embeds": "x"}, 400, "prompt_embeds"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
        ("/v1/embeddings", {"input": "a", "truncation_side": "up"}, 400, "truncation_side"),
        ("/v1/embeddings", {"input": "a", "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("/v1/embeddings", {"input": "a", "documents": [{"a": 1}]}, 400, "documents"),
        ("/embed", {"inputs": None}, 422, "inputs"),
        ("/embed", {"inputs": "a", "parameters": {"merged_adapters": {"ids": ["a"]}}}, 422, "merged_adapters"),
        ("/embed", {"inputs": "a", "parameters": {"adapters": [{"id": "a"}]}}, 422, "adapters"),
        ("/embed", {"inputs": "a", "parameters": {"truncate": 0}}, 422, "truncate"),
        ("/embed", {"inputs": "a", "lora_id": "a"}, 422, "lora_id"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "prompt_name"),
        ("/classify", {}, 400, "input"),
        ("/classify", {"input": "a", "reasoning_effort": "low"}, 400, "reasoning_effort"),
        ("/classify", {"input": "a", "inputs": "b"}, 422, "input"),
        ("/classify_batch", {"inputs": ["b"], "messages": [{"role": "user", "content": "a"}]}, 422, "messages"),
        ("/classify", {"inputs": ["a", "b"]}, 422, "inputs"),
        ("/classify_batch", {"inputs": "a"}, 422, "inputs"),
        ("/score", {"text_2": "a"}, 400, "text_1"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, 400, "text_1"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "a"}, 400, "queries"),
        ("/score", {"text_1": "a", "text_2": "a", "documents": ["b"]}, 400, "documents"),
        ("/score", {"text_1": "a", "text_2": "a", "true_token": "Y"}, 400, "true_token"),
        ("/score", {"text_1": "a", "text_2": "a", "method": "classifier", "pooling": "mean"}, 400, "pooling"),
        ("/rerank", {"query": "a", "documents": ["a"], "texts": ["b"]}, 400, "texts"),
        ("/score", {"text_1": "a", "text_2": "b", "method": "guess"}, 400, "method"),
        ("/rerank", {"documents": ["a"]}, 400, "query"),
        ("/rerank", {"query": "a"}, 400, "documents"),
        ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, 400, "documents"),
        ("/rerank", {"query": "a", "texts": [5]}, 400, "texts"),
    ],
)
async def test_mistakes_are_named(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    async with http_cluster() as (c, http):
        raw = json.dumps(fields).encode()
        answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code == status
        error = answer.json()["error"]  # LoRAX's clients want a text
        assert f"`{param}`" in error if status == 422 else error["param"] == param
        assert not c.workers[0].pooling


async def test_credentials_and_another_tenants_adapter(tmp_path: Path) -> None:
    rows = (credential("user", "a", "a/*"), credential("admin", "b", roles=("admin",)))
    auth = write_credentials(tmp_path / "auth.json", *rows)
    async with http_cluster(auth_file=auth, worker_token="w") as (_, http):
        for path in METHODS:
            assert (await http.post(path, json={})).status_code == 401
            admin = {"authorization": "Bearer admin"}
            assert (await http.post(path, json={}, headers=admin)).status_code == 403
        user = {"authorization": "Bearer user"}
        answer = await http.post("/v1/embeddings", json={"model": "b/1", "input": "x"}, headers=user)
        assert answer.status_code == 404
        answer = await http.post("/v1/embeddings", json={"model": "a/1", "input": "x"}, headers=user)
        assert answer.status_code == 200
