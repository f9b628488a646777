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
FIRST_MESSAGE_S = 2e-4  # taken for granted until there is a median
MEDIAN_STEP = 0.1


class Pacer:
    """Weighs the CPU time that sending takes against the time that has passed since tokens were last sent.

    What one message takes is a running median of what this process has spent from one sending to the next: the CPU time
    of other things, such as a request that comes in, holds no tokens back for longer than twice that.
    """

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
        self._message_s = FIRST_MESSAGE_S
        self._num_messages = 0
        self._sent_at_s, self._cpu_at_s = clock(), cpu_clock()

    def is_due(self) -> bool:
        """Whether sending has not taken more than its share since the last time."""
        spent_s = min(self._spent_s(), 2 * self._message_s * self._num_messages)
        return spent_s <= self._share * (self._clock() - self._sent_at_s)

    def sent(self, num_messages: int) -> None:
        """Tokens are being sent now; what that costs counts from here."""
        if self._num_messages:
            is_more = self._spent_s() > self._message_s * self._num_messages
            self._message_s *= 1 + MEDIAN_STEP if is_more else 1 - MEDIAN_STEP
        self._num_messages = num_messages
        self._sent_at_s, self._cpu_at_s = self._clock(), self._cpu_clock()

    def _spent_s(self) -> float:
        return self._cpu_clock() - self._cpu_at_s


def delivery_share(device: str) -> float:
    """What of one core this process may take for sending, beside an engine on `device`."""
    if not device.startswith("cpu"):
        return DEVICE_SHARE
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(DEVICE_SHARE, CPU_SHARE * num_cores)
