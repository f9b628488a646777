"""How long drafts should be: what has been accepted so far, when to stop trying, and what pays in this step. Pure.

Three parts that build on each other. `Acceptance` says how likely the tokens of a draft are to be accepted; `Backoff`
keeps a proposer that misses from being asked; `choose_lengths` spends the step's time on those positions of all drafts
that promise the most. `TrackRecord` is the first two for one sequence and one proposer. Steps are counted by the
caller; nothing here knows tokens, requests or clocks.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from loraplex_server.speculation.base import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, UNIVERSAL
from loraplex_server.speculation.costs import FREE, ProposerCost, StepCosts

# What to expect before anything is known: the chance that a draft token is accepted when those before it were, by
# level (see AcceptancePool); the last one holds for all levels beyond. Hopeful, for who is never tried is never known.
PRIORS: Mapping[str, tuple[float, ...]] = {
    PROMPT_LOOKUP: (0.3, 0.4, 0.7, 0.8, 0.85),
    MEDUSA: (0.9, 0.8, 0.7),
    DRAFT_MODEL: (0.9,),
    UNIVERSAL: (0.9,),
}
# Of a lookup in earlier outputs, by where it found its match: what those have in common is copied, and then a value
# comes that is another one.
HISTORY_PRIORS: Mapping[str, tuple[float, ...]] = {
    "history": (0.3, 0.3, 0.5, 0.8, 0.8, 0.7),
    "resumed": (0.3, 0.6, 0.8, 0.6),
}
DEFAULT_PRIOR = (0.9,)

_NUM_LEVELS = 32
_LEAST, _MOST = 0.01, 0.98  # of any rate: nothing is certain

# A pool's prior is worth this many trials, and no more than so many are remembered; half of them after so many steps.
_PRIOR_TRIALS = 4.0
_MOST_TRIALS = 400.0
_HALF_LIFE = 500

_SKILL_STEP = 0.2
_MOST_SKILL = 4.0
_IDLE_DECAY = 0.97  # per step

# Misses in a row mean that nothing is to be had when they are less likely than one in fifty to be chance: never two of
# them, always ten.
_NO_CHANCE = math.log(50.0)
_LEAST_MISSES, _MOST_MISSES = 3, 10
MAX_PAUSE = 128  # steps; a power of two, as all pauses
_MIN_MAX_PAUSE = 8
_NUM_DOUBLINGS = 4  # from the first pause to the longest
_NUM_PROBED = 1  # draft tokens
_PROBE_SHARE = 0.01  # of the time

# Positions that are less likely than this to be accepted never pay for the work around them.
_MIN_SURVIVAL = 0.02
_MAX_CYCLES = 3


class AcceptancePool:
    """Acceptance rates by level over all sequences that share a proposer: one draft model, one set of heads, lookup.

    A level is the evidence that the draft began with plus the position in the draft. Of a draft model or of heads it
    is the position alone; of a lookup it is how many tokens match at that point, so that what a match of 5 is worth
    counts for the fourth token behind a match of 1 too.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = tuple(prior[min(level, len(prior) - 1)] for level in range(_NUM_LEVELS))
        self._accepted = [0.0] * _NUM_LEVELS
        self._tried = [0.0] * _NUM_LEVELS
        self._news: list[tuple[int, int, bool]] = []  # what has been observed since the step began
        self._forgot_step = 0
        # Up to the level that somebody has asked for, without and with bounds.
        self._estimates: list[float] = []
        self._rates: list[float] = []
        self._step = -1

    @classmethod
    def of(cls, proposer: str, source: str = "") -> AcceptancePool:
        """One with the prior of that kind of proposer, and of where it found its draft."""
        return cls(HISTORY_PRIORS.get(source) or PRIORS.get(proposer, DEFAULT_PRIOR))

    def rates(self, step: int, num_levels: int = _NUM_LEVELS) -> Sequence[float]:
        """The chance that a draft token is accepted when those before it are, of the first `num_levels` levels at
        least. The same all through a step."""
        if step != self._step:
            self._step = step
            self._take_news()
            self._forget(step)
        if len(self._rates) < num_levels:
            self._estimate(min(num_levels, _NUM_LEVELS))
        return self._rates

    def observe(self, level: int, num_accepted: int, *, is_rejected: bool) -> None:
        """From `level` on that many tokens were accepted one after another, and the next one was rejected or not."""
        self._news.append((level, num_accepted, is_rejected))

    def _take_news(self) -> None:
        accepted, tried = self._accepted, self._tried
        for level, num_accepted, is_rejected in self._news:
            for idx in range(level, level + num_accepted + is_rejected):
                at = idx if idx < _NUM_LEVELS else _NUM_LEVELS - 1
                if tried[at] >= _MOST_TRIALS:
                    tried[at] *= 0.5
                    accepted[at] *= 0.5
                tried[at] += 1.0
                accepted[at] += idx < level + num_accepted
            self._drop_estimates(min(level, _NUM_LEVELS - 1))
        self._news.clear()

    def _forget(self, step: int) -> None:
        num_steps = step - self._forgot_step
        if num_steps * 16 < _HALF_LIFE:
            return  # too little to be worth the sums
        kept = 0.5 ** (num_steps / _HALF_LIFE)
        self._tried = [count * kept for count in self._tried]
        self._accepted = [count * kept for count in self._accepted]
        self._forgot_step = step
        self._drop_estimates(0)

    def _drop_estimates(self, level: int) -> None:
        """What is known of one level is expected of those behind it."""
        del self._estimates[level:], self._rates[level:]

    def _estimate(self, num_levels: int) -> None:
        estimates, rates = self._estimates, self._rates
        rate = estimates[-1] if estimates else 0.0
        for level in range(len(estimates), num_levels):
            # Where the level before does better than expected, so may this one: nobody knows before it is tried.
            expected = max(rate, self.prior[level])
            rate = (self._accepted[level] + _PRIOR_TRIALS * expected) / (self._tried[level] + _PRIOR_TRIALS)
            estimates.append(rate)
            rates.append(min(max(rate, _LEAST), _MOST))


