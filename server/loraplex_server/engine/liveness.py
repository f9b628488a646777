"""Heartbeat of the engine in shared memory, and liveness monitoring by the front end.

In the engine a thread counts beats as long as the process runs at all. The loop writes when its turn began and how long
the turn may last; writing wakes nobody, so steps pay nothing for it. Times are of the monotonic clock, which all
processes of a machine share.

The engine is stalled when its process neither beats nor uses a CPU, or when one turn of its loop outlasts its bound.
Time counts in looks, so that a pause of the whole machine is not taken for a stall.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from loraplex_contracts.errors import FailedPrecondition

log = logging.getLogger(__name__)

# Between two beats, in seconds.
BEAT_S: Final = 0.5
# A turn is given this long even where steps are known to be short: adapters are copied and kernels compiled in turns.
MIN_TURN_S: Final = 60.0
# A step may take this many times as long as the slowest one so far, per token.
STEP_FACTOR: Final = 10.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """The heartbeat's numbers at one moment."""

    num_beats: int
    # When the turn under way began; 0 while the loop waits for work.
    busy_since_s: float
    # How long the turn under way may last.
    allowed_s: float


class StepBound:
    """The time after which a turn counts as hung: `fixed_s`, or a multiple of the steps so far. Pure.

    A long step is legal: seconds per token are those of the slowest step, and no bound holds before one has ended.
    """

    def __init__(self, fixed_s: float | None = None) -> None:
        self._fixed_s = fixed_s
        self._slowest_s_per_token: float | None = None

    def learn(self, num_tokens: int, step_s: float) -> None:
        """Learns from a turn with a step of `num_tokens` tokens that has ended after `step_s`."""
        if num_tokens:
            self._slowest_s_per_token = max(self._slowest_s_per_token or 0.0, step_s / num_tokens)

    def allowed_s(self, num_tokens: int) -> float:
        """Seconds allowed for a turn that computes `num_tokens` tokens; 0 tokens where it runs no step."""
        if self._fixed_s is not None:
            return self._fixed_s
        if self._slowest_s_per_token is None:
            return float("inf")
        return max(MIN_TURN_S, STEP_FACTOR * self._slowest_s_per_token * num_tokens)


class Heartbeat:
    """The shared numbers. Passed to the engine's process when it is spawned; only the engine writes."""

    def __init__(self) -> None:
        """Raises FailedPrecondition where there is no shared memory."""
        try:
            self._numbers = multiprocessing.get_context("spawn").RawArray("d", 3)
        except OSError as error:
            raise FailedPrecondition(
                f"there is no shared memory ({error}); let this user write to /dev/shm, in a container by a tmpfs there"
            ) from error

    def read(self) -> Pulse:
        num_beats, busy_since_s, allowed_s = self._numbers
        return Pulse(int(num_beats), busy_since_s, allowed_s)

    def beat(self) -> None:
        self._numbers[0] += 1

    @contextlib.contextmanager
    def beating(self) -> Generator[None]:
        """Beats from a thread of its own."""
        ended = threading.Event()

        def run() -> None:
            while not ended.wait(BEAT_S):
                self.beat()

        thread = threading.Thread(target=run, name="engine-heartbeat", daemon=True)
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
    """Writes the loop's turns to the heartbeat and learns how long steps take."""

    def __init__(self, heartbeat: Heartbeat, bound: StepBound) -> None:
        self._heartbeat = heartbeat
        self._bound = bound
        self._began_s = 0.0
        self._num_tokens = 0

    def begin(self) -> None:
        self._began_s, self._num_tokens = time.monotonic(), 0
        self._heartbeat.write(self._began_s, self._bound.allowed_s(0))

    def step(self, num_tokens: int) -> None:
        """Writes that the turn runs a step of so many tokens."""
        self._num_tokens += num_tokens
        self._heartbeat.write(self._began_s, self._bound.allowed_s(self._num_tokens))

    def end(self) -> None:
        self._heartbeat.write(0.0, 0.0)
        self._bound.learn(self._num_tokens, time.monotonic() - self._began_s)


