"""Faults of processes: clients, workers and engines that die, and deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest
from support.faults import Stopwatch, fault
from support.processes import Running, loraplex, together, wait_until
from support.world import TinyWorld

from loraplex import AsyncClient, DeadlineExceeded, EngineLost, WorkerLost
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc

pytestmark = pytest.mark.timeout(240)
LONG = {"max_tokens": 450, "ignore_eos": True, "n": 8}  # seconds, even on a fast machine


def worker_command(world: TinyWorld) -> tuple[str, ...]:
    return (
        "worker", str(world.model), "--adapters", str(world.adapters), "--port", "0", "--dtype", "float64",
        "--threads", "1", "--drain", "2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def workers(tiny_world: TinyWorld) -> Iterator[list[Running]]:
    """Four. Starting one takes seconds, so they are shared, and the tests that kill one come last."""
    with together(*[worker_command(tiny_world)] * 4) as running:
        yield running


@pytest.fixture(scope="module")
def router(workers: list[Running]) -> Iterator[Running]:
    arguments = [argument for worker in workers for argument in ("--worker", worker.address)]
    with loraplex("router", "--port", "0", *arguments) as running:
        yield running


def alive(workers: list[Running]) -> list[Running]:
    return [worker for worker in workers if worker.process.poll() is None]


def load_of(worker: Running) -> worker_pb2.Load:
    with grpc.insecure_channel(worker.address) as channel:
        return worker_pb2_grpc.WorkerServiceStub(channel).GetLoad(worker_pb2.GetLoadRequest()).load


def is_idle(worker: Running) -> bool:
    load = load_of(worker)
    return load.running_requests == 0 and load.queued_requests == 0


def busy_one(workers: list[Running]) -> Running:
    busy = [worker for worker in alive(workers) if not is_idle(worker)]
    assert len(busy) == 1, "one stream is under way"
    return busy[0]


@fault("client killed in mid-stream", clients_see="others: nothing; its KV blocks are free", within_s=5)
async def test_a_killed_client_frees_what_it_held(
    router: Running, workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    code = (
        "import sys; from loraplex import Client\n"
        "for _ in Client(sys.argv[1]).stream('hello', adapter_id=sys.argv[2], max_tokens=450, ignore_eos=True, n=8):\n"
        "    print('token', flush=True)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, router.address, tiny_world.names[2]], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "token\n"
    victim = await asyncio.to_thread(busy_one, workers)
    free_before = load_of(victim).total_kv_blocks
    stopwatch.start()
    child.kill()
    child.wait()
    child.stdout.close()
    await asyncio.to_thread(wait_until, lambda: is_idle(victim), 10, "the worker is idle")
    stopwatch.stop()
    load = load_of(victim)
    # One block is never handed out; cached prefixes count as free.
    assert load.free_kv_blocks >= free_before - 1
    async with AsyncClient(router.address) as client:
        assert (await client.generate("hello", adapter_id=tiny_world.names[2], max_tokens=4)).text


@fault("deadline passes in mid-stream", clients_see="DEADLINE_EXCEEDED behind the tokens made so far", within_s=3)
async def test_a_deadline_in_mid_stream(
    router: Running, workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    async with AsyncClient(router.address) as client:
        other = asyncio.ensure_future(client.generate("other", adapter_id=tiny_world.names[4], max_tokens=60))
        chunks: list[str] = []
        stopwatch.start()
        with pytest.raises(DeadlineExceeded):
            async for chunk in client.stream(
                "hello", adapter_id=tiny_world.names[3], timeout_s=0.6, **{**LONG, "n": 32}
            ):
                chunks.append(chunk.text)
        stopwatch.stop()
        assert chunks, "tokens came before the deadline"
        assert (await other).completions[0].finish_reason is not None
    for worker in alive(workers):
        await asyncio.to_thread(wait_until, lambda worker=worker: is_idle(worker), 10, "the worker is idle")


@fault("worker killed, with `--resume` of the router", clients_see="a pause: another worker goes on", within_s=10)
async def test_streams_go_on_at_another_worker(
    workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    wanted = {"adapter_id": tiny_world.names[0], "max_tokens": 450, "ignore_eos": True}
    samplings: list[dict[str, float]] = [{}, {"temperature": 1.0, "seed": 11}]
    arguments = [argument for worker in workers for argument in ("--worker", worker.address)]
    with loraplex("router", "--port", "0", "--resume", *arguments) as router:
        async with AsyncClient(router.address) as client:
            expected = [(await client.generate("hello", **wanted, **one)).completions[0].token_ids for one in samplings]
            streams = [client.stream("hello", **wanted, **one) for one in samplings]
            got = [list((await anext(stream)).token_ids) for stream in streams]
            victim = await asyncio.to_thread(busy_one, workers)
            stopwatch.start()
            victim.kill()
            for tokens, stream in zip(got, streams, strict=True):
                async for chunk in stream:
                    tokens += chunk.token_ids
            stopwatch.stop()
    assert [tuple(tokens) for tokens in got] == [tuple(tokens) for tokens in expected]
    assert got[0] != got[1]


@fault(
    "worker killed (its front end)",
    clients_see="WORKER_LOST with the tokens sent; new requests go elsewhere",
    within_s=3,
)
async def test_a_killed_worker_mid_stream(
    router: Running, workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    async with AsyncClient(router.address) as client:
        expected = (await client.generate("hello", adapter_id=tiny_world.names[0], max_tokens=8)).text
        stream = client.stream("hello", adapter_id=tiny_world.names[0], **LONG)
        await anext(stream)
        victim = await asyncio.to_thread(busy_one, workers)
        others = [worker for worker in alive(workers) if worker is not victim]
        stopwatch.start()
        victim.kill()
        with pytest.raises(WorkerLost) as caught:
            async for _ in stream:
                pass
        stopwatch.stop()
        assert int(caught.value.metadata["tokens_sent"]) >= 1
        # The rest serves on, and the same adapter is served by the worker that is left.
        for _ in range(5):
            again = await client.generate("hello", adapter_id=tiny_world.names[0], max_tokens=8)
            assert again.text == expected
    assert all(worker.process.poll() is None for worker in others)


@fault(
    "engine killed",
    clients_see="ENGINE_LOST with the tokens sent and when to retry; the worker ends",
    within_s=3,
)
async def test_a_killed_engine_ends_its_worker_and_nothing_else(
    router: Running, workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    async with AsyncClient(router.address) as client:
        stream = client.stream("hello", adapter_id=tiny_world.names[1], **LONG)
        num_tokens = len((await anext(stream)).token_ids)
        victim = await asyncio.to_thread(busy_one, workers)
        stopwatch.start()
        os.kill(victim.engine_pid(), signal.SIGKILL)
        with pytest.raises(EngineLost) as caught:
            async for chunk in stream:
                num_tokens += len(chunk.token_ids)
        assert await asyncio.to_thread(victim.process.wait, 30) == 1  # well below a second on an idle machine
        stopwatch.stop()
        assert int(caught.value.metadata["tokens_sent"]) == num_tokens
        assert caught.value.retry_after_s is not None
        for _ in range(5):
            assert (await client.generate("hello", adapter_id=tiny_world.names[1], max_tokens=4)).text


@fault("Ctrl-C of a worker", clients_see="running requests end well; the worker ends with status 0", within_s=10)
async def test_ctrl_c_drains(workers: list[Running], tiny_world: TinyWorld, stopwatch: Stopwatch) -> None:
    (worker,) = alive(workers)
    async with AsyncClient(worker.address) as client:
        stream = client.stream("hello", max_tokens=30, ignore_eos=True)
        await anext(stream)
        stopwatch.start()
        worker.process.send_signal(signal.SIGINT)
        text = [chunk.text async for chunk in stream]  # the running request ends as it should
        assert text
    assert await asyncio.to_thread(worker.process.wait, 30) == 0
    stopwatch.stop()
    assert "Traceback" not in worker.output
