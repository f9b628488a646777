"""Turns of texts that wait to be tokenized."""

from __future__ import annotations

import asyncio

import pytest

from loraplex_contracts.errors import QueueFull
from loraplex_server.text.turns import BYTES_PER_S, Turns


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def waiting(turns: Turns, num_bytes: int, log: list[int]) -> None:
    await turns.take(num_bytes)
    log.append(num_bytes)


async def all_begun(*tasks: asyncio.Task[None]) -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_short_ones_go_first_but_not_for_ever() -> None:
    clock, log = Clock(), list[int]()
    turns = Turns(1, 1 << 30, clock)
    await turns.take(1)
    tasks = [asyncio.ensure_future(waiting(turns, 4 * BYTES_PER_S, log))]
    await all_begun()
    for clock.now_s, num_bytes in ((1.0, 100), (3.9, 50), (4.1, 10)):
        tasks.append(asyncio.ensure_future(waiting(turns, num_bytes, log)))
        await all_begun()
    for _ in range(4):
        turns.give_back()
        await all_begun()
    assert log == [100, 50, 4 * BYTES_PER_S, 10]
    await asyncio.gather(*tasks)


async def test_so_many_at_once() -> None:
    log: list[int] = []
    turns = Turns(2, 1 << 30)
    tasks = [asyncio.ensure_future(waiting(turns, number, log)) for number in range(5)]
    await all_begun()
    assert log == [0, 1]
    turns.give_back()
    await all_begun()
    assert log == [0, 1, 2]
    for _ in range(3):
        turns.give_back()
    await asyncio.gather(*tasks)
    await turns.take(1)  # one that nobody has is there again


async def test_whoever_leaves_frees_its_place() -> None:
    log: list[int] = []
    turns = Turns(1, 10)
    await turns.take(1)
    leaver = asyncio.ensure_future(waiting(turns, 10, log))
    await all_begun()
    with pytest.raises(QueueFull) as caught:
        await turns.take(1)
    assert caught.value.retry_after_s
    leaver.cancel()
    await all_begun()
    stayer = asyncio.ensure_future(waiting(turns, 10, log))
    await all_begun()
    turns.give_back()
    await stayer
    assert log == [10]


async def test_whoever_leaves_in_the_moment_of_its_turn_passes_it_on() -> None:
    log: list[int] = []
    turns = Turns(1, 100)
    await turns.take(1)
    leaver, stayer = (asyncio.ensure_future(waiting(turns, number, log)) for number in (1, 2))
    await all_begun()
    turns.give_back()
    leaver.cancel()
    await stayer
    assert log == [2]


async def test_one_that_waits_alone_may_have_any_length() -> None:
    turns = Turns(1, 10)
    await turns.take(1)
    waiter = asyncio.ensure_future(turns.take(1000))
    await all_begun()
    turns.give_back()
    await waiter
