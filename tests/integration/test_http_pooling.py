"""Routes of embeddings in front of scripted workers: dialects, errors, credentials."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.fake_workers import Cluster, cluster, until

from loraplex_proto.v1 import pooling_pb2
from loraplex_runtime.auth import token_digest


@contextlib.asynccontextmanager
async def http_cluster(**options: Any) -> AsyncIterator[tuple[Cluster, httpx2.AsyncClient]]:
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
        ("/v1/embeddings", {"input": "a", "cache_salt": "a b"}, 400, "cache_salt"),
        ("/v1/embeddings", {"input": "a", "prompt_embeds": "x"}, 400, "prompt_embeds"),
        ("/embed", {"inputs": None}, 400, "inputs"),
        ("/embed", {"inputs": "a", "parameters": {"merged_adapters": {"ids": ["a"]}}}, 400, "merged_adapters"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, 400, "prompt_name"),
    ],
)
async def test_mistakes_are_named(path: str, fields: dict[str, Any], status: int, param: str) -> None:
    async with http_cluster() as (c, http):
        raw = json.dumps(fields).encode()
        answer = await http.post(path, content=raw, headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
        assert not c.workers[0].pooling


async def test_credentials_and_another_tenants_adapter(tmp_path: Path) -> None:
    auth = tmp_path / "auth.json"
    rows = [
        {"sha256": token_digest("user"), "tenant": "a", "adapters": ["a/*"]},
        {"sha256": token_digest("admin"), "tenant": "b", "roles": ["admin"]},
    ]
    auth.write_text(json.dumps({"credentials": rows}))
    async with http_cluster(auth_file=auth, worker_token="w") as (_, http):
        for path in ("/v1/embeddings", "/embed"):
            assert (await http.post(path, json={})).status_code == 401
            admin = {"authorization": "Bearer admin"}
            assert (await http.post(path, json={}, headers=admin)).status_code == 403
        user = {"authorization": "Bearer user"}
        answer = await http.post("/v1/embeddings", json={"model": "b/1", "input": "x"}, headers=user)
        assert answer.status_code == 404
        answer = await http.post("/v1/embeddings", json={"model": "a/1", "input": "x"}, headers=user)
        assert answer.status_code == 200
