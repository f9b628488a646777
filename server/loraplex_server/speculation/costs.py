"""What a step and a draft cost, in seconds: a table measured at start-up, and averages of what proposers take.

Pure: whoever measures passes a function and a clock. Knows neither model nor device, nor what the costs are for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

DEFAULT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LIMIT_S = 2.0
NUM_REPEATS = 5

# Of what a new observation differs by, how much is taken over; more where the last one is long ago.
_LEARNING_RATE = 0.2
# An observation counts as at most this many times what was expected: a pause of the machine is not what drafting costs.
_MAX_SURPRISE = 3.0
# What has not been seen for this long is believed to cost half. An estimate that keeps a proposer from being used
# keeps itself from being corrected, so it must fade.
_HALF_LIFE_S = 20.0
_CATCH_UP_HALF_LIFE_S = 60.0
# The first observations are believed in part: they tend to be the slow ones.
_NUM_TO_TRUST = 4
# Tokens beside rounds, in what a difference is put down to: drafting for more sequences at once is cheap.
_TOKEN_SCALE = 1.0 / 16.0


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
        """Of a step with that many token rows; of none, as of one."""
        if num_rows < len(self._table):
            return self._table[max(num_rows, 1)]
        return self._table[-1] + self._slope_s * (num_rows - self.sizes[-1])

    def span(self, num_rows: int, num_more: int) -> list[float]:
        """Of steps with `num_rows` to `num_rows + num_more` rows, at one go."""
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
    sizes: Iterable[int] = DEFAULT_SIZES,
    num_repeats: int = NUM_REPEATS,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = time.monotonic,
) -> StepCosts:
    """Runs a step of each size to warm up, then all sizes `num_repeats` times in turn, of which the shortest counts:
    whatever else happens on a machine makes a step longer.

    `run` runs one step of so many token rows and returns how long it took. When `limit_s` have passed nothing new is
    begun, but that the two smallest sizes are run in any case: without them there is no slope.
    """
    begin_s = clock()
    times_s: dict[int, list[float]] = {}
    for _ in range(1 + num_repeats):
        for size in sorted(set(sizes)):
            if clock() - begin_s >= limit_s and (len(times_s) >= 2 or size in times_s):
                break
            times_s.setdefault(size, []).append(run(size))
    # A first run counts only where there is no other.
    return StepCosts({size: min(runs[1:] or runs) for size, runs in times_s.items()})


class ProposerCost(NamedTuple):
    """What one call of a proposer costs beside the step."""

    per_call_s: float = 0.0
    per_round_s: float = 0.0  # times the longest draft: what has to run one token after another
    per_token_s: float = 0.0  # times the tokens of all drafts

    def seconds(self, num_rounds: int, num_tokens: int) -> float:
        if num_tokens <= 0:
            return 0.0
        return self.per_call_s + self.per_round_s * num_rounds + self.per_token_s * num_tokens


FREE = ProposerCost()


class LeastCost(NamedTuple):
    """What the steps of a draft model take when nothing else is done. Drafting with it never costs less."""

    per_round_s: float = 0.0
    per_read_token_s: float = 0.0  # of a text that is new to it

    @classmethod
    def of(cls, step_costs: StepCosts, num_rounds: float = 1.0) -> LeastCost:
        """From steps that were measured at the start. `num_rounds`: for one token of the target's."""
        one_s, num_rows = step_costs.seconds(1), step_costs.sizes[-1]
        read_s = (step_costs.seconds(num_rows) - one_s) / max(1, num_rows - 1)
        return cls(one_s * num_rounds, read_s * num_rounds)


_NO_LEAST: Mapping[str, LeastCost] = {}


