"""Speculation policy: proposer and draft length of each sequence in a step.

The policy maximises expected tokens per second of the whole batch. An acceptance rate is kept per proposer, per source
of its drafts (of heads per adapter) and per level, as a running average over all sequences; one factor per sequence, on
the odds, follows how its own drafts do. A step's time comes from a table measured at start-up, a draft's from a running
average of the proposer's calls. Of several proposers a sequence gets the one that gains the most tokens beyond those
which the time would have brought anyway. Then draft tokens of the whole batch are taken in order of the probability
that they are reached, as far as tokens per second grow. Misses in a row that are no chance begin a cooldown: no drafts
for a while, then a probe of one token, each pause twice as long as the last one, up to where probes take 1 % of the
time. A proposer that has to read the text first is asked once the steps that it would have sped up had saved as much as
reading takes.

Pure except for the running averages that it owns. Knows neither tensors nor what a draft says, and of a proposer only
what `Proposer` says of it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from loraplex_contracts.plan import Candidate
from loraplex_server.speculation.proposer import Ask, Choice, Piece, Proposer, remember
from loraplex_server.speculation.step_costs import StepCosts

# Trials that a prior is worth, and the most that a rate remembers.
_PRIOR_TRIALS, _MOST_TRIALS = 4.0, 200.0
_NUM_LEVELS = 32
_LEAST, _MOST = 0.02, 0.98  # of any rate: nothing is certain
# How much of a draft token's surprise moves the logarithm of a sequence's odds, and how far they go.
_SKILL_STEP, _MOST_SKILL = 0.1, 4.0
_IDLE_DECAY = 0.97  # of that logarithm, per step without a draft: else what did not pay once never would
# Misses in a row are no chance when they are less likely than one in fifty.
_NO_CHANCE = math.log(50.0)
_PROBE_SHARE = 0.01  # of the time
_LEAST_PAUSE, MOST_PAUSE = 8, 128  # steps, powers of two: sequences probe together, and share the call
# A proposer whose drafts begin in more than one way (lookup) is looked at in every fourth step only while it is in a
# cooldown, or after eight offers in a row that did not pay: at batch 32 that is 0.964x to 0.976x of the speed without
# speculation instead of 0.951x to 0.956x.
_REST, _MANY_REFUSED = 4, 8
_LONG_REST = 16  # steps until a proposer that did not pay is looked at again
# What a call adds to the average of what calls take, which counts at most three times the average: a pause of the
# machine is not what drafting costs. Unused averages halve in this time, or they would never be corrected.
_LEARNING_RATE, _MOST_SURPRISE, _HALF_LIFE_S = 0.2, 3.0, 20.0
_TOKEN_UNITS = 1.0 / 16.0
_PACE_KEPT = 0.997  # of the average pace, from one sequence's step to the next


class AcceptanceRates:
    """Rates at which draft tokens are accepted when those before were, by level, over all sequences of a proposer.

    A level is the evidence that the draft began with plus the position in the draft. Of a draft model or of heads it is
    the position alone; of a lookup it is how many tokens match at that point.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = [prior[min(level, len(prior) - 1)] for level in range(_NUM_LEVELS)]
        self.rates = list(self.prior)
        self._num_trials = [_PRIOR_TRIALS] * _NUM_LEVELS

    def observe(self, level: int, num_accepted: int, num_tried: int) -> None:
        """Learns that from `level` on `num_tried` tokens were verified, of which `num_accepted` were right."""
        for idx in range(num_tried):
            at = min(level + idx, _NUM_LEVELS - 1)
            self._num_trials[at] = min(self._num_trials[at] + 1.0, _MOST_TRIALS)
            rate = self.rates[at] + ((idx < num_accepted) - self.rates[at]) / self._num_trials[at]
            self.rates[at] = min(max(rate, _LEAST), _MOST)
            # An untried level may be as good as the one before it.
            if at + 1 < _NUM_LEVELS and self._num_trials[at + 1] == _PRIOR_TRIALS:
                self.rates[at + 1] = max(self.prior[at + 1], self.rates[at])


