"""Events of streams over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import Request

from loraplex_contracts.errors import Cancelled, Internal, MessageTooLarge
from loraplex_router.http import streaming
from loraplex_router.http.streaming import DONE, KEEP_ALIVE, FanOut, events_of


async def chunks_of(num_messages: int, pause_s: float, shown: set[int], first_s: float = 0) -> list[bytes]:
    """Chunks of a stream of which the messages `shown` have events. The first message comes after `first_s`."""

    async def handle(raw: bytes, context: Any) -> None:
        await asyncio.sleep(first_s)
        for number in range(num_messages):
            await asyncio.sleep(pause_s)
            await context.write(bytes([number]))

    def to_events(prompt: int, raw: bytes) -> Iterable[bytes]:
        return (raw,) if raw[0] in shown else ()

    def of_error(error: Any) -> bytes:
        return type(error).__name__.encode()

    calls = FanOut(handle, [b""], request())
    first = await calls.first(stays)
    return [chunk async for chunk in events_of(calls, first, to_events, lambda: (), of_error)]


def request() -> Request:
    return Request({"type": "http", "path": "/", "headers": [], "state": {"request_id": "r1"}})


async def stays() -> dict[str, str]:
    await asyncio.Event().wait()
    return {}


async def test_a_client_that_leaves_ends_calls_that_have_been_counted() -> None:
    async def handle(raw: bytes, context: Any) -> None:
        await asyncio.Event().wait()

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    calls = FanOut(handle, [b""], request())
    with pytest.raises(Cancelled) as caught:
        await calls.while_connected(left, calls.answers())
    calls.cancel()
    assert caught.value.metadata == {"request_id": "r1"}


async def test_answers_that_are_too_large_have_been_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def handle(raw: bytes, context: Any) -> bytes:
        return raw

    monkeypatch.setattr(streaming, "MAX_ANSWER_BYTES", 3)
    with pytest.raises(MessageTooLarge) as caught:
        await FanOut(handle, [b"ab", b"cd"], request()).answers()
    assert caught.value.metadata == {"request_id": "r1"}


async def test_messages_without_events_send_nothing() -> None:
    assert await chunks_of(4, 0, {0, 2}) == [b"\x00", b"\x02", DONE]


async def test_comments_come_while_messages_have_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    found = await chunks_of(30, 0.01, {0})
    assert KEEP_ALIVE in found
    assert b"" not in found


async def test_a_stream_whose_first_message_is_late_begins_with_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    assert await chunks_of(2, 0, {0, 1}, first_s=0.08) == [KEEP_ALIVE, b"\x00", b"\x01", DONE]


async def test_a_stream_without_messages_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Internal):
        await chunks_of(0, 0, set())
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.05)
    assert await chunks_of(0, 0, set(), first_s=0.08) == [KEEP_ALIVE, b"Internal" + DONE]
