"""Speculation policy: draft lengths, costs and cooldowns.

No test looks at a clock: time is what the cost table says it is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.speculation.policy import (
    MOST_PAUSE,
    AcceptanceRates,
    CallCost,
    LeastCost,
    RunningCost,
    SurvivalCurve,
    TrackRecord,
    choose_lengths,
    longest_pause,
)
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP
from loraplex_server.speculation.step_costs import StepCosts

# A model of 245M parameters on two cores: eight rows cost little more than one.
CPU = StepCosts({1: 0.0135, 2: 0.0142, 4: 0.0145, 8: 0.0159, 16: 0.0184, 32: 0.0279, 64: 0.0454})
COSTS = {PROMPT_LOOKUP: CallCost(), MEDUSA: CallCost(0.0015, drafts_at_once=True), DRAFT_MODEL: CallCost(0.003)}
LOOKUP_PRIOR = PromptLookupProposer.prior
MAX_TOKENS = 8

curves = st.lists(st.floats(0.0, 1.0), max_size=6).map(lambda chances: sorted(chances, reverse=True))
proposers = st.sampled_from([PROMPT_LOOKUP, MEDUSA, DRAFT_MODEL])
offer_lists = st.lists(st.builds(SurvivalCurve, proposers, curves, st.booleans()), max_size=8)


class Decoding:
    """Sequences that decode together, drafted for by one proposer, on the clock of a cost table."""

    def __init__(self, proposer: str, num_sequences: int, seed: int = 0) -> None:
        rates = AcceptanceRates(LOOKUP_PRIOR if proposer == PROMPT_LOOKUP else (0.9,))
        self.records = [TrackRecord(rates) for _ in range(num_sequences)]
        self.lengths: list[list[int]] = []
        self.num_tokens = 0
        self.time_s = 0.0
        self._proposer = proposer
        self._cost = COSTS[proposer]
        self._rng = random.Random(seed)

    def run(self, num_steps: int, chance: float, evidence: Callable[[int], int] = lambda step: 0) -> None:
        """Runs decode steps in which every draft token is right by `chance`."""
        num_sequences = len(self.records)
        pause = longest_pause(num_sequences, num_sequences, CPU, self._cost.seconds(1, num_sequences))
        for _ in range(num_steps):
            step = 1000 + len(self.lengths)
            level = evidence(step)
            curves = [record.survival(step, MAX_TOKENS, level, max_pause=pause) for record in self.records]
            lengths = choose(
                [SurvivalCurve(self._proposer, curve) for curve in curves],
                num_rows=num_sequences,
                num_tokens=num_sequences,
            )
            self.time_s += CPU.seconds(num_sequences + sum(lengths)) + self._cost.seconds(max(lengths), sum(lengths))
            for record, length in zip(self.records, lengths, strict=True):
                num_accepted = 0
                while num_accepted < length and self._rng.random() < chance:
                    num_accepted += 1
                record.observe(step, length, num_accepted, level)
                self.num_tokens += num_accepted + 1
            self.lengths.append(lengths)

    @property
    def num_drafted(self) -> int:
        return sum(map(sum, self.lengths))


def choose(curves: Sequence[SurvivalCurve], num_rows: int, num_tokens: int, budget: int = 1000) -> list[int]:
    return choose_lengths(
        curves, num_rows=num_rows, num_tokens=num_tokens, budget=budget, step_costs=CPU, call_costs=COSTS
    )


def speed(curves: Sequence[SurvivalCurve], lengths: Sequence[int], num_rows: int, num_tokens: int) -> float:
    """Expected tokens per second, from first principles."""
    expected = num_tokens + sum(sum(curve.survival[:n]) for curve, n in zip(curves, lengths, strict=True))
    seconds = CPU.seconds(num_rows + sum(lengths))
    for proposer, cost in COSTS.items():
        own = [n for curve, n in zip(curves, lengths, strict=True) if curve.proposer == proposer]
        seconds += cost.seconds(max(own, default=0), sum(own))
    return expected / seconds


def test_cheap_probes_may_come_more_often() -> None:
    assert longest_pause(1, 1, CPU, 0.0) <= 16
    assert longest_pause(1, 1, CPU, 0.01) >= 64
    assert longest_pause(32, 32, CPU, 0.0) >= 64
    assert longest_pause(1, 1, CPU, 9.0) == MOST_PAUSE


# --- what pays -------------------------------------------------------------------------------------------------------


@given(offer_lists, st.integers(0, 40), st.integers(0, 30))
def test_lengths_keep_room_and_budget(curves: list[SurvivalCurve], num_more: int, budget: int) -> None:
    lengths = choose(curves, len(curves) + num_more, len(curves), budget)
    assert len(lengths) == len(curves)
    assert sum(lengths) <= budget
    assert all(0 <= length <= len(curve.survival) for curve, length in zip(curves, lengths, strict=True))


@given(offer_lists, st.integers(0, 40))
def test_fixed_lengths_are_kept_and_the_others_do_no_harm(curves: list[SurvivalCurve], num_more: int) -> None:
    num_rows = max(1, len(curves)) + num_more
    lengths = choose(curves, num_rows, max(1, len(curves)))
    fixed_only = [len(curve.survival) if curve.fixed_length else 0 for curve in curves]
    for curve, length in zip(curves, lengths, strict=True):
        assert not curve.fixed_length or length == len(curve.survival)
    chosen, without = (speed(curves, each, num_rows, max(1, len(curves))) for each in (lengths, fixed_only))
    assert chosen >= without * (1 - 1e-9)


@given(st.lists(st.floats(0.05, 0.99), min_size=1, max_size=3), st.sampled_from([PROMPT_LOOKUP, MEDUSA]))
def test_one_proposer_gets_the_best_there_is(chances: list[float], proposer: str) -> None:
    curves = [SurvivalCurve(proposer, [chance**k for k in range(1, 5)]) for chance in chances]
    num_rows = 4 * len(curves)  # others decode as well
    lengths = choose(curves, num_rows, num_rows)
    best = max(speed(curves, each, num_rows, num_rows) for each in product(range(5), repeat=len(curves)))
    # Positions below 2 % are left out.
    assert speed(curves, lengths, num_rows, num_rows) >= best * (1 - 1e-3)


def test_a_proposer_that_does_not_pay_is_left_out_and_another_is_not() -> None:
    curves = [SurvivalCurve(DRAFT_MODEL, [0.5, 0.25]), SurvivalCurve(PROMPT_LOOKUP, [0.9, 0.8, 0.7])]
    assert choose(curves, 8, 8) == [0, 3]
    assert choose(curves[:1] * 8, 8, 8) == [1] * 8  # shared by many it pays


def test_cuts_begin_with_the_least_likely_and_end_with_fixed_lengths() -> None:
    fixed = SurvivalCurve(PROMPT_LOOKUP, [0.1, 0.05], fixed_length=True)
    likely, doubtful = SurvivalCurve(PROMPT_LOOKUP, [0.9, 0.8]), SurvivalCurve(PROMPT_LOOKUP, [0.7, 0.5])
    curves = [doubtful, fixed, likely]
    assert choose(curves, 3, 3, budget=6) == [2, 2, 2]
    assert choose(curves, 3, 3, budget=5) == [1, 2, 2]
    assert choose(curves, 3, 3, budget=3) == [0, 2, 1]
    assert choose(curves, 3, 3, budget=1) == [0, 1, 0]
    assert choose(curves, 3, 3, budget=0) == [0, 0, 0]


def test_the_fuller_the_batch_the_shorter_the_drafts() -> None:
    def mean_length(num_sequences: int) -> float:
        curves = [SurvivalCurve(MEDUSA, [0.7**k for k in range(1, 9)])] * num_sequences
        return sum(choose(curves, num_sequences, num_sequences)) / num_sequences

    lengths = [mean_length(num_sequences) for num_sequences in (1, 8, 16, 64)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 4
    assert lengths[-1] < 1


def test_nothing_to_choose_from() -> None:
    assert choose([], 1, 1) == []
    assert choose([SurvivalCurve(MEDUSA, [])], 1, 1) == [0]


# --- all of it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_sequences", [1, 8, 32])
@pytest.mark.parametrize("proposer", [PROMPT_LOOKUP, MEDUSA, DRAFT_MODEL])
def test_text_on_which_nothing_is_accepted_costs_little(proposer: str, num_sequences: int) -> None:
    decoding = Decoding(proposer, num_sequences)
    # Matches of all lengths come and go, and none is worth anything.
    rng = random.Random(7)
    decoding.run(512, 0.0, lambda _: rng.choice((1, 1, 2, 3, 5, 9, 20)) if proposer == PROMPT_LOOKUP else 0)
    assert decoding.time_s <= 1.02 * 512 * CPU.seconds(num_sequences)
    assert decoding.num_drafted <= (320 if proposer == PROMPT_LOOKUP else 96) * num_sequences


@pytest.mark.parametrize("num_sequences", [1, 8])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("proposer", [MEDUSA, DRAFT_MODEL])
def test_speed_is_near_that_of_the_best_length(proposer: str, chance: float, num_sequences: int) -> None:
    decoding = Decoding(proposer, num_sequences)
    decoding.run(600, chance)

    def speed_at(length: int) -> float:
        curves = [SurvivalCurve(proposer, [chance**k for k in range(1, length + 1)], fixed_length=True)] * num_sequences
        return speed(curves, [length] * num_sequences, num_sequences, num_sequences)

    best = max(range(MAX_TOKENS + 1), key=speed_at)
    assert decoding.num_tokens / decoding.time_s >= 0.9 * speed_at(best)
    if num_sequences == 1:
        mean = sum(map(sum, decoding.lengths[100:])) / 500
        assert abs(mean - best) <= 1.5


@pytest.mark.parametrize("proposer", [PROMPT_LOOKUP, MEDUSA])
def test_a_stretch_that_copies_is_noticed_after_a_dry_one(proposer: str) -> None:
    decoding = Decoding(proposer, 1)
    decoding.run(300, 0.0, lambda _: 1)
    begin = 1000 + len(decoding.lengths)
    num_before = decoding.num_tokens
    decoding.run(40, 0.95, lambda step: 1 + step - begin)  # a match that grows by at least a token in each step
    first = next(idx for idx, lengths in enumerate(decoding.lengths[300:]) if lengths[0] > 0)
    assert first <= (3 if proposer == PROMPT_LOOKUP else longest_pause(1, 1, CPU, COSTS[proposer].unit_s))
    assert decoding.num_tokens - num_before > 100


# --- acceptance rates ------------------------------------------------------------------------------------------------


def record(*prior: float) -> TrackRecord:
    return TrackRecord(AcceptanceRates(prior or (0.9,)))


def test_survival_falls_and_knows_the_prior() -> None:
    curve = record(0.5, 0.8).survival(0, 4, max_pause=None)
    assert curve == pytest.approx((0.5, 0.4, 0.32, 0.256))


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 70), st.integers(0, 300)), max_size=40),
    st.integers(0, 70),
)
def test_survival_is_a_chance_whatever_was_seen(seen: list[tuple[int, int, int, int]], evidence: int) -> None:
    one = record(*LOOKUP_PRIOR)
    step = 0
    for num_drafted, num_accepted, level, num_steps in seen:
        step += num_steps
        one.observe(step, num_drafted, min(num_accepted, num_drafted), level)
    curve = one.survival(step + 1, 8, evidence, max_pause=None)
    assert len(curve) == 8
    assert curve == sorted(curve, reverse=True)
    assert 0.0 < curve[-1] <= curve[0] < 1.0
    assert len(one.survival(step + 1, 8, evidence, max_pause=MOST_PAUSE)) <= 8


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_estimates_come_near_the_truth(chance: float) -> None:
    rng = random.Random(3)
    one = record()
    curves: list[list[float]] = []
    for step in range(400):
        curves.append(one.survival(step, 3, max_pause=None))
        num_accepted = 0
        while num_accepted < 4 and rng.random() < chance:
            num_accepted += 1
        one.observe(step, 4, num_accepted)
    for idx in range(3):
        mean = sum(curve[idx] for curve in curves[100:]) / 300
        assert mean == pytest.approx(chance ** (idx + 1), abs=0.08)


def test_what_is_behind_the_first_rejection_says_nothing() -> None:
    long, short = record(), record()
    for step in range(10):
        long.observe(step, 8, 2)
        short.observe(step, 3, 2)
    assert long.survival(10, 8, max_pause=None) == short.survival(10, 8, max_pause=None)
    short.observe(10, 0, 0)
    assert long.survival(11, 8, max_pause=None) == short.survival(11, 8, max_pause=None)


def test_longer_matches_are_judged_by_themselves() -> None:
    one = record(*LOOKUP_PRIOR)
    before = one.survival(0, 1, 8, max_pause=None)[0]
    for step in range(10):
        one.observe(step, 4, 0, evidence=1)
    assert one.survival(10, 1, 1, max_pause=None)[0] < 0.15
    assert one.survival(10, 1, 8, max_pause=None)[0] > before - 0.15


def test_what_one_sequence_learned_others_begin_with() -> None:
    """A proposer that failed one sequence begins low for others, and gets another chance after a pause."""
    teacher = record()
    pupil = TrackRecord(teacher.shared)
    for step in range(50):
        teacher.observe(step, 4, 0)
    assert pupil.survival(50, 1, max_pause=MOST_PAUSE)[0] < 0.2
    assert pupil.survival(50 + MOST_PAUSE, 1, max_pause=MOST_PAUSE)[0] > 0.8


# --- cooldowns -------------------------------------------------------------------------------------------------------


def misses(one: TrackRecord, step: int, evidence: int = 0) -> int:
    """A draft of as many tokens as may be, none of them right."""
    num_tokens = len(one.survival(step, 8, evidence, max_pause=MOST_PAUSE))
    one.observe(step, num_tokens, 0, evidence)
    return num_tokens


def test_pauses_grow_and_probes_are_short() -> None:
    one = record()
    lengths = {step: num for step in range(1024) if (num := misses(one, step))}
    drafted = list(lengths)
    gaps = [after - before for before, after in pairwise(drafted)]
    assert max(gaps) == gaps[-1] == MOST_PAUSE
    assert drafted[-1] % MOST_PAUSE == 0  # with all others that probe
    assert len(drafted) < 10 + 5 + 1024 / MOST_PAUSE
    assert lengths[drafted[-1]] == 1


def test_who_is_usually_right_is_doubted_sooner() -> None:
    def num_before_pause(rate: float) -> int:
        one = record(rate)
        step = 0
        while misses(one, step) == 8:
            step += 1
        return step

    numbers = [num_before_pause(rate) for rate in (0.95, 0.6, 0.01)]
    assert numbers == sorted(numbers)
    assert numbers[0] <= 4
    assert numbers[-1] == 10


def test_success_ends_a_pause_at_once() -> None:
    one = record()
    step = 0
    while misses(one, step) != 1:  # until the first probe
        step += 1
    one.observe(step, 1, 1)
    assert len(one.survival(step + 1, 8, max_pause=MOST_PAUSE)) == 8


def test_a_long_match_gives_a_pause_an_end() -> None:
    one = record(*LOOKUP_PRIOR)
    step = 0
    while misses(one, step, evidence=2):
        step += 1
    assert one.survival(step, 8, 4, max_pause=MOST_PAUSE) == []
    assert len(one.survival(step, 8, 5, max_pause=MOST_PAUSE)) == 5
    one.observe(step, 5, 0, evidence=5)
    assert one.survival(step + 1, 8, 10, max_pause=MOST_PAUSE) == []  # that was no news


# --- costs -----------------------------------------------------------------------------------------------------------


def test_rounds_and_tokens_of_a_call() -> None:
    round_by_round, at_once = CallCost(2.0), CallCost(2.0, drafts_at_once=True)
    assert at_once.units(4, 0) == 1
    assert round_by_round.units(4, 16) == 5
    assert round_by_round.seconds(4, 16) == 10
    assert at_once.units(0, 0) == round_by_round.units(0, 0) == 0


def test_what_was_never_seen_is_free_and_what_is_old_fades() -> None:
    cost = RunningCost()
    assert cost.seconds(0.0) == 0.0
    for idx in range(5):
        cost.observe(0.5, now_s=0.01 * idx)
    assert cost.seconds(0.04) == pytest.approx(0.5, rel=0.01)
    assert cost.seconds(20.04) == pytest.approx(0.25, rel=0.01)
    assert cost.seconds(400.0) < 0.001


def test_a_slow_first_call_does_not_stay() -> None:
    cost = RunningCost()
    cost.observe(1.0, now_s=0.0)
    assert cost.seconds(0.0) == 0.0
    for idx in range(20):
        cost.observe(0.02, now_s=0.1 * idx)
    assert cost.seconds(2.0) < 0.04


def test_a_hiccup_counts_for_little() -> None:
    cost = RunningCost()
    for idx in range(10):
        cost.observe(0.02, now_s=0.1 * idx)
    cost.observe(30.0, now_s=1.0)
    assert cost.seconds(1.0) < 0.03


@given(st.lists(st.floats(-1.0, 10.0), max_size=30))
def test_no_cost_is_ever_negative(observed: list[float]) -> None:
    cost = RunningCost()
    for seconds in observed:
        cost.observe(seconds, now_s=0.0)
        assert cost.seconds(0.0) >= 0.0


def test_a_draft_model_never_costs_less_than_its_own_steps() -> None:
    least = LeastCost.of(StepCosts({1: 1.0, 2: 1.1, 32: 4.1}))
    assert least.per_round_s == pytest.approx(1.0)
    assert least.per_read_token_s == pytest.approx(0.1)
    assert LeastCost.of(StepCosts({1: 1.0})) == LeastCost(1.0, 0.0)
    assert LeastCost.of(StepCosts({1: 1.0, 11: 2.0}), 0.5) == pytest.approx((0.5, 0.05))
    cost = RunningCost(least.per_round_s)
    assert cost.seconds(0.0) == 1.0
    for _ in range(6):
        cost.observe(4.0, 0.0)
    assert cost.seconds(0.0) > 2.5
    assert cost.seconds(1e4) == 1.0
