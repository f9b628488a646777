"""Step times by number of token rows, measured at start-up."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence

from loraplex_contracts.plan import NewSequence, Span, StepPlan
from loraplex_contracts.request import OutputParams, SamplingParams
from loraplex_runtime.reports import Progress, counted, no_progress
from loraplex_server.model.runner import ModelRunner

DEFAULT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Time for measuring. A round of all sizes takes 0.4 s with 245M parameters on two cores.
LIMIT_S = 1.0
NUM_REPEATS = 3


class StepCosts:
    """The time of a step by its number of token rows: rising, interpolated, and linear beyond what was measured."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        """`measured`: seconds by number of rows, one entry or more. Noise that falls with more rows is averaged out."""
        if not measured or min(measured) < 1:
            raise ValueError("step costs need at least one measurement, of 1 row or more")
        self.sizes = tuple(sorted(measured))
        self.times_s = _rising([max(measured[size], 1e-9) for size in self.sizes])
        # One entry per number of rows: asked for hundreds of times in every step.
        self._table = self._interpolated()
        self._slope_s = self._last_slope()

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step with that many token rows; 0 rows count as one."""
        if num_rows < len(self._table):
            return self._table[max(num_rows, 1)]
        return self._table[-1] + self._slope_s * (num_rows - self.sizes[-1])

    def span(self, num_rows: int, num_more: int) -> list[float]:
        """Seconds of steps with `num_rows` to `num_rows + num_more` rows, in one call."""
        first = max(num_rows, 0)
        known = self._table[first : first + num_more + 1]
        return known + [self.seconds(first + idx) for idx in range(len(known), num_more + 1)]

    def _interpolated(self) -> list[float]:
        table = [self.times_s[0]] * (self.sizes[0] + 1)
        for idx in range(1, len(self.sizes)):
            low, high = self.sizes[idx - 1], self.sizes[idx]
            step_s = (self.times_s[idx] - self.times_s[idx - 1]) / (high - low)
            # Rounded, the sum may come out above what it leads to.
            table += [min(self.times_s[idx - 1] + step_s * num, self.times_s[idx]) for num in range(1, high - low + 1)]
        return table

    def _last_slope(self) -> float:
        """Seconds per row beyond the table: as between the last size and the one of half that."""
        last = self.sizes[-1]
        half = max(0, bisect_left(self.sizes, last // 2 + 1) - 1)
        if len(self.sizes) == 1 or self.sizes[half] == last:
            return self.times_s[-1] / last  # one size tells no slope: the most that it can be
        return (self.times_s[-1] - self.times_s[half]) / (last - self.sizes[half])


def measure_step_costs(
    run: Callable[[int], float],
    *,
    sizes: Iterable[int],
    num_repeats: int = NUM_REPEATS,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
    progress: Progress = no_progress,
) -> StepCosts:
    """Runs a step of each size to warm up, then all sizes `num_repeats` times in turn, of which the
    shortest counts: whatever else happens on a machine makes a step longer.

    `run` runs one step of so many token rows and returns how long it took. When `limit_s` have passed nothing new is
    begun, but that two sizes are run in any case: without them there is no slope. So sizes are taken from far apart
    first.
    """
    begin_s = clock()
    order = _far_apart_first(sorted(set(sizes)))
    times_s: dict[int, list[float]] = {}
    tell = counted(progress, "measuring how long steps take", (1 + num_repeats) * len(order), "steps")
    for round_idx in range(1 + num_repeats):
        for idx, size in enumerate(order):
            tell(round_idx * len(order) + idx)
            if clock() - begin_s >= limit_s and (len(times_s) >= 2 or size in times_s):
                break
            times_s.setdefault(size, []).append(run(size))
    # A first run counts only where there is no other.
    return StepCosts({size: min(runs[1:] or runs) for size, runs in times_s.items()})


def _far_apart_first(sizes: list[int]) -> list[int]:
    """The smallest, then the middle one of the others, then the middles of what is on both sides of it, and so on."""
    order, parts = sizes[:1], [sizes[1:]]
    while parts := [part for part in parts if part]:
        order += [part[len(part) // 2] for part in parts]
        parts = [half for part in parts for half in (part[: len(part) // 2], part[len(part) // 2 + 1 :])]
    return order


def measure_runner(
    runner: ModelRunner, *, max_rows: int, num_blocks: int, block_size: int, progress: Progress = no_progress
) -> StepCosts:
    """Measures a runner's steps. Takes about LIMIT_S, or two steps where they are longer. Before the first request
    only."""
    num_sequences = min(max_rows, num_blocks)
    # Each sequence in a block of its own, and no longer than the context.
    max_len = min(block_size, runner.mirror.max_len)
    # Kernels compute rows in blocks, and the row behind a full batch may well be the first of another one.
    sizes = [size for size in {*DEFAULT_SIZES, max_rows, max_rows + 1} if size <= num_sequences * max_len]

    def run(num_rows: int) -> float:
        """A step of so many rows, on as many sequences as there may be."""
        num_entered = min(num_rows, num_sequences)
        spans: list[Span] = []
        entered: list[NewSequence] = []
        for row in range(num_entered):
            num_tokens = min(max_len, num_rows // num_entered + (row < num_rows % num_entered))
            draft = (0,) * (num_tokens - 1)
            name = f"timing-{row}"
            start = max_len - num_tokens
            known = (0,) * (start + 1)
            entered.append(NewSequence(name, row, known, len(known), SamplingParams(), OutputParams()))
            spans.append(Span(name, row, start, num_tokens, num_tokens, (row,), draft))
        plan = StepPlan(0, tuple(spans), tuple(entered))
        start_s = time.perf_counter()
        runner.execute(plan).result()
        return time.perf_counter() - start_s

    runner.clear_blocks(range(num_sequences))
    costs = measure_step_costs(run, sizes=sizes, num_repeats=NUM_REPEATS, limit_s=LIMIT_S, progress=progress)
    runner.execute(StepPlan(0, (), released=tuple(range(num_sequences))))
    return costs


def _rising(times_s: Sequence[float]) -> tuple[float, ...]:
    """The nearest sequence that never falls: where it does, neighbours take their mean (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for time_s in times_s:
        mean_s, count = time_s, 1
        while pools and pools[-1][0] > mean_s:
            last_s, last_count = pools.pop()
            mean_s = (mean_s * count + last_s * last_count) / (count + last_count)
            count += last_count
        pools.append((mean_s, count))
    return tuple(mean_s for mean_s, count in pools for _ in range(count))
