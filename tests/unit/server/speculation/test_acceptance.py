"""Acceptance statistics of proposers.

Steps are counted, no test looks at a clock.
"""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_server.speculation.acceptance import MAX_PAUSE, Acceptance, AcceptancePool, Backoff, TrackRecord
from loraplex_server.speculation.base import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP

# --- how likely ------------------------------------------------------------------------------------------------------


def test_survival_falls_and_knows_the_prior() -> None:
    curve = Acceptance(AcceptancePool((0.5, 0.8))).survival(0, 4)
    assert curve == pytest.approx((0.5, 0.4, 0.32, 0.256))


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(0, 70), st.integers(0, 300)), max_size=40),
    st.integers(0, 70),
)
def test_survival_is_a_chance_whatever_was_seen(seen: list[tuple[int, int, int, int]], evidence: int) -> None:
    record = TrackRecord.new(AcceptancePool.of(PROMPT_LOOKUP))
    step = 0
    for num_drafted, num_accepted, level, num_steps in seen:
        step += num_steps
        record.observe(step, num_drafted, min(num_accepted, num_drafted), level)
    curve = record.survival(step + 1, 8, evidence, holds_back=False)
    assert len(curve) == 8
    assert list(curve) == sorted(curve, reverse=True)
    assert 0.0 < curve[-1] <= curve[0] < 1.0
    assert len(record.survival(step + 1, 8, evidence)) <= 8


@pytest.mark.parametrize("chance", [0.2, 0.6, 0.9])
def test_estimates_come_near_the_truth(chance: float) -> None:
    rng = random.Random(3)
    acceptance = Acceptance(AcceptancePool.of(DRAFT_MODEL))
    curves: list[tuple[float, ...]] = []
    for step in range(400):
        curves.append(acceptance.survival(step, 3))
        num_accepted = 0
        while num_accepted < 4 and rng.random() < chance:
            num_accepted += 1
        acceptance.observe(step, 4, num_accepted)
    for idx in range(3):
        mean = sum(curve[idx] for curve in curves[100:]) / 300
        assert mean == pytest.approx(chance ** (idx + 1), abs=0.08)


def test_what_is_behind_the_first_rejection_says_nothing() -> None:
    long, short = (Acceptance(AcceptancePool.of(DRAFT_MODEL)) for _ in range(2))
    for step in range(10):
        long.observe(step, 8, 2)
        short.observe(step, 3, 2)
    assert long.survival(10, 8) == short.survival(10, 8)
    short.observe(10, 0, 0)
    assert long.survival(11, 8) == short.survival(11, 8)


def test_longer_matches_are_judged_by_themselves() -> None:
    acceptance = Acceptance(AcceptancePool.of(PROMPT_LOOKUP))
    before = acceptance.survival(0, 1, 8)[0]
    for step in range(10):
        acceptance.observe(step, 4, 0, evidence=1)
    assert acceptance.survival(10, 1, 1)[0] < 0.15
    assert acceptance.survival(10, 1, 8)[0] > before - 0.15


def test_what_one_sequence_learned_others_begin_with() -> None:
    pool = AcceptancePool.of(MEDUSA)
    teacher, pupil = Acceptance(pool), Acceptance(pool)
    for step in range(50):
        teacher.observe(step, 4, 0)
    assert pupil.survival(50, 1)[0] < 0.2
    assert pupil.survival(50 + 5000, 1)[0] > 0.8  # long ago


def test_bad_luck_fades_while_nothing_is_tried() -> None:
    pool = AcceptancePool((0.8,))
    unlucky = Acceptance(pool)
    for step in range(8):
        unlucky.observe(step, 1, 0)
    for other in range(200):
        Acceptance(pool).observe(8, 5, 4 if other % 2 else 5)
    others = Acceptance(pool)
    assert unlucky.survival(9, 1)[0] < others.survival(9, 1)[0] - 0.03
    assert unlucky.survival(200, 1)[0] == pytest.approx(others.survival(200, 1)[0], abs=0.001)


# --- when to stop trying ---------------------------------------------------------------------------------------------


def test_pauses_grow_and_probes_are_short() -> None:
    backoff = Backoff()
    drafted = [step for step in range(1024) if _misses(backoff, step)]
    gaps = [after - before for before, after in pairwise(drafted)]
    assert max(gaps) == gaps[-1] == MAX_PAUSE
    assert drafted[-1] % MAX_PAUSE == 0  # with everybody else who probes
    assert len(drafted) < 10 + 5 + 1024 / MAX_PAUSE


def _misses(backoff: Backoff, step: int, evidence: int = 0, max_pause: int = MAX_PAUSE) -> int:
    """A draft of as many tokens as may be, none of them right."""
    limit = backoff.limit(step, 8, evidence, max_pause)
    backoff.observe(step, limit, 0, evidence)
    return limit


def test_who_is_usually_right_is_doubted_sooner() -> None:
    def num_before_pause(rate: float) -> int:
        backoff = Backoff()
        step = 0
        while backoff.limit(step, 8) == 8:
            backoff.observe(step, 8, 0, rate=rate)
            step += 1
        return step

    assert [num_before_pause(rate) for rate in (0.95, 0.6, 0.01)] == [3, 5, 10]


def test_success_ends_a_pause_at_once() -> None:
    backoff = Backoff()
    step = 0
    while backoff.limit(step, 8) != 1:  # until the first probe
        _misses(backoff, step)
        step += 1
    backoff.observe(step, 1, 1)
    assert backoff.limit(step + 1, 8) == 8


def test_a_long_match_gives_a_pause_an_end() -> None:
    backoff = Backoff()
    step = 0
    while backoff.limit(step, 8, 2):
        _misses(backoff, step, evidence=2)
        step += 1
    assert backoff.limit(step, 8, 4) == 0
    assert backoff.limit(step, 8, 5) == 5
    backoff.observe(step, 5, 0, evidence=5)
    assert backoff.limit(step + 1, 8, 10) == 0  # that was no news
