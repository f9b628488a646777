"""How background work shares the machine with the step loop.

Compute threads take a step in lockstep: whoever takes a core from one of them makes all of them wait. And a thread that
runs Python without a pause makes every torch call of another one wait up to a switch interval (5 ms) to get the
interpreter back, hundreds of times per step. So whatever loads an adapter calls `pace()` between small pieces of work:
beside busy threads it works in spells and takes a share of one core, more of it the more loads wait for this one;
alone it hardly pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Pace = Callable[[], None]

# Of a core, beside threads that work, for each load that is under way or waits. A few steps that are longer cost less
# than many that are a little longer, and than requests that wait for their adapters.
SHARE = 0.5
MAX_SHARE = 0.8
# Shorter spells take more of the machine: after every pause the caches are full of other things. Longer ones keep the
# core for so long that the system moves the compute threads together on another.
SPELL_S = 0.002
MAX_PAUSE_S = 0.008
ALONE_SPELL_S, ALONE_PAUSE_S = 0.005, 0.001
# Of a pause in which the process's other threads have used less than this part, nobody was there to make room for.
IDLE_SHARE = 0.25


def no_pace() -> None:
    """For callers that have no neighbours: tests, commands."""


class GentlePace:
    """One per thread. Call it often; it pauses when a spell of work is over. Work is CPU time of this thread: what it
    waits for costs nobody anything."""

    def __init__(self, num_waiting: Callable[[], int] = lambda: 0) -> None:
        """`num_waiting`: jobs behind the present one."""
        self._num_waiting = num_waiting
        self._is_alone = False
        self._begin()

    def _begin(self) -> None:
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
        self._begin()
