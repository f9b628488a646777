"""When tokens that have come are sent on.

Sending costs about the same per message, whether it carries one token or ten, and where the engine computes on the same
cores it is the engine that pays. So messages are sent as often as they may take a share of the CPU, and no oftener:
with few streams at once, with many, or a model whose steps are short, as tokens of several steps together. Pure but for
its clocks; knows neither streams nor the event loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

# Of all cores where the engine computes on them too, of one core where it does not.
CPU_SHARE = 0.025
DEVICE_SHARE = 0.5


class Pacer:
    """Weighs the CPU time that this process has taken since tokens were last sent against the time that has passed."""

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        """`share` of one core may be taken; the clocks count seconds."""
        self._share = share
        self._clock = clock
        self._cpu_clock = cpu_clock
        self.sent()

    def is_due(self) -> bool:
        """Whether sending has not taken more than its share since the last time."""
        return self._cpu_clock() - self._cpu_at_s <= self._share * (self._clock() - self._sent_at_s)

    def sent(self) -> None:
        """Tokens are being sent now; what that costs counts from here."""
        self._sent_at_s, self._cpu_at_s = self._clock(), self._cpu_clock()


def delivery_share(device: str) -> float:
    """What of one core this process may take for sending, beside an engine on `device`."""
    if not device.startswith("cpu"):
        return DEVICE_SHARE
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(DEVICE_SHARE, CPU_SHARE * num_cores)
