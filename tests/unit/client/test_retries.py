"""Retries: the policy, and both clients against a server that fails at first."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import loraplex
from loraplex import AsyncClient, CallRecord, Client
from loraplex.retries import FIRST_WAIT_S, JITTER, MAX_WAIT_S, wait_before_retry
from loraplex_contracts import errors
from loraplex_proto.v1.inference_pb2 import GenerateStreamResponse


def wait(error: errors.LoraplexError, num_retries: int = 0, **more: Any) -> float | None:
    how: dict[str, Any] = {"is_idempotent": True, "remaining_s": None, "draw": 0.0, **more}
    return wait_before_retry(error, num_retries, **how)


def test_the_wait_is_the_servers_and_grows() -> None:
    assert wait(errors.QueueFull("full", retry_after_s=2.0)) == 2.0
    assert wait(errors.WorkerLost("gone", retry_after_s=0.0), 3) == FIRST_WAIT_S * 8
    assert wait(errors.QueueFull("full", retry_after_s=2.0), draw=1.0) == 2.0 * (1 + JITTER), "never earlier than told"


@pytest.mark.parametrize(
    "error",
    [
        errors.QuotaExceeded("more than all"),
        errors.InvalidArgument("no", retry_after_s=1.0),
        errors.DeadlineExceeded("late", retry_after_s=1.0),
        errors.QueueFull("full", retry_after_s=MAX_WAIT_S * 2),
    ],
)
def test_what_another_try_does_not_mend(error: errors.LoraplexError) -> None:
    assert wait(error) is None


def test_no_wait_beyond_the_deadline() -> None:
    full = errors.QueueFull("full", retry_after_s=1.0)
    assert wait(full, remaining_s=1.5) == 1.0
    assert wait(full, remaining_s=1.0) is None


@pytest.mark.parametrize(
    ("error", "is_sent_again"),
    [
        (errors.ServerUnreachable("no", retry_after_s=1.0), True),
        (errors.Draining("no", retry_after_s=1.0), True),
        (errors.AdapterLoadsBusy("no", retry_after_s=1.0), True),
        (errors.ConnectionLost("no", retry_after_s=1.0), False),
        (errors.WorkerLost("no", retry_after_s=1.0), False),
    ],
)
def test_a_load_is_sent_again_where_nothing_was_done(error: errors.LoraplexError, is_sent_again: bool) -> None:
    assert (wait(error, is_idempotent=False) is not None) is is_sent_again
    assert wait(error) is not None


# --- clients --------------------------------------------------------------------------------------------------------

Told = list[CallRecord]


async def _sync(fake: Any, run: Callable[[Any], Any], **more: Any) -> Any:
    def blocking() -> Any:
        with Client(fake.address, **more) as client:
            return run(client)

    return await asyncio.to_thread(blocking)


async def _async(fake: Any, run: Callable[[Any], Any], **more: Any) -> Any:
    async with AsyncClient(fake.address, **more) as client:
        result = run(client)
        return await result if isinstance(result, Awaitable) else [chunk async for chunk in result]


BOTH = pytest.mark.parametrize("use", [_sync, _async])
BUSY = errors.Overloaded("busy", retry_after_s=0.01)


def busy_for(fake: Any, num_calls: int, error: errors.LoraplexError = BUSY) -> None:
    """The server refuses so many calls."""
    arrived = fake.received

    async def refuse(method: str, request: Any, context: Any) -> None:
        fake.error = error if len(fake.seen) < num_calls else None
        await arrived(method, request, context)

    fake.received = refuse


@BOTH
async def test_a_refused_call_is_sent_again(use: Any, fake: Any) -> None:
    busy_for(fake, 2)
    told: Told = []
    answer = await use(fake, lambda client: client.generate("a"), retries=3, on_call=told.append)
    assert answer.text == "text 0"
    assert len({seen.request.request_id for seen in fake.seen}) == 1
    assert [one.num_retries for one in told] == [0, 1, 2]
    assert [type(one.error) for one in told] == [errors.Overloaded, errors.Overloaded, type(None)]
    assert told[0].retry_in_s is not None
    assert "OVERLOADED: busy; next try in 0.0" in str(told[0])
    assert told[-1].retry_in_s is None


@BOTH
async def test_a_stream_is_sent_again_before_its_first_chunk(use: Any, fake: Any) -> None:
    fake.chunks = [GenerateStreamResponse(text_delta="a")]
    fake.error = BUSY
    fake.chunks, later = [], fake.chunks
    told: Told = []

    def mend(record: CallRecord) -> None:
        told.append(record)
        fake.error, fake.chunks = None, later

    chunks = await use(fake, lambda client: _listed(client.stream("a")), retries=3, on_call=mend)
    assert [chunk.text for chunk in chunks] == ["a"]
    assert [one.error is None for one in told] == [False, True]


def _listed(stream: Any) -> Any:
    return list(stream) if isinstance(stream, loraplex.Stream) else stream


@BOTH
async def test_a_stream_is_not_sent_again_after_its_first_chunk(use: Any, fake: Any) -> None:
    fake.chunks = [GenerateStreamResponse(text_delta="a")]
    fake.stream_error = BUSY
    with pytest.raises(loraplex.Overloaded):
        await use(fake, lambda client: _listed(client.stream("a")), retries=3)
    assert len(fake.seen) == 1


@BOTH
async def test_tries_are_counted_and_share_one_deadline(use: Any, fake: Any) -> None:
    fake.error = BUSY
    with pytest.raises(loraplex.Overloaded):
        await use(fake, lambda client: client.generate("a", timeout_s=2), retries=2)
    assert len(fake.seen) == 3
    remaining = [seen.time_remaining_s for seen in fake.seen]
    assert remaining[2] < remaining[0] - 3 * FIRST_WAIT_S + 0.02, "the waits are part of it"


@BOTH
async def test_retries_of_the_environment(use: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    busy_for(fake, 1)
    monkeypatch.setenv("LORAPLEX_RETRIES", "1")
    assert (await use(fake, lambda client: client.generate("a"))).text == "text 0"
    assert len(fake.seen) == 2
    monkeypatch.setenv("LORAPLEX_RETRIES", "often")
    with pytest.raises(loraplex.InvalidArgument, match="LORAPLEX_RETRIES takes how often"):
        Client(fake.address)


def test_retries_are_on_by_default(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LORAPLEX_RETRIES")
    busy_for(fake, 3)
    with Client(fake.address) as client:
        assert client.generate("a").text == "text 0"
    assert len(fake.seen) == 4


def test_server_and_token_of_the_environment(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORAPLEX_SERVER", fake.address)
    monkeypatch.setenv("LORAPLEX_TOKEN", "t0k")
    for token in (None, "other", ""):
        with Client(token=token) as client:
            client.info()
    sent = [seen.metadata.get("authorization") for seen in fake.seen]
    assert sent == ["Bearer t0k", "Bearer other", None]
    monkeypatch.delenv("LORAPLEX_SERVER")
    assert "localhost:50051" in repr(Client())
    assert "t0k" not in repr(Client())


def test_the_time_to_connect_is_bounded() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # takes the connection and says nothing
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with Client(address, connect_timeout_s=0.3) as client, pytest.raises(loraplex.Unavailable):
            client.info(timeout_s=15)
        assert time.monotonic() - start < 5
    with pytest.raises(loraplex.InvalidArgument, match="connect_timeout_s"):
        Client("h:1", connect_timeout_s=0)


def test_further_headers(fake: Any) -> None:
    with Client(fake.address, headers=lambda: {"Traceparent": "00-1-2-01"}) as client:
        client.info()
        list(client.stream("a"))
    assert [seen.metadata["traceparent"] for seen in fake.seen] == ["00-1-2-01"] * 2


def test_a_hook_that_fails_fails_no_call(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    def broken(record: CallRecord) -> None:
        raise RuntimeError("hook")

    with caplog.at_level("DEBUG", "loraplex"), Client(fake.address, on_call=broken) as client:
        assert client.info().model_id == "m"
    assert "on_call failed" in caplog.text
    assert "GetInfo at 127.0.0.1" in caplog.text


# --- ends during the wait for another try -----------------------------------------------------------------------------

FULL = errors.QueueFull("full", retry_after_s=20.0)


def end_of(stream: Any) -> tuple[BaseException | None, float]:
    """The error that ends a stream without a chunk, None for an ordinary end, and the seconds that it took."""
    start = time.monotonic()
    try:
        assert next(stream, None) is None
    except loraplex.LoraplexError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def test_a_stream_that_waits_ends_with_its_client(fake: Any) -> None:
    fake.error, records = FULL, list[CallRecord]()
    client = Client(fake.address, retries=5, on_call=records.append)
    stream = client.stream("a")
    threading.Timer(0.3, client.close).start()
    error, took_s = end_of(stream)
    assert isinstance(error, loraplex.Cancelled)
    assert took_s < 5
    assert end_of(stream)[0] is None, "an ended stream stays ended"
    assert [one.num_retries for one in records] == [0]


def test_a_stream_that_is_closed_while_it_waits_has_one_record_of_its_try(fake: Any) -> None:
    fake.error, records = FULL, list[CallRecord]()
    with Client(fake.address, retries=5, on_call=records.append) as client:
        stream = client.stream("a")
        threading.Timer(0.3, stream.close).start()
        error, took_s = end_of(stream)
    assert error is None
    assert took_s < 5
    assert [type(one.error) for one in records] == [errors.QueueFull]


def test_a_stream_that_is_closed_while_its_next_try_begins_leaves_nothing_under_way(fake: Any) -> None:
    fake.error, records = errors.QueueFull("full", retry_after_s=0.0), list[CallRecord]()

    def headers() -> dict[str, str]:
        if records:  # of the second try
            fake.error, fake.is_endless = None, True
            stream.close()
        return {}

    with Client(fake.address, retries=1, headers=headers, on_call=records.append) as client:
        stream = client.stream("a")
        assert list(stream) == []
        assert [one.num_retries for one in records] == [0, 1]
        time.sleep(0.3)
        num_sent = fake.num_sent
        time.sleep(0.2)
        assert fake.num_sent == num_sent


def test_a_hook_that_fails_ends_the_stream(fake: Any) -> None:
    fake.error, records = errors.QueueFull("full", retry_after_s=0.0), list[CallRecord]()

    def headers() -> dict[str, str]:
        return {"x": "\n"} if records else {}

    with Client(fake.address, retries=5, headers=headers, on_call=records.append) as client:
        stream = client.stream("a")
        assert isinstance(end_of(stream)[0], loraplex.InvalidArgument)
        assert end_of(stream)[0] is None
    assert len(records) == 1


async def test_what_waits_ends_with_its_client_for_asyncio(fake: Any) -> None:
    fake.error = FULL
    client = AsyncClient(fake.address, retries=5)
    stream = client.stream("a")
    waiting = [asyncio.ensure_future(one) for one in (anext(stream), client.generate("a"))]
    await asyncio.sleep(0.3)
    await client.close()
    for found in await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 5):
        assert isinstance(found, loraplex.Cancelled)
    assert [chunk async for chunk in stream] == [], "an ended stream stays ended"


async def test_a_stream_that_is_closed_while_it_waits_ends_for_asyncio(fake: Any) -> None:
    fake.error, records = FULL, list[CallRecord]()
    async with AsyncClient(fake.address, retries=5, on_call=records.append) as client:
        stream = client.stream("a")
        waiting = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0.3)
        await stream.aclose()
        assert await asyncio.wait_for(waiting, 5) is None
    assert [type(one.error) for one in records] == [errors.QueueFull]
