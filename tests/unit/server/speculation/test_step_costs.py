"""Step costs: rising with rows, and measured within their time."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.dense import greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.plan import StepPlan
from loraplex_runtime.reports import share_of
from loraplex_server.model.isolation import StepHandle
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation import step_costs
from loraplex_server.speculation.step_costs import StepCosts, measure_runner, measure_step_costs

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


def test_a_bar_can_be_shown() -> None:
    told: list[str] = []
    machine = Machine(lambda rows, _: 0.1 * rows)
    measure_step_costs(machine.run, sizes=(1, 2), num_repeats=1, clock=machine.clock, progress=told.append)
    assert told[0] == "measuring how long steps take: 0 of 4 steps"
    assert share_of(told[0]) == 0


def test_measuring_ends_in_time() -> None:
    """Sizes from far apart are measured until the limit."""
    machine = Machine(lambda rows, _: 0.1 * rows)
    costs = measure_step_costs(machine.run, sizes=(1, 2, 4, 8, 16, 32), limit_s=1.0, clock=machine.clock)
    assert machine.ran == [1, 8, 4]
    assert costs.sizes == (1, 4, 8)
    assert machine.now_s - 100.0 <= 1.0 + 0.4  # the step that was under way when the limit came
    assert costs.seconds(32) == pytest.approx(3.2)


@pytest.mark.parametrize("num_sizes", range(1, 12))
def test_every_size_has_its_turn(num_sizes: int) -> None:
    machine = Machine(lambda rows, _: 0.1 * rows)
    sizes = tuple(range(1, num_sizes + 1))
    assert measure_step_costs(machine.run, sizes=sizes, limit_s=1e9, clock=machine.clock).sizes == sizes


def test_two_sizes_are_measured_however_slow() -> None:
    machine = Machine(lambda rows, _: 5.0 + rows)
    costs = measure_step_costs(machine.run, sizes=(1, 2, 4), limit_s=2.0, clock=machine.clock)
    assert costs.sizes == (1, 4)
    assert machine.ran == [1, 4]


# --- of a runner ------------------------------------------------------------------------------------------------------

BLOCK_SIZE = 4  # of the rig


@pytest.fixture
def rig() -> Rig:
    return make_rig(adopt_model(random_model("llama"), verify=False), max_rows=5, num_blocks=40)


def watch(rig: Rig) -> list[StepPlan]:
    """The plans that are run from here on. Every span has to give its tokens."""
    plans: list[StepPlan] = []
    execute = rig.runner.execute

    def watching(plan: StepPlan) -> StepHandle:
        plans.append(plan)
        done = execute(plan)
        for result in done.result().spans.values():
            assert result.error is None
            assert result.token_ids
        return done

    rig.runner.execute = watching  # type: ignore[assignment, method-assign]
    return plans


@pytest.mark.parametrize(
    ("max_rows", "num_blocks", "sizes"),
    [
        (5, 40, (1, 2, 4, 5, 6, 8, 16)),  # 20 rows at most
        (2, 40, (1, 2, 3, 4, 8)),
        (5, 2, (1, 2, 4, 5, 6, 8)),  # fewer blocks than rows
        (1, 1, (1, 2, 4)),
    ],
)
def test_steps_of_every_size_that_fits(rig: Rig, max_rows: int, num_blocks: int, sizes: tuple[int, ...]) -> None:
    plans = watch(rig)
    costs = measure_runner(rig.runner, max_rows=max_rows, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    assert costs.sizes == sizes
    assert all(seconds > 1e-5 for seconds in costs.times_s)
    *timed, last = plans
    assert {plan.num_tokens for plan in timed} == set(sizes)
    for plan in timed:
        assert len(plan.spans) == min(plan.num_tokens, max_rows, num_blocks)
        blocks = [block_id for span in plan.spans for block_id in span.new_block_ids]
        assert len(set(blocks)) == len(blocks)
        assert max(blocks) < num_blocks
    assert not last.spans
    assert set(last.released) == {span.row for plan in timed for span in plan.spans}


def test_no_longer_than_the_context() -> None:
    """A block may hold more than the model's context."""
    loaded = adopt_model(random_model("llama"), verify=False, max_context_tokens=3)
    rig = make_rig(loaded, max_rows=2, num_blocks=8)
    watch(rig)
    costs = measure_runner(rig.runner, max_rows=2, num_blocks=8, block_size=BLOCK_SIZE)
    assert costs.sizes == (1, 2, 3, 4)


def test_slow_steps_end_the_measuring(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = watch(rig)
    monkeypatch.setattr(step_costs, "LIMIT_S", 0.0)
    costs = measure_runner(rig.runner, max_rows=5, num_blocks=40, block_size=BLOCK_SIZE)
    assert costs.sizes == (1, 6)
    assert [plan.num_tokens for plan in plans] == [1, 6, 0]


def test_nothing_of_it_stays() -> None:
    """The rows are free afterwards, and what was written to the blocks is not read."""
    model = make_dense(random_model("llama"))
    rig = make_rig(adopt_model(copy.deepcopy(model), verify=False), max_rows=3, num_blocks=40)
    measure_runner(rig.runner, max_rows=3, num_blocks=40, block_size=BLOCK_SIZE)
    assert not any(rig.runner.mirror.block_ids(row) for row in range(3))
    jobs = [Job(prompt, 6) for prompt in random_prompts(4, VOCAB_SIZE, seed=2)]
    rig.run(jobs)
    assert [job.tokens for job in jobs] == [greedy(model, job.prompt, 6) for job in jobs]