# Between two looks, in seconds.
LOOK_S: Final = 1.0
# Without a sign of life for this long, an engine counts as stalled. Routers must hear of it within five seconds.
SILENT_S: Final = 3.0
# One look counts at most this much, however late it came.
MAX_COUNTED_S: Final = 1.5 * LOOK_S
# An engine that has been stalled for so long is killed; the worker's supervisor starts another.
KILL_STALLED_S: Final = 10.0


class Liveness:
    """Judges one pulse after another. Owns the last one, and for how long nothing has changed since."""

    def __init__(self, cpu_seconds: Callable[[], float | None]) -> None:
        self._cpu_seconds = cpu_seconds
        self._last: Pulse | None = None
        self._last_cpu_s: float | None = None
        self._looked_s = 0.0
        self._silent_s = 0.0
        self._busy_s = 0.0

    def look(self, pulse: Pulse, now_s: float) -> str:
        """The reason that the engine counts as stalled; empty while it does not."""
        last, self._last = self._last, pulse
        elapsed_s = min(now_s - self._looked_s, MAX_COUNTED_S)
        self._looked_s = now_s
        if last is None:
            return ""
        is_same_turn = pulse.busy_since_s and pulse.busy_since_s == last.busy_since_s
        self._busy_s = self._busy_s + elapsed_s if is_same_turn else 0.0
        if pulse.num_beats != last.num_beats or self._uses_cpu():
            self._silent_s, self._last_cpu_s = 0.0, None
        else:
            self._silent_s += elapsed_s
        if self._silent_s >= SILENT_S:
            return f"its process has done nothing for {self._silent_s:.0f} s"
        if self._busy_s > pulse.allowed_s:
            return f"it has been in one step for {self._busy_s:.0f} s, and {pulse.allowed_s:.0f} s are allowed"
        return ""

    def _uses_cpu(self) -> bool:
        """True if the process has computed since the last call: it may hold the interpreter's lock for long."""
        before_s, self._last_cpu_s = self._last_cpu_s, self._cpu_seconds()
        return before_s is not None and self._last_cpu_s is not None and self._last_cpu_s > before_s


class LivenessMonitor:
    """Looks at the heartbeat once a second, and kills an engine that stays stalled.

    Owns the heartbeat, the task that looks, and `stalled`: why the engine counts as stalled, empty while it does not.
    `on_change` is called when `stalled` has changed.
    """

    def __init__(self, on_change: Callable[[], None], kill: Callable[[], None]) -> None:
        self.heartbeat = Heartbeat()
        self.stalled = ""
        self._on_change = on_change
        self._kill = kill
        self._pid: int | None = None
        self._liveness = Liveness(lambda: cpu_seconds(self._pid))
        self._num_stalled_looks = 0
        self._task: asyncio.Task[None] | None = None

    def start(self, pid: int | None) -> None:
        """Begins to watch an engine that is ready. `pid`: its process, None where it runs in a thread."""
        self._pid = pid
        self._task = asyncio.create_task(self._watch(), name="engine liveness")

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def look(self, now_s: float) -> bool:
        """Looks once. True when the engine was killed."""
        before, self.stalled = self.stalled, self._liveness.look(self.heartbeat.read(), now_s)
        if bool(before) != bool(self.stalled):
            self._on_change()
        self._num_stalled_looks = self._num_stalled_looks + 1 if self.stalled else 0
        if self._num_stalled_looks * LOOK_S < KILL_STALLED_S:
            return False
        log.error("the engine is killed: %s", self.stalled)
        self._kill()
        return True

    async def _watch(self) -> None:
        is_killed = False
        while not is_killed:
            await asyncio.sleep(LOOK_S)
            is_killed = self.look(time.monotonic())


def cpu_seconds(pid: int | None) -> float | None:
    """CPU seconds of a process, all its threads together; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
