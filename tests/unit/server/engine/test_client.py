from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.engine_fakes import build_fake, build_for_ever, build_losing, build_slow

from loraplex_contracts.errors import AdapterNotFound, Cancelled, ClientTooSlow, EngineLost, UnsupportedModel
from loraplex_contracts.events import Event, RequestFailed, Tokens
from loraplex_contracts.request import Request, StoppingParams
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.engine.streams import RequestStream

CONFIG = EngineConfig(ModelConfig("fake"))


def request(request_id: str = "r", max_tokens: int = 4, adapter_id: str = "") -> Request:
    return Request(request_id, (20, 21, 22), StoppingParams(max_tokens=max_tokens), adapter_id=adapter_id)


async def read(stream: RequestStream) -> list[Event]:
    events: list[Event] = []
    while not stream.is_read:
        events += await stream.next()
    return events


@asynccontextmanager
async def client_of(
    builder: EngineBuilder, *, inline: bool = True, max_unread_tokens: int = 1000
) -> AsyncIterator[EngineClient]:
    client = EngineClient(CONFIG, max_unread_tokens=max_unread_tokens)
    await client.start(inline=inline, builder=builder)
    try:
        yield client
    finally:
        await client.stop()


async def test_many_requests_at_once() -> None:
    async with client_of(build_fake) as client:
        streams = [client.submit(request(f"r{i}", adapter_id="ab"[i % 2])) for i in range(20)]
        everything = await asyncio.gather(*(read(stream) for stream in streams))
        for events in everything:
            assert [t for e in events if isinstance(e, Tokens) for t in e.token_ids] == [13, 14, 15, 16]
    assert client.integrity == ""


async def test_a_start_that_fails_says_why() -> None:
    client = EngineClient(EngineConfig(ModelConfig("broken")))
    with pytest.raises(UnsupportedModel, match="this fake is broken"):
        await client.start(inline=True, builder=build_fake)
    await client.stop()


async def test_a_start_that_is_given_up_leaves_no_engine() -> None:
    """Ctrl-C while a model loads neither waits for the load nor leaves it running."""
    client = EngineClient(CONFIG)
    is_loading = asyncio.Event()
    starting = asyncio.ensure_future(client.start(lambda text: is_loading.set(), builder=build_for_ever))
    await asyncio.wait_for(is_loading.wait(), 60)
    pid = client.pid
    assert pid is not None
    started_s = time.monotonic()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - started_s < 10
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EngineLost):
        client.submit(request())
    await client.stop()


async def test_progress_is_reported() -> None:
    texts: list[str] = []
    client = EngineClient(CONFIG)
    await client.start(texts.append, inline=True, builder=build_fake)
    await client.stop()
    assert texts == ["building a fake"]


async def test_cancelling_frees_and_the_reader_hears_it() -> None:
    async with client_of(build_slow) as client:
        stream = client.submit(request(max_tokens=200))
        await stream.next()
        client.cancel(stream, Cancelled("gone"))
        last = (await read(stream))[-1]
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, Cancelled)
        other = client.submit(request("other"))
        await read(other)
        assert client.state.load.num_running == 0
    assert client.integrity == ""


async def test_a_reader_that_falls_behind_loses_its_request_only() -> None:
    # Slow, since what comes all at once is not held against the reader.
    async with client_of(build_slow, max_unread_tokens=50) as client:
        slow = client.submit(request("slow", max_tokens=200))
        quick = client.submit(request("quick", max_tokens=20))
        await read(quick)
        while not slow.is_over:  # the reader does not read, so nothing tells it
            await asyncio.sleep(0.01)
        last = (await slow.next())[-1]
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, ClientTooSlow)
    assert client.integrity == ""


async def test_adapter_operations() -> None:
    async with client_of(build_fake) as client:
        (info,) = await client.adapters("load", "a")
        assert info.adapter_id == "a"
        with pytest.raises(AdapterNotFound):
            await client.adapters("get", "zzz")
        assert len(list(client.state.listing.rows())) == 2


async def test_an_engine_that_loses_its_device_ends() -> None:
    """Its requests may be tried elsewhere; whoever watches `lost` ends the worker."""
    client = EngineClient(CONFIG)
    await client.start(inline=True, builder=build_losing)
    streams = [client.submit(request(name, max_tokens=100)) for name in "ab"]
    for stream in streams:
        last = (await asyncio.wait_for(read(stream), 20))[-1]
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, EngineLost)
    assert client.lost.is_set()
    assert client.integrity == ""
    await client.stop()


async def test_an_engine_that_is_killed_fails_its_requests() -> None:
    client = EngineClient(CONFIG)
    await client.start(builder=build_slow)
    stream = client.submit(request(max_tokens=250))
    await stream.next()

    async def watch() -> None:
        while not client.lost.is_set():
            await client.news.next().wait()

    watching = asyncio.ensure_future(watch())
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    last = (await asyncio.wait_for(read(stream), 20))[-1]
    await asyncio.wait_for(watching, 1)
    assert isinstance(last, RequestFailed)
    assert isinstance(last.error, EngineLost)
    assert client.lost.is_set()
    with pytest.raises(EngineLost):
        client.submit(request("late"))
    await client.stop()