class TrackRecord:
    """One proposer's record in one sequence: its odds beside those of all sequences, and its cooldown."""

    __slots__ = ("_doubt", "_failed_evidence", "_last_step", "_num_pauses", "_skill", "shared")

    def __init__(self, shared: AcceptanceRates) -> None:
        self.shared = shared
        self._skill = 0.0  # logarithm of the factor on the odds
        self._doubt = 0.0  # minus the logarithm of the chance of all misses since something was accepted
        self._num_pauses = 0
        self._last_step = -1  # of the last draft
        self._failed_evidence = 0

    @property
    def is_cooling(self) -> bool:
        return self._doubt >= _NO_CHANCE

    def next_step(self, max_pause: int) -> int:
        """The step from which on a draft may be tried; of one in a cooldown, a multiple of the pause."""
        pause = max(1, max_pause >> max(0, 5 - self._num_pauses)) if self.is_cooling else MOST_PAUSE
        return (self._last_step // pause + 1) * pause

    def survival(self, step: int, num_tokens: int, evidence: int = 0, *, max_pause: int | None) -> list[float]:
        """The chance, for each of at most `num_tokens` draft tokens, that it and all before it are accepted; empty in a
        cooldown. After a pause it is one token, expected to be accepted as if nothing were known. `evidence`: how many
        tokens match. `max_pause`: in steps; None: no cooldown, for requests of fixed length."""
        is_probe = False
        if self._last_step < 0:
            self._last_step = step
        if max_pause is not None:
            is_probe = step >= self.next_step(max_pause)
            if self.is_cooling:
                if is_probe:
                    num_tokens = 1
                elif evidence > 2 * self._failed_evidence:
                    num_tokens = min(num_tokens, evidence)
                else:
                    return []
        factor = math.exp(self._faded_skill(step))
        curve: list[float] = []
        chance = 1.0
        rates = self.shared.rates
        for level in range(evidence, evidence + num_tokens):
            at = level if level < _NUM_LEVELS else _NUM_LEVELS - 1
            odds = factor * rates[at]
            rate = odds / (1.0 - rates[at] + odds)
            if is_probe and rate < self.shared.prior[at]:
                rate = self.shared.prior[at]
            chance *= rate
            curve.append(chance)
        return curve

    def observe(self, step: int, num_drafted: int, num_accepted: int, evidence: int = 0) -> None:
        """Learns from `num_drafted` tokens that were verified. Those behind the first that was rejected say nothing."""
        if num_drafted <= 0:
            return
        rates, num_tried = self.shared.rates, min(num_accepted + 1, num_drafted)
        if num_accepted:
            # One token may be chance.
            self._num_pauses = 0 if num_accepted > 1 or num_accepted == num_drafted else self._num_pauses // 2
            self._doubt = 0.0
            self._failed_evidence = 0
        else:
            surprise = -math.log1p(-rates[min(evidence, _NUM_LEVELS - 1)])
            self._doubt += min(max(surprise, _NO_CHANCE / 9.99), _NO_CHANCE / 2.99)
            self._num_pauses += self.is_cooling
            self._failed_evidence = max(evidence, self._failed_evidence // 2)
        self._skill = self._faded_skill(step)
        factor = math.exp(self._skill)
        for idx in range(num_tried):
            rate = rates[min(evidence + idx, _NUM_LEVELS - 1)]
            self._skill += _SKILL_STEP * ((idx < num_accepted) - factor * rate / (1.0 - rate + factor * rate))
        self._skill = min(max(self._skill, -_MOST_SKILL), _MOST_SKILL)
        self._last_step = step
        self.shared.observe(evidence, num_accepted, num_tried)

    def _faded_skill(self, step: int) -> float:
        return self._skill * _IDLE_DECAY ** max(0, step - self._last_step - 1)


def longest_pause(num_rows: int, num_users: int, step_costs: StepCosts, call_s: float) -> int:
    """The steps of the longest pause, so that probes take a small part of the time: one token for each of `num_users`
    in a step of `num_rows` rows, by a call of `call_s`."""
    step_s = step_costs.seconds(num_rows)
    probe_s = step_costs.seconds(num_rows + num_users) - step_s + call_s
    num_steps = math.ceil(probe_s / (_PROBE_SHARE * step_s))
    return min(MOST_PAUSE, max(_LEAST_PAUSE, 1 << (num_steps - 1).bit_length()))


class LeastCost(NamedTuple):
    """The time of a draft model's steps when nothing else is done. Drafting with it never costs less."""

    per_round_s: float = 0.0
    per_read_token_s: float = 0.0  # of a text that is new to it

    @classmethod
    def of(cls, step_costs: StepCosts, num_rounds: float = 1.0) -> LeastCost:
        """The least cost, from steps that were measured at the start. `num_rounds`: for one token of the target's."""
        one_s, num_rows = step_costs.seconds(1), step_costs.sizes[-1]
        read_s = (step_costs.seconds(num_rows) - one_s) / max(1, num_rows - 1)
        return cls(one_s * num_rounds, read_s * num_rounds)


class RunningCost:
    """A running average of seconds, never less than `least_s`. The first call is left out: whatever runs for the first
    time takes ten times as long."""

    def __init__(self, least_s: float = 0.0) -> None:
        self._least_s = least_s
        self._known_s = 0.0
        self._seen_s = 0.0
        self._num_seen = 0

    def seconds(self, now_s: float) -> float:
        return max(self._least_s, self._known_s * 0.5 ** ((now_s - self._seen_s) / _HALF_LIFE_S))

    def observe(self, seconds: float, now_s: float) -> None:
        self._num_seen += 1
        if self._num_seen < 2:
            return
        known_s = self._known_s
        if known_s <= 0.0:
            gain = 1.0
        elif seconds > known_s:
            gain = _LEARNING_RATE  # after a while without it nothing of it is in the caches
            seconds = min(seconds, _MOST_SURPRISE * known_s)
        else:
            gain = 1.0 - (1.0 - _LEARNING_RATE) * 0.5 ** ((now_s - self._seen_s) / _HALF_LIFE_S)
        self._known_s = known_s + gain * (max(0.0, seconds) - known_s)
        self._seen_s = now_s


class CallCost(NamedTuple):
    """The cost of a proposer's calls, in units of which a running average knows the time."""

    unit_s: float = 0.0
    drafts_at_once: bool = False

    def units(self, num_rounds: int, num_tokens: int) -> float:
        """The units of a call for `num_tokens` tokens, of which the longest draft has `num_rounds`: a draft model runs
        a round for each of those, heads guess all in one, and sixteen tokens take as long as a round."""
        return (1 if self.drafts_at_once and num_rounds else num_rounds) + num_tokens * _TOKEN_UNITS

    def seconds(self, num_rounds: int, num_tokens: int) -> float:
        return self.unit_s * self.units(num_rounds, num_tokens)


class SurvivalCurve(NamedTuple):
    """The chances of a proposer's draft tokens for one sequence to survive verification."""

    proposer: str
    survival: Sequence[float]  # of each draft token, never rising; as many as there may be
    fixed_length: bool = False  # all of them, whether they pay or not


def choose_lengths(
    curves: Sequence[SurvivalCurve],
    *,
    num_rows: int,
    num_tokens: int,
    budget: int,
    step_costs: StepCosts,
    call_costs: Mapping[str, CallCost],
) -> list[int]:
    """The number of tokens to draft for each curve, `budget` in all at most: the most expected tokens per second of the
    whole step.

    `num_rows` and `num_tokens` are the step's without drafts: token rows, and tokens that come out of it.
    `call_costs`: by proposer. Each proposer takes its positions in order of survival, as many as serve the step best
    beside those taken already, the cheapest proposer first.
    """
    lengths = [len(curve.survival) if curve.fixed_length else 0 for curve in curves]
    num_taken = sum(lengths)
    gain = num_tokens + sum(sum(curve.survival) for curve in curves if curve.fixed_length)
    names = sorted({curve.proposer for curve in curves}, key=lambda name: call_costs[name].unit_s)
    fixed: dict[str, tuple[int, int]] = {}  # rounds and tokens
    for name in names:
        drafts = [num for curve, num in zip(curves, lengths, strict=True) if curve.proposer == name]
        fixed[name] = max(drafts), sum(drafts)
    drafts_s = sum(call_costs[name].seconds(*fixed[name]) for name in names)
    for name in names:
        positions = [
            (survival, depth, idx)
            for idx, curve in enumerate(curves)
            if curve.proposer == name and not curve.fixed_length
            for depth, survival in enumerate(curve.survival, start=1)
            if survival >= _LEAST
        ]
        # Stable: where survival does not fall, what comes first in a draft stays first.
        positions.sort(key=itemgetter(0), reverse=True)
        times_s = step_costs.span(num_rows + num_taken, len(positions))
        cost, (num_rounds, num_fixed) = call_costs[name], fixed[name]
        others_s = drafts_s - cost.seconds(num_rounds, num_fixed)
        num_best, best_gain, found = 0, gain, gain
        best_rate = gain / (times_s[0] + drafts_s)
        for num, (survival, depth, _) in enumerate(positions, start=1):
            found += survival
            if depth > num_rounds:
                num_rounds = depth
            taken_s = others_s + cost.seconds(num_rounds, num_fixed + num) if cost.unit_s else others_s
            rate = found / (times_s[num] + taken_s)
            if rate > best_rate:
                num_best, best_rate, best_gain, drafts_s = num, rate, found, taken_s
        for _, depth, idx in positions[:num_best]:
            lengths[idx] = depth
        num_taken, gain = num_taken + num_best, best_gain
    _cut_to_budget(curves, lengths, budget)
    return lengths


def _cut_to_budget(curves: Sequence[SurvivalCurve], lengths: list[int], budget: int) -> None:
    """Shortens drafts to `budget` tokens together: the least likely tokens go, of fixed lengths only when nothing else
    is left."""
    tails = [
        (curve.fixed_length, curve.survival[num - 1], idx)
        for idx, (curve, num) in enumerate(zip(curves, lengths, strict=True))
        if num
    ]
    heapq.heapify(tails)
    for _ in range(sum(lengths) - budget):
        is_fixed, _, idx = heapq.heappop(tails)
        lengths[idx] -= 1
        if lengths[idx]:
            heapq.heappush(tails, (is_fixed, curves[idx].survival[lengths[idx] - 1], idx))


@dataclass(slots=True)
class DraftedSequence:
    """The result of drafting for one sequence so far."""

    request_id: str
    choice: Choice
    records: dict[tuple[str, str], TrackRecord] = field(default_factory=dict[tuple[str, str], TrackRecord])  # by source
    rests: dict[str, int] = field(default_factory=dict[str, int])  # the step in which a proposer is looked at again
    failed: set[str] = field(default_factory=set[str])  # proposers that raised over it, and are left out
    asked: set[str] = field(default_factory=set[str])  # proposers that have seen it
    num_refused: dict[str, int] = field(default_factory=dict[str, int])  # offers that did not pay, since one was right
    missed_s: dict[str, float] = field(default_factory=dict[str, float])  # what one that is behind would have saved
    num_tokens: int = 0  # when it was last looked at
    # The fields below are those of the draft under way.
    proposer: str = ""
    pieces: Sequence[Piece] = ()

    def may_draft(self, step: int) -> bool:
        """True if any of its proposers is looked at in that step."""
        return any(self.rests.get(name, 0) <= step for name in self.choice.proposers if name not in self.failed)


class Option(NamedTuple):
    """One proposer's offer for one sequence in this step."""

    candidate: Candidate
    sequence: DraftedSequence
    proposer: str
    survival: Sequence[float]
    pieces: Sequence[Piece]
    num_behind: int = 0  # tokens that the proposer has to read first


class Policy:
    """Chooses proposers and draft lengths (see the module). `proposers` by the names that Choice has for them."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        step_costs: StepCosts,
        least_costs: Mapping[str, LeastCost],
        max_step_tokens: int,
        clock: Callable[[], float],
        on_failure: Callable[[str, str, Exception], None],
    ) -> None:
        """`on_failure`: told of a proposer that raised, of what it could not do, and of the error."""
        self._proposers = proposers
        self._step_costs = step_costs
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._on_failure = on_failure
        self._unit_costs = {name: RunningCost(least.per_round_s) for name, least in least_costs.items()}
        self._read_costs = {name: RunningCost(least.per_read_token_s) for name, least in least_costs.items()}
        self._rates: dict[tuple[str, str, Hashable], AcceptanceRates] = {}
        self._paces: dict[tuple[str, ...], float] = {}  # plain steps per token, by choice of proposers
        self._step = 0
        self._step_size = 1.0  # in plain steps, of the last one
        # The fields below are those of the present step.
        self._choices: Sequence[Choice | None] = ()
        self._pauses: dict[str, int] = {}
        self._costs: dict[str, CallCost] = {}

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._step

    def skip(self) -> None:
        """Counts a step without drafts."""
        self._step += 1
        self._step_size = 1.0

    def begin(self, choices: Sequence[Choice | None]) -> None:
        """Begins a step with a row for each of these choices; None where a row does not speculate."""
        self._step += 1
        self._choices = choices
        self._pauses.clear()
        self._costs.clear()

    def choose(
        self,
        waiting: Sequence[tuple[Candidate, DraftedSequence]],
        silent: Mapping[str, Collection[str]],
        num_drafted: int,
    ) -> list[tuple[Option, int]]:
        """The proposer to ask for each of these, and for how many tokens; those that get none are left out. `silent`:
        by sequence, proposers that had nothing to say in this step. `num_drafted`: tokens that others have been
        drafted."""
        found = [self._best(one, sequence, silent.get(one.sequence_id, ())) for one, sequence in waiting]
        options = [option for option in found if option is not None]
        if not options:
            return []
        num_rows = len(self._choices)
        lengths = choose_lengths(
            [SurvivalCurve(one.proposer, one.survival, one.sequence.choice.params.fixed_length) for one in options],
            num_rows=num_rows + num_drafted,
            num_tokens=num_rows,
            budget=self._max_step_tokens - num_rows - num_drafted,
            step_costs=self._step_costs,
            call_costs={one.proposer: self._cost(one.proposer) for one in options},
        )
        for option, num in zip(options, lengths, strict=True):
            if num == 0:
                self._refuse(option)
        return [(option, num) for option, num in zip(options, lengths, strict=True) if num > 0]

    def end(self, drafts: Sequence[tuple[str, int]]) -> None:
        """Ends the step: it has drafts of these proposers, of so many tokens."""
        num_rows = len(self._choices)
        taken_s = self._step_costs.seconds(num_rows + sum(num for _, num in drafts))
        for name in {name for name, _ in drafts}:
            lengths = [num for one, num in drafts if one == name]
            taken_s += self._cost(name).seconds(max(lengths), sum(lengths))
        self._step_size = taken_s / self._step_costs.seconds(num_rows)

    # --- what is learned ----------------------------------------------------------------------------------------------

    def learn(self, sequence: DraftedSequence, num_drafted: int, num_accepted: int) -> None:
        """Learns from a verified draft. Each piece stands for its source, as far as those before it were right."""
        if num_accepted:
            sequence.num_refused.pop(sequence.proposer, None)
        for source, num_tokens, evidence, _ in sequence.pieces:
            num = min(num_tokens, num_drafted)
            self._record(sequence, sequence.proposer, source).observe(self._step, num, min(num, num_accepted), evidence)
            num_drafted -= num
            num_accepted -= num
            if num_drafted <= 0 or num_accepted < 0:
                break

    def note_call(
        self, name: str, asked: Sequence[tuple[Option, int]], drafts: Sequence[Sequence[int]], seconds: float
    ) -> None:
        """Learns the cost of a call, which was for so many tokens of each and gave these drafts. A prompt that is read
        for the first time is not what drafting costs, and neither are heads on their way, which give nothing."""
        if self._proposers[name].is_free:
            return
        cost = self._cost(name)
        behind = [one for one, _ in asked if one.num_behind]
        num_read = sum(one.num_behind - self._proposers[name].num_behind(one.candidate) for one in behind)
        now_s = self._clock()
        if num_read > 0:
            lengths = [len(draft) for draft in drafts]
            seconds -= cost.seconds(max(lengths), sum(lengths))
            self._read_costs.setdefault(name, RunningCost()).observe(seconds / num_read, now_s)
        elif any(drafts) and all(name in one.sequence.asked for one, _ in asked):
            units = cost.units(max(num for _, num in asked), sum(num for _, num in asked))
            self._unit_costs.setdefault(name, RunningCost()).observe(seconds / units, now_s)
        for option, _ in asked:
            option.sequence.asked.add(name)

    # --- the best proposer --------------------------------------------------------------------------------------------

    def _best(self, candidate: Candidate, sequence: DraftedSequence, silent: Collection[str]) -> Option | None:
        """The proposer of the most value, if any; of those that are behind, one that can make up for that."""
        choice = sequence.choice
        if len(choice.proposers) > 1:
            self._note_pace(sequence, len(candidate.token_ids))
        options: list[Option] = []
        for name in choice.proposers:
            if name in silent or name in sequence.failed or self._step < sequence.rests.get(name, 0):
                continue
            try:
                option = self._option(candidate, sequence, name)
            except Exception as error:
                sequence.failed.add(name)
                self._on_failure(name, "could not look at a sequence", error)
                continue
            if option is not None:
                options.append(option)
        if len(options) < 2 and not (options and options[0].num_behind):
            return options[0] if options else None
        num_rows = len(self._choices)
        plain_s = self._step_costs.seconds(num_rows)
        pace = self._paces.get(choice.proposers, 1.0)
        best, best_value = None, 1.0 - 1.0 / pace  # without a draft
        # Those that have something to read come last: they are compared with the best of the others.
        for option in sorted(options, key=lambda one: one.num_behind):
            value, num_tokens = self._value(option, num_rows, pace)
            read_s = self._read_s(option) * num_rows
            if read_s and not choice.params.fixed_length:
                saved_s = (value - best_value) * pace * plain_s
                if saved_s * option.candidate.num_room <= read_s * num_tokens:
                    self._rest(option, _LONG_REST)
                    continue
                if len(choice.proposers) > 1:
                    sequence.missed_s[option.proposer] = sequence.missed_s.get(option.proposer, 0.0) + saved_s
                    if sequence.missed_s[option.proposer] < read_s:
                        continue
            if best is None or value > best_value:
                best, best_value = option, value
        return best

    def _value(self, option: Option, num_rows: int, pace: float) -> tuple[float, float]:
        """The option's gain in tokens at best, if all rows of the step had the same, beyond those that the time would
        have brought anyway; and its tokens in all. A step that gives little may lead to where the next one gives much,
        so that what it gives per second is no measure."""
        per_second = 1.0 / (pace * self._step_costs.seconds(num_rows))
        tokens = 1.0
        best = 1.0 - 1.0 / pace, tokens
        cost = self._cost(option.proposer)
        for num, survival in enumerate(option.survival, start=1):
            tokens += survival
            taken_s = self._step_costs.seconds(num_rows * (1 + num)) + cost.seconds(num, num_rows * num)
            best = max(best, (tokens - per_second * taken_s, tokens))
        return best

    def _option(self, candidate: Candidate, sequence: DraftedSequence, name: str) -> Option | None:
        """The proposer's offer for the sequence; None where it has no draft to offer in this step."""
        proposer, params = self._proposers[name], sequence.choice.params
        num_tokens = min(params.max_draft_tokens, candidate.num_room)
        pieces = proposer.pieces(Ask(candidate, num_tokens, params, sequence.choice.medusa_key))
        if not pieces:
            return None
        max_pause = None if params.fixed_length else self._max_pause(name)
        survival: list[float] = []
        chance = 1.0
        for source, num, evidence, _ in pieces:
            record = self._record(sequence, name, source)
            found = record.survival(self._step, num, evidence, max_pause=max_pause)
            survival += found if chance == 1.0 else [chance * one for one in found]
            if len(found) < num:
                break
            chance = survival[-1]
        if not survival:
            step = (self._step // _REST + 1) * _REST
            if max_pause is not None and not proposer.starts:
                step = self._record(sequence, name, pieces[0].source).next_step(max_pause)
            elif any(source in proposer.starts and not one.is_cooling for (_, source), one in sequence.records.items()):
                return None  # the next draft may begin with another source
            sequence.rests[name] = step
            return None
        return Option(candidate, sequence, name, survival, pieces, proposer.num_behind(candidate))

    def _refuse(self, option: Option) -> None:
        """Lets a proposer rest whose offer does not pay; after several such offers only where the next one may be a
        better one."""
        name, num_refused = option.proposer, option.sequence.num_refused
        if self._proposers[name].starts:
            num_refused[name] = num_refused.get(name, 0) + 1
            if num_refused[name] >= _MANY_REFUSED:
                self._rest(option, _REST)
        else:
            self._rest(option, _LONG_REST)

    def _rest(self, option: Option, num_steps: int) -> None:
        option.sequence.rests[option.proposer] = (self._step // num_steps + 1) * num_steps

    # --- estimates ----------------------------------------------------------------------------------------------------

    def _record(self, sequence: DraftedSequence, name: str, source: str) -> TrackRecord:
        """The proposer's record in the sequence, one for each source: a match in an earlier output is not worth what
        one in the own text is."""
        record = sequence.records.get((name, source))
        if record is None:
            proposer = self._proposers[name]
            place = (name, source, proposer.rates_key(sequence.choice))
            rates = self._rates.get(place)
            if rates is None:
                rates = AcceptanceRates(proposer.prior)
                remember(self._rates, place, rates)
            record = sequence.records[name, source] = TrackRecord(rates)
        return record

    def _cost(self, name: str) -> CallCost:
        """The cost of the proposer's calls, the same all through a step."""
        cost = self._costs.get(name)
        if cost is None:
            unit_s = self._unit_costs[name].seconds(self._clock()) if name in self._unit_costs else 0.0
            cost = self._costs[name] = CallCost(unit_s, self._proposers[name].drafts_at_once)
        return cost

    def _read_s(self, option: Option) -> float:
        if not option.num_behind or option.proposer not in self._read_costs:
            return 0.0
        return self._read_costs[option.proposer].seconds(self._clock()) * option.num_behind

    def _max_pause(self, name: str) -> int:
        """Length in steps of the proposer's longest pause. All that may use it probe together when nothing is
        accepted."""
        if name not in self._pauses:
            num_users = sum(choice is not None and name in choice.proposers for choice in self._choices)
            call_s = self._cost(name).seconds(1, num_users)
            self._pauses[name] = longest_pause(len(self._choices), num_users, self._step_costs, call_s)
        return self._pauses[name]

    def _note_pace(self, sequence: DraftedSequence, num_tokens: int) -> None:
        """Learns the pace of a sequence that has come to `num_tokens` tokens with the last step."""
        if sequence.num_tokens and num_tokens > sequence.num_tokens:
            pace = self._paces.get(sequence.choice.proposers, 1.0)
            # An average of steps per token, so that a step counts by its tokens.
            num_new = num_tokens - sequence.num_tokens
            kept = _PACE_KEPT**num_new
            self._paces[sequence.choice.proposers] = min(1.0, pace * kept + self._step_size / num_new * (1.0 - kept))
        sequence.num_tokens = num_tokens
