"""Queue of texts to tokenize, short ones before long ones.

Turns are given by arrival plus expected time, so that a short text does not wait for a row of long ones, and a long
one is not overtaken for ever. Owns the queue. Used from one event loop; knows nothing of the work.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

from loraplex_contracts.errors import QueueFull

# What tokenizers do in a second, roughly.
BYTES_PER_S = 1 << 20
_RETRY_AFTER_S = 1.0


class Turns:
    """Gives `num_at_once` turns at the same time. Those that wait have `max_waiting_bytes` together, if there are
    several."""

    def __init__(self, num_at_once: int, max_waiting_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_free = num_at_once
        self._max_waiting_bytes = max_waiting_bytes
        self._clock = clock
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap; the number settles equal times
        self._numbers = itertools.count()
        self._waiting_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Waits for a turn; `give_back` it. Whoever is cancelled while waiting has none. Raises QueueFull."""
        if self._num_free:
            self._num_free -= 1
            return
        if self._waiting_bytes and self._waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise QueueFull(
                f"{self._waiting_bytes} bytes of other requests' text wait to be tokenized; try again",
                retry_after_s=_RETRY_AFTER_S,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        due_s = self._clock() + num_bytes / BYTES_PER_S
        heapq.heappush(self._waiting, (due_s, next(self._numbers), turn))
        self._waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.give_back()
            raise
        finally:
            self._waiting_bytes -= num_bytes

    def give_back(self) -> None:
        """Ends a turn; the next one begins."""
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
