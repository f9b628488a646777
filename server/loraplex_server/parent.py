"""End of a child process when its parent dies.

A child sees its parent's death as the end of a pipe whose other end only the parent holds: the engine by its own pipe,
a worker by its standard input. A stopped child (SIGSTOP) cannot see it, so on Linux the kernel wakes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import resource_tracker
from typing import Any, Final

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.shutdown import SIGNALS

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
    them first, then unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        resource_tracker.ensure_running()  # unblocks some of them where it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# From the end of the drain until the engine is killed, and from there until the worker itself is. Together with what an
# engine takes to end by itself (engine/process.py) they stay under 10 seconds.
END_S: Final = 5.0
KILL_S: Final = 2.0
HURRY_EVERY_S: Final = 0.5

END: Final = "end"


def orphan_drain_s(text: str) -> float:
    """Seconds of `--on-orphan`: `end` or `drain=SECONDS`. Raises InvalidArgument."""
    kind, _, seconds = text.partition("=")
    try:
        drain_s = 0.0 if text == END else float(seconds)
    except ValueError:
        drain_s = math.nan
    if (kind != "drain" and text != END) or not 0 <= drain_s < math.inf:
        raise InvalidArgument(f"--on-orphan takes end or drain=SECONDS, not {text!a}", field="--on-orphan")
    return drain_s


def end_with_supervisor(drain_s: float) -> None:
    """Ends this process when standard input ends: requests get `drain_s` to end, then what still runs is killed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the supervisor may have been started with nohup
    continue_when_parent_dies()
    threading.Thread(target=_wait_and_end, args=(drain_s,), name="supervisor", daemon=True).start()


def _wait_and_end(drain_s: float) -> None:
    """Prints nothing: a pipe that nobody reads could block the end."""
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
            pass
    me = os.getpid()
    os.kill(me, signal.SIGHUP)  # a drain; one that is under way goes on
    time.sleep(drain_s)
    killing_at_s = time.monotonic() + END_S
    while time.monotonic() < killing_at_s:
        os.kill(me, signal.SIGTERM)  # the first asks for the end; the next ones hurry it
        time.sleep(HURRY_EVERY_S)
    for child in multiprocessing.active_children():
        child.kill()  # a front end that still works then ends and leaves no files
    time.sleep(KILL_S)
    os.kill(me, signal.SIGKILL)