class Acceptance:
    """How likely drafts of one proposer are to be accepted in one sequence: the pool's rates, shifted by its skill.

    Skill is one number, added to the logarithm of the odds of every level, and moved by every token tried by as much as
    the outcome surprised (as players are rated by Elo's method): a few drafts tell it, and a miss where little was
    expected says little about where much is. It fades while nothing is tried, or what did not pay once never would.
    """

    def __init__(self, pool: AcceptancePool) -> None:
        self.pool = pool
        self._skill = 0.0
        self._step = 0  # of the last draft

    def survival(self, step: int, num_tokens: int, evidence: int = 0, *, is_probe: bool = False) -> tuple[float, ...]:
        """The chance, for each of `num_tokens` draft tokens, that it and all before it are accepted.

        Of a probe: if the proposer is still as good as one hopes before knowing anything.
        """
        shift = math.exp(self._faded(step))
        rates, prior = self.pool.rates(step, evidence + num_tokens), self.pool.prior
        curve: list[float] = []
        chance = 1.0
        for level in range(evidence, evidence + num_tokens):
            at = level if level < _NUM_LEVELS else _NUM_LEVELS - 1
            rate = rates[at]
            odds = shift * rate
            rate = odds / (1.0 - rate + odds)
            if is_probe and rate < prior[at]:
                rate = prior[at]
            chance *= rate
            curve.append(chance)
        return tuple(curve)

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """`num_drafted` tokens were verified. Those behind the first that was rejected say nothing."""
        if num_drafted <= 0:
            return
        rates = self.pool.rates(step, evidence + num_accepted + 1)
        skill = self._faded(step)
        shift = math.exp(skill)
        for idx in range(min(num_accepted + 1, num_drafted)):
            rate = rates[min(evidence + idx, _NUM_LEVELS - 1)]
            odds = shift * rate
            skill += _SKILL_STEP * ((idx < num_accepted) - odds / (1.0 - rate + odds))
        self._skill = min(max(skill, -_MOST_SKILL), _MOST_SKILL)
        self._step = step
        self.pool.observe(evidence, num_accepted, is_rejected=num_accepted < num_drafted)

    def _faded(self, step: int) -> float:
        return self._skill * _IDLE_DECAY ** max(0, step - self._step - 1)


