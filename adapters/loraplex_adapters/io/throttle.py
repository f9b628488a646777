"""Throttle of the threads that load adapters beside the step loop.

Compute threads take a step in lockstep: a thread that takes a core from one of them makes all of them wait. And a
thread that runs Python without a pause makes every torch call of another one wait up to a switch interval (5 ms) for
the interpreter, hundreds of times per step. So code that loads adapters calls `checkpoint` between small pieces of
work. A throttled thread pauses there: beside busy threads it leaves most of one core to them, the less the more loads
wait; alone it hardly pauses. On any other thread (tests, commands) `checkpoint` does nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

# Share of a core, beside threads that work, for each load that is under way or waits. A few longer steps cost less than
# many that are a little longer, and than requests that wait for their adapters.
SHARE = 0.5
MAX_SHARE = 0.8
# Shorter spells take more of the machine: after every pause the caches are full of other things. Longer ones keep the
# core for so long that the system moves the compute threads together on another.
SPELL_S = 0.002
MAX_PAUSE_S = 0.008
ALONE_SPELL_S, ALONE_PAUSE_S = 0.005, 0.001
# The thread is alone when the process's other threads used less than this part of a core in a pause.
IDLE_SHARE = 0.25

_of_thread = threading.local()


def checkpoint() -> None:
    """Pauses the calling thread if it is throttled and its spell of work is over. Cheap enough for every small step."""
    pause_if_due: Callable[[], None] | None = getattr(_of_thread, "pause_if_due", None)
    if pause_if_due is not None:
        pause_if_due()


@contextmanager
def throttled(pause_if_due: Callable[[], None]) -> Generator[None]:
    """Within the block, every `checkpoint` of this thread calls `pause_if_due` (a Throttle)."""
    _of_thread.pause_if_due = pause_if_due
    try:
        yield
    finally:
        del _of_thread.pause_if_due


class Throttle:
    """Pauses of one thread. A spell is CPU time of the thread: waiting costs the others nothing."""

    def __init__(self, num_waiting: Callable[[], int] = lambda: 0) -> None:
        """`num_waiting` counts the jobs behind the present one."""
        self._num_waiting = num_waiting
        self._is_alone = False
        self._begin_spell()

    def _begin_spell(self) -> None:
        self._started_at_s = time.perf_counter()
        self._started_s = time.thread_time()

    def __call__(self) -> None:
        spell_s = ALONE_SPELL_S if self._is_alone else SPELL_S
        if time.perf_counter() - self._started_at_s < spell_s:
            return  # a thread works no longer than time passes, and this clock costs little to read
        worked_s = time.thread_time() - self._started_s
        if worked_s < spell_s:
            return
        share = min(MAX_SHARE, SHARE * (1 + self._num_waiting()))
        pause_s = ALONE_PAUSE_S if self._is_alone else min(worked_s * (1 / share - 1), MAX_PAUSE_S)
        before_s = time.process_time()
        time.sleep(pause_s)
        self._is_alone = time.process_time() - before_s < IDLE_SHARE * pause_s
        self._begin_spell()
