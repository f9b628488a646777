"""A child process and the death of its parent.

A child learns of it by the end of a pipe whose other end only the parent holds. That works everywhere, but not for a
child that is stopped (SIGSTOP), so on Linux the kernel wakes it.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from multiprocessing import resource_tracker
from typing import Any, Final

from loraplex_runtime.shutdown import SIGNALS

PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def continue_when_parent_dies() -> None:
    """Has the kernel send SIGCONT to this process when its parent dies. Does nothing where there is no prctl.

    Linux means the thread that started this process, which may end before its process; SIGCONT does nothing to a
    process that runs, so a mistake costs nothing.
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
