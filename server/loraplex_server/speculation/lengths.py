"""How long drafts should be: what has been accepted so far, when to stop trying, and what pays in this step. Pure.

Three parts that build on each other. `Acceptance` says how likely the tokens of a draft are to be accepted; `Backoff`
keeps a proposer that misses from being asked; `choose_lengths` spends the step's time on those positions of all drafts
that promise the most. `TrackRecord` is the first two for one sequence and one proposer. Steps are counted by the
caller; nothing here knows tokens, requests or clocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from loraplex_server.speculation.base import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, UNIVERSAL
from loraplex_server.speculation.costs import FREE, ProposerCost, StepCosts

# What to expect before anything is known: the chance that a draft token is accepted when those before it were, by
# level (see Acceptance); the last one holds for all levels beyond. A little hopeful: who is never tried is never known.
PRIORS: Mapping[str, tuple[float, ...]] = {
    PROMPT_LOOKUP: (0.3, 0.35, 0.6, 0.7, 0.75, 0.8),
    MEDUSA: (0.7, 0.65, 0.6, 0.55),
    DRAFT_MODEL: (0.75,),
    UNIVERSAL: (0.7,),
}
DEFAULT_PRIOR = (0.6,)

_NUM_LEVELS = 32
_LEAST, _MOST = 0.01, 0.98  # of any rate: nothing is certain

# A pool's prior is worth this many trials, and no more than this many are remembered.
_POOL_PRIOR = 20.0
_POOL_TRIALS = 400.0
_POOL_HALF_LIFE = 1000  # steps

# A sequence's own luck: what counts of the past after another draft, and after a step without one. Luck that is not
# tried is forgotten, or a draft that did not pay once would never be tried again.
_DECAY = 0.88
_IDLE_DECAY = 0.98
_LUCK_PRIOR = 2.0

_MAX_PAUSE = 64  # steps
_NUM_PROBED = 2  # draft tokens

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
        self._prior = [prior[min(level, len(prior) - 1)] for level in range(_NUM_LEVELS)]
        self._hits = [0.0] * _NUM_LEVELS
        self._trials = [0.0] * _NUM_LEVELS
        self._step = 0
        self._rates = list(self._prior)

    @classmethod
    def of(cls, proposer: str) -> AcceptancePool:
        """One with the prior of that kind of proposer."""
        return cls(PRIORS.get(proposer, DEFAULT_PRIOR))

    def rates(self, step: int) -> Sequence[float]:
        """The chance by level that a draft token is accepted, given that those before it are."""
        self._forget(step)
        return self._rates

    def observe(self, step: int, level: int, num_accepted: int, *, is_rejected: bool) -> None:
        """From `level` on that many tokens were accepted one after another, and the next one was rejected or not."""
        self._forget(step)
        for idx in range(level, level + num_accepted + is_rejected):
            at = min(idx, _NUM_LEVELS - 1)
            if self._trials[at] >= _POOL_TRIALS:
                self._trials[at] *= 0.5
                self._hits[at] *= 0.5
            self._trials[at] += 1.0
            self._hits[at] += idx < level + num_accepted
            self._rates[at] = self._rate(at)

    def _forget(self, step: int) -> None:
        # Not at every step: the sum over all levels is not worth it.
        num_steps = step - self._step
        if num_steps * 16 < _POOL_HALF_LIFE:
            return
        kept = 0.5 ** (num_steps / _POOL_HALF_LIFE)
        self._step = step
        for level in range(_NUM_LEVELS):
            self._trials[level] *= kept
            self._hits[level] *= kept
            self._rates[level] = self._rate(level)

    def _rate(self, level: int) -> float:
        return (self._hits[level] + _POOL_PRIOR * self._prior[level]) / (self._trials[level] + _POOL_PRIOR)


class Acceptance:
    """How likely drafts of one proposer are to be accepted in one sequence: the pool's rates times the sequence's luck.

    Luck is accepted tokens over those that the pool let expect, both decayed: one number, so that a few drafts tell it,
    and a miss where little was expected says little about where much is.
    """

    def __init__(self, pool: AcceptancePool) -> None:
        self._pool = pool
        self._accepted = 0.0
        self._expected = 0.0
        self._step = 0

    def survival(self, step: int, num_tokens: int, evidence: int = 0) -> tuple[float, ...]:
        """The chance, for each of `num_tokens` draft tokens, that it and all before it are accepted."""
        luck = self._luck(step)
        rates = self._pool.rates(step)
        curve: list[float] = []
        chance = 1.0
        for level in range(evidence, evidence + num_tokens):
            rate = luck * rates[level if level < _NUM_LEVELS else -1]
            chance *= _MOST if rate > _MOST else rate if rate > _LEAST else _LEAST
            curve.append(chance)
        return tuple(curve)

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """`num_drafted` tokens were verified. Those behind the first that was rejected say nothing."""
        if num_drafted <= 0:
            return
        num_tried = min(num_accepted + 1, num_drafted)
        rates = self._pool.rates(step)
        expected = sum(rates[min(level, _NUM_LEVELS - 1)] for level in range(evidence, evidence + num_tried))
        kept = _DECAY * self._kept(step)
        self._accepted = self._accepted * kept + num_accepted
        self._expected = self._expected * kept + expected
        self._step = step
        self._pool.observe(step, evidence, num_accepted, is_rejected=num_accepted < num_drafted)

    def _luck(self, step: int) -> float:
        kept = self._kept(step)
        return (self._accepted * kept + _LUCK_PRIOR) / (self._expected * kept + _LUCK_PRIOR)

    def _kept(self, step: int) -> float:
        return _IDLE_DECAY ** max(0, step - self._step - 1)


class Backoff:
    """When nothing is accepted: no drafts for ever more steps, then a probe of few tokens.

    Pauses end at steps that are multiples of their length: sequences that probe do so together, and share the call. A
    pause gives way to a match twice as long as the ones that failed: that is news.
    """

    def __init__(self) -> None:
        self._num_misses = 0  # since something was accepted
        self._resume_step = 0
        self._failed_evidence = 0

    def limit(self, step: int, num_tokens: int, evidence: int = 0) -> int:
        """How many of `num_tokens` draft tokens may be tried."""
        if step < self._resume_step:
            return min(num_tokens, evidence) if evidence > 2 * self._failed_evidence else 0
        return min(num_tokens, _NUM_PROBED) if self._num_misses >= 2 else num_tokens

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        if num_drafted <= 0:
            return
        if num_accepted > 0:
            # One token may be chance.
            is_well = num_accepted > 1 or num_accepted == num_drafted
            self._num_misses = 0 if is_well else self._num_misses // 2
            self._failed_evidence = 0
            self._resume_step = step
            return
        was_due = step >= self._resume_step
        self._failed_evidence = max(evidence, self._failed_evidence // 2 if was_due else self._failed_evidence)
        self._num_misses += 1
        if self._num_misses >= 2:
            pause = min(_MAX_PAUSE, 1 << (self._num_misses - 1))
            self._resume_step = (step // pause + 1) * pause


@dataclass(slots=True)
class TrackRecord:
    """One proposer's luck with one sequence: what its next draft promises."""

    acceptance: Acceptance
    backoff: Backoff = field(default_factory=Backoff)

    @classmethod
    def new(cls, pool: AcceptancePool) -> TrackRecord:
        return cls(Acceptance(pool))

    def survival(self, step: int, num_tokens: int, evidence: int = 0, *, holds_back: bool = True) -> tuple[float, ...]:
        """The chances of the draft tokens that may be tried now, `num_tokens` at most, none during a pause.

        `evidence`: how many tokens match, of a lookup; else 0. Without `holds_back` nothing is left out: for requests
        of fixed length.
        """
        if holds_back:
            num_tokens = self.backoff.limit(step, num_tokens, evidence)
        return self.acceptance.survival(step, num_tokens, evidence)

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """A draft was verified, of which `num_drafted` tokens had room; with none nothing is learned."""
        self.acceptance.observe(step, num_drafted, num_accepted, evidence)
        self.backoff.observe(step, num_drafted, num_accepted, evidence)


@dataclass(frozen=True, slots=True)
class Offer:
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
        others = sum(each.num_tokens for each in self._groups if each is not group)
        if others == group.num_others:
            return False  # seen before
        group.num_others = others
        num_before = group.num_taken
        group.take(0, 0.0, 0)
        num_rows = self._num_rows + others + group.num_fixed
        without = self._gain + sum(each.gain for each in self._groups)
        others_s = sum(each.cost_s for each in self._groups if each is not group)
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
    return sorted(groups.values(), key=lambda group: group.cost.per_call_s + group.cost.per_round_s)


def _survival(position: tuple[float, int, int]) -> float:
    return position[0]


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
