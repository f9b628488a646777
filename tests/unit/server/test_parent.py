"""A child whose parent dies while it is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest
from support.processes import wait_until

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.parent import orphan_drain_s

CHILD = """
import os
from loraplex_server.parent import continue_when_parent_dies
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
from loraplex_server import parent as supervised
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


@pytest.mark.parametrize(("text", "seconds"), [("end", 0.0), ("drain=0", 0.0), ("drain=2.5", 2.5)])
def test_what_an_orphan_does(text: str, seconds: float) -> None:
    assert orphan_drain_s(text) == seconds


@pytest.mark.parametrize("text", ["", "drain", "drain=", "drain=-1", "drain=nan", "drain=inf", "end=3", "stop=3", "3"])
def test_and_what_it_cannot(text: str) -> None:
    with pytest.raises(InvalidArgument, match="takes end or drain=SECONDS"):
        orphan_drain_s(text)


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
