"""Commands as child processes for integration tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

READY = re.compile(r"ready on ([\w.:\[\]-]+:\d+)")


@dataclass
class Running:
    """A child process and everything that it printed."""

    process: subprocess.Popen[str]
    address: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def end(self, number: int = signal.SIGTERM, timeout_s: float = 20) -> int:
        """Sends the signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(20)

    def engine_pid(self) -> int:
        """Process id of a worker's engine."""
        (pid,) = [
            child.pid
            for child in psutil.Process(self.process.pid).children()
            if any("spawn_main" in argument for argument in child.cmdline())
        ]
        return pid


@contextlib.contextmanager
def loraplex(
    *arguments: str, wait_ready: bool = True, timeout_s: float = 90, folder: Path | None = None
) -> Iterator[Running]:
    """`loraplex ARGUMENTS…` as a child, in `folder`; killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        cwd=folder,
    )
    running = Running(process)
    is_ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            running.lines.append(line)
            found = READY.search(line)
            if found and not running.address:
                running.address = found[1]
                is_ready.set()
        is_ready.set()  # the output has ended, and so has the waiting

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if wait_ready and (not is_ready.wait(timeout_s) or not running.address):
            raise AssertionError(f"loraplex {' '.join(arguments)} did not get ready:\n{running.output}")
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # as SIGTERM, without the time to tell balancers
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait(20)
        reader.join(5)
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def together(*commands: tuple[str, ...], timeout_s: float = 150) -> Iterator[list[Running]]:
    """Several `loraplex` commands, started at the same time: most of a start is importing."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(loraplex(*command, wait_ready=False)) for command in commands]
        for one in running:
            wait_until(lambda one=one: one.address or one.process.poll() is not None, timeout_s, "ready")
            assert one.address, one.output
        yield running


def wait_until(condition: object, timeout_s: float = 20, what: str = "the condition") -> None:
    """Polls `condition()` until it is true."""
    end = time.monotonic() + timeout_s
    assert callable(condition)
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not become true within {timeout_s} s")
        time.sleep(0.02)
