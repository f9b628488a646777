"""Tokens, credentials and certificates that are replaced while worker and router run.

The first test holds the documented bound with the polling interval that ships; the others poll faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.certificates import Pair, certificate_of, new_pair
from support.credentials import credential, write_credentials
from support.fake_workers import FAST_WATCH, Chunk, FakeWorker, Generate, chunks, cluster, router_for, until
from support.inline_worker import inline_worker
from support.world import TinyWorld

from loraplex_contracts.errors import Unauthenticated
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from loraplex_router.config import RouterConfig
from loraplex_router.server import Router, start_router
from loraplex_runtime import reload
from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig, WorkerConfig

BOUND_S = 5.0


@pytest.fixture
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reload, "POLL_S", 0.1)


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def replace_credentials(path: Path, **roles: str) -> None:
    """`roles` by token. Replaced by renaming, as the documentation says."""
    rows = [credential(token, "acme", roles=(role,)) for token, role in roles.items()]
    write_credentials(path.with_suffix(".new"), *rows).rename(path)


async def is_let_in(channel: grpc.aio.Channel, token: str) -> bool:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    try:
        await stub.Generate(Generate(text="x", stopping={"max_tokens": 1}), metadata=bearer(token), timeout=30)
    except grpc.aio.AioRpcError as error:
        if isinstance(from_rpc_error(error), Unauthenticated):
            return False
        raise
    return True


async def seconds_until(is_so: Callable[[], Awaitable[bool]]) -> float:
    started_s = time.monotonic()
    async with asyncio.timeout(6 * BOUND_S):
        while not await is_so():
            await asyncio.sleep(0.02)
    return time.monotonic() - started_s


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


# --- a worker with a model, a router, TLS on both hops ----------------------------------------------------------------


@dataclass
class Files:
    worker_auth: Path
    router_auth: Path
    token: Path
    pair: Pair  # of both servers
    other: Pair  # to replace it with
    ca: Path  # of both pairs


@pytest.fixture
def files(tmp_path: Path) -> Files:
    pair, other = new_pair(tmp_path, "pair"), new_pair(tmp_path, "other")
    files = Files(*(tmp_path / name for name in ("worker.json", "router.json", "token")), pair, other, tmp_path / "ca")
    files.ca.write_bytes(pair.cert.read_bytes() + other.cert.read_bytes())
    replace_credentials(files.worker_auth, direct="user", hop="router")
    replace_credentials(files.router_auth, revoked="user", kept="user")
    files.token.write_text("hop")
    return files


@pytest.fixture
def worker_address(tiny_world: TinyWorld, files: Files) -> Iterator[str]:
    engine = EngineConfig(
        ModelConfig(str(tiny_world.model), max_context_tokens=64),
        KvConfig(memory_bytes=1 << 20),
        BatchConfig(max_running=4, max_step_tokens=32),
        AdaptersConfig(root=tiny_world.adapters, num_device_slots=2),
    )
    pair = files.pair
    config = WorkerConfig(engine, port=0, auth_file=files.worker_auth, tls_cert=pair.cert, tls_key=pair.key)
    with inline_worker(config) as worker:
        yield worker.address


@contextlib.asynccontextmanager
async def router_before(address: str, files: Files) -> AsyncIterator[Router]:
    config = RouterConfig(
        workers=(address,),
        port=0,
        auth_file=files.router_auth,
        worker_token_file=files.token,
        worker_ca=files.ca,
        tls_cert=files.pair.cert,
        tls_key=files.pair.key,
        watch=FAST_WATCH,
    )
    router = await start_router(config)
    try:
        yield router
    finally:
        await router.drain(0.0)


async def test_rotation(
    worker_address: str, files: Files, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = grpc.ssl_channel_credentials(files.ca.read_bytes())
    async with (
        router_before(worker_address, files) as router,
        grpc.aio.secure_channel(router.address, tls) as channel,
        grpc.aio.secure_channel(worker_address, tls) as direct,
    ):
        assert await is_let_in(channel, "revoked")
        assert await is_let_in(direct, "direct")
        assert not await is_let_in(channel, "added")
        watch: Any = worker_pb2_grpc.WorkerServiceStub(direct)
        reports = watch.WatchLoad(worker_pb2.WatchLoadRequest(), metadata=bearer("hop"))
        await reports.read()

        # Everything at once: tokens go and come at both, the router gets another one, both get another certificate.
        old, new = files.pair.cert.read_text(), files.other.cert.read_text()
        files.other.copy_to(files.pair)
        replace_credentials(files.router_auth, kept="user", added="user")
        replace_credentials(files.worker_auth, hop="router", **{"next-hop": "router"})
        files.token.write_text("next-hop")

        async def is_done() -> bool:
            refused = [not await is_let_in(channel, "revoked"), not await is_let_in(direct, "direct")]
            shown = [await asyncio.to_thread(certificate_of, at) for at in (router.address, worker_address)]
            assert set(shown) <= {old, new}
            return all(refused) and await is_let_in(channel, "added") and shown == [new, new]

        assert await seconds_until(is_done) < BOUND_S
        assert not errors(caplog)
        # Over a connection of before: a stream that goes on, and new calls.
        assert isinstance(await asyncio.wait_for(reports.read(), 10), worker_pb2.WatchLoadResponse)
        assert await is_let_in(channel, "kept")

        # What is broken changes nothing, and is told once for each file.
        monkeypatch.setattr(reload, "POLL_S", 0.1)
        for path in (files.router_auth, files.token, files.pair.key, files.ca):
            path.write_text("")
        files.worker_auth.unlink()
        await until(lambda: len(errors(caplog)) >= 6)
        await asyncio.sleep(0.5)
        assert await is_let_in(channel, "added")
        said = "\n".join(sorted(errors(caplog)))
        assert len(errors(caplog)) == 6, said
        for what in (
            f"the credentials file {files.router_auth} is not valid JSON",
            f"--auth-file {files.worker_auth} cannot be read",
            f"--worker-token-file {files.token} is empty",
            f"--worker-ca {files.ca} does not hold certificates",
        ):
            assert said.count(what) == 1, said
        assert said.count("are not a certificate and its key") == 2, said  # the router's and the worker's

        # The token that the router showed before ends, and the reports that were opened with it.
        replace_credentials(files.worker_auth, **{"next-hop": "router"})
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                assert await asyncio.wait_for(reports.read(), 10)
        assert isinstance(from_rpc_error(caught.value), Unauthenticated)
        assert await is_let_in(channel, "added"), "the router shows the new one"


# --- scripted workers -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fast_polling")
async def test_a_stream_under_a_revoked_token_runs_to_its_end(tmp_path: Path) -> None:
    release = asyncio.Event()

    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        first, *rest = chunks()
        yield first
        await release.wait()
        for chunk in rest:
            yield chunk

    auth_file, worker_auth, token = (tmp_path / name for name in ("auth.json", "worker.json", "token"))
    replace_credentials(auth_file, a="user")
    replace_credentials(worker_auth, hop="router")
    token.write_text("hop")
    async with cluster(1, auth_file=auth_file, worker_auth_file=worker_auth, worker_token_file=token) as c:
        c.workers[0].stream = stream
        stub: Any = inference_pb2_grpc.InferenceServiceStub(c.channel)
        call = stub.GenerateStream(Generate(text="x"), metadata=bearer("a"))
        await call.read()
        replace_credentials(auth_file, b="user")
        assert await seconds_until(lambda: _not(is_let_in(c.channel, "a"))) < BOUND_S
        release.set()
        tokens = [(await call.read()).token_ids[0] for _ in range(2)]
        assert tokens == [2, 3]
        assert await call.code() is grpc.StatusCode.OK


async def _not(answer: Awaitable[bool]) -> bool:
    return not await answer


@pytest.mark.usefixtures("fast_polling")
async def test_a_router_whose_token_was_revoked_says_so_and_comes_back_with_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker_auth, token = tmp_path / "worker.json", tmp_path / "token"
    replace_credentials(worker_auth, hop="router")
    token.write_text("hop")
    async with cluster(1, worker_auth_file=worker_auth, worker_token_file=token) as c:
        replace_credentials(worker_auth, **{"next-hop": "router"})
        await until(lambda: c.router.replicas.num_routable == 0)
        assert "UNAUTHENTICATED: this credential is not known here" in caplog.text
        token.write_text("next-hop\n")
        await until(lambda: c.router.replicas.num_routable == 1)


@pytest.mark.usefixtures("fast_polling")
async def test_authorities_of_workers_are_replaced(tmp_path: Path) -> None:
    pair, other = new_pair(tmp_path, "pair"), new_pair(tmp_path, "other")
    ca = tmp_path / "ca.pem"
    ca.write_bytes(pair.cert.read_bytes())
    release = asyncio.Event()

    async def stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
        first, second, _ = chunks()
        yield first
        if not release.is_set():
            await release.wait()
        yield second

    worker = await FakeWorker("w", tls=(pair.key, pair.cert)).start()
    worker.stream = stream
    async with router_for([worker.address], worker_ca=ca) as (router, channel):
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.GenerateStream(Generate(text="old"))
        await call.read()
        # Others than the worker's: reports say that requests would not get through.
        ca.write_bytes(other.cert.read_bytes())
        await until(lambda: router.replicas.num_routable == 0)
        # The worker gets a certificate of theirs.
        other.copy_to(pair)
        await until(lambda: router.replicas.num_routable == 1)
        assert await is_let_in(channel, "")
        release.set()
        rest = await call.read()
        assert isinstance(rest, Chunk)
        assert rest.token_ids == [2]
    await worker.stop()
