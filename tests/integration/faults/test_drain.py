"""Faults while a worker or router drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.fake_workers import Generate, chunks, cluster
from support.faults import Stopwatch, fault
from support.light_worker import light_worker

from loraplex import AsyncClient
from loraplex_contracts.errors import Draining

ROW = {"clients_see": "DRAINING with a retry hint; what runs ends well", "within_s": 2.0}
TOKENS = [3, 4, 5]


async def check_that_newcomers_hear_why(address: str, stopwatch: Stopwatch) -> None:
    """New connections are told of the drain all the while: a closed port would say `connection refused`."""
    for _ in range(5):
        async with AsyncClient(address) as newcomer:
            stopwatch.start()
            with pytest.raises(Draining) as unary:
                await newcomer.generate(token_ids=TOKENS, max_tokens=2)
            with pytest.raises(Draining) as streamed:
                await anext(aiter(newcomer.stream(token_ids=TOKENS, max_tokens=2)))
            with pytest.raises(Draining):
                await newcomer.tokenize("hello")
            stopwatch.stop()
        assert unary.value.retry_after_s
        assert streamed.value.retry_after_s
        await asyncio.sleep(0.05)


@fault("SIGTERM of a router, streams still run", **ROW)
async def test_a_router_that_drains(stopwatch: Stopwatch) -> None:
    release = asyncio.Event()

    async def until_released(request: Generate, context: Any) -> AsyncIterator[bytes]:
        first, last = chunks(2)
        yield first
        await release.wait()
        yield last

    async with cluster(1) as c, AsyncClient(c.router.address) as client:
        c.workers[0].stream = until_released
        stream = aiter(client.stream("hello"))
        await anext(stream)
        draining = asyncio.ensure_future(c.router.drain(30.0))
        await check_that_newcomers_hear_why(c.router.address, stopwatch)
        release.set()
        assert [chunk.finish_reason async for chunk in stream] == ["length"]
        await asyncio.wait_for(draining, 5)


@fault("SIGTERM of a worker, streams still run", **ROW)
async def test_a_worker_that_drains(stopwatch: Stopwatch) -> None:
    async with light_worker() as worker, AsyncClient(worker.address) as client:
        stream = aiter(client.stream(token_ids=TOKENS, max_tokens=200, ignore_eos=True))
        await anext(stream)
        draining = asyncio.ensure_future(worker.drain(30.0))
        await check_that_newcomers_hear_why(worker.address, stopwatch)
        reasons = [chunk.finish_reason async for chunk in stream]
        assert reasons[-1] == "length"
        await asyncio.wait_for(draining, 5)


@fault("drain of a worker takes longer than --drain", clients_see="DRAINING behind the tokens made so far", within_s=3)
async def test_what_does_not_end_in_time_hears_why(stopwatch: Stopwatch) -> None:
    async with light_worker() as worker, AsyncClient(worker.address) as client:
        stream = aiter(client.stream(token_ids=TOKENS, max_tokens=250, ignore_eos=True))
        await anext(stream)
        stopwatch.start()
        draining = asyncio.ensure_future(worker.drain(0.2))
        with pytest.raises(Draining):
            async for _ in stream:
                pass
        stopwatch.stop()
        await draining
        assert worker.engine.integrity == ""
