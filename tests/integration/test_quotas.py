"""Quotas of tenants over gRPC and HTTP, with and without a router."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import pytest
from prometheus_client import CollectorRegistry
from support.adapter_files import Slots, base_targets, write_adapter
from support.credentials import credential
from support.engine_fakes import FakeRunner, build_slow, make_engine
from support.fake_workers import error_of, router_for, until
from support.light_worker import light_worker

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import (
    CONCURRENT_REQUESTS,
    TOKENS_PER_MINUTE,
    InvalidArgument,
    LoraplexError,
    QuotaExceeded,
)
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc, pooling_pb2, pooling_pb2_grpc
from loraplex_runtime.auth import token_digest
from loraplex_server.config import EngineConfig
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.process import EngineBuilder

Generate = inference_pb2.GenerateRequest
ROW, OTHER = credential("a", "acme", "*"), credential("b", "other", "*")
ACME, OTHERS = ((("authorization", f"Bearer {token}"),) for token in "ab")


def write(path: Path, **limits: int) -> Path:
    path.write_text(json.dumps({"credentials": [ROW, OTHER], "tenants": {"acme": limits}}))
    return path


@dataclass
class Server:
    """A server that asks for credentials, with a slow engine: texts of 255 tokens that take a second or more."""

    auth_file: Path
    channel: grpc.aio.Channel
    registry: CollectorRegistry | None
    http_address: str = ""

    def __post_init__(self) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.pooling = pooling_pb2_grpc.PoolingServiceStub(self.channel)

    @contextlib.asynccontextmanager
    async def running(self, **fields: Any) -> AsyncGenerator[Any]:
        """A stream of acme's that has begun, cancelled at the end."""
        call = self.inference.GenerateStream(Generate(text="x", **fields), metadata=ACME)
        await call.read()
        yield call
        call.cancel()


@contextlib.asynccontextmanager
async def serving(
    way: str, auth_file: Path, builder: EngineBuilder = build_slow, **settings: Any
) -> AsyncGenerator[Server]:
    if way == "worker":
        async with (
            light_worker(builder, inline=True, auth_file=auth_file, **settings) as worker,
            grpc.aio.insecure_channel(worker.address) as channel,
        ):
            yield Server(auth_file, channel, worker.listener.registry)
        return
    async with light_worker(builder, inline=True, router_digest=token_digest("w")) as worker:
        given = {"auth_file": auth_file, "worker_token": "w", "http_port": 0, **settings}
        async with router_for([worker.address], **given) as (router, channel):
            assert router.http is not None
            await until(lambda: router.replicas.num_routable == 1)
            yield Server(auth_file, channel, router.listener.registry, router.http.address)


@pytest.fixture(params=["router", "worker"])
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_runtime.reload.POLL_S", 0.02)


async def quota_of(call: Awaitable[Any]) -> tuple[str, bool]:
    """The quota that a call is refused for, and whether another try may help."""
    error = await error_of(call)
    assert isinstance(error, QuotaExceeded), error
    return error.metadata["quota"], error.retry_after_s is not None


def inputs(num: int) -> list[pooling_pb2.PoolingInput]:
    return [pooling_pb2.PoolingInput(text="x")] * num


