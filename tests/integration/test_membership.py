"""Workers that join, leave and change their address while requests run."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from support.fake_workers import FAST_WATCH, Chunk, FakeWorker, Generate, chunks, until

from loraplex_contracts.errors import NoWorker
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, adapter_pb2_grpc, inference_pb2, inference_pb2_grpc
from loraplex_router import membership
from loraplex_router import workers as router_workers
from loraplex_router.config import PolicyConfig, RouterConfig
from loraplex_router.policy import rendezvous_order
from loraplex_router.server import Router, start_router

NUM_TOKENS = 30
TOKEN_S = 0.01


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "FILE_INTERVAL_S", 0.02)


async def slow_stream(request: Generate, context: Any) -> AsyncIterator[bytes]:
    for chunk in chunks(NUM_TOKENS):
        yield chunk
        await asyncio.sleep(TOKEN_S)


async def new_worker(name: str) -> FakeWorker:
    worker = FakeWorker(name)
    worker.stream = slow_stream
    return await worker.start()


class Fleet:
    """A router that follows a file."""

    def __init__(self, path: Path, router: Router, channel: grpc.aio.Channel) -> None:
        self.path = path
        self.router = router
        self.channel = channel
        self.stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)

    def write(self, *lines: str) -> None:
        write(self.path, lines)

    async def ask(self, adapter_id: str = "") -> list[Chunk]:
        request = Generate(text="x", adapter_id=adapter_id, stopping=inference_pb2.Stopping(max_tokens=NUM_TOKENS))
        return [chunk async for chunk in self.stub.GenerateStream(request, timeout=30)]

    def names(self) -> list[str]:
        return sorted(replica.name for replica in self.router.replicas.all() if replica.is_routable)


def write(path: Path, lines: Sequence[str]) -> None:
    part = path.with_suffix(".part")
    part.write_text("".join(f"{line}\n" for line in ("# members", *lines)))
    os.replace(part, path)


@pytest.fixture
async def workers() -> AsyncIterator[list[FakeWorker]]:
    found = [await new_worker(f"w{number}") for number in range(4)]
    yield found
    for worker in found:
        await worker.stop()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    path = tmp_path / "members"
    write(path, [])
    config = RouterConfig(workers_from=f"file:{path}", port=0, watch=FAST_WATCH, policy=PolicyConfig(slow_start_s=0.5))
    router = await start_router(config)
    channel = grpc.aio.insecure_channel(router.address, options=[("grpc.use_local_subchannel_pool", 1)])
    yield Fleet(path, router, channel)
    await channel.close()
    await router.drain(0.0)


async def test_an_empty_list_is_a_state(fleet: Fleet, workers: list[FakeWorker]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await fleet.ask()
    error = from_rpc_error(refused.value)
    assert isinstance(error, NoWorker)
    assert "no workers yet" in error.message
    assert error.retry_after_s
    assert not fleet.router.listener.health.is_ready
    fleet.write(workers[0].address)
    await until(lambda: fleet.router.listener.health.is_ready)
    assert len(await fleet.ask()) == NUM_TOKENS
    fleet.write()
    await until(lambda: not fleet.router.replicas.all())
    assert not fleet.router.listener.health.is_ready


def load(fleet: Fleet, adapter_id: str) -> asyncio.Task[Any]:
    stub: Any = adapter_pb2_grpc.AdapterServiceStub(fleet.channel)

    async def ask() -> Any:
        return await stub.LoadAdapter(adapter_pb2.LoadAdapterRequest(adapter_id=adapter_id), timeout=30)

    return asyncio.create_task(ask())


async def test_a_load_succeeds_though_a_holder_leaves_meanwhile(fleet: Fleet, workers: list[FakeWorker]) -> None:
    fleet.write(*(worker.address for worker in workers[:3]))
    await until(lambda: len(fleet.names()) == 3)
    order = [next(w for w in workers if w.address == one) for one in rendezvous_order("sql", fleet.names())]
    order[2].adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="v1")
    order[0].may_load = asyncio.Event()
    loading = load(fleet, "sql")
    await until(lambda: "LoadAdapter" in order[0].calls)
    fleet.write(*(worker.address for worker in order[:2]))
    await until(lambda: len(fleet.router.replicas.all()) == 2)
    order[0].may_load.set()
    assert [row.worker for row in (await loading).adapters] == [worker.address for worker in order[:2]]
    assert "LoadAdapter" not in order[2].calls


async def test_a_load_ends_though_the_connection_of_a_leaving_worker_closes(
    fleet: Fleet, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_workers, "CLOSE_S", 0.1)
    fleet.write(workers[0].address, workers[1].address)
    await until(lambda: len(fleet.names()) == 2)
    workers[0].may_load = asyncio.Event()
    loading = load(fleet, "sql")
    await until(lambda: "LoadAdapter" in workers[0].calls)
    fleet.write(workers[1].address)
    assert [row.worker for row in (await loading).adapters] == [workers[1].address]


async def test_no_stream_is_lost_while_members_come_and_go(
    fleet: Fleet, workers: list[FakeWorker], caplog: pytest.LogCaptureFixture
) -> None:
    fleet.write(f"a={workers[0].address}", f"b={workers[1].address}")
    await until(lambda: fleet.names() == ["a", "b"])
    is_over, num_answers = False, 0

    async def ask(number: int) -> None:
        nonlocal num_answers
        while not is_over:
            answer = await fleet.ask(f"adapter-{number}" if number % 2 else "")
            assert len(answer) == NUM_TOKENS
            num_answers += 1

    with caplog.at_level(logging.INFO):
        clients = [asyncio.create_task(ask(number)) for number in range(12)]
        addresses = [worker.address for worker in workers]
        views = [
            {"a": 0, "b": 1, "c": 2},
            {"b": 1, "c": 2},
            {"b": 2, "c": 1},  # they swap their addresses
            {"b": 2, "c": 1, "d": 3},
            {"d": 3},
            {"d": 0, "e": 3},
        ]
        for view in views:
            fleet.write(*(f"{name}={addresses[number]}" for name, number in view.items()))
            await until(lambda view=view: fleet.names() == sorted(view))
            await asyncio.sleep(0.4)
        is_over = True
        await asyncio.gather(*clients)
    assert num_answers > 24
    assert all(worker.requests for worker in workers)
    await until(lambda: len(fleet.router.replicas.all()) == 2)
    assert set(fleet.router._workers.upstreams) == {f"d={addresses[0]}", f"e={addresses[3]}"}
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_worker_that_leaves_ends_its_streams_first(fleet: Fleet, workers: list[FakeWorker]) -> None:
    fleet.write(f"a={workers[0].address}")
    await until(lambda: fleet.names() == ["a"])
    running = asyncio.create_task(fleet.ask())
    await until(lambda: len(workers[0].requests) == 1)
    fleet.write(f"a={workers[1].address}")  # a replacement
    await until(lambda: len(fleet.router.replicas.all()) == 2 and fleet.names() == ["a"])
    assert len(await fleet.ask()) == NUM_TOKENS
    assert len(workers[1].requests) == 1
    assert len(await running) == NUM_TOKENS
    await until(lambda: len(fleet.router.replicas.all()) == 1)


async def test_one_that_comes_back_before_it_has_left_stays(fleet: Fleet, workers: list[FakeWorker]) -> None:
    fleet.write(workers[0].address)
    await until(lambda: len(fleet.names()) == 1)
    running = asyncio.create_task(fleet.ask())
    await until(lambda: len(workers[0].requests) == 1)
    fleet.write()
    await until(lambda: not fleet.names())
    fleet.write(workers[0].address)
    await until(lambda: len(fleet.names()) == 1)
    assert len(await running) == NUM_TOKENS
    await asyncio.sleep(0.5)
    assert len(await fleet.ask()) == NUM_TOKENS


async def test_a_replacement_inherits_the_adapters_of_its_name(fleet: Fleet, workers: list[FakeWorker]) -> None:
    a, b, c, d = (worker.address for worker in workers)
    fleet.write(f"x={a}", f"y={b}", f"z={c}")
    await until(lambda: fleet.names() == ["x", "y", "z"])

    names = {a: "x", b: "y", c: "z", d: "y"}

    async def homes() -> dict[str, str]:
        for worker in workers:
            worker.raw_requests.clear()
        await asyncio.gather(*(fleet.ask(f"adapter-{number}") for number in range(12)))
        return {request.adapter_id: names[worker.address] for worker in workers for request in worker.requests}

    before = await homes()
    assert set(before.values()) == {"x", "y", "z"}
    fleet.write(f"x={a}", f"y={d}", f"z={c}")
    await until(lambda: len(fleet.router.replicas.all()) == 3 and workers[3].num_watches > 0)
    await until(lambda: fleet.names() == ["x", "y", "z"])
    await asyncio.sleep(0.6)  # the newcomer gets its share
    assert await homes() == before
