"""Once asked, drain; twice asked, hurry."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from loraplex_runtime.shutdown import SIGNALS, Ending


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


async def test_a_terminal_that_closes_hurries_nobody() -> None:
    """Kernel and shell send a SIGHUP each."""
    drains, ending = Drains(0.05), Ending()
    ending.ask(signal.SIGHUP)
    ending.ask(signal.SIGHUP)
    await ending.drain(drains.gently(), drains.at_once)
    assert drains.said == ["gently", "done"]
    ending.ask(signal.SIGTERM)
    await ending.drain(drains.gently(), drains.at_once)
    assert drains.said[-1] == "at once"


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of this process, however it was started; they come back at the end."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def stop_listening() -> None:
    for number in SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)


@pytest.mark.parametrize("number", SIGNALS)
async def test_what_the_signals_mean(number: signal.Signals, handlers: None) -> None:
    ending = Ending()
    ending.listen()
    try:
        os.kill(os.getpid(), number)
        await asyncio.wait_for(ending.asked.wait(), 5)
    finally:
        stop_listening()
    assert ending.announce_s(3.0) == (0.0 if number is signal.SIGINT else 3.0)
    assert ending.status == {signal.SIGHUP: 129, signal.SIGINT: 130, signal.SIGTERM: 143}[number]


async def test_nohup_is_left_in_force(handlers: None) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    ending = Ending()
    ending.listen()
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert not ending.asked.is_set()
    finally:
        stop_listening()


def test_an_exit_at_once_says_its_last_words_and_tears_nothing_down() -> None:
    code = (
        "import atexit, sys; from loraplex_runtime.shutdown import exit_at_once\n"
        "atexit.register(print, 'torn down'); sys.stdout.write('last words'); exit_at_once(7)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "last words", "")


def test_an_exit_at_once_does_not_need_a_reader() -> None:
    code = (
        "import os, sys; from loraplex_runtime.shutdown import exit_at_once\n"
        "sys.stdout.write('x'); os.close(1); exit_at_once(3)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 3


# --- output that nobody reads -----------------------------------------------------------------------------------------

CODE = """
import os, sys
from loraplex_runtime.shutdown import unread_output_is_lost
sys.stdin.read()  # the reader is gone by then
with unread_output_is_lost():
    print("lost", flush=True)
with unread_output_is_lost():
    print("lost too")
print("still heard", file=sys.stderr)
"""


def test_a_closed_pipe_is_no_error_and_the_other_stream_goes_on() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdin, process.stdout, process.stderr:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == "still heard\n"
    assert process.wait(10) == 0
