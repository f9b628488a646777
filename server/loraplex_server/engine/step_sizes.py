"""Lengths and sizes of an engine's steps since its start, by buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex_contracts.plan import StepPlan

STEP_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOKEN_BOUNDS: Final = tuple(float(1 << power) for power in range(14))
SEQUENCE_BOUNDS: Final = tuple(float(1 << power) for power in range(10))

# The front end gets them so often while requests run, and when the last one has ended.
REPORT_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers of values up to each bound, behind them of those above all, and the sum of the values."""

    counts: tuple[int, ...]
    total: float

    @classmethod
    def empty(cls, bounds: Sequence[float]) -> Distribution:
        return cls((0,) * (len(bounds) + 1), 0.0)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Distributions of steps' lengths and sizes, as the front end gets them."""

    seconds: Distribution = Distribution.empty(STEP_BOUNDS_S)
    tokens: Distribution = Distribution.empty(TOKEN_BOUNDS)
    sequences: Distribution = Distribution.empty(SEQUENCE_BOUNDS)


@dataclass(slots=True)
class _Tally:
    bounds: tuple[float, ...]
    total: float = 0.0
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def report(self) -> Distribution:
        return Distribution(tuple(self.counts), self.total)


class StepTally:
    """Owns the counts of steps. Every step pays for `add`: about two microseconds."""

    def __init__(self) -> None:
        self._seconds = _Tally(STEP_BOUNDS_S)
        self._tokens = _Tally(TOKEN_BOUNDS)
        self._sequences = _Tally(SEQUENCE_BOUNDS)
        self._last_end_s = 0.0
        self._due_s = 0.0
        self._has_news = True

    def add(self, plan: StepPlan, num_tokens: int, started_s: float, ended_s: float) -> None:
        """Counts a step. It takes from its planning to its result, or from the result of the one before where they
        overlap."""
        self._seconds.add(ended_s - max(started_s, self._last_end_s))
        self._tokens.add(num_tokens)
        self._sequences.add(len(plan.spans))
        self._last_end_s = ended_s
        self._has_news = True

    def report(self, now: float, *, is_idle: bool) -> StepSizes | None:
        """The distributions to report; None where the front end knows them, or will be told soon."""
        if not self._has_news or (now < self._due_s and not is_idle):
            return None
        self._has_news, self._due_s = False, now + REPORT_EVERY_S
        return StepSizes(self._seconds.report(), self._tokens.report(), self._sequences.report())
