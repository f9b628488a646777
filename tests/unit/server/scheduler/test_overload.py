"""Step speed as the scheduler measures it."""

from __future__ import annotations

import pytest

from loraplex_server.scheduler.overload import StepSize, StepSpeed


def fed(num_steps: int = 400, slower: float = 1.0) -> StepSpeed:
    """An engine whose steps take 20 ms, 1 ms for each row and 0.2 ms for each prompt token."""
    speed = StepSpeed()
    for number in range(num_steps):
        rows, prompts = 1 + number % 16, 64 * (number % 3 == 0)
        seconds = slower * (0.02 + 0.001 * rows + 0.0002 * prompts)
        speed.on_step(StepSize(rows, prompts, is_full=rows > 12), rows, seconds)
    return speed


def test_nothing_is_known_at_first() -> None:
    speed = StepSpeed()
    assert not speed.is_known
    assert not speed.is_work_known
    assert speed.interval_s(8) == 0.0
    assert speed.num_outputs(40) == 40


def test_full_steps_say_what_work_costs() -> None:
    speed = fed()
    assert speed.is_work_known
    # 14.5 rows in a step, on average over full ones.
    assert speed.work_s(0, 1000) == pytest.approx(1000 * 0.0345 / 14.5, rel=0.1)
    assert speed.work_s(1000, 0) == pytest.approx(1000 * 0.0002, rel=0.2)


def test_steps_without_anybody_waiting_say_nothing_of_a_full_engine() -> None:
    speed = StepSpeed()
    for _ in range(100):
        speed.on_step(StepSize(1, 0, is_full=False), 1, 0.02)
    assert speed.is_known
    assert not speed.is_work_known


@pytest.mark.parametrize("rows", [1, 4, 8, 16])
def test_the_time_of_a_step_follows_its_rows(rows: int) -> None:
    prompts_beside = rows * (64 / 3) / 8.5 * 0.0002
    assert fed().interval_s(rows) == pytest.approx(0.02 + 0.001 * rows + prompts_beside, rel=0.15)


def test_more_rows_than_ever_take_at_least_as_long_as_the_most() -> None:
    speed = fed()
    assert speed.interval_s(64) >= speed.interval_s(16) > speed.interval_s(1)


def test_drafts_that_are_accepted_bring_the_next_token_sooner() -> None:
    speed = StepSpeed()
    for _ in range(100):
        speed.on_step(StepSize(4, 0, is_full=True), 12, 0.03)
    assert speed.interval_s(4) == pytest.approx(0.01)
    assert speed.work_s(0, 1200) == pytest.approx(3.0)


def test_one_hiccup_changes_little_and_a_slower_engine_everything() -> None:
    speed = fed()
    before_s = speed.interval_s(8)
    speed.on_step(StepSize(8, 0, is_full=True), 8, 30.0)
    assert speed.interval_s(8) < 2 * before_s
    for number in range(1000):
        speed.on_step(StepSize(1 + number % 16, 0, is_full=True), 8, 0.1)
    assert speed.interval_s(8) == pytest.approx(0.1, rel=0.1)


def test_texts_that_end_early_make_less_work() -> None:
    speed = StepSpeed()
    for number in range(2000):
        speed.on_step(StepSize(10, 0, is_full=True), 10, 0.02)
        if number % 5 == 0:
            speed.on_early_end()  # at each 50th token
    assert speed.num_outputs(4096) == pytest.approx(50, rel=0.1)
    assert speed.num_outputs(10) == pytest.approx(9, rel=0.1)


def test_texts_that_never_end_early_have_what_they_may_have() -> None:
    assert fed(3000).num_outputs(100) == pytest.approx(100, rel=0.01)


def test_cached_prompts_are_no_work() -> None:
    speed = fed()
    whole_s = speed.work_s(1000, 0)
    for _ in range(200):
        speed.on_entry(num_cached=90, num_tokens=100)
    assert speed.work_s(1000, 0) == pytest.approx(whole_s / 10, rel=0.05)
