"""Shutdown: once asked, drain; twice asked, hurry; and the death of the parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
from support.processes import wait_until

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.shutdown import SIGNALS, Ending, orphan_drain_s


class Drains:
    """Drains that record what was begun, and how it ended."""

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
    ending.ask(signal.SIGINT)
    await ending.drain(drains.gently(), drains.at_once)
    assert drains.said[-1] == "at once"


HUP, INT, TERM = signal.SIGHUP, signal.SIGINT, signal.SIGTERM


@pytest.mark.parametrize(
    ("numbers", "last"),
    [
        ((HUP, TERM), "done"),  # a supervisor's, and systemd's to all processes of the unit
        ((TERM, HUP), "done"),
        ((HUP, TERM, HUP), "done"),
        ((HUP, TERM, TERM), "at once"),
        ((TERM, HUP, INT), "at once"),
        ((TERM, TERM), "at once"),
        ((INT, INT), "at once"),
        ((INT, TERM), "at once"),
    ],
)
async def test_who_hurries(numbers: tuple[signal.Signals, ...], last: str) -> None:
    drains, ending = Drains(0.01), Ending()
    for number in numbers:
        ending.ask(number)
    await ending.drain(drains.gently(), drains.at_once)
    assert drains.said[-1] == last


@pytest.fixture
def handlers() -> Iterator[None]:
    """Handlers of this process, however it was started; they come back at the end."""
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


CHILD = """
import os
from loraplex_runtime.shutdown import continue_when_parent_dies
continue_when_parent_dies()
print("started", flush=True)
os.read(0, 1)
print("alone", flush=True)
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no signal for the death of a parent")
def test_a_stopped_child_goes_on() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        assert parent.stdout.readline() == "started\n"
        (child,) = psutil.Process(parent.pid).children()
        child.suspend()
        wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
        parent.kill()
        parent.wait(10)
        assert parent.stdout.readline() == "alone\n"


END_S, KILL_S = 1.0, 0.5
START = f"""
import os, signal, sys, time
from loraplex_runtime import shutdown as supervised
supervised.END_S, supervised.KILL_S = {END_S}, {KILL_S}
def say(number, frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
signal.signal(signal.SIGTERM, say)
supervised.end_with_supervisor(float(sys.argv[1]))
signal.signal(signal.SIGHUP, say)
"""
# Its child ignores what can be ignored, as an engine does.
STUBBORN = """
import multiprocessing
def engine():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(120)
child = multiprocessing.get_context("fork").Process(target=engine, daemon=True)
child.start()
print("started", flush=True)
child.join()
print("killed", flush=True)
os._exit(0)
"""
HUNG = 'print("started", flush=True)\nwhile True: time.sleep(60)\n'


def orphaned(code: str, drain_s: float) -> tuple[int, list[str], float]:
    """Status, output and seconds until the end of a process whose standard input closes."""
    process = subprocess.Popen(
        [sys.executable, "-c", START + code, str(drain_s)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        assert process.stdout.readline() == "started\n"
        started_s = time.monotonic()
        process.stdin.close()
        lines = process.stdout.read().splitlines()
    return process.wait(10), lines, time.monotonic() - started_s


def test_a_child_that_does_not_end_is_killed() -> None:
    status, lines, took_s = orphaned(STUBBORN, 0.0)
    assert status == 0
    assert set(lines[:2]) == {"SIGHUP", "SIGTERM"}, "sent together"
    assert lines[-1] == "killed"
    assert END_S - 0.2 < took_s < END_S + KILL_S + 3


def test_a_process_that_hangs_is_killed_after_its_drain() -> None:
    status, lines, took_s = orphaned(HUNG, 1.0)
    assert status == -signal.SIGKILL
    assert lines[:2] == ["SIGHUP", "SIGTERM"]
    assert 1.0 + END_S + KILL_S - 0.2 < took_s < 1.0 + END_S + KILL_S + 4


@pytest.mark.parametrize(("text", "seconds"), [("end", 0.0), ("drain=0", 0.0), ("drain=2.5", 2.5)])
def test_what_an_orphan_does(text: str, seconds: float) -> None:
    assert orphan_drain_s(text, is_supervised=True) == seconds


@pytest.mark.parametrize("text", ["", "drain", "drain=", "drain=-1", "drain=nan", "drain=inf", "end=3", "stop=3", "3"])
@pytest.mark.parametrize("is_supervised", [False, True])
def test_and_what_it_cannot(text: str, is_supervised: bool) -> None:
    with pytest.raises(InvalidArgument, match="takes end or drain=SECONDS"):
        orphan_drain_s(text, is_supervised=is_supervised)


def test_only_a_supervised_process_becomes_an_orphan() -> None:
    assert orphan_drain_s("end", is_supervised=False) == 0.0
    with pytest.raises(InvalidArgument, match="--on-orphan goes with --supervised"):
        orphan_drain_s("drain=1", is_supervised=False)
