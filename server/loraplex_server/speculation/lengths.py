"""How long drafts should be: `choose_lengths` spends the step's time on those positions of all drafts that promise the
most, and `longest_pause` says how seldom a proposer that misses may be tried. Pure; what drafts promise is in
acceptance.py.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from loraplex_server.speculation.acceptance import MAX_PAUSE
from loraplex_server.speculation.costs import FREE, ProposerCost, StepCosts

_MIN_MAX_PAUSE = 8
_PROBE_SHARE = 0.01  # of the time

# Positions that are less likely than this to be accepted never pay for the work around them.
_MIN_SURVIVAL = 0.02
_MAX_CYCLES = 3


def longest_pause(num_rows: int, num_sequences: int, step_costs: StepCosts, cost: ProposerCost) -> int:
    """How long `Backoff` may pause for, so that probes take a small part of the time and text that changes is noticed.

    Of `num_sequences` that probe together, in a step of `num_rows` rows without drafts.
    """
    step_s = step_costs.seconds(num_rows)
    probe_s = step_costs.seconds(num_rows + num_sequences) - step_s + cost.seconds(1, num_sequences)
    num_steps = math.ceil(probe_s / (_PROBE_SHARE * step_s))
    return min(MAX_PAUSE, max(_MIN_MAX_PAUSE, 1 << (num_steps - 1).bit_length()))


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
    if len(offers) == 1 and not offers[0].is_fixed:
        (offer,) = offers
        most = min(len(offer.survival), budget)
        cost = proposer_costs.get(offer.proposer, FREE)
        return [_one_length(offer.survival[:most], num_rows, float(num_tokens), step_costs, cost)]
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


def _one_length(
    survival: Sequence[float], num_rows: int, gain: float, step_costs: StepCosts, cost: ProposerCost
) -> int:
    """The same for one offer alone, which is most steps of a server with little to do."""
    times_s = step_costs.span(num_rows, len(survival))
    best, best_rate = 0, gain / times_s[0]
    per_token_s = cost.per_round_s + cost.per_token_s
    cost_s = cost.per_call_s
    for length, chance in enumerate(survival, start=1):
        if chance < _MIN_SURVIVAL:
            break
        gain += chance
        cost_s += per_token_s
        rate = gain / (times_s[length] + cost_s)
        if rate > best_rate:
            best, best_rate = length, rate
    return best


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
