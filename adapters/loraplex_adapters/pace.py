"""How background work shares the interpreter with the step loop.

A thread that runs Python without a pause makes every torch call of another thread wait up to a switch interval (5 ms)
to get the interpreter back, hundreds of times per step. So loops over an adapter's hundreds of modules call `pace()`,
which pauses whenever a short spell of work has passed. Without other threads it costs a few milliseconds per adapter.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Pace = Callable[[], None]

WORK_S = 0.0003
PAUSE_S = 0.0005


def no_pace() -> None:
    """For callers that have no neighbours: tests, commands."""


class GentlePace:
    """One per thread. Call it often; it pauses when `WORK_S` have passed since the last pause."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()

    def __call__(self) -> None:
        if time.perf_counter() - self._started_s >= WORK_S:
            time.sleep(PAUSE_S)
            self._started_s = time.perf_counter()
