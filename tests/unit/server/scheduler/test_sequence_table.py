"""Transitions of requests and sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.scheduler_harness import make_request

from loraplex_contracts.errors import IllegalTransition
from loraplex_contracts.request import SamplingParams
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.sequence_table import (
    REQUEST_TRANSITIONS,
    SEQUENCE_TRANSITIONS,
    RequestPhase,
    RequestState,
    SequenceState,
    SequenceStatus,
)


def make_state() -> RequestState:
    request = make_request("r")
    return RequestState(request, (), "", max_total_tokens=9, num_prompt_tokens=3, stop_ids=frozenset())


def make_sequence() -> SequenceState:
    return SequenceState("r#0@1", make_state(), 0, (0, 0.0, 1, 0), SamplingParams(), 3, 9, [1, 2, 3], None)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(SequenceStatus, SequenceStatus)))
def test_sequences(before: SequenceStatus, after: SequenceStatus) -> None:
    seq = make_sequence()
    seq.status = before
    if after in SEQUENCE_TRANSITIONS[before]:
        seq.move(after)
        assert seq.status is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.value} -> {after.value}"):
            seq.move(after)
        assert seq.status is before


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RequestPhase, RequestPhase)))
def test_requests(before: RequestPhase, after: RequestPhase) -> None:
    state = make_state()
    state.phase = before
    if after in REQUEST_TRANSITIONS[before]:
        state.move(after)
        assert state.phase is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.value} -> {after.value}"):
            state.move(after)
        assert state.phase is before


def test_nothing_leaves_the_end() -> None:
    assert SEQUENCE_TRANSITIONS[SequenceStatus.FINISHED] == frozenset()
    assert REQUEST_TRANSITIONS[RequestPhase.ENDED] == frozenset()


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_running": 0},
        {"max_running": 9},  # more than the step's tokens
        {"max_context_tokens": 1},
        {"max_queued": 0},
        {"num_spare_blocks": -1},
        {"max_bypasses": -1},
        {"max_adapter_wait_s": -1.0},
    ],
)
def test_configurations_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {"max_running": 8, "max_step_tokens": 8, "max_context_tokens": 64}
    SchedulerConfig(**right)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SchedulerConfig(**(right | wrong))
