"""Once asked, drain; twice asked, hurry."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from loraplex_proto.ending import SIGNALS, Ending


class Drains:
    """What was begun, and whether it came to its end."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.said: list[str] = []

    async def gently(self) -> None:
        self.said.append("gently")
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.said.append("cancelled")
            raise
        self.said.append("done")

    async def at_once(self) -> None:
        self.said.append("at once")


async def test_one_signal_leaves_time() -> None:
    drains, ending = Drains(0.0), Ending()
    ending.ask()
    await ending.drain(drains.gently(), drains.at_once)
    assert drains.said == ["gently", "done"]


async def test_a_second_one_does_not() -> None:
    drains, ending = Drains(60.0), Ending()
    ending.ask()
    draining = asyncio.ensure_future(ending.drain(drains.gently(), drains.at_once))
    await asyncio.sleep(0.01)
    ending.ask()
    await asyncio.wait_for(draining, 5)
    assert drains.said == ["gently", "cancelled", "at once"]
    # What comes next is hurried too.
    await asyncio.wait_for(ending.drain(drains.gently(), drains.at_once), 5)
    assert drains.said[-1] == "at once"


async def test_errors_and_cancellation_go_through() -> None:
    async def fails() -> None:
        raise ValueError("no")

    drains = Drains(60.0)
    with pytest.raises(ValueError, match="no"):
        await Ending().drain(fails(), drains.at_once)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(Ending().drain(drains.gently(), drains.at_once), 0.01)
    assert drains.said == ["gently", "cancelled"]


@pytest.mark.parametrize("number", SIGNALS)
async def test_who_is_told_beforehand(number: signal.Signals) -> None:
    ending = Ending()
    ending.listen()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(ending.asked.wait(), 5)
    finally:
        for one in SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(one)
    assert ending.announce_s(3.0) == (3.0 if number is signal.SIGTERM else 0.0)


def test_an_exit_at_once_says_its_last_words_and_tears_nothing_down() -> None:
    code = (
        "import atexit, sys; from loraplex_proto.ending import exit_at_once\n"
        "atexit.register(print, 'torn down'); sys.stdout.write('last words'); exit_at_once(7)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "last words", "")


def test_an_exit_at_once_does_not_need_a_reader() -> None:
    code = (
        "import os, sys; from loraplex_proto.ending import exit_at_once\n"
        "sys.stdout.write('x'); os.close(1); exit_at_once(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3
