"""Waiting and cancellation in the two clients."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

import loraplex
from loraplex import AsyncClient, Client
from loraplex.aio import AsyncStream


def test_a_dropped_stream_is_cancelled(fake: Any) -> None:
    fake.is_endless = True
    with Client(fake.address) as client:
        stream = client.stream("a")
        next(stream)
        del stream
        gc.collect()
        assert fake.cancelled.wait(3)


def test_closing_from_another_thread(fake: Any) -> None:
    fake.delay_s = 30.0
    with Client(fake.address) as client:
        stream = client.stream("a")
        threading.Timer(0.2, stream.close).start()
        start = time.monotonic()
        assert list(stream) == []
        assert time.monotonic() - start < 5
    assert fake.cancelled.wait(3)


@pytest.mark.parametrize("kind", ["generate", "stream"])
def test_closing_the_client_while_a_call_begins(kind: str, fake: Any) -> None:
    def close() -> dict[str, str]:
        client.close()
        return {}

    client = Client(fake.address, headers=close)  # its headers are asked for between two looks at the channel
    with pytest.raises(loraplex.Cancelled, match="the client was closed"):
        getattr(client, kind)("a")


def test_many_threads_share_a_client(fake: Any) -> None:
    answers: list[str] = []
    with Client(fake.address) as client:
        threads = [threading.Thread(target=lambda: answers.append(client.generate("a").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert answers == ["text 0"] * 8


async def test_cancelling_the_task_cancels_the_request(fake: Any) -> None:
    fake.delay_s = 30.0
    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(client.generate("a"))
        assert await asyncio.to_thread(fake.arrived.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, 20)


async def test_cancelling_the_task_cancels_the_stream(fake: Any) -> None:
    fake.is_endless = True

    async def consume(client: AsyncClient) -> None:
        async for _ in client.stream("a"):
            pass

    async with AsyncClient(fake.address) as client:
        task = asyncio.create_task(consume(client))
        assert await asyncio.to_thread(fake.arrived.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake.cancelled.wait, 20)


async def test_cancelling_the_task_cancels_a_call_that_grpc_leaves_under_way() -> None:
    """A task's cancellation cancels a call that gRPC has just sent, and would leave under way."""

    class Sent:
        is_cancelled = False

        async def read(self) -> bytes:
            return await asyncio.Future[bytes]()

        def cancel(self) -> None:
            self.is_cancelled = True

    sent = Sent()
    connection = SimpleNamespace(channel=lambda: SimpleNamespace(unary_stream=None))
    call = SimpleNamespace(start=lambda _: sent, cancelled=lambda: None, ended=lambda _: None)
    stream = AsyncStream(cast(Any, connection), cast(Any, call))
    task = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sent.is_cancelled


async def test_closing_from_another_task_ends_the_stream(fake: Any) -> None:
    fake.delay_s = 30.0
    async with AsyncClient(fake.address) as client:
        stream = client.stream("a")

        async def consume() -> list[loraplex.Chunk]:
            return [chunk async for chunk in stream]

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.2)
        await stream.aclose()
        assert await asyncio.wait_for(task, 3) == []
        assert await asyncio.to_thread(fake.cancelled.wait, 20)


async def test_many_at_once(fake: Any) -> None:
    async with AsyncClient(fake.address) as client:
        answers = await asyncio.gather(*(client.generate("a", request_id=f"r{i}") for i in range(20)))
    assert [a.request_id for a in answers] == [f"r{i}" for i in range(20)]


async def test_a_client_that_was_never_used_closes(fake: Any) -> None:
    client = AsyncClient(fake.address)
    await client.close()


def test_an_async_client_can_be_made_outside_a_loop(fake: Any) -> None:
    client = AsyncClient(fake.address)

    async def use() -> str:
        async with client:
            return (await client.generate("a")).text

    assert asyncio.run(use()) == "text 0"