async def test_requests_at_a_time(way: str, tmp_path: Path) -> None:
    async with serving(way, write(tmp_path / "auth.json", max_concurrent_requests=2)) as server:
        ask, full = server.inference, ("concurrent_requests", True)
        one = Generate(text="x")
        one.stopping.max_tokens = 1
        grammar = Generate(text="x", grammar=inference_pb2.Grammar(regex="a" * 100))
        async with server.running() as call:
            await ask.Generate(one, metadata=ACME)
            assert await quota_of(ask.Generate(Generate(text="x", n=2), metadata=ACME)) == full
            assert await quota_of(ask.Generate(Generate(text="x", n=3), metadata=ACME)) == (full[0], False)
            async with server.running():
                assert await quota_of(ask.Generate(one, metadata=ACME)) == full
                assert await quota_of(ask.Generate(grammar, metadata=ACME)) == full
                assert await quota_of(ask.GenerateStream(one, metadata=ACME).read()) == full
                assert await quota_of(ask.Tokenize(inference_pb2.TokenizeRequest(text="x"), metadata=ACME)) == full
                assert await quota_of(ask.Detokenize(inference_pb2.DetokenizeRequest(), metadata=ACME)) == full
                embed = pooling_pb2.EmbedRequest(inputs=inputs(1))
                assert await quota_of(server.pooling.Embed(embed, metadata=ACME)) == full
                await ask.Generate(one, metadata=OTHERS)  # has none
            call.cancel()
        # A cancelled call gives back what it held, and a failed one.
        for _ in range(4):
            with pytest.raises(grpc.aio.AioRpcError):
                await ask.Generate(Generate(text="x", adapter_id="none"), metadata=ACME)

        async def both() -> bool:
            try:
                two = Generate(text="x", n=2)
                two.stopping.max_tokens = 1
                await ask.Generate(two, metadata=ACME)
            except grpc.aio.AioRpcError:
                return False
            return True

        while not await both():
            await asyncio.sleep(0.01)


async def test_tokens_per_minute(way: str, tmp_path: Path) -> None:
    async with serving(way, write(tmp_path / "auth.json", tokens_per_minute=120)) as server:
        ask = server.inference
        wrong = Generate(token_ids=inference_pb2.TokenIds(ids=[5] * 10), adapter_id="none")
        wrong.stopping.max_tokens = 40
        for _ in range(2):  # 10 tokens each
            await error_of(ask.Generate(wrong, metadata=ACME))
        # Of this one 30 and 20 are used, whatever it might have had.
        one = Generate(token_ids=inference_pb2.TokenIds(ids=[5] * 30))
        one.stopping.max_tokens = 20
        answer = await ask.Generate(one, metadata=ACME)
        assert answer.usage.completion_tokens == 20
        one.stopping.max_tokens = 60
        error = await error_of(ask.Generate(one, metadata=ACME))
        assert isinstance(error, QuotaExceeded)
        assert error.retry_after_s is not None
        # 50 are left, 40 too few; so is the time that has passed.
        assert 10 < error.retry_after_s <= 20
        # A stream that says nothing of its length is charged as it goes.
        async with server.running(n=2) as call:
            for _ in range(100):
                await call.read()
            embed = pooling_pb2.EmbedRequest(inputs=inputs(1))
            assert await quota_of(server.pooling.Embed(embed, metadata=ACME)) == ("tokens_per_minute", True)
        too_long = Generate(token_ids=inference_pb2.TokenIds(ids=[5] * 121))
        assert await quota_of(ask.Generate(too_long, metadata=ACME)) == ("tokens_per_minute", False)
        one.stopping.max_tokens = 1
        await ask.Generate(one, metadata=OTHERS)


async def test_a_text_that_is_cancelled_unseen_counts(way: str, tmp_path: Path) -> None:
    async with serving(way, write(tmp_path / "auth.json", tokens_per_minute=256)) as server:
        call = server.inference.Generate(Generate(text="x"), metadata=ACME)
        await asyncio.sleep(0.3)
        call.cancel()
        full = Generate(token_ids=inference_pb2.TokenIds(ids=[5] * 200))
        full.stopping.max_tokens = 56
        assert await quota_of(server.inference.Generate(full, metadata=ACME)) == ("tokens_per_minute", True)


async def test_the_file_is_read_again(way: str, tmp_path: Path) -> None:
    path = write(tmp_path / "auth.json", max_concurrent_requests=1)
    async with serving(way, path) as server, server.running():
        one = Generate(text="x")
        one.stopping.max_tokens = 1
        assert await quota_of(server.inference.Generate(one, metadata=ACME)) == ("concurrent_requests", True)
        write(path, max_concurrent_requests=2)

        async def is_admitted() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await server.inference.Generate(one, metadata=ACME)
                return True
            return False

        while not await is_admitted():
            await asyncio.sleep(0.02)


