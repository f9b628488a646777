"""Costs rise with rows, are measured within their time, and follow what proposers take."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.speculation.costs import (
    FREE,
    CatchUpCosts,
    LeastCost,
    ProposerCost,
    ProposerCosts,
    StepCosts,
    measure_step_costs,
)

tables = st.dictionaries(st.integers(1, 300), st.floats(0.0, 1.0), min_size=1, max_size=8)


@given(tables, st.integers(0, 400), st.integers(0, 50))
def test_more_rows_never_cost_less(table: dict[int, float], num_rows: int, num_more: int) -> None:
    costs = StepCosts(table)
    times_s = costs.span(num_rows, num_more)
    assert times_s == [costs.seconds(num_rows + idx) for idx in range(num_more + 1)]
    assert times_s == sorted(times_s)
    assert times_s[0] > 0.0


def test_between_sizes_times_are_interpolated_and_beyond_them_extended() -> None:
    costs = StepCosts({1: 0.010, 4: 0.016, 8: 0.020, 16: 0.036})
    assert costs.seconds(0) == costs.seconds(1) == 0.010
    assert costs.seconds(2) == pytest.approx(0.012)
    assert costs.seconds(4) == pytest.approx(0.016)
    assert costs.seconds(12) == pytest.approx(0.028)
    assert costs.seconds(116) == pytest.approx(0.236)  # 2 ms per row, as from 8 to 16


def test_noise_that_falls_is_averaged() -> None:
    costs = StepCosts({1: 0.010, 2: 0.014, 4: 0.012, 8: 0.020})
    assert costs.times_s == pytest.approx((0.010, 0.013, 0.013, 0.020))


def test_a_single_size_is_taken_to_be_the_dearest_slope() -> None:
    assert StepCosts({4: 0.008}).seconds(8) == pytest.approx(0.016)
    assert StepCosts({4: 0.008}).seconds(2) == pytest.approx(0.008)


@pytest.mark.parametrize("table", [{}, {0: 1.0}])
def test_a_table_needs_rows(table: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        StepCosts(table)


class Machine:
    """Steps whose time passes on its own clock."""

    def __init__(self, step_s: Callable[[int, int], float]) -> None:
        self.now_s = 100.0
        self.ran: list[int] = []
        self._step_s = step_s

    def clock(self) -> float:
        return self.now_s

    def run(self, num_rows: int) -> float:
        taken_s = self._step_s(num_rows, self.ran.count(num_rows))
        self.ran.append(num_rows)
        self.now_s += taken_s
        return taken_s


def test_the_shortest_run_counts_and_not_the_warm_up() -> None:
    hiccups = {0: 0.001, 1: 0.5, 2: 0.5}  # by which run of a size it is

    machine = Machine(lambda rows, idx: hiccups.get(idx, 0.01 + 0.001 * rows))
    costs = measure_step_costs(machine.run, sizes=(4, 1, 2), num_repeats=3, limit_s=1e9, clock=machine.clock)
    assert costs.sizes == (1, 2, 4)
    assert costs.times_s == pytest.approx((0.011, 0.012, 0.014))
    assert len(machine.ran) == 3 * (1 + 3)


def test_measuring_ends_in_time() -> None:
    machine = Machine(lambda rows, _: 0.1 * rows)
    costs = measure_step_costs(machine.run, sizes=(1, 2, 4, 8, 16, 32), limit_s=1.0, clock=machine.clock)
    assert costs.sizes == (1, 2, 4, 8)
    assert machine.now_s - 100.0 <= 1.0 + 0.8  # the step that was under way when the limit came
    assert costs.seconds(32) == pytest.approx(3.2)


def test_two_sizes_are_measured_however_slow() -> None:
    machine = Machine(lambda rows, _: 5.0 + rows)
    costs = measure_step_costs(machine.run, sizes=(1, 2, 4), limit_s=2.0, clock=machine.clock)
    assert costs.sizes == (1, 2)
    assert machine.ran == [1, 2]


def test_a_call_costs_nothing_without_tokens() -> None:
    cost = ProposerCost(1.0, 0.1, 0.01)
    assert cost.seconds(0, 0) == 0.0
    assert cost.seconds(3, 5) == pytest.approx(1.35)


@pytest.mark.parametrize(
    "true_cost", [ProposerCost(0.002), ProposerCost(0.001, 0.004), ProposerCost(0.0005, 0.002, 0.0001)]
)
def test_observed_costs_come_near_the_true_ones(true_cost: ProposerCost) -> None:
    costs = ProposerCosts()
    rng = random.Random(5)
    for idx in range(400):
        num_asks, num_rounds = rng.choice((1, 4, 32)), rng.randint(1, 8)
        seconds = true_cost.seconds(num_rounds, num_rounds * num_asks) * rng.uniform(0.9, 1.1)
        costs.observe("draft_model", num_rounds, num_rounds * num_asks, seconds, now_s=0.01 * idx)
    found = costs.cost("draft_model", now_s=4.0)
    for num_rounds, num_asks in ((1, 1), (6, 1), (2, 32), (8, 4)):
        expected = true_cost.seconds(num_rounds, num_rounds * num_asks)
        assert found.seconds(num_rounds, num_rounds * num_asks) == pytest.approx(expected, rel=0.35)


def test_who_was_never_seen_is_free_and_what_is_old_fades() -> None:
    costs = ProposerCosts()
    assert costs.cost("medusa", 0.0) == FREE
    for idx in range(5):
        costs.observe("medusa", 4, 4, 0.5, now_s=0.01 * idx)
    costs.observe("medusa", 0, 0, 7.0, now_s=0.05)  # asked for nothing: says nothing
    now, later, long_after = (costs.cost("medusa", now_s).seconds(4, 4) for now_s in (0.04, 20.04, 400.0))
    assert now == pytest.approx(0.5)
    assert later == pytest.approx(0.25)
    assert long_after < 0.001


def test_a_slow_first_call_does_not_stay() -> None:
    costs = ProposerCosts()
    costs.observe("draft_model", 4, 4, 1.0, now_s=0.0)  # it read a prompt
    assert costs.cost("draft_model", 0.0).seconds(4, 4) <= 0.25
    for idx in range(20):
        costs.observe("draft_model", 4, 4, 0.02, now_s=0.1 * idx)
    assert costs.cost("draft_model", 2.0).seconds(4, 4) < 0.04


def test_one_slow_call_after_a_long_time_counts_for_little() -> None:
    """Nothing of it is in the caches then. One that is quicker than was thought is believed."""
    for seconds, least, most in ((0.04, 0.02, 0.026), (0.005, 0.004, 0.01)):
        costs = ProposerCosts()
        for idx in range(10):
            costs.observe("draft_model", 4, 4, 0.02, now_s=0.1 * idx)
        costs.observe("draft_model", 4, 4, seconds, now_s=200.0)
        assert least < costs.cost("draft_model", 200.0).seconds(4, 4) < most


def test_a_hiccup_counts_for_little() -> None:
    costs = ProposerCosts()
    for idx in range(10):
        costs.observe("draft_model", 4, 4, 0.02, now_s=0.1 * idx)
    costs.observe("draft_model", 4, 4, 30.0, now_s=1.0)
    assert costs.cost("draft_model", 1.0).seconds(4, 4) < 0.03


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 200), st.floats(0.0, 10.0)), max_size=30))
def test_no_cost_is_ever_negative(observed: list[tuple[int, int, float]]) -> None:
    costs = ProposerCosts()
    for num_rounds, num_tokens, seconds in observed:
        costs.observe("medusa", num_rounds, num_tokens, seconds, now_s=0.0)
        cost = costs.cost("medusa", 0.0)
        assert min(cost.per_call_s, cost.per_round_s, cost.per_token_s) >= 0.0


def test_what_catching_up_costs_is_known_from_the_second_time_on() -> None:
    costs = CatchUpCosts()
    assert costs.seconds("a", 100, 0.0) == 0.0
    costs.observe("a", 10, 50.0, 0.0)  # whatever runs for the first time
    assert costs.seconds("a", 100, 0.0) == 0.0
    costs.observe("a", 10, 1.0, 0.0)
    assert costs.seconds("a", 100, 0.0) == pytest.approx(10.0)
    costs.observe("a", 10, 2.0, 1.0)
    assert costs.seconds("a", 100, 1.0) == pytest.approx(15.0)
    costs.observe("a", 10, 1e6, 1.0)  # a pause of the machine
    assert costs.seconds("a", 100, 1.0) < 40.0
    assert costs.seconds("b", 100, 1.0) == 0.0
    for _ in range(50):
        costs.observe("a", 10, -1.0, 1.0)
    assert costs.seconds("a", 100, 1.0) < 0.1


def test_what_catching_up_has_cost_fades() -> None:
    costs = CatchUpCosts()
    for _ in range(2):
        costs.observe("a", 1, 1.0, 0.0)
    assert costs.seconds("a", 1, 5.0) > 0.9
    assert costs.seconds("a", 1, 600.0) < 0.01


def test_a_draft_model_never_costs_less_than_its_own_steps() -> None:
    least = LeastCost.of(StepCosts({1: 1.0, 2: 1.1, 32: 4.1}))
    assert least.per_round_s == pytest.approx(1.0)
    assert least.per_read_token_s == pytest.approx(0.1)
    assert LeastCost.of(StepCosts({1: 1.0})) == LeastCost(1.0, 0.0)
    assert LeastCost.of(StepCosts({1: 1.0, 11: 2.0}), 0.5) == pytest.approx((0.5, 0.05))
    costs, reading = ProposerCosts({"a": least}), CatchUpCosts({"a": least})
    assert costs.cost("a", 0.0).seconds(3, 3) == pytest.approx(3.0)
    assert reading.seconds("a", 100, 0.0) == pytest.approx(10.0)
    assert costs.cost("b", 0.0) == FREE
    assert reading.seconds("b", 100, 0.0) == 0.0
    for _ in range(6):
        costs.observe("a", 2, 2, 8.0, 0.0)
        reading.observe("a", 10, 5.0, 0.0)
    assert costs.cost("a", 0.0).seconds(2, 2) > 6.0
    assert costs.cost("a", 1e4).seconds(2, 2) == pytest.approx(2.0)
    assert reading.seconds("a", 10, 0.0) == pytest.approx(5.0)
    assert reading.seconds("a", 10, 1e4) == pytest.approx(1.0)
