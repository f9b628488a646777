"""Transitions of requests and sequences."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.engine_fakes import FakeCache
from support.scheduler_harness import make_request

from loraplex_contracts.errors import IllegalTransition
from loraplex_contracts.request import SamplingParams
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.sequence_table import (
    EXPECTED_TOKENS,
    REQUEST_TRANSITIONS,
    SEQUENCE_TRANSITIONS,
    RequestPhase,
    RequestState,
    SequenceState,
    SequenceStatus,
    SequenceTable,
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


def test_what_waits_moves_by_what_came_before_it() -> None:
    """Three requests of two completions, of one flow, that may have the whole context; another flow's stays."""
    table = SequenceTable(8, BlockPool(64, 16), FakeCache(), None)
    states: list[RequestState] = []
    for serial, tenant in enumerate(["a", "a", "a", "b", "b"]):
        request = make_request(f"r{serial}", n=2, tenant=tenant)
        state = RequestState(request, (), "", max_total_tokens=8003, num_prompt_tokens=3, stop_ids=frozenset())
        for index in range(2):
            order = 0, 0.0, serial, index
            seq = SequenceState(f"s{serial}", state, index, order, SamplingParams(), 3, 8003, [1, 2, 3], None)
            seq.status = SequenceStatus.HELD if index else SequenceStatus.WAITING
            state.sequences.append(seq)
        table.add(state)
        states.append(state)
    charged = 3 + 2 * EXPECTED_TOKENS

    def starts() -> list[float]:
        table.move_waiting()
        assert list(table.waiting) == sorted(table.waiting, key=lambda seq: seq.order)
        assert all(seq.order[1] == seq.request.place.start for seq in table.waiting)
        return [state.place.start for state in states]

    assert starts() == [0, charged, 2 * charged, 0, charged]
    # A completion that had 1000 tokens, then one that had none.
    states[0].sequences[0].token_ids = [1] * 1003
    more = 1000 - EXPECTED_TOKENS
    table.finish(states[0].sequences[0])
    assert starts() == [0, charged + more, 2 * charged + more, 0, charged]
    table.finish(states[0].sequences[1])
    more -= EXPECTED_TOKENS
    assert starts() == [0, charged + more, 2 * charged + more, 0, charged]
    # One leaves the queue: only those behind it move.
    table.end_request(states[1])
    assert starts() == [0, charged + more, charged + more, 0, charged]


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