class ProposerCosts:
    """Running averages of what each proposer costs. Owns them; `now_s` is anybody's monotonic clock, always the same.

    A proposer that nobody has observed costs the least that it can, so that it gets used and observed.
    """

    def __init__(self, least: Mapping[str, LeastCost] = _NO_LEAST) -> None:
        self._least = least
        self._costs: dict[str, ProposerCost] = {}
        self._seen_s: dict[str, float] = {}
        self._num_seen: Counter[str] = Counter()

    def observe(self, proposer: str, num_rounds: int, num_tokens: int, seconds: float, now_s: float) -> None:
        """A call that was asked for `num_tokens` in all, `num_rounds` for the longest draft, took `seconds`.

        Leave calls out in which a sequence came for the first time: a prompt that is read once is not what drafting
        costs.
        """
        if num_tokens <= 0 or num_rounds <= 0 or seconds < 0.0:
            return
        known = self._costs.get(proposer, FREE)
        expected = known.seconds(num_rounds, num_tokens)
        if expected > 0.0:
            seconds = min(seconds, _MAX_SURPRISE * expected)
        gain = 1.0 - (1.0 - _LEARNING_RATE) * self._trust(proposer, now_s)
        if seconds > expected and self._num_seen[proposer] >= _NUM_TO_TRUST:
            gain = _LEARNING_RATE  # after a while without it nothing of it is in the caches
        self._costs[proposer] = _corrected(known, num_rounds, num_tokens, gain * (seconds - expected))
        self._seen_s[proposer] = now_s
        self._num_seen[proposer] += 1

    def cost(self, proposer: str, now_s: float) -> ProposerCost:
        known = self._costs.get(proposer, FREE)
        trust = self._trust(proposer, now_s)
        round_s = known.per_round_s * trust
        if proposer in self._least:
            round_s = max(round_s, self._least[proposer].per_round_s)
        return ProposerCost(known.per_call_s * trust, round_s, known.per_token_s * trust)

    def _trust(self, proposer: str, now_s: float) -> float:
        """1 for what has just been observed, not for the first time, fading to 0."""
        if proposer not in self._seen_s:
            return 0.0
        age_s = max(0.0, now_s - self._seen_s[proposer])
        return min(1.0, self._num_seen[proposer] / _NUM_TO_TRUST) * 0.5 ** (age_s / _HALF_LIFE_S)


class CatchUpCosts:
    """What it takes each proposer to read a token of a sequence that is new to it. Owns running averages, which fade as
    those above do, but more slowly: what they are for is asked once per sequence, not in every step.

    The first observation says nothing: whatever runs for the first time takes ten times as long.
    """

    def __init__(self, least: Mapping[str, LeastCost] = _NO_LEAST) -> None:
        self._least = least
        self._per_token_s: dict[str, float] = {}
        self._seen_s: dict[str, float] = {}
        self._num_seen: Counter[str] = Counter()

    def observe(self, proposer: str, num_tokens: int, seconds: float, now_s: float) -> None:
        """Reading `num_tokens` tokens took `seconds`, drafting not included."""
        self._num_seen[proposer] += 1
        num_before = self._num_seen[proposer] - 2
        if num_before < 0:
            return
        seen_s, known_s = max(0.0, seconds) / num_tokens, self._per_token_s.get(proposer, 0.0)
        if known_s > 0.0:
            seen_s = min(seen_s, _MAX_SURPRISE * known_s)
        self._per_token_s[proposer] = known_s + (seen_s - known_s) * max(_LEARNING_RATE, 1.0 / (1 + num_before))
        self._seen_s[proposer] = now_s

    def seconds(self, proposer: str, num_tokens: int, now_s: float) -> float:
        """Of reading so many tokens: the least where that is not known, so that it gets known."""
        token_s = self._least[proposer].per_read_token_s if proposer in self._least else 0.0
        if proposer in self._per_token_s:
            age_s = max(0.0, now_s - self._seen_s[proposer])
            token_s = max(token_s, self._per_token_s[proposer] * 0.5 ** (age_s / _CATCH_UP_HALF_LIFE_S))
        return token_s * num_tokens


def _corrected(cost: ProposerCost, num_rounds: int, num_tokens: int, difference_s: float) -> ProposerCost:
    """The nearest cost that explains `difference_s` more (normalised least mean squares), no part of it negative."""
    scaled = num_tokens * _TOKEN_SCALE
    share_s = difference_s / (1.0 + num_rounds * num_rounds + scaled * scaled)
    return ProposerCost(
        max(0.0, cost.per_call_s + share_s),
        max(0.0, cost.per_round_s + share_s * num_rounds),
        max(0.0, cost.per_token_s + share_s * scaled * _TOKEN_SCALE),
    )


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
