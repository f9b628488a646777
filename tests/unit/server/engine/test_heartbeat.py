from __future__ import annotations

import math
import time

import pytest

from loraplex_server.engine.heartbeat import MIN_TURN_S, Heartbeat, StepBound, TurnTimer


def test_nothing_is_bounded_before_a_step_was_measured() -> None:
    assert StepBound().allowed_s(1) == math.inf


def test_a_long_step_is_legal_where_steps_are_slow() -> None:
    bound = StepBound()
    bound.learn(num_tokens=10, step_s=20.0)
    assert bound.allowed_s(1000) == pytest.approx(20_000.0)
    assert bound.allowed_s(1) == MIN_TURN_S
    assert bound.allowed_s(0) == MIN_TURN_S, "copying an adapter is no step"


def test_the_slowest_step_counts() -> None:
    bound = StepBound()
    for step_s in (0.5, 9.0, 0.1):
        bound.learn(num_tokens=1, step_s=step_s)
    assert bound.allowed_s(1) == pytest.approx(90.0)


def test_a_turn_without_a_step_teaches_nothing() -> None:
    bound = StepBound()
    bound.learn(num_tokens=0, step_s=1000.0)
    assert bound.allowed_s(1) == math.inf


def test_a_given_bound_holds_from_the_first_step_on() -> None:
    bound = StepBound(5.0)
    assert bound.allowed_s(1) == 5.0
    bound.learn(num_tokens=1, step_s=100.0)
    assert bound.allowed_s(1000) == 5.0


def test_a_turn_is_seen_while_it_lasts() -> None:
    heartbeat = Heartbeat()
    timer = TurnTimer(heartbeat, StepBound(7.0))
    assert heartbeat.read().busy_since_s == 0.0
    before_s = time.monotonic()
    timer.begin()
    timer.step(12)
    pulse = heartbeat.read()
    assert before_s <= pulse.busy_since_s <= time.monotonic()
    assert pulse.allowed_s == 7.0
    timer.end()
    assert heartbeat.read().busy_since_s == 0.0


def test_it_beats_as_long_as_it_is_asked_to() -> None:
    heartbeat = Heartbeat()
    with heartbeat.beating():
        end_s = time.monotonic() + 10
        while heartbeat.read().num_beats < 2 and time.monotonic() < end_s:
            time.sleep(0.02)
    num_beats = heartbeat.read().num_beats
    assert num_beats >= 2
    time.sleep(0.7)
    assert heartbeat.read().num_beats == num_beats
