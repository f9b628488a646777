"""The last minute of a router."""

from __future__ import annotations

from collections import Counter

import pytest

from loraplex_router.activity import ERRORS_BY_CODE, WINDOW_S, Activity, FailedCall, percentile


def failed(ended_s: float, code: str = "INTERNAL") -> FailedCall:
    return FailedCall(ended_s, "Generate", code, code, "m")


def test_counts_are_of_the_last_minute() -> None:
    activity = Activity(started_s=0.0)
    for second in range(200):
        activity.tokens("a", 10, 4, 3, second + 0.5)
    found = activity.summary(199.9)
    assert (found.tokens, found.drafted_tokens, found.accepted_tokens) == (600, 240, 180)
    assert found.window_s == WINDOW_S
    assert activity.tokens_by_second(199.9) == [10] * 60
    assert activity.summary(230.0).tokens == 290
    assert activity.summary(260.0).tokens == 0


def test_a_young_router_says_how_short_its_window_is() -> None:
    activity = Activity(started_s=100.0)
    activity.tokens("a", 5, 0, 0, 101.0)
    assert activity.summary(104.0).window_s == pytest.approx(4.0)
    assert activity.summary(104.0).tokens == 5


def test_workers_are_apart_and_the_sum_has_all() -> None:
    activity = Activity(started_s=0.0)
    activity.ended("a", False, 1.0)
    activity.ended("b", True, 1.0)
    activity.ended("", True, 2.0)  # refused before any worker was asked
    assert (activity.summary(3.0, "a").requests, activity.summary(3.0, "a").failed_requests) == (1, 0)
    assert (activity.summary(3.0, "b").requests, activity.summary(3.0, "b").failed_requests) == (1, 1)
    assert (activity.summary(3.0).requests, activity.summary(3.0).failed_requests) == (3, 2)
    assert activity.summary(3.0, "gone").requests == 0


def test_workers_that_are_gone_take_no_memory() -> None:
    activity = Activity(started_s=0.0)
    for number in range(10_000):
        activity.tokens(f"w{number}", 1, 0, 0, number * 10.0)
    assert len(activity._tallies) <= WINDOW_S  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("took_s", [0.0, 0.00001, 0.003, 0.25, 7.0, 500.0])
def test_a_percentile_is_right_within_a_bucket(took_s: float) -> None:
    activity = Activity(started_s=0.0)
    for _ in range(5):
        activity.first_message("a", took_s, 1.0)
    found = activity.summary(2.0).time_to_first_p50_s
    assert max(took_s, 1e-4) <= found * 1.000001
    assert found <= max(took_s, 1e-4) * 1.0906


def test_percentiles_of_a_mixture() -> None:
    activity = Activity(started_s=0.0)
    for number in range(100):
        activity.first_message("a", 0.010 if number < 98 else 1.0, 1.0)
    found = activity.summary(2.0)
    assert found.time_to_first_p50_s == pytest.approx(0.010, rel=0.1)
    assert found.time_to_first_p99_s == pytest.approx(1.0, rel=0.1)
    assert percentile(Counter(), 0.5) == 0.0


def test_a_flood_of_one_error_hides_no_other() -> None:
    activity = Activity(started_s=0.0)
    activity.failed(failed(1.0))
    for number in range(1000):
        activity.failed(failed(2.0 + number, "NOT_FOUND"))
    found = activity.errors()
    assert len(found) == ERRORS_BY_CODE + 1
    assert found[0].ended_s == 1001.0
    assert found[-1].code == "INTERNAL"
