"""Faults of workers that fall silent: frozen processes and dropped packets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from support.fake_workers import Chunk, FakeWorker, Generate, chunks, endless, router_for, until
from support.faults import Stopwatch, fault
from support.fleet import free_port
from support.tcp_proxy import tcp_proxy

from loraplex import AsyncClient
from loraplex_contracts.errors import ConnectionLost, LoraplexError, WorkerLost
from loraplex_proto.status import from_rpc_error
from loraplex_router.config import WatchConfig

STREAM = "/loraplex.v1.InferenceService/GenerateStream"
UNARY = "/loraplex.v1.InferenceService/Generate"
NUM_STREAMS = 6


@contextlib.contextmanager
def worker_process() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A worker whose streams stop behind their first token, as a process that can be frozen."""
    process = subprocess.Popen(
        [sys.executable, "-m", "support.fake_workers"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def outcome_of(call: Any) -> tuple[int, LoraplexError | None]:
    """The number of tokens that a stream brought, and the error that it ended with."""
    num_tokens = 0
    try:
        async for message in call:
            num_tokens += len(Chunk.FromString(message).token_ids)
    except grpc.aio.AioRpcError as error:
        return num_tokens, from_rpc_error(error)
    return num_tokens, None


async def first_answer(call: Any) -> None:
    """Waits until the router has its port, and its worker."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call(Generate(text="x").SerializeToString(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.1)
            else:
                return


async def streams_with_a_token(channel: grpc.aio.Channel, healthy: FakeWorker) -> list[asyncio.Task[Any]]:
    """Streams under way, all on the worker that will fall silent."""
    healthy.report(draining=True)
    await asyncio.sleep(0.1)
    calls = [channel.unary_stream(STREAM)(Generate(text="before").SerializeToString()) for _ in range(NUM_STREAMS)]
    for call in calls:
        await call.initial_metadata()  # comes with the first token
    healthy.report()
    return [asyncio.ensure_future(outcome_of(call)) for call in calls]


async def check_that_nothing_stands(
    channel: grpc.aio.Channel, before: list[asyncio.Task[Any]], stopwatch: Stopwatch
) -> None:
    """Streams with tokens end as lost and say how many were sent; requests without one end well elsewhere."""
    after = [
        asyncio.ensure_future(outcome_of(channel.unary_stream(STREAM)(Generate(text="after").SerializeToString())))
        for _ in range(NUM_STREAMS)
    ]
    unary = [channel.unary_unary(UNARY)(Generate(text="after").SerializeToString()) for _ in range(NUM_STREAMS)]
    for num_tokens, error in await asyncio.gather(*before):
        assert isinstance(error, WorkerLost), error
        assert error.metadata["tokens_sent"] == str(num_tokens)
        assert error.retry_after_s is not None
    for num_tokens, error in await asyncio.gather(*after):
        assert (num_tokens, error) == (3, None)
    await asyncio.gather(*unary)
    stopwatch.stop()


@fault(
    "worker frozen (SIGSTOP of its front end)",
    clients_see="WORKER_LOST with the tokens sent; requests without a token go elsewhere",
    within_s=10,
    left="the worker, out of rotation until it speaks again",
)
async def test_a_frozen_front_end(stopwatch: Stopwatch) -> None:
    healthy = await FakeWorker("healthy").start()
    with worker_process() as (address, process):
        async with router_for([address, healthy.address], watch=WatchConfig()) as (router, channel):
            await until(lambda: router.replicas.num_routable == 2)
            before = await streams_with_a_token(channel, healthy)
            await until(lambda: router.replicas.num_routable == 2)
            process.send_signal(signal.SIGSTOP)
            stopwatch.start()
            await check_that_nothing_stands(channel, before, stopwatch)
            assert router.replicas[address].num_in_flight == 0
            process.send_signal(signal.SIGCONT)
            await until(lambda: router.replicas.num_routable == 2)
    await healthy.stop()


@pytest.mark.slow
@pytest.mark.timeout(180)
@fault("server frozen (SIGSTOP) in mid-stream, asked without a router", clients_see="CONNECTION_LOST", within_s=95)
async def test_a_frozen_server_is_noticed_by_its_client(stopwatch: Stopwatch) -> None:
    with worker_process() as (address, process):
        async with AsyncClient(address, retries=0, timeout_s=None) as client:
            stream = client.stream("hello")
            await anext(stream)
            process.send_signal(signal.SIGSTOP)
            stopwatch.start()
            with pytest.raises(ConnectionLost):
                async for _ in stream:
                    pass
            stopwatch.stop()


@fault(
    "packets to a worker dropped, or its machine without power",
    clients_see="WORKER_LOST with the tokens sent; requests without a token go elsewhere",
    within_s=10,
)
async def test_a_network_that_forwards_nothing(stopwatch: Stopwatch) -> None:
    healthy, far = await FakeWorker("healthy").start(), await FakeWorker("far").start()
    far.stream = endless
    async with (
        tcp_proxy(far.address) as proxy,
        router_for([proxy.address, healthy.address], watch=WatchConfig()) as (router, channel),
    ):
        await until(lambda: router.replicas.num_routable == 2)
        before = await streams_with_a_token(channel, healthy)
        await until(lambda: router.replicas.num_routable == 2)
        proxy.stop_forwarding()
        stopwatch.start()
        await check_that_nothing_stands(channel, before, stopwatch)
        proxy.resume()
        await until(lambda: router.replicas.num_routable == 2)
        # The worker hears that nobody wants its streams any more.
        await until(lambda: far.num_ended >= NUM_STREAMS)
    await far.stop()
    await healthy.stop()


@fault("worker reports nothing, but its streams flow", clients_see="nothing", within_s=10)
async def test_a_worker_whose_streams_flow_is_alive(stopwatch: Stopwatch) -> None:
    """A worker is given up only where it gives no sign of life at all."""
    watch = WatchConfig(stale_after_s=0.5, min_backoff_s=0.05, max_backoff_s=0.1)
    worker = await FakeWorker("busy").start()

    async def slow(request: Generate, context: Any) -> AsyncIterator[bytes]:
        for chunk in chunks(40):
            await asyncio.sleep(0.05)
            yield chunk

    worker.stream = slow
    async with router_for([worker.address], watch=watch) as (router, channel):
        await until(lambda: router.replicas.num_routable == 1)
        stopwatch.start()
        assert await outcome_of(channel.unary_stream(STREAM)(Generate(text="x").SerializeToString())) == (40, None)
        stopwatch.stop()
    await worker.stop()


@fault("router stands still (SIGSTOP, a frozen machine) and goes on", clients_see="nothing but the wait", within_s=10)
async def test_a_pause_of_the_router_is_not_its_workers_silence(stopwatch: Stopwatch) -> None:
    watch = WatchConfig(stale_after_s=1.5)
    release = asyncio.Event()
    worker = await FakeWorker("w").start()

    async def in_two_parts(request: Generate, context: Any) -> AsyncIterator[bytes]:
        first, *rest = chunks()
        yield first
        await release.wait()
        for chunk in rest:
            yield chunk

    worker.stream = in_two_parts
    async with router_for([worker.address], watch=watch) as (router, channel):
        await until(lambda: router.replicas.num_routable == 1)
        call = channel.unary_stream(STREAM)(Generate(text="x").SerializeToString())
        await call.initial_metadata()
        stopwatch.start()
        time.sleep(2 * watch.stale_after_s)  # nothing in this process gets a turn
        await asyncio.sleep(0.5)  # whoever gives a worker up has done so by now
        release.set()
        assert await outcome_of(call) == (3, None)
        stopwatch.stop()
        assert router.replicas.num_routable == 1
    await worker.stop()


@fault("reader of a router's log frozen: its pipe is full", clients_see="nothing", within_s=10)
async def test_a_log_that_nobody_reads(stopwatch: Stopwatch) -> None:
    num_requests = 100
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # the lines of a few requests
    worker = await FakeWorker("w").start()
    port = free_port()
    command = [sys.executable, "-m", "loraplex", "router", "--worker", worker.address, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=writer)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(UNARY)
            await first_answer(call)
            stopwatch.start()
            for _ in range(num_requests):
                await call(Generate(text="x").SerializeToString(), timeout=5)
            stopwatch.stop()
        await asyncio.to_thread(os.read, reader, 4096)  # it was full of lines
        process.terminate()
        assert await asyncio.to_thread(process.wait, 30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
        os.close(writer)
        await worker.stop()
