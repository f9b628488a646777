from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest
from support.engine_fakes import build_losing, build_slow

from loraplex_proto.errors import Cancelled, EngineLost, LoraplexError
from loraplex_server.config import EngineConfig, ModelConfig
from loraplex_server.engine import client as client_module
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.pacing import Pacer
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.engine.streams import HeldStreams, RequestStream
from loraplex_server.events import Admitted, CompletionEnd, Event, FinishReason, RequestFailed, Tokens
from loraplex_server.frontend.completion import CompletionAssembler, Delta
from loraplex_server.frontend.generation import Progress, generate
from loraplex_server.request import Request, StoppingParams
from loraplex_server.text.stops import StopMatcher


def stream_of(n: int = 1, max_unread_tokens: int = 1000) -> RequestStream:
    def cancel(stream: RequestStream, error: LoraplexError) -> None:
        raise AssertionError("nothing is cancelled here")

    return RequestStream(Request("r", (1, 2), StoppingParams(max_tokens=9), n=n), cancel, max_unread_tokens)


def tokens(*token_ids: int, index: int = 0) -> Tokens:
    return Tokens("r", index, token_ids)


END = CompletionEnd("r", 0, FinishReason.LENGTH, None, 2, 0)


class FixedPacer(Pacer):
    """One that always, or never, finds that sending took no more than its share."""

    def __init__(self, is_due: bool) -> None:
        super().__init__(1.0)
        self._is_due = is_due

    def is_due(self) -> bool:
        return self._is_due


async def test_first_tokens_of_each_completion_and_ends_wake_the_reader_at_once() -> None:
    stream = stream_of(n=2)
    stream.push(Admitted("r", "", 0.0))
    assert stream.is_held
    stream.push(tokens(5))
    assert len(await asyncio.wait_for(stream.next(), 1)) == 2
    stream.push(tokens(6))
    assert stream.is_held
    stream.push(tokens(7, index=1))
    assert not stream.is_held
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(6), tokens(7, index=1)]
    stream.push(tokens(8))
    stream.push(END)
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(8), END]


async def test_a_failure_brings_what_was_held_before_it() -> None:
    stream = stream_of()
    stream.push(tokens(5))
    await stream.next()
    stream.push(tokens(6))
    failure = RequestFailed("r", Cancelled("gone"))
    stream.push(failure)
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(6), failure]
    assert stream.is_read


async def begun() -> RequestStream:
    stream = stream_of()
    stream.push(tokens(1))
    await stream.next()
    return stream


async def test_tokens_go_out_as_they_come_while_that_is_cheap() -> None:
    stream, held = await begun(), HeldStreams(FixedPacer(is_due=True), 60.0)
    stream.push(tokens(2))
    held.add(stream)
    held.release_when_due()
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(2)]


async def test_tokens_wait_for_later_ones_where_sending_costs_too_much() -> None:
    stream, held = await begun(), HeldStreams(FixedPacer(is_due=False), 0.05)
    held.release_when_due()  # of the step before
    for token_id in (2, 3, 4):
        stream.push(tokens(token_id))
        held.add(stream)
        held.release_when_due()
        assert stream.is_held
    assert await asyncio.wait_for(stream.next(), 5) == [tokens(2), tokens(3), tokens(4)]


async def test_tokens_do_not_wait_for_steps_that_are_longer_than_they_may_wait() -> None:
    stream, held = await begun(), HeldStreams(FixedPacer(is_due=False), 0.02)
    for token_id in (2, 3):
        await asyncio.sleep(0.03)
        stream.push(tokens(token_id))
        held.add(stream)
        held.release_when_due()
        assert not stream.is_held
        await stream.next()


async def test_a_wait_of_zero_sends_each_at_once() -> None:
    stream, held = await begun(), HeldStreams(FixedPacer(is_due=False), 0.0)
    stream.push(tokens(2))
    held.add(stream)
    held.release_when_due()
    assert not stream.is_held


async def test_an_idle_stream_is_not_woken() -> None:
    stream, held = await begun(), HeldStreams(FixedPacer(is_due=True), 60.0)
    held.add(stream)
    held.release_when_due()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()


async def test_held_tokens_do_not_make_a_quick_reader_a_slow_one() -> None:
    stream = stream_of(max_unread_tokens=4)
    for token_id in range(50):
        stream.push(tokens(token_id))
        if not stream.is_held:
            await asyncio.wait_for(stream.next(), 1)


@pytest.mark.parametrize("seed", range(20))
async def test_whatever_comes_between_every_event_is_read_once_and_in_order(seed: int) -> None:
    """Steps, timers, readers that are busy, and completions that end at different times."""
    rng = random.Random(seed)
    streams = [stream_of(n=3) for _ in range(4)]
    held = HeldStreams(FixedPacer(is_due=bool(seed % 2)), rng.choice([0.0, 0.001, 0.01]))
    sent: list[list[Event]] = [[] for _ in streams]

    async def read(stream: RequestStream) -> list[Event]:
        events: list[Event] = []
        while not stream.is_read:
            events += await stream.next()
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
        return events

    def push(idx: int, event: Event) -> None:
        sent[idx].append(event)
        streams[idx].push(event)
        held.add(streams[idx])

    reading = asyncio.gather(*map(read, streams))
    lengths = {(idx, index): rng.randint(1, 12) for idx in range(len(streams)) for index in range(3)}
    while lengths:
        for (idx, index), length in list(lengths.items()):
            if rng.random() < 0.3:
                continue
            push(idx, tokens(length, index=index))
            lengths[idx, index] -= 1
            if length == 1:
                push(idx, CompletionEnd("r", index, FinishReason.LENGTH, None, 2, 0))
                del lengths[idx, index]
        held.release_when_due()
        await asyncio.sleep(rng.choice([0, 0.001]))
    assert await asyncio.wait_for(reading, 5) == sent


# --- with an engine whose tokens are never due ----------------------------------------------------------------------


@asynccontextmanager
async def reluctant(
    monkeypatch: pytest.MonkeyPatch, builder: EngineBuilder, wait_s: float, *, inline: bool = True
) -> AsyncIterator[EngineClient]:
    """A client that finds every message too expensive, so that tokens wait as long as they may."""
    monkeypatch.setattr(client_module, "delivery_share", lambda device: 1e-9)
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
        assert any(isinstance(event, Tokens) for event in events), "what was held comes before it"
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

    def assembler(request: Request, index: int) -> CompletionAssembler:
        return CompletionAssembler(index, request.stopping, Letters(), StopMatcher(request.stopping.stop), str)

    async with reluctant(monkeypatch, build_slow, 600.0) as client:
        deltas: list[Delta] = []
        request = long_request(stop=("tu",))
        async with aclosing(generate(client, request, assembler, Progress())) as batches:
            async for batch in batches:
                deltas += batch
        end = deltas[-1].end
        assert end is not None
        assert (end.reason, end.stop_string) == (FinishReason.STOP, "tu")
        assert client.state.load.num_steps < 100, "the engine does not write on for long"
    assert client.integrity == ""
