"""Faults of engines that hang behind a front end that answers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.engine_fakes import build_long_steps
from support.fake_workers import router_for, until
from support.faults import Stopwatch, fault
from support.light_worker import light_worker
from support.processes import Running, loraplex, wait_until
from support.world import TinyWorld

from loraplex import AsyncClient
from loraplex_contracts.errors import WorkerLost
from loraplex_router.config import WatchConfig
from loraplex_router.server import Router
from loraplex_server.grpc.server import Worker

PROMPT = [3, 4, 5]
NUM_STREAMS = 12
NUM_TOKENS = 250


@asynccontextmanager
async def two_workers() -> AsyncIterator[tuple[list[Worker], Router]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(light_worker()) for _ in range(2)]
        addresses = [worker.address for worker in workers]
        router, _ = await stack.enter_async_context(router_for(addresses, watch=WatchConfig()))
        await until(lambda: router.replicas.num_routable == 2)
        yield workers, router


async def health_of(worker: Worker) -> int:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        request = health_pb2.HealthCheckRequest(service="loraplex.v1.InferenceService")
        return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


def signal_engine(worker: Worker, number: signal.Signals) -> None:
    assert worker.engine.pid is not None
    os.kill(worker.engine.pid, number)


@fault(
    "engine frozen (SIGSTOP), its front end answers",
    clients_see="WORKER_LOST with the tokens sent; requests without a token go elsewhere; health NOT_SERVING",
    within_s=5,
    left="the worker, out of rotation until its engine works again",
)
async def test_a_frozen_engine(stopwatch: Stopwatch) -> None:
    async with two_workers() as (workers, router), AsyncClient(router.address) as client:
        num_read = [0] * NUM_STREAMS

        async def stream(number: int) -> WorkerLost | None:
            try:
                async for chunk in client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True):
                    num_read[number] += len(chunk.token_ids)
            except WorkerLost as lost:
                return lost
            return None

        streams = [asyncio.ensure_future(stream(number)) for number in range(NUM_STREAMS)]
        await until(lambda: all(num_read))  # a request without a token would go elsewhere
        victim, other = workers
        signal_engine(victim, signal.SIGSTOP)
        stopwatch.start()
        after = [
            asyncio.ensure_future(client.generate(token_ids=PROMPT, max_tokens=3, ignore_eos=True)) for _ in range(8)
        ]
        await until(lambda: router.replicas.num_routable == 1)
        stopwatch.stop()
        errors = await asyncio.gather(*streams)
        for answer in await asyncio.gather(*after):
            assert len(answer.completions[0].token_ids) == 3
        for num_tokens, error in zip(num_read, errors, strict=True):
            if error is None:
                assert num_tokens == NUM_TOKENS
            else:
                assert error.metadata["tokens_sent"] == str(num_tokens)
                assert error.retry_after_s is not None
        assert 0 < errors.count(None) < NUM_STREAMS, "some were on the other worker"
        assert await health_of(victim) == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await health_of(other) == health_pb2.HealthCheckResponse.SERVING
        signal_engine(victim, signal.SIGCONT)
        await until(lambda: router.replicas.num_routable == 2)
        assert await health_of(victim) == health_pb2.HealthCheckResponse.SERVING
        await until(lambda: victim.num_requests == 0)
    assert [worker.engine.integrity for worker in workers] == ["", ""]


@pytest.mark.slow
@fault(
    "engine stays frozen",
    clients_see="as above; then the engine is killed and its worker ends with status 1",
    within_s=20,
)
async def test_an_engine_that_stays_frozen_is_killed(stopwatch: Stopwatch) -> None:
    async with light_worker() as worker:
        signal_engine(worker, signal.SIGSTOP)
        stopwatch.start()
        # Much is sent to it before anybody notices; the pipe of a process that does not read takes 200 kB.
        async with AsyncClient(worker.address) as client:
            prompt = [5] * 250
            requests = [client.generate(token_ids=prompt, max_tokens=2) for _ in range(500)]
            errors = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(error) for error in errors} == {WorkerLost}
        await asyncio.wait_for(worker.engine.lost.wait(), 20)
        stopwatch.stop()


@pytest.mark.slow
@fault("step takes seconds, legally", clients_see="nothing but the wait", within_s=120)
async def test_a_long_step_is_not_a_hung_engine(stopwatch: Stopwatch, caplog: pytest.LogCaptureFixture) -> None:
    async with light_worker(build_long_steps) as worker, AsyncClient(worker.address) as client:
        stopwatch.start()
        answer = await client.generate(token_ids=PROMPT, max_tokens=6, ignore_eos=True, timeout_s=100)
        stopwatch.stop()
        assert len(answer.completions[0].token_ids) == 6
        assert await health_of(worker) == health_pb2.HealthCheckResponse.SERVING
    assert "does not respond" not in caplog.text


def workers_of(serve: Running) -> set[int]:
    """Process ids of the workers that `loraplex serve` runs."""
    children = psutil.Process(serve.process.pid).children()
    return {child.pid for child in children if child.status() != "zombie" and "worker" in child.cmdline()}


@contextmanager
def served(world: TinyWorld) -> Iterator[Running]:
    command = ("serve", str(world.model), "--adapters", str(world.adapters), "--port", "0", "--workers", "2")
    with loraplex(*command, "--threads", "1", "--dtype", "float64", timeout_s=150) as serve:
        yield serve


async def check_replaced(serve: Running, victim: int, frozen: int, world: TinyWorld, stopwatch: Stopwatch) -> None:
    """Freezes a process for good; its worker is replaced, nothing of it is left, and the texts are the same."""
    before = workers_of(serve)
    family = [psutil.Process(victim), *psutil.Process(victim).children(recursive=True)]
    async with AsyncClient(serve.address) as client:
        texts = [(await client.generate("hello", adapter_id=name, max_tokens=8)).text for name in world.names[:4]]
        os.kill(frozen, signal.SIGSTOP)
        stopwatch.start()
        await asyncio.to_thread(wait_until, lambda: workers_of(serve) - before, 90, "another worker")
        stopwatch.stop()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
        assert not alive
        again = [(await client.generate("hello", adapter_id=name, max_tokens=8)).text for name in world.names[:4]]
        assert again == texts
    assert serve.end() == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@fault("engine stays frozen under `serve`", clients_see="as above; another worker takes its place", within_s=30)
async def test_serve_replaces_a_worker_whose_engine_stays_frozen(tiny_world: TinyWorld, stopwatch: Stopwatch) -> None:
    with served(tiny_world) as serve:
        victim = min(workers_of(serve))
        (engine,) = (
            child.pid
            for child in psutil.Process(victim).children()
            if any("spawn_main" in argument for argument in child.cmdline())
        )
        await check_replaced(serve, victim, engine, tiny_world, stopwatch)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@fault("front end stays frozen under `serve`", clients_see="as above; another worker takes its place", within_s=60)
async def test_serve_replaces_a_worker_whose_front_end_stays_frozen(
    tiny_world: TinyWorld, stopwatch: Stopwatch
) -> None:
    with served(tiny_world) as serve:
        victim = min(workers_of(serve))
        await check_replaced(serve, victim, victim, tiny_world, stopwatch)
