"""Shutdown of a process: signals, death of the parent, exit, unread output.

The first SIGTERM, SIGINT or SIGHUP asks a server to drain, a second SIGTERM or SIGINT to end at once.

A child sees its parent's death as the end of a pipe whose other end only the parent holds: the engine by its own
pipe, a worker by its standard input. A stopped child (SIGSTOP) cannot see it, so on Linux the kernel wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator
from multiprocessing import resource_tracker
from typing import Any, Final, NoReturn

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.child_folder import in_child_folder

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
HOW_TO_HURRY: Final = "Ctrl-C again ends it at once"


class Ending:
    """Requests to end. From `listen` on it owns the process's handlers of the signals; without, the caller calls
    `ask`."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self._at_once = asyncio.Event()
        self._first: signal.Signals | None = None
        self._was_told = False  # by other than a SIGHUP

    def listen(self) -> None:
        for number in SIGNALS:
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: a closed terminal is not to end it
            asyncio.get_running_loop().add_signal_handler(number, self.ask, number)

    def ask(self, number: signal.Signals | None = None) -> None:
        """The first asks for a drain, the second to hurry. A SIGHUP hurries nobody: kernel and shell both send one when
        a terminal closes. Nor does a SIGTERM beside it: systemd tells a supervisor and its children at once, and the
        supervisor tells the children by a SIGHUP, in either order."""
        if not self.asked.is_set():
            self._first = number
            self.asked.set()
        elif number is not signal.SIGHUP and (number is not signal.SIGTERM or self._was_told):
            self._at_once.set()
        self._was_told = self._was_told or number is not signal.SIGHUP

    @property
    def status(self) -> int:
        """The exit status of a process that was asked before there was anything to drain."""
        return 128 + (self._first or signal.SIGINT)

    def announce_s(self, configured_s: float) -> float:
        """Time to say NOT_SERVING before draining; 0 after Ctrl-C, where no balancer has to be told first."""
        return configured_s if self._first in (signal.SIGTERM, signal.SIGHUP) else 0.0

    async def drain(self, gently: Coroutine[Any, Any, None], at_once: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `gently`; when asked a second time, before or meanwhile, `at_once` in its place."""
        draining = asyncio.ensure_future(gently)
        if await ends_before(draining, self._at_once):
            return draining.result()
        return await at_once()


async def ends_before(task: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """True when `task` has ended. False where `event` is set first: `task` is cancelled then, and has ended as well."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:  # also when the caller is cancelled: nothing else awaits the task
        waiting.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


# --- death of the parent ----------------------------------------------------------------------------------------------

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def continue_when_parent_dies() -> None:
    """Has the kernel send SIGCONT to this process when its parent dies. Does nothing where there is no prctl.

    Linux means the thread that started this process, which may end before its process; SIGCONT changes
    nothing in a process that runs.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def start_shielded(process: Any) -> None:
    """Starts a process of multiprocessing with the signals blocked that reach a whole process group: the child ignores
    them first, then unblocks them. Raises OSError where the system gives no process."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # unblocks some of them where it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        with in_child_folder():
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin_shielded() -> None:
    """The child's side of `start_shielded`, first thing in it: ignores those signals, and sees its parent's death even
    where it is stopped."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # blocked since before the start
    continue_when_parent_dies()


# Seconds from the end of the drain until the engine is killed, and from there until the worker itself is. With what an
# engine takes to end by itself (engine/process.py) they stay under 10 seconds.
END_S: Final = 5.0
KILL_S: Final = 2.0
HURRY_EVERY_S: Final = 0.5


END: Final = "end"


def orphan_drain_s(text: str, *, is_supervised: bool) -> float:
    """Seconds of `--on-orphan`: `end` or `drain=SECONDS`. Raises InvalidArgument, also for the latter without
    `--supervised`."""
    if text == END:
        return 0.0
    kind, _, seconds = text.partition("=")
    with contextlib.suppress(ValueError):
        if kind == "drain" and 0 <= float(seconds) < math.inf:
            if not is_supervised:
                raise InvalidArgument("--on-orphan goes with --supervised", field="--on-orphan")
            return float(seconds)
    raise InvalidArgument(f"--on-orphan takes end or drain=SECONDS, not {text!a}", field="--on-orphan")


def end_with_supervisor(drain_s: float) -> None:
    """Ends this process when standard input ends: requests get `drain_s` to end, then what still runs is killed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the supervisor may have been started with nohup
    continue_when_parent_dies()
    threading.Thread(target=_wait_and_end, args=(drain_s,), name="supervisor", daemon=True).start()


def _wait_and_end(drain_s: float) -> None:
    """Ends this process when standard input ends. Prints nothing: a pipe that nobody reads could block the end."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
            pass
    me = os.getpid()
    os.kill(me, signal.SIGHUP)  # a drain; one that is under way goes on
    time.sleep(drain_s)
    killing_at_s = time.monotonic() + END_S
    while time.monotonic() < killing_at_s:
        os.kill(me, signal.SIGTERM)  # the first may be systemd's; the second hurries
        time.sleep(HURRY_EVERY_S)
    for child in multiprocessing.active_children():
        child.kill()  # a front end that still works then ends and leaves no files
    time.sleep(KILL_S)
    os.kill(me, signal.SIGKILL)


# --- the end ----------------------------------------------------------------------------------------------------------


def exit_at_once(code: int) -> NoReturn:
    """Ends a process that has closed everything. Tearing down an interpreter full of native threads takes seconds."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or missing
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def unread_output_is_lost() -> Generator[None]:
    """Wraps a block that prints: a closed pipe or terminal raises nothing in here, nor when the process ends."""
    try:
        yield
    except OSError:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()  # of text that could not be written, which would raise again at the end
            except OSError:
                with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), stream.fileno())
            except (AttributeError, ValueError):
                continue  # the stream is missing or closed
