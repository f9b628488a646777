"""How often tokens that have come are sent on.

Sending costs about the same per message, whether it carries one token or ten, and waking up for it more than that;
where the engine computes on the same cores it is the engine that pays. So tokens are sent as often as that may take a
share of the CPU, and no oftener: with few streams at once, with many, or a model whose steps are short, those of
several steps together. The front end, which sends, measures; in the engine, which has the tokens, they wait. Pure but
for a clock; knows neither streams nor threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from loraplex_server.backends.cpu.native.threads import own_cpus

# Of all cores where the engine computes on them too, of one core where it does not. Clients and routers on the same
# machine take about as much again, each.
CPU_SHARE = 0.006
DEVICE_SHARE = 0.5
FIRST_MESSAGE_S = 1e-4  # taken for granted until there is a median
MEDIAN_STEP = 0.1
# Waking up, and what is done once for all streams, takes as long as so many messages.
MESSAGES_PER_WAKE = 8
TOLD_CHANGE = 1.25  # what has changed by less is not worth telling


class SendingMeter:
    """What one message takes of the CPU: what this process spent from a sending to the next look.

    A running median, so that other things, such as a request that came in just then, do not count.
    """

    def __init__(self, cpu_clock: Callable[[], float] = time.process_time) -> None:
        self._cpu_clock = cpu_clock
        self._message_s = self._told_s = FIRST_MESSAGE_S
        self._num_messages = 0
        self._cpu_at_s = 0.0

    def sent(self, num_messages: int) -> None:
        """Tokens are being sent now; what that takes counts from here."""
        self._num_messages, self._cpu_at_s = num_messages, self._cpu_clock()

    def look(self) -> float | None:
        """To be called when the next tokens have come. What a message takes, if that has changed since it was told."""
        if not self._num_messages:
            return None
        usual_s = self._message_s * (MESSAGES_PER_WAKE + self._num_messages)
        self._message_s *= 1 + MEDIAN_STEP if self._cpu_clock() - self._cpu_at_s > usual_s else 1 - MEDIAN_STEP
        self._num_messages = 0
        if 1 / TOLD_CHANGE < self._message_s / self._told_s < TOLD_CHANGE:
            return None
        self._told_s = self._message_s
        return self._message_s


class Pacer:
    """How long to pause between sendings. `message_s` is what one message takes, as the front end says."""

    def __init__(self, share: float, max_wait_s: float) -> None:
        """`share` of one core may be taken; no token waits longer than `max_wait_s`."""
        self.message_s = FIRST_MESSAGE_S
        self._share = share
        self._max_wait_s = max_wait_s

    def pause_s(self, num_messages: int) -> float:
        """From a sending of so many messages to the next one."""
        return min(self._max_wait_s, self.message_s * (MESSAGES_PER_WAKE + num_messages) / self._share)


def delivery_share(device: str) -> float:
    """What of one core the front end may take for sending, beside an engine on `device`."""
    if not device.startswith("cpu"):
        return DEVICE_SHARE
    return min(DEVICE_SHARE, CPU_SHARE * len(own_cpus()))
