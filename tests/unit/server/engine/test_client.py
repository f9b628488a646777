"""Client of the engine's process."""

from __future__ import annotations

import asyncio
import errno
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.engine_fakes import build_fake, build_for_ever, build_losing, build_slow

from loraplex_contracts.errors import (
    AdapterNotFound,
    Cancelled,
    ClientTooSlow,
    EngineLost,
    FailedPrecondition,
    Internal,
    LoraplexError,
    UnsupportedModel,
)
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    Request,
    RequestFailed,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine import client as client_module
from loraplex_server.engine import process as process_module
from loraplex_server.engine.client import EngineClient, RequestStream
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.frontend.generation import Delta, Progress, generate
from loraplex_server.text.detokenizer import StopMatcher
from loraplex_server.text.tokenizer import TextTokenizer

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
    loading = asyncio.ensure_future(is_loading.wait())
    await asyncio.wait({starting, loading}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert loading.done(), starting  # which shows the exception of a start that failed
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


@pytest.mark.parametrize(
    ("owner", "name"), [(client_module, "start_shielded"), (type(multiprocessing.get_context("spawn")), "Pipe")]
)
async def test_a_process_that_cannot_be_started(
    owner: object, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(owner, name, start)
    client = EngineClient(CONFIG)
    with pytest.raises(FailedPrecondition, match="cannot be started: Resource temporarily unavailable"):
        await client.start(builder=build_fake)
    await asyncio.wait_for(client.stop(), 1)
    assert list(tmp_path.iterdir()) == []


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
        (info,) = await client.load_adapter("a")
        assert info.adapter_id == "a"
        with pytest.raises(AdapterNotFound):
            await client.get_adapter("zzz")
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
            await client.changes.next().wait()

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


@pytest.mark.parametrize("is_started", [True, False])
async def test_a_front_end_without_memory_loses_its_engine(is_started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not try to read for ever."""

    def read_nothing(fd: int, size: int) -> bytes:
        raise MemoryError

    client = EngineClient(CONFIG)
    if is_started:
        await client.start(builder=build_slow)
        stream = client.submit(request(max_tokens=250))
    monkeypatch.setattr(client_module, "os", SimpleNamespace(read=read_nothing))
    if is_started:
        last = (await asyncio.wait_for(read(stream), 20))[-1]
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, EngineLost)
    else:
        with pytest.raises(Internal, match="ended while it was starting"):
            await asyncio.wait_for(client.start(builder=build_slow), 20)
    assert client.lost.is_set()
    await client.stop()


def stream_of(n: int = 1, max_unread_tokens: int = 1000) -> RequestStream:
    def cancel(stream: RequestStream, error: LoraplexError) -> None:
        raise AssertionError("nothing is cancelled here")

    return RequestStream(Request("r", (1, 2), StoppingParams(max_tokens=9), n=n), cancel, max_unread_tokens)


def tokens(*token_ids: int, index: int = 0) -> Tokens:
    return Tokens("r", index, token_ids)


END = CompletionEnd("r", 0, FinishReason.LENGTH, None, 2, 0)


async def test_whatever_comes_wakes_the_reader() -> None:
    stream = stream_of(n=2)
    for event in (Admitted("r", "", 0.0), tokens(5), tokens(7, index=1), END):
        stream.push(event)
        assert await asyncio.wait_for(stream.next(), 1) == [event]
    assert not stream.is_over


async def test_what_piled_up_comes_together_and_a_failure_last() -> None:
    stream, failure = stream_of(), RequestFailed("r", Cancelled("gone"))
    for event in (tokens(5), tokens(6), failure):
        stream.push(event)
    assert not stream.is_read
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(5), tokens(6), failure]
    assert stream.is_read


async def test_much_at_once_does_not_make_a_quick_reader_a_slow_one() -> None:
    stream = stream_of(max_unread_tokens=4)
    for _ in range(5):
        stream.push(tokens(*range(50)))
        await asyncio.wait_for(stream.next(), 1)


async def test_a_slow_reader_is_cut_off() -> None:
    cut: list[LoraplexError] = []
    request = Request("r", (1, 2), StoppingParams(max_tokens=9))
    stream = RequestStream(request, lambda stream, error: cut.append(error), 4)
    for token_id in range(5):
        stream.push(tokens(token_id))
        assert not cut
    stream.push(tokens(5))
    assert isinstance(cut[0], ClientTooSlow)


# --- with an engine whose tokens are never due ----------------------------------------------------------------------


@asynccontextmanager
async def reluctant(
    monkeypatch: pytest.MonkeyPatch, builder: EngineBuilder, wait_s: float, *, inline: bool = True
) -> AsyncIterator[EngineClient]:
    """A client that finds every message too expensive, so that tokens wait as long as they may."""
    monkeypatch.setattr(process_module, "delivery_share", lambda device: 1e-9)
    client = EngineClient(EngineConfig(ModelConfig("fake")), max_stream_wait_s=wait_s)
    await client.start(inline=inline, builder=builder)
    try:
        yield client
    finally:
        await client.stop()


def long_request(name: str = "r", n: int = 1, stop: tuple[str, ...] = ()) -> Request:
    return Request(name, (20, 21, 22), StoppingParams(max_tokens=200, stop=stop), n=n)


async def rest_of(stream: RequestStream) -> list[Event]:
    events: list[Event] = []
    while not stream.is_read:
        events += await asyncio.wait_for(stream.next(), 20)
    return events


async def test_first_tokens_and_ends_come_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reluctant(monkeypatch, build_slow, 600.0) as client:
        streams = [client.submit(long_request(f"r{i}", n=2)) for i in range(4)]
        for stream in streams:
            first = await asyncio.wait_for(stream.next(), 20)
            assert {e.index for e in first if isinstance(e, Tokens)}, "the first tokens wait for nobody"
            events = first + await rest_of(stream)
            for index in (0, 1):
                assert sum(len(e.token_ids) for e in events if isinstance(e, Tokens) and e.index == index) == 200
            assert sum(isinstance(e, CompletionEnd) for e in events) == 2
    assert client.integrity == ""


async def test_tokens_between_wait_no_longer_than_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reluctant(monkeypatch, build_slow, 0.02) as client:
        stream = client.submit(long_request())
        looks = 0
        while not stream.is_over:
            await asyncio.wait_for(stream.next(), 20)
            looks += 1
        assert 3 < looks < 150, "200 steps of 5 ms and more, four or so at a time"


async def test_a_cancelled_reader_hears_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with reluctant(monkeypatch, build_slow, 600.0) as client:
        stream = client.submit(long_request())
        await asyncio.wait_for(stream.next(), 20)
        await asyncio.sleep(0.05)
        client.cancel(stream, Cancelled("gone"))
        events = await rest_of(stream)
        assert isinstance(events[-1], RequestFailed)
    assert client.integrity == ""


@pytest.mark.parametrize("is_killed", [False, True])
async def test_an_engine_that_is_lost_fails_its_readers_at_once(
    monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    builder = build_slow if is_killed else build_losing
    async with reluctant(monkeypatch, builder, 600.0, inline=not is_killed) as client:
        stream = client.submit(long_request())
        events = await asyncio.wait_for(stream.next(), 60)
        if is_killed:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
        last = [*events, *await rest_of(stream)][-1]
        assert isinstance(last, RequestFailed)
        assert isinstance(last.error, EngineLost)


async def test_a_stop_string_is_met_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    class Letters:
        def push(self, token_ids: tuple[int, ...]) -> str:
            return "".join(chr(ord("a") + i % 26) for i in token_ids)

        def finish(self) -> str:
            return ""

    tokenizer = TextTokenizer(None)
    monkeypatch.setattr(tokenizer, "new_detokenizer", lambda *given, **options: Letters())
    monkeypatch.setattr(tokenizer, "new_stop_matcher", lambda stopping, ending_ids: StopMatcher(stopping.stop))

    async with reluctant(monkeypatch, build_slow, 600.0) as client:
        deltas: list[Delta] = []
        request = long_request(stop=("tu",))
        async with aclosing(generate(client, request, tokenizer, (), Progress())) as batches:
            async for batch in batches:
                deltas += batch
        end = deltas[-1].end
        assert end is not None
        assert (end.reason, end.stop_string) == (FinishReason.STOP, "tu")
        assert client.state.load.num_steps < 100, "the engine does not write on for long"
    assert client.integrity == ""
