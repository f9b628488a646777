"""Liveness checks of the engine."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import count

import pytest

from loraplex_contracts.errors import FailedPrecondition
from loraplex_server.engine.liveness import (
    KILL_STALLED_S,
    LOOK_S,
    MIN_TURN_S,
    SILENT_S,
    Heartbeat,
    Liveness,
    LivenessMonitor,
    Pulse,
    StepBound,
    TurnTimer,
    cpu_seconds,
)


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


def looks(liveness: Liveness, pulses: Iterator[Pulse], num: int, step_s: float = LOOK_S) -> list[str]:
    """The conclusions of so many looks, `step_s` apart."""
    return [liveness.look(pulse, number * step_s) for number, pulse in zip(range(num), pulses, strict=False)]


def still(**changes: float) -> Iterator[Pulse]:
    """Pulses that never change: those of a process that does nothing."""
    while True:
        yield Pulse(7, changes.get("busy_since_s", 0.0), changes.get("allowed_s", 0.0))


def beating(busy_since_s: float = 0.0, allowed_s: float = math.inf) -> Iterator[Pulse]:
    return (Pulse(number, busy_since_s, allowed_s) for number in count())


def test_an_idle_engine_that_beats_is_alive() -> None:
    assert set(looks(Liveness(lambda: 0.0), beating(), 100)) == {""}


def test_a_process_that_does_nothing_is_stalled_within_five_seconds() -> None:
    said = looks(Liveness(lambda: 3.0), still(), 10)
    first = next(number for number, why in enumerate(said) if why)
    assert SILENT_S <= first * LOOK_S <= 5 - LOOK_S, "a freeze just behind a beat is seen a look later"
    assert all(said[first:]), "until it does something"


def test_a_process_without_beats_that_computes_is_alive() -> None:
    """Native code may hold the interpreter's lock for as long as a step takes."""
    cpu_s = count()
    assert set(looks(Liveness(lambda: float(next(cpu_s))), still(busy_since_s=1.0, allowed_s=math.inf), 100)) == {""}


def test_where_the_system_does_not_tell_of_the_cpu_beats_decide() -> None:
    assert looks(Liveness(lambda: None), still(), 10)[-1]


def test_one_turn_may_last_as_long_as_is_allowed() -> None:
    said = looks(Liveness(lambda: 0.0), beating(busy_since_s=50.0, allowed_s=20.0), 30)
    assert set(said[:21]) == {""}
    assert all("20 s are allowed" in why for why in said[21:])


def test_turns_that_follow_each_other_are_no_long_turn() -> None:
    pulses = (Pulse(number, 50.0 + number, 2.0) for number in count())
    assert set(looks(Liveness(lambda: 0.0), pulses, 30)) == {""}


def test_it_is_alive_again_with_the_next_beat() -> None:
    liveness = Liveness(lambda: 0.0)
    assert looks(liveness, still(), 10)[-1]
    assert liveness.look(Pulse(8, 0.0, 0.0), 10.0) == ""


def test_a_pause_of_the_whole_machine_is_not_the_engines() -> None:
    """The front end slept as long as the engine did: nobody looked."""
    liveness = Liveness(lambda: 0.0)
    for now_s in (0.0, 1.0, 3600.0):
        assert liveness.look(Pulse(7, 1.0, 60.0), now_s) == ""


def test_a_stalled_engine_is_told_once_and_killed_when_it_stays_so() -> None:
    told: list[str] = []
    killed: list[bool] = []
    monitor = LivenessMonitor(lambda: told.append(monitor.stalled), lambda: killed.append(True))
    num_looks = next(number for number in range(100) if monitor.look(number * LOOK_S))
    assert (len(told), killed) == (1, [True])
    assert SILENT_S + KILL_STALLED_S - 2 * LOOK_S <= num_looks * LOOK_S <= SILENT_S + KILL_STALLED_S + LOOK_S


def test_an_engine_that_works_again_is_told_and_not_killed() -> None:
    told: list[str] = []
    monitor = LivenessMonitor(lambda: told.append(monitor.stalled), lambda: pytest.fail("it works again"))
    for number in range(60):
        if number % 8 == 0:
            monitor.heartbeat.beat()
        assert not monitor.look(number * LOOK_S)
    assert any(told)
    assert "" in told


def test_the_cpu_of_a_process() -> None:
    before_s = cpu_seconds(os.getpid())
    assert before_s is not None
    while cpu_seconds(os.getpid()) == before_s:
        sum(range(100_000))
    assert cpu_seconds(None) is None


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "/dev/shm/pym-1")

    monkeypatch.setattr(multiprocessing.get_context("spawn"), "RawArray", refuse)
    with pytest.raises(FailedPrecondition, match=r"Read-only file system: '/dev/shm/pym-1'.*tmpfs"):
        Heartbeat()
