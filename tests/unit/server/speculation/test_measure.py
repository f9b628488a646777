"""Step times measured at start."""

from __future__ import annotations

import copy

import pytest
from support.dense import greedy, make_dense
from support.driver import Job, Rig, make_rig, random_prompts
from support.zoo import VOCAB_SIZE, random_model

from loraplex_contracts.plan import StepPlan
from loraplex_server.model.fault_isolation import StepHandle
from loraplex_server.model.loader import adopt_model
from loraplex_server.speculation import measure
from loraplex_server.speculation.measure import measure_runner

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
    monkeypatch.setattr(measure, "LIMIT_S", 0.0)
    costs = measure_runner(rig.runner, max_rows=5, num_blocks=40, block_size=BLOCK_SIZE)
    assert costs.sizes == (1, 2)
    assert [plan.num_tokens for plan in plans] == [1, 2, 0]


def test_nothing_of_it_stays() -> None:
    """Rows are free, and what was written to the blocks is not read."""
    model = make_dense(random_model("llama"))
    rig = make_rig(adopt_model(copy.deepcopy(model), verify=False), max_rows=3, num_blocks=40)
    measure_runner(rig.runner, max_rows=3, num_blocks=40, block_size=BLOCK_SIZE)
    assert not any(rig.runner.mirror.block_ids(row) for row in range(3))
    jobs = [Job(prompt, 6) for prompt in random_prompts(4, VOCAB_SIZE, seed=2)]
    rig.run(jobs)
    assert [job.tokens for job in jobs] == [greedy(model, job.prompt, 6) for job in jobs]
