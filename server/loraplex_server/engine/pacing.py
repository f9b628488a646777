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
    """Weighs the CPU time that sending took against the time that has passed since.

    It is what this process spent from a sending to the next look, which comes with the next step's tokens: what later
    steps take to arrive is not a matter of sending. A running median of what one message takes keeps other things, such
    as a request that came in just then, from holding tokens back.
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
        self._due_at_s: float | None = 0.0  # None until it is known what the last sending took
        self._sent_at_s, self._cpu_at_s = clock(), cpu_clock()

    def is_due(self) -> bool:
        """Whether sending has taken no more than its share since the last time."""
        if self._due_at_s is None:
            self._due_at_s = self._sent_at_s + self._cost_s() / self._share
        return self._clock() >= self._due_at_s

    def sent(self, num_messages: int) -> None:
        """Tokens are being sent now; what that takes counts from here."""
        self._num_messages, self._due_at_s = num_messages, None
        self._sent_at_s, self._cpu_at_s = self._clock(), self._cpu_clock()

    def _cost_s(self) -> float:
        """What the last sending took."""
        spent_s, usual_s = self._cpu_clock() - self._cpu_at_s, self._message_s * self._num_messages
        self._message_s *= 1 + MEDIAN_STEP if spent_s > usual_s else 1 - MEDIAN_STEP
        return min(spent_s, 2 * usual_s)


def delivery_share(device: str) -> float:
    """What of one core this process may take for sending, beside an engine on `device`."""
    if not device.startswith("cpu"):
        return DEVICE_SHARE
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(DEVICE_SHARE, CPU_SHARE * num_cores)