async def test_a_share(way: str, tmp_path: Path) -> None:
    async with (
        serving(way, write(tmp_path / "auth.json", max_concurrent_requests=3), quota_share=0.5) as server,
        server.running(),
    ):
        assert await quota_of(server.inference.Generate(Generate(text="x"), metadata=ACME)) == (
            "concurrent_requests",
            True,
        )


@pytest.mark.parametrize("share", [0, 1.5])
async def test_shares_that_are_none(way: str, tmp_path: Path, share: float) -> None:
    with pytest.raises(InvalidArgument, match="--quota-share"):
        async with serving(way, write(tmp_path / "auth.json"), quota_share=share):
            pass


# --- bytes of adapters -----------------------------------------------------------------------------------------------


def build_with(root: Path) -> EngineBuilder:
    """A slow engine whose cache loads the adapters in `root`."""

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        cache: Any = AdapterManager(
            AdapterCacheConfig(1 << 20, 1 << 20, 4, 1 << 24),
            DirectorySource(root),
            base_targets(),
            "cpu",
            Slots().install,
            notify,
        )
        return make_engine(FakeRunner(lambda plan: time.sleep(0.005)), cache, clock=time.monotonic)

    return build


async def test_bytes_of_adapters_in_memory(way: str, tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    for seed, name in enumerate("abc"):
        write_adapter(root / name, rank=4, seed=seed)  # 1280 bytes each
    auth_file = write(tmp_path / "auth.json", max_resident_adapter_bytes=2000)
    one = {name: Generate(text="x", adapter_id=name) for name in "abc"}
    for request in one.values():
        request.stopping.max_tokens = 1
    async with serving(way, auth_file, builder=build_with(root)) as server:
        ask = server.inference
        for name in "aba":  # idle ones make room
            await ask.Generate(one[name], metadata=ACME)
        async with server.running(adapter_id="a") as call:
            await ask.Generate(one["a"], metadata=ACME)
            assert await quota_of(ask.Generate(one["b"], metadata=ACME)) == ("resident_adapter_bytes", True)
            stream = ask.GenerateStream(one["b"], metadata=ACME)
            assert await quota_of(stream.read()) == ("resident_adapter_bytes", True)
            embed = pooling_pb2.EmbedRequest(inputs=inputs(1), adapter_id="b")
            assert await quota_of(server.pooling.Embed(embed, metadata=ACME)) == ("resident_adapter_bytes", True)
            await ask.Generate(one["b"], metadata=OTHERS)
            await ask.Generate(one["c"], metadata=OTHERS)
            call.cancel()
        async with asyncio.timeout(20):
            while True:
                try:
                    await ask.Generate(one["b"], metadata=ACME)
                    break
                except grpc.aio.AioRpcError:  # the cancelled one has not ended yet
                    await asyncio.sleep(0.02)
        write(auth_file, max_resident_adapter_bytes=1000)
        error: LoraplexError | None = None
        async with asyncio.timeout(20):
            while error is None:
                try:
                    await ask.Generate(one["b"], metadata=ACME)
                except grpc.aio.AioRpcError as caught:
                    error = from_rpc_error(caught)
        assert isinstance(error, QuotaExceeded)
        assert error.retry_after_s is None, "it takes more than all that the tenant may have"


# --- HTTP -------------------------------------------------------------------------------------------------------------

MESSAGES = [{"role": "user", "content": "x"}]
OPENAI = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "x"},
    "/v1/embeddings": {"input": "x"},
    "/v1/tokenize": {"prompt": "x"},
    "/v1/detokenize": {"tokens": [5]},
    "/generate": {"text": "x"},
    "/score": {"text_1": "x", "text_2": "y"},
    "/rerank": {"query": "x", "documents": ["y"]},
}
NATIVE = {
    "/": {"inputs": "x"},
    "/generate": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/embed": {"inputs": "x"},
    "/tokenize": {"inputs": "x"},
}


