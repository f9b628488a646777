"""Liveness of the engine: whether it does anything, concluded from looks at its heartbeat.

An engine does nothing when its process neither beats nor uses a CPU, or when one turn of its loop outlasts its bound. A
step that takes long does neither. Time counts in looks, so that a pause of the whole machine is nobody's fault. Pure
but for `cpu_seconds`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from loraplex_server.engine.heartbeat import Pulse

# Between two looks, in seconds.
LOOK_S: Final = 1.0
# Without a sign of life for this long, an engine counts as stalled. Routers are to hear of it within five seconds.
SILENT_S: Final = 3.0
# One look counts at most this much, however late it came.
MAX_COUNTED_S: Final = 1.5 * LOOK_S


class Liveness:
    """Owns what the last look saw, and for how long nothing has changed since."""

    def __init__(self, cpu_seconds: Callable[[], float | None], silent_s: float = SILENT_S) -> None:
        self._cpu_seconds = cpu_seconds
        self._max_silent_s = silent_s
        self._last: Pulse | None = None
        self._last_cpu_s: float | None = None
        self._looked_s = 0.0
        self._silent_s = 0.0
        self._busy_s = 0.0

    def look(self, pulse: Pulse, now_s: float) -> str:
        """Why the engine counts as stalled; empty while it does not."""
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
        if self._silent_s >= self._max_silent_s:
            return f"its process has done nothing for {self._silent_s:.0f} s"
        if self._busy_s > pulse.allowed_s:
            return f"it has been in one step for {self._busy_s:.0f} s, and {pulse.allowed_s:.0f} s are allowed"
        return ""

    def _uses_cpu(self) -> bool:
        """Whether the process has computed since the look before: it may hold the interpreter's lock for long."""
        before_s, self._last_cpu_s = self._last_cpu_s, self._cpu_seconds()
        return before_s is not None and self._last_cpu_s is not None and self._last_cpu_s > before_s


def cpu_seconds(pid: int | None) -> float | None:
    """What a process has used of the CPU, all its threads together; None where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
