"""Child process that answers calls within bounds of time and memory.

For work on what a user wrote, such as a grammar or a template, which may take a library for ever, all memory or more
than the stack. Questions and answers are JSON: nothing that a child says can run code here.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final

from loraplex_runtime.child_folder import child_folder
from loraplex_runtime.shutdown import SIGNALS

START_S: Final = 60.0
PARENT_CHECK_S: Final = 0.5
MAX_ANSWER_BYTES: Final = 128 << 20

Answer = Callable[[Any], Any]


class LimitExceeded(Exception):
    """A call came to a bound: `what` is "time" or "memory". A process that ends during a call, for whatever reason, is
    "memory"."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the call came to its bound of {what}")
        self.what = what


class ProcessFailed(Exception):
    """The process could not start, its function raised, or it has been closed: not the question's fault."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a child process."""

    memory_bytes: int  # beyond what it has when it is ready
    stack_bytes: int  # of the thread that answers
    cpu_s: int  # of a call; behind its time, where the parent is too busy to see that it is over
    file_bytes: int = 0  # of each file that it writes


class LimitedProcess:
    """The parent's side. The process starts with the first call, or with `start`. `call` is for one thread at a time.

    `function` is "module:name" of a function that takes `setup`, in the child, and gives the one that answers.
    """

    def __init__(self, function: str, setup: Any, limits: Limits, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self._first = {"function": function, "setup": setup, "limits": asdict(limits)}
        self._process: subprocess.Popen[bytes] | None = None
        self._conn: Any = None
        self._lock = threading.Lock()  # over the two above
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def call(self, question: Any, timeout_s: float) -> Any:
        """The answer. Raises LimitExceeded and ProcessFailed, and the process is gone then; the next call starts
        another one. Time to start does not count. A process that was there before and ends is started again and asked
        once more: it may have been dead, or full of what earlier questions left."""
        was_running = self.pid is not None
        try:
            return self._ask(question, timeout_s)
        except LimitExceeded as limit:
            if limit.what == "time" or not was_running:
                raise
        return self._ask(question, timeout_s)

    def _ask(self, question: Any, timeout_s: float) -> Any:
        process, conn = self.start()
        is_late = threading.Event()
        try:
            with _killed_after(timeout_s, process, is_late):
                conn.send_bytes(json.dumps(question).encode())
                reply = conn.recv_bytes(MAX_ANSWER_BYTES)
            answer = json.loads(reply)
            if answer is None:
                raise EOFError  # of memory
            if "failure" in answer:
                raise ProcessFailed(answer["failure"])
            return answer["answer"]
        except (EOFError, OSError, ValueError, TypeError, KeyError):
            self.kill()
            if self._is_closed:
                raise ProcessFailed("it has been closed") from None
            raise LimitExceeded("time" if is_late.is_set() else "memory") from None
        except ProcessFailed:
            self.kill()
            raise

    def start(self) -> tuple[subprocess.Popen[bytes], Any]:
        """Starts the process where there is none, and waits until it is ready. Returns it, and its connection. Raises
        ProcessFailed, and there is none then."""
        is_late = threading.Event()
        try:
            return self._started(is_late)
        except (EOFError, OSError, ProcessFailed) as error:
            self.kill()
            why = f"it was not ready within {START_S:g} s" if is_late.is_set() else str(error)
            raise ProcessFailed(why or "it ended before it was ready") from None

    def _started(self, is_late: threading.Event) -> tuple[subprocess.Popen[bytes], Any]:
        with self._lock:
            if self._process is not None:
                return self._process, self._conn
            if self._is_closed:
                raise EOFError("it has been closed")
            conn, theirs = Pipe()
            with theirs:
                process = self._process = subprocess.Popen(
                    [sys.executable, "-m", "loraplex_runtime.limited_process", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    env=self._environment,
                    cwd=child_folder(),
                )
            self._conn = conn
        with _killed_after(START_S, process, is_late):
            conn.send_bytes(json.dumps(self._first).encode())
            conn.recv_bytes()
        return process, conn

    def kill(self) -> None:
        """Kills the child, from any thread. A call under way fails as one whose process ends, see `call`."""
        with self._lock:
            process, conn, self._process, self._conn = self._process, self._conn, None, None
        if process is not None:
            process.kill()
            process.wait()
            conn.close()

    def close(self) -> None:
        """Kills the process for good."""
        self._is_closed = True
        self.kill()


@contextlib.contextmanager
def _killed_after(seconds: float, process: subprocess.Popen[bytes], is_late: threading.Event) -> Generator[None]:
    """Kills the process where the block lasts longer, and sets `is_late`: what the block sends to it or waits for from
    it fails then. A frozen process reads nothing, and what a pipe does not hold would be sent for ever."""

    def kill() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError as error:  # limits of processes count threads, too
        raise ProcessFailed(str(error)) from None
    try:
        yield
    finally:
        timer.cancel()


def main(fd: int) -> None:
    """The child's side. Ends with the other end of the pipe, in the middle of an answer too."""
    parent = os.getppid()
    for number in SIGNALS:  # the parent decides
        signal.signal(number, signal.SIG_IGN)
    conn: Any = Connection(fd)
    first = json.loads(conn.recv_bytes())
    module, _, name = first["function"].partition(":")
    answer: Answer = getattr(importlib.import_module(module), name)(first["setup"])
    limits = Limits(**first["limits"])
    _lower(resource.RLIMIT_AS, _address_space_bytes() + limits.memory_bytes)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, limits.file_bytes)
    conn.send_bytes(b"")
    with contextlib.suppress(OSError):
        os.nice(5)
    threading.stack_size(limits.stack_bytes)
    while True:
        try:
            question = conn.recv_bytes()
        except EOFError:
            os._exit(0)
        _lower(resource.RLIMIT_CPU, int(time.process_time()) + 1 + limits.cpu_s, is_final=False)
        thread = threading.Thread(target=_answer, args=(conn, answer, question))
        thread.start()
        while thread.is_alive():
            thread.join(PARENT_CHECK_S)
            if os.getppid() != parent:
                os._exit(0)


def _answer(conn: Any, answer: Answer, question: bytes) -> None:
    try:
        reply = json.dumps({"answer": answer(json.loads(question))}).encode()
    except (MemoryError, RecursionError):
        reply = b"null"
    except Exception as error:
        with contextlib.suppress(OSError):  # a file, which may be full or over this process's bound
            traceback.print_exc()
        reply = json.dumps({"failure": f"{type(error).__name__}: {error}"}).encode()
    conn.send_bytes(reply)


def _lower(kind: int, value: int, *, is_final: bool = True) -> None:
    """Sets a limit of this process, the hard one as well where it is final. Never above the hard limit that the process
    was given, such as a batch system's: only root may raise that."""
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value if is_final else hard))


def _address_space_bytes() -> int:
    """The size of this process's address space; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
