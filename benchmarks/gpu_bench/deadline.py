"""Time limit of the GPU benchmark, and the parts left out for it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Deadline:
    """Time limit of a run. A part that wants to begin says how long it may take."""

    limit_s: float
    start_s: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list[str])

    @property
    def used_s(self) -> float:
        return time.monotonic() - self.start_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.used_s

    def allows(self, what: str, needed_s: float) -> bool:
        """True if a part of so many seconds fits in the time left; else notes it as left out."""
        if self.left_s >= needed_s:
            return True
        self.left_out.append(f"{what} ({needed_s:.0f} s needed, {max(0.0, self.left_s):.0f} s left)")
        return False
