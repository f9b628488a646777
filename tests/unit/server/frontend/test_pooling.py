"""Pooled answers: vectors, probabilities, and calls of several requests."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import numpy as np
import pytest

from loraplex_contracts.errors import (
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    NoClassifier,
    Overloaded,
    Unavailable,
)
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    Pooled,
    PoolingParams,
    Request,
    RequestFailed,
    StoppingParams,
)
from loraplex_runtime.request_record import RequestRecord
from loraplex_server.frontend import pooling as module
from loraplex_server.frontend.pooling import MAX_AT_ONCE, PooledAnswer, embedding, pool_all, probabilities, sigmoid


def request(name: str) -> Request:
    return Request(name, (5, 6), StoppingParams(1), pooling=PoolingParams("embed"))


def pool(engine: Any, num_requests: int, record: RequestRecord | None = None) -> asyncio.Future[list[PooledAnswer]]:
    requests = [request(str(number)) for number in range(num_requests)]
    return asyncio.ensure_future(pool_all(engine, requests, record or RequestRecord("Embed")))


class FakeStream:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.is_over = False
        self.come = asyncio.Event()
        self.events: list[Event] = []

    async def next(self) -> list[Event]:
        await self.come.wait()
        self.is_over = True
        return self.events


class FakeEngine:
    """Answers request `n` with the value n, or with `errors[n]`, when it is told to."""

    def __init__(self, **errors: LoraplexError) -> None:
        self.errors = errors
        self.streams: list[FakeStream] = []
        self.cancelled: list[str] = []
        self.most_at_once = 0

    def submit(self, request: Request) -> FakeStream:
        stream, name = FakeStream(request), request.request_id
        self.streams.append(stream)
        num_open = sum(not one.is_over for one in self.streams)
        self.most_at_once = max(self.most_at_once, num_open)
        end: Event = CompletionEnd(name, 0, FinishReason.LENGTH, None, 2, 1)
        stream.events = [Admitted(name, "digest", 0.5), Pooled(name, array("d", [float(name)]), 1, ("a",), True), end]
        if error := self.errors.get(f"r{name}"):
            stream.events = [RequestFailed(name, error)]
        return stream

    def cancel(self, stream: FakeStream, error: LoraplexError) -> None:
        self.cancelled.append(stream.request.request_id)

    async def answer(self) -> None:
        """Answers all requests that are waiting, the last one first."""
        await asyncio.sleep(0.01)
        for stream in reversed(self.streams):
            stream.come.set()
            await asyncio.sleep(0)


async def test_answers_come_in_the_order_of_requests() -> None:
    engine: Any = FakeEngine()
    pooling = pool(engine, 100)
    while not pooling.done():
        await engine.answer()
    answers = await pooling
    assert [float(one.values[0, 0]) for one in answers] == list(range(100))
    first = answers[0]
    assert (first.labels, first.per_token, first.adapter_digest, first.queue_s) == (("a",), True, "digest", 0.5)
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (2, 1)
    assert engine.most_at_once == MAX_AT_ONCE
    assert not engine.cancelled


async def test_labels_of_tokens_are_bounded_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLASS_VALUES", 40)
    engine: Any = FakeEngine()
    pooling = pool(engine, 100)
    while not pooling.done():
        await engine.answer()
    with pytest.raises(InvalidArgument, match="more than 40") as caught:
        await pooling
    assert caught.value.field == "inputs"
    assert len(engine.streams) < 100


async def test_answers_of_two_versions_of_an_adapter_are_refused() -> None:
    engine: Any = FakeEngine()
    pooling = pool(engine, 2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    engine.streams[1].events[0] = Admitted("1", "newer", 0.5)
    await engine.answer()
    with pytest.raises(Unavailable, match="replaced during this call; send it again") as caught:
        await pooling
    assert caught.value.retry_after_s


async def test_the_first_error_ends_all() -> None:
    engine: Any = FakeEngine(r1=NoClassifier("no"), r2=Overloaded("full"))
    pooling = pool(engine, 40)
    await asyncio.sleep(0.01)
    engine.streams[1].come.set()
    with pytest.raises(NoClassifier):
        await pooling
    submitted = {stream.request.request_id for stream in engine.streams}
    assert set(engine.cancelled) == submitted - {"1"}
    assert len(submitted) < 40, "the others were never submitted"


async def test_the_record_has_the_longest_waits() -> None:
    engine: Any = FakeEngine()
    record = RequestRecord("Embed")
    pooling = pool(engine, 3, record)
    await asyncio.sleep(0.01)
    for stream, queue_s in zip(engine.streams, (0.1, 0.4, 0.2), strict=True):
        stream.events[0] = Admitted(stream.request.request_id, "digest", queue_s, queue_s / 2)
    await engine.answer()
    await pooling
    assert (record.queue_s, record.adapter_wait_s, record.waited_s) == (0.4, 0.2, None)
    record = RequestRecord("Embed")
    pooling = pool(engine, 1, record)
    await asyncio.sleep(0.01)
    engine.streams[-1].events = [RequestFailed("0", DeadlineExceeded("late"), 3.0, 2.0)]
    await engine.answer()
    with pytest.raises(DeadlineExceeded):
        await pooling
    assert (record.queue_s, record.adapter_wait_s, record.waited_s) == (None, 2.0, 3.0)


async def test_a_caller_that_leaves_cancels_what_runs() -> None:
    engine: Any = FakeEngine()
    pooling = pool(engine, 2)
    await asyncio.sleep(0.01)
    pooling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pooling
    assert sorted(engine.cancelled) == ["0", "1"]


def test_vectors() -> None:
    values = np.array([3.0, 4.0, 12.0])
    np.testing.assert_allclose(embedding(values, 0, normalizes=True), values / 13)
    np.testing.assert_allclose(embedding(values, 2, normalizes=True), [0.6, 0.8])
    np.testing.assert_array_equal(embedding(values, 2, normalizes=False), [3.0, 4.0])
    np.testing.assert_array_equal(embedding(np.zeros(3), 0, normalizes=True), np.zeros(3))


def test_probabilities() -> None:
    logits = np.array([[0.0, 1000.0], [-1000.0, -1000.0]])
    np.testing.assert_allclose(probabilities(logits), [[0.0, 1.0], [0.5, 0.5]])
    np.testing.assert_allclose(probabilities(np.array([[0.0], [1000.0], [-1000.0]])), [[0.5], [1.0], [0.0]])
    assert sigmoid(2.0) + sigmoid(-2.0) == pytest.approx(1.0)
