from __future__ import annotations

import asyncio

from loraplex_proto.errors import Cancelled, LoraplexError
from loraplex_server.engine.pacing import Pacer
from loraplex_server.engine.streams import HeldStreams, RequestStream
from loraplex_server.events import Admitted, CompletionEnd, FinishReason, RequestFailed, Tokens
from loraplex_server.request import Request, StoppingParams


def stream_of(n: int = 1) -> RequestStream:
    def cancel(stream: RequestStream, error: LoraplexError) -> None:
        raise AssertionError("nothing is cancelled here")

    return RequestStream(Request("r", (1, 2), StoppingParams(max_tokens=9), n=n), cancel, 1000)


def tokens(*token_ids: int, index: int = 0) -> Tokens:
    return Tokens("r", index, token_ids)


END = CompletionEnd("r", 0, FinishReason.LENGTH, None, 2, 0)


def pacer(is_due: bool) -> Pacer:
    """One that always, or never, finds that sending took its share already."""
    spent_s = iter([0.0] if is_due else [0.0, *range(1, 1000)])
    last = 0.0

    def cpu_clock() -> float:
        nonlocal last
        last = next(spent_s, last)
        return last

    return Pacer(0.0, lambda: 0.0, cpu_clock)


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
    stream, held = await begun(), HeldStreams(pacer(is_due=True), 60.0)
    stream.push(tokens(2))
    held.add(stream)
    held.release_when_due()
    assert await asyncio.wait_for(stream.next(), 1) == [tokens(2)]


async def test_tokens_wait_for_later_ones_where_sending_costs_too_much() -> None:
    stream, held = await begun(), HeldStreams(pacer(is_due=False), 0.05)
    for token_id in (2, 3, 4):
        stream.push(tokens(token_id))
        held.add(stream)
        held.release_when_due()
        assert stream.is_held
    assert await asyncio.wait_for(stream.next(), 5) == [tokens(2), tokens(3), tokens(4)]


async def test_a_wait_of_zero_sends_each_at_once() -> None:
    stream, held = await begun(), HeldStreams(pacer(is_due=False), 0.0)
    stream.push(tokens(2))
    held.add(stream)
    held.release_when_due()
    assert not stream.is_held


async def test_an_idle_stream_is_not_woken() -> None:
    stream, held = await begun(), HeldStreams(pacer(is_due=True), 60.0)
    held.add(stream)
    held.release_when_due()
    waiting = asyncio.ensure_future(stream.next())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    waiting.cancel()
