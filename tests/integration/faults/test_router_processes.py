"""Faults of router processes that share one port."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil
import pytest
from support.fake_workers import FakeWorker, Generate, chunks, until
from support.faults import Stopwatch, fault
from support.processes import Running, loraplex

from loraplex import AsyncClient

pytestmark = pytest.mark.timeout(120)
NUM_CLIENTS = 8  # enough that each of two processes gets some


@asynccontextmanager
async def two_processes(worker: FakeWorker) -> AsyncIterator[Running]:
    """Started and ended in a thread: the worker is in this event loop."""
    arguments = ("router", "--worker", worker.address, "--port", "0", "--processes", "2", "--announce", "0")
    running = loraplex(*arguments)
    router = await asyncio.to_thread(running.__enter__)
    try:
        yield router
    finally:
        await asyncio.to_thread(running.__exit__, None, None, None)


def processes_of(router: Running) -> list[psutil.Process]:
    return psutil.Process(router.process.pid).children()


async def asked(address: str) -> None:
    """A request on a connection of its own."""
    async with AsyncClient(address, retries=0) as client:
        assert (await client.generate("hello", max_tokens=3)).text


@fault(
    "SIGTERM to all processes of `router --processes 2` at once, as systemd sends it",
    clients_see="running requests end well; status 0",
    within_s=10,
)
@pytest.mark.parametrize("is_parent_first", [True, False])
async def test_a_signal_to_all_processes_drains(is_parent_first: bool, stopwatch: Stopwatch) -> None:
    release = asyncio.Event()

    async def until_released(request: Generate, context: Any) -> AsyncIterator[bytes]:
        first, *rest = chunks()
        yield first
        await release.wait()
        for chunk in rest:
            yield chunk

    worker = await FakeWorker("w").start()
    worker.stream = until_released
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(two_processes(worker))
        streams: list[AsyncIterator[Any]] = []
        for _ in range(NUM_CLIENTS):
            client = await stack.enter_async_context(AsyncClient(router.address, retries=0))
            streams.append(aiter(client.stream("hello")))
            await anext(streams[-1])
        parent, children = psutil.Process(router.process.pid), processes_of(router)
        stopwatch.start()
        for process in [parent, *children] if is_parent_first else [*children, parent]:
            process.send_signal(signal.SIGTERM)
        await asyncio.sleep(1.0)  # who hurries has cut them off by now
        release.set()
        for stream in streams:
            assert [chunk async for chunk in stream][-1].finish_reason == "length"
        assert await asyncio.to_thread(router.process.wait, 30) == 0
        stopwatch.stop()
    await worker.stop()


@fault(
    "one process of `router --processes 2` stays frozen (SIGSTOP)",
    clients_see="its part of new connections waits, then UNAVAILABLE; another takes its place",
    within_s=30,
)
async def test_a_frozen_process_is_replaced(stopwatch: Stopwatch) -> None:
    worker = await FakeWorker("w").start()
    async with two_processes(worker) as router:
        frozen, other = processes_of(router)
        stopwatch.start()
        frozen.suspend()
        await until(lambda: not frozen.is_running(), 40)
        await until(lambda: len(processes_of(router)) == 2, 40)
        await asyncio.gather(*(asked(router.address) for _ in range(NUM_CLIENTS)))
        stopwatch.stop()
        assert other in processes_of(router)
    await worker.stop()
