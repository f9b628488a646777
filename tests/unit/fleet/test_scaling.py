"""Scaling of workers under loads of known shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_fleet.scaling import START, Bounds, decide, wanted_for

BOUNDS = Bounds(min=1, max=10, target=1000.0, up_after_s=10.0, down_after_s=300.0, settle_s=60.0)
Load = Callable[[float, int], float]  # of seconds and workers


def run(load: Load, duration_s: float, count: int = 1, bounds: Bounds = BOUNDS) -> list[tuple[float, int]]:
    """The changes: when, and to how many. One look a second."""
    state, changes = START, list[tuple[float, int]]()
    for second in range(int(duration_s)):
        now_s = 1000.0 + second
        new, state = decide(state, now_s, count, load(float(second), count), bounds)
        if new != count:
            changes.append((float(second), new))
            count = new
    return changes


@pytest.mark.parametrize("pending", [0.0, 500.0, 999.0, 1000.0, 2500.0, 7001.0, 50_000.0])
@pytest.mark.parametrize("count", [1, 4, 10])
def test_a_constant_load_settles_in_two_changes(pending: float, count: int) -> None:
    changes = run(lambda second, workers: pending, 3600, count)
    assert len(changes) <= 2
    settled = changes[-1][1] if changes else count
    assert settled * BOUNDS.target >= min(pending, BOUNDS.max * BOUNDS.target), "enough of them"


@pytest.mark.parametrize("mean", [1500.0, 3000.0, 4200.0])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_a_wave_of_a_minute_changes_once_a_period_at_most(mean: float, share: float) -> None:
    changes = run(lambda second, workers: mean * (1 + share * math.sin(2 * math.pi * second / 60)), 3600)
    times = [when for when, _ in changes]
    assert all(later - sooner >= 60 for sooner, later in pairwise(times))
    assert not [when for when in times if when > 600], "and comes to rest"


def test_a_step_of_five_times_is_one_decision() -> None:
    changes = run(lambda second, workers: 1000.0 if second < 100 else 5000.0, 600)
    assert changes == [(110.0, 5)]


def test_a_short_peak_changes_nothing() -> None:
    assert run(lambda second, workers: 9000.0 if 100 <= second < 109 else 500.0, 600) == []


def test_fewer_only_where_the_others_have_room_and_after_a_while() -> None:
    down = run(lambda second, workers: 2000.0, 2000, count=5)
    assert down == [(300.0, 3)], "two would be full: they would have 1000 of 1000 each"
    assert run(lambda second, workers: 2000.0, 2000, count=3) == []


def test_a_peak_within_the_wait_is_remembered() -> None:
    changes = run(lambda second, workers: 2700.0 if second == 150 else 100.0, 310, count=6)
    assert changes == [(300.0, 4)]


def test_a_queue_that_workers_work_off_does_not_swing() -> None:
    """Closed loop: 2600 tokens arrive each second, a worker does 1000 of them; each takes a second when nothing waits.
    Three are enough for the rate, a fourth may come for what had piled up."""
    waiting = 0.0

    def load(second: float, workers: int) -> float:
        nonlocal waiting
        waiting = max(0.0, waiting + 2600.0 - 1000.0 * workers)
        return 2600.0 + waiting

    changes = run(load, 7200)
    assert len(changes) <= 4
    assert changes[-1][1] in (3, 4)
    assert changes[-1][0] < 3600


def test_changed_bounds_hold_at_once() -> None:
    assert decide(START, 0.0, 20, 0.0, BOUNDS)[0] == BOUNDS.max
    assert decide(START, 0.0, 0, 0.0, BOUNDS)[0] == BOUNDS.min


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 10))
def test_never_outside_the_bounds(loads: list[float], count: int) -> None:
    state = START
    for second, pending in enumerate(loads):
        count, state = decide(state, 20.0 * second, count, pending, BOUNDS)
        assert BOUNDS.min <= count <= BOUNDS.max
        assert BOUNDS.min <= wanted_for(pending, BOUNDS) <= BOUNDS.max