@contextlib.asynccontextmanager
async def http_client(server: Server, token: str = "a") -> AsyncGenerator[httpx2.AsyncClient]:
    headers = {"authorization": f"Bearer {token}"}
    base = f"http://{server.http_address}"
    async with httpx2.AsyncClient(base_url=base, timeout=20, trust_env=False, headers=headers) as client:
        yield client


async def test_every_dialect_says_it_in_its_form(tmp_path: Path) -> None:
    auth_file = write(tmp_path / "auth.json", max_concurrent_requests=1)
    async with serving("router", auth_file) as server, server.running(), http_client(server) as http:
        for is_native, bodies in enumerate((OPENAI, NATIVE)):
            for path, body in bodies.items():
                for stream in ({}, {"stream": True}) if path in ("/", "/v1/completions", "/v1/responses") else ({},):
                    answer = await http.post(path, json={**body, **stream})
                    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1"), (path, answer.text)
                    content = answer.json()
                    if is_native:
                        assert content["error_type"] == "overloaded"
                    else:
                        assert content["error"]["type"] == "rate_limit_error"
                        assert content["error"]["code"] == "rate_limit_exceeded"
                        assert content["error"]["reason"] == "QUOTA_EXCEEDED"
        async with http_client(server, "b") as other:
            assert (await other.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_batches_of_prompts(tmp_path: Path) -> None:
    """A batch that fits no quota at any time is not to be sent again as it is; no prompt of it is begun."""
    auth_file = write(tmp_path / "auth.json", max_concurrent_requests=4, tokens_per_minute=300)
    async with serving("router", auth_file, metrics_port=0) as server, http_client(server) as http:
        body = {"prompt": ["x"] * 4, "max_tokens": 1}
        for _ in range(3):
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        pairs = {"text_1": ["x"] * 5, "text_2": ["y"] * 5}
        for stream in (False, True):
            for more in ({"prompt": ["x"] * 5}, {"n": 5}, {"n": 2}, {"prompt": ["x"] * 2, "max_tokens": 250}):
                answer = await http.post("/v1/completions", json={**body, **more, "stream": stream})
                assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false"), more
                assert "retry-after" not in answer.headers
        answer = await http.post("/score", json=pairs)
        assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
        assert server.registry is not None
        name = "loraplex:router_quota_refusals_total"
        quotas = (CONCURRENT_REQUESTS, TOKENS_PER_MINUTE)
        refused = [server.registry.get_sample_value(name, {"quota": quota}) for quota in quotas]
        assert refused == [7.0, 2.0]
        # What fits by itself waits for the others.
        async with server.running(stopping=inference_pb2.Stopping(max_tokens=250)):
            answer = await http.post("/v1/completions", json={"prompt": ["x"] * 2, "max_tokens": 100})
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) > 1


# --- metrics ----------------------------------------------------------------------------------------------------------


async def test_refusals_are_counted_by_quota(way: str, tmp_path: Path) -> None:
    auth_file = write(tmp_path / "auth.json", max_concurrent_requests=1, tokens_per_minute=10)
    async with serving(way, auth_file, metrics_port=0) as server:
        long = Generate(token_ids=inference_pb2.TokenIds(ids=[5] * 11))
        for request in (long, long, Generate(text="x", n=2)):
            await quota_of(server.inference.Generate(request, metadata=ACME))
        name = "loraplex:quota_refusals_total" if way == "worker" else "loraplex:router_quota_refusals_total"
        quotas = ("tokens_per_minute", "concurrent_requests")
        assert server.registry is not None
        assert [server.registry.get_sample_value(name, {"quota": quota}) for quota in quotas] == [2, 1]
