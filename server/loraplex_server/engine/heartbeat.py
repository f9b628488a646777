"""Heartbeat of the engine: a few numbers in shared memory that the engine's process writes and the front end reads.

A thread counts beats as long as the process runs at all. The loop writes since when it has been busy with one turn, and
for how long that turn may last. Writing wakes nobody, so it costs the steps nothing. Times are of the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Final

# Between two beats, in seconds.
BEAT_S: Final = 0.5
# A turn is given this long even where steps are known to be short: adapters are copied and kernels compiled in turns.
MIN_TURN_S: Final = 60.0
# A step may take this many times as long as the slowest one so far, per token.
STEP_FACTOR: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the heartbeat says at one moment."""

    num_beats: int
    # When the turn under way began; 0 while the loop waits for work.
    busy_since_s: float
    # How long the turn under way may last.
    allowed_s: float


class StepBound:
    """How long a turn may last before it counts as hung: `fixed_s`, or what the steps so far allow. Pure.

    A long step is legal: seconds per token are those of the slowest step, and no bound holds before one has ended.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._slowest_s_per_token: float | None = None

    def learn(self, num_tokens: int, step_s: float) -> None:
        """A turn with a step of `num_tokens` tokens has ended after `step_s`."""
        if num_tokens:
            self._slowest_s_per_token = max(self._slowest_s_per_token or 0.0, step_s / num_tokens)

    def allowed_s(self, num_tokens: int) -> float:
        """For a turn that computes `num_tokens` tokens, which is 0 where it runs no step."""
        if self._fixed_s is not None:
            return self._fixed_s
        if self._slowest_s_per_token is None:
            return float("inf")
        return max(MIN_TURN_S, STEP_FACTOR * self._slowest_s_per_token * num_tokens)


class Heartbeat:
    """The shared numbers. Passed to the engine's process when it is spawned; only the engine writes."""

    def __init__(self) -> None:
        self._numbers = multiprocessing.get_context("spawn").RawArray("d", 3)

    def read(self) -> Pulse:
        num_beats, busy_since_s, allowed_s = self._numbers
        return Pulse(int(num_beats), busy_since_s, allowed_s)

    @contextlib.contextmanager
    def beating(self) -> Generator[None]:
        """Beats from a thread of its own."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                self._numbers[0] += 1

        thread = threading.Thread(target=beat, name="engine-heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def write(self, busy_since_s: float, allowed_s: float) -> None:
        self._numbers[2] = allowed_s
        self._numbers[1] = busy_since_s


class TurnTimer:
    """Tells the heartbeat what the loop is busy with, and learns how long steps take. The loop's own."""

    def __init__(self, heartbeat: Heartbeat, bound: StepBound) -> None:
        self._heartbeat = heartbeat
        self._bound = bound
        self._began_s = 0.0
        self._num_tokens = 0

    def begin(self) -> None:
        self._began_s, self._num_tokens = time.monotonic(), 0
        self._heartbeat.write(self._began_s, self._bound.allowed_s(0))

    def step(self, num_tokens: int) -> None:
        """The turn runs a step of so many tokens."""
        self._num_tokens += num_tokens
        self._heartbeat.write(self._began_s, self._bound.allowed_s(self._num_tokens))

    def end(self) -> None:
        self._heartbeat.write(0.0, 0.0)
        self._bound.learn(self._num_tokens, time.monotonic() - self._began_s)
