"""Supervision of one child process: start, readiness, drain, end.

With threads, so that it does not depend on the event loop that Ray runs a replica in.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO, Any, Final

from loraplex_contracts.errors import Cancelled, FailedPrecondition, LoraplexError
from loraplex_runtime.config import child_environment
from loraplex_runtime.reports import Progress, failure_of, no_progress, report_of

log = logging.getLogger(__name__)

NUM_LINES: Final = 8  # of standard error, kept to say why a child ended
MAX_LINE: Final = 400
_SIGNALS: Final = frozenset(signal.valid_signals())
_CHATTER: Final = frozenset({"debug", "info"})
_LOG_LINE: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (\w+) +\S+: ")
# Beyond the drain: what a server takes to end by itself once its requests are over.
GRACE_S: Final = 12.0


class Child:
    """Owns the process. It gets a pipe as standard input that only this process holds, so that it ends with it."""

    def __init__(self, command: Sequence[str], on_progress: Progress = no_progress) -> None:
        self._command = tuple(command)
        self._on_progress = on_progress
        self._process: subprocess.Popen[bytes] | None = None
        self._is_decided = threading.Event()
        self._ready: dict[str, Any] = {}
        self._error: LoraplexError | None = None
        self._errors: deque[str] = deque(maxlen=NUM_LINES)
        self._readers: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def status(self) -> int | None:
        """The exit status, None while it runs or has yet to start."""
        return None if self._process is None else self._process.poll()

    @property
    def last_words(self) -> str:
        """The last thing that it wrote to standard error, except for what tells of no trouble."""
        return next((line for line in reversed(self._errors) if not is_chatter(line)), "")

    @property
    def end(self) -> str:
        """How it has ended, and why by its own words; empty while it runs."""
        status = self.status
        return "" if status is None else f"the process {end_text(status, self.last_words)}"

    def start(self) -> dict[str, Any]:
        """Blocks until it is ready, and returns its report. Raises the error that it reported, or FailedPrecondition
        where it ended without one; Cancelled where `stop` came first."""
        try:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=child_environment(),
                # Signals to this process's group are for this process, which then tells the child.
                start_new_session=True,
            )
        except OSError as error:
            raise FailedPrecondition(f"{self._command[0]} cannot be started: {error.strerror}") from error
        for read, stream in ((self._read_reports, process.stdout), (self._read_errors, process.stderr)):
            thread = threading.Thread(target=read, args=(stream,), name="output of the child", daemon=True)
            thread.start()
            self._readers.append(thread)
        self._is_decided.wait()
        if self._error is not None:
            self.kill()
            raise self._error
        return self._ready

    def stop(self, drain_s: float) -> int:
        """Stops the child: SIGTERM, `drain_s` for its requests to end, then SIGKILL. Blocks, and returns the exit
        status."""
        process = self._process
        if process is None:
            return 0
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(drain_s + GRACE_S)
        except subprocess.TimeoutExpired:
            log.error("process %d does not end and is killed", process.pid)
        return self.kill()

    def kill(self) -> int:
        """Kills a child that no longer responds. What it started ends by itself. Returns the exit status."""
        process = self._process
        if process is None:
            return 0
        process.kill()
        if process.stdin is not None:
            process.stdin.close()
        status = process.wait()
        for reader in self._readers:
            reader.join(1.0)  # its last words; what it started may still hold the pipe
        return status

    def _read_reports(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self._take(report_of(line), line)
        if not self._is_decided.is_set():
            self._error = self._ended()
            self._is_decided.set()

    def _take(self, report: dict[str, Any], line: bytes) -> None:
        match report.get("event"):
            case "progress":
                self._on_progress(str(report["text"]))
            case "ready":
                self._ready = report
                self._is_decided.set()
            case "failed":
                self._error = failure_of(report)
                self._is_decided.set()
            case "draining" | "alive":
                pass
            case _:
                log.info("%s", _text(line))

    def _ended(self) -> LoraplexError:
        assert self._process is not None
        status = self._process.wait()
        if len(self._readers) > 1:
            self._readers[1].join(1.0)  # of standard error
        if status in (-signal.SIGTERM, 128 + signal.SIGTERM):
            return Cancelled("it was ended before it was ready")
        return FailedPrecondition(f"it {end_text(status, self.last_words, ' before it was ready')}")

    def _read_errors(self, stream: IO[bytes]) -> None:
        """Copies standard error into the log of this process, which Ray keeps for each replica."""
        with stream:
            for line in stream:
                if text := _text(line):
                    self._errors.append(text)
                    log.info("%s", text)


def is_chatter(line: str) -> bool:
    """True for a line of the log, plain or JSON, that is no warning or error."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            return str(json.loads(line).get("level")) in _CHATTER
    return (found := _LOG_LINE.match(line)) is not None and found[1].lower() in _CHATTER


def end_text(status: int, last_words: str, when: str = "") -> str:
    """How a process has ended, in words. A shell says 128 and the number for a signal."""
    number = -status if status < 0 else max(status - 128, 0)
    if number not in _SIGNALS:
        return f"ended with status {status}{when}" + (f": {last_words}" if last_words else "")
    text = f"was killed by signal {number}{when}"
    if number == signal.SIGKILL:
        text += " (perhaps out of memory)"
    return f"{text}; its last words: {last_words}" if last_words else text


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip()[:MAX_LINE]
