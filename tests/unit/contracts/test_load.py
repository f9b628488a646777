"""Refusals by a worker's forecast, at its front end and at routers."""

from __future__ import annotations

import pytest

from loraplex_contracts.errors import Overloaded
from loraplex_contracts.load import Forecast, expected_tokens, has_place

FLOOD, OTHER = ("a", "sql"), ("b", "")


def forecast(wait_s: float = 5.0, end_probability: float = 0.0) -> Forecast:
    return Forecast(0.001, 0.02, end_probability, 60.0, {FLOOD: wait_s}, longest_tokens=100)


def test_who_cannot_be_done_in_time_is_refused_with_a_hint() -> None:
    with pytest.raises(Overloaded) as caught:
        forecast().check(FLOOD, 50, 100, left_s=6.0)
    assert caught.value.retry_after_s == pytest.approx(5.0 - 0.8 * (6.0 - 0.05 - 2.0))


@pytest.mark.parametrize(
    ("flow", "num_prompt", "num_outputs", "left_s"),
    [
        (OTHER, 50, 100, 1.0),  # nobody waits ahead of it
        (FLOOD, 10, 40, 1.0),  # it passes those that are longer
        (FLOOD, 50, 100, 20.0),
        (FLOOD, 50, 100, None),
    ],
)
def test_others_go_to_the_engine(
    flow: tuple[str, str], num_prompt: int, num_outputs: int, left_s: float | None
) -> None:
    forecast().check(flow, num_prompt, num_outputs, left_s)


def test_without_a_deadline_the_servers_bound_holds() -> None:
    with pytest.raises(Overloaded, match="--max-queue-wait allows 60"):
        forecast(wait_s=61.0).check(FLOOD, 50, 100, left_s=None)


def test_texts_that_end_early_leave_more_time() -> None:
    forecast(end_probability=0.1).check(FLOOD, 50, 400, left_s=7.0)
    with pytest.raises(Overloaded):
        forecast().check(FLOOD, 50, 400, left_s=7.0)
    assert expected_tokens(400, 0.1) == pytest.approx(10)
    assert expected_tokens(400, 0.0) == 400


@pytest.mark.parametrize(
    ("num_all", "num_own", "num_tenants", "is_taken"),
    [(9, 9, 1, True), (10, 10, 1, False), (10, 0, 2, True), (12, 4, 2, True), (12, 5, 2, False), (99, 0, 2, True)],
)
def test_a_full_queue_is_full_for_those_that_filled_it(
    num_all: int, num_own: int, num_tenants: int, is_taken: bool
) -> None:
    assert has_place(num_all, num_own, num_tenants, most=10) is is_taken