class Backoff:
    """When nothing is accepted any more: no drafts for ever more steps, then a probe of few tokens.

    Begins when misses in a row are no chance: the likelier a proposer usually is to be right, the sooner. Pauses end at
    steps that are multiples of their length: sequences that probe do so together, and share the call. A pause gives way
    to a match twice as long as the ones that failed: that is news.
    """

    def __init__(self) -> None:
        self._num_misses = 0  # since something was accepted
        self._doubt = 0.0  # how unlikely that was: minus the logarithm of the chance
        self._num_pauses = 0  # each twice as long as the one before
        self._last_step: int | None = None  # of the last draft; before it, the first one that could have had one
        self._failed_evidence = 0

    def limit(self, step: int, num_tokens: int, evidence: int = 0, max_pause: int = MAX_PAUSE) -> int:
        """How many of `num_tokens` draft tokens may be tried."""
        if self._last_step is None:
            self._last_step = step
        if not self.is_dry:
            return num_tokens
        if self.is_probe(step, max_pause):
            return min(num_tokens, _NUM_PROBED)
        return min(num_tokens, evidence) if evidence > 2 * self._failed_evidence else 0

    def is_probe(self, step: int, max_pause: int = MAX_PAUSE) -> bool:
        """Whether a draft of this step would be there to see whether anything is accepted again.

        Also after a long time without a draft, though nothing was missed: because others had no luck, say.
        """
        if self._last_step is None:
            return False
        pause = self._pause(max_pause) if self.is_dry else MAX_PAUSE
        return step >= (self._last_step // pause + 1) * pause

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0, *, rate: float = 0.5) -> None:
        """`rate`: how likely the first of the draft's tokens was to be accepted, so far as others know."""
        if num_drafted <= 0:
            return
        self._last_step = step
        if num_accepted > 0:
            # One token may be chance.
            is_well = num_accepted > 1 or num_accepted == num_drafted
            self._num_misses, self._doubt = 0, 0.0
            self._num_pauses = 0 if is_well else self._num_pauses // 2
            self._failed_evidence = 0
            return
        self._failed_evidence = max(evidence, self._failed_evidence // 2)
        self._num_misses += 1
        self._doubt += max(-math.log1p(-min(rate, _MOST)), _NO_CHANCE / _MOST_MISSES)
        if self.is_dry:
            self._num_pauses = min(self._num_pauses + 1, _NUM_DOUBLINGS + 1)

    @property
    def is_dry(self) -> bool:
        """Whether there are pauses, up to a `max_pause`, now."""
        return self._num_misses >= _LEAST_MISSES and self._doubt > _NO_CHANCE * 0.999

    def _pause(self, max_pause: int) -> int:
        return max(1, max_pause >> max(0, _NUM_DOUBLINGS + 1 - self._num_pauses))


def longest_pause(num_rows: int, num_sequences: int, step_costs: StepCosts, cost: ProposerCost) -> int:
    """How long `Backoff` may pause for, so that probes take a small part of the time and text that changes is noticed.

    Of `num_sequences` that probe together, in a step of `num_rows` rows without drafts.
    """
    step_s = step_costs.seconds(num_rows)
    probe_s = step_costs.seconds(num_rows + num_sequences) - step_s + cost.seconds(1, num_sequences)
    num_steps = math.ceil(probe_s / (_PROBE_SHARE * step_s))
    return min(MAX_PAUSE, max(_MIN_MAX_PAUSE, 1 << (num_steps - 1).bit_length()))


@dataclass(slots=True)
class TrackRecord:
    """One proposer's luck with one sequence: what its next draft promises."""

    acceptance: Acceptance
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def new(cls, pool: AcceptancePool) -> TrackRecord:
        return cls(Acceptance(pool))

    @property
    def is_dry(self) -> bool:
        """Whether it matters how long pauses may be."""
        return self.backoff.is_dry

    def survival(
        self,
        step: int,
        num_tokens: int,
        evidence: int = 0,
        *,
        max_pause: int = MAX_PAUSE,
        holds_back: bool = True,
    ) -> tuple[float, ...]:
        """The chances of the draft tokens that may be tried now, `num_tokens` at most, none during a pause.

        `evidence`: how many tokens match, of a lookup; else 0. `max_pause`: see `longest_pause`. Without `holds_back`
        nothing is left out: for requests of fixed length.
        """
        if not holds_back:
            return self.acceptance.survival(step, num_tokens, evidence)
        num_tokens = self.backoff.limit(step, num_tokens, evidence, max_pause)
        if num_tokens == 0:
            return ()
        return self.acceptance.survival(step, num_tokens, evidence, is_probe=self.backoff.is_probe(step, max_pause))

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """A draft was verified, of which `num_drafted` tokens had room; with none nothing is learned."""
        at = min(evidence, _NUM_LEVELS - 1)
        rate = self.acceptance.pool.rates(step, at + 1)[at]
        self.backoff.observe(step, num_drafted, num_accepted, evidence, rate=rate)
        self.acceptance.observe(step, num_drafted, num_accepted, evidence)


class Offer(NamedTuple):
    """What a sequence could be drafted in the next step."""

    proposer: str
    survival: Sequence[float]  # of each draft token, never rising; as many as there may be
    is_fixed: bool = False  # all of them, whether they pay or not


def choose_lengths(
    offers: Sequence[Offer],
    *,
    num_rows: int,
    num_tokens: int,
    budget: int,
    step_costs: StepCosts,
    proposer_costs: Mapping[str, ProposerCost],
) -> list[int]:
    """The number of tokens to draft for each offer, `budget` in all at most.

    What counts is expected tokens per second of the whole step, drafts included. `num_rows` and `num_tokens` are the
    step's without drafts: token rows, and tokens that come out of it. Each proposer takes its positions in order of
    survival, as many as serve the step best given what the others take, the cheapest proposer first.
    """
    groups = _grouped(offers, proposer_costs)
    step = _Step(num_rows, float(num_tokens), step_costs, groups)
    adaptive = [group for group in groups if group.positions]
    for _ in range(_MAX_CYCLES if len(adaptive) > 1 else 1):
        num_changed = sum(step.improve(group) for group in adaptive)
        if not num_changed:
            break
    lengths = [len(offer.survival) if offer.is_fixed else 0 for offer in offers]
    for group in adaptive:
        for _, depth, idx in group.positions[: group.num_taken]:
            lengths[idx] = depth
    _cut(offers, lengths, budget)
    return lengths


class _Group:
    """The offers of one proposer, and how many of their positions are taken."""

    __slots__ = (
        *("cost", "cost_s", "fixed_gain", "gain", "num_fixed", "num_fixed_rounds", "num_others", "num_taken"),
        *("num_tokens", "positions"),
    )

    def __init__(self, cost: ProposerCost) -> None:
        self.cost = cost
        self.positions: list[tuple[float, int, int]] = []  # survival, how deep, which offer: likeliest first
        self.num_fixed = 0
        self.num_fixed_rounds = 0
        self.fixed_gain = 0.0
        self.num_others = -1  # tokens that the other groups took when this one's number was chosen
        self.take(0, 0.0, 0)

    def take(self, num_taken: int, gain: float, num_rounds: int) -> None:
        """The first `num_taken` positions: `gain` tokens, the longest draft `num_rounds`."""
        self.num_taken = num_taken
        self.num_tokens = self.num_fixed + num_taken
        self.gain = self.fixed_gain + gain
        self.cost_s = self.cost.seconds(max(num_rounds, self.num_fixed_rounds), self.num_tokens)


class _Step:
    """The step as chosen so far."""

    def __init__(self, num_rows: int, gain: float, step_costs: StepCosts, groups: Sequence[_Group]) -> None:
        self._num_rows = num_rows
        self._gain = gain
        self._step_costs = step_costs
        self._groups = groups

    def improve(self, group: _Group) -> bool:
        """Takes the best number of the group's positions, given the other groups'; whether that is another number."""
        others, others_s, without = 0, 0.0, self._gain + group.fixed_gain
        for each in self._groups:
            if each is not group:
                others += each.num_tokens
                others_s += each.cost_s
                without += each.gain
        if others == group.num_others:
            return False  # seen before
        group.num_others = others
        num_before = group.num_taken
        group.take(0, 0.0, 0)
        num_rows = self._num_rows + others + group.num_fixed
        times_s = self._step_costs.span(num_rows, len(group.positions))
        best_rate = without / (times_s[0] + others_s + group.cost_s)
        best = (0, 0.0, 0)
        # Spelled out: this loop runs over every position of every draft.
        round_s, token_s = group.cost.per_round_s, group.cost.per_token_s
        base_s = others_s + group.cost.per_call_s + token_s * group.num_fixed
        gain, num_rounds = 0.0, group.num_fixed_rounds
        for num_taken, (survival, depth, _) in enumerate(group.positions, start=1):
            gain += survival
            if depth > num_rounds:
                num_rounds = depth
            rate = (without + gain) / (times_s[num_taken] + base_s + round_s * num_rounds + token_s * num_taken)
            if rate > best_rate:
                best_rate, best = rate, (num_taken, gain, num_rounds)
        group.take(*best)
        return group.num_taken != num_before


def _grouped(offers: Sequence[Offer], proposer_costs: Mapping[str, ProposerCost]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    for idx, offer in enumerate(offers):
        group = groups.get(offer.proposer)
        if group is None:
            group = groups[offer.proposer] = _Group(proposer_costs.get(offer.proposer, FREE))
        if offer.is_fixed:
            group.num_fixed += len(offer.survival)
            group.num_fixed_rounds = max(group.num_fixed_rounds, len(offer.survival))
            group.fixed_gain += sum(offer.survival)
            continue
        for depth, survival in enumerate(offer.survival, start=1):
            if survival < _MIN_SURVIVAL:
                break
            group.positions.append((survival, depth, idx))
    for group in groups.values():
        # Stable: where survival does not fall, what comes first in a draft stays first.
        group.positions.sort(key=_survival, reverse=True)
        group.take(0, 0.0, 0)
    if len(groups) == 1:
        return list(groups.values())
    return sorted(groups.values(), key=lambda group: group.cost.per_call_s + group.cost.per_round_s)


_survival: Callable[[tuple[float, int, int]], float] = itemgetter(0)


def _cut(offers: Sequence[Offer], lengths: list[int], budget: int) -> None:
    """Takes the least likely tokens away until the budget is kept; of fixed lengths only when nothing else is left."""
    excess = sum(lengths) - budget
    if excess <= 0:
        return
    tails = [_tail(offer, num_tokens, idx) for idx, (offer, num_tokens) in enumerate(zip(offers, lengths, strict=True))]
    heap = [tail for tail in tails if tail is not None]
    heapq.heapify(heap)
    while excess > 0 and heap:
        _, _, idx = heapq.heappop(heap)
        lengths[idx] -= 1
        excess -= 1
        tail = _tail(offers[idx], lengths[idx], idx)
        if tail is not None:
            heapq.heappush(heap, tail)


def _tail(offer: Offer, num_tokens: int, idx: int) -> tuple[bool, float, int] | None:
    """The last token of a draft of that length, in order of what goes first."""
    return (offer.is_fixed, offer.survival[num_tokens - 1], idx) if num_tokens > 0 else None
