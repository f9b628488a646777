"""States of a step: written once, behind what counts, where the plan says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from loraplex_contracts.plan import Span, StateUse
from loraplex_server.model.states import StateMemory, StateSpec, StateStep, TextPerToken

SPEC = StateSpec((1,), torch.float64)


def _add(parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
    """A recurrence whose state is the sum of all tokens, times 3 each."""
    (x,) = parts  # [pieces, tokens]
    sums = [torch.zeros(x.shape[0], dtype=x.dtype) if state is None else state[:, 0]]
    for i in range(x.shape[1]):
        sums.append(sums[-1] * 3 + x[:, i])
    return torch.stack(sums[1:], 1), sums[-1].unsqueeze(1)


def _of(*tokens: float) -> float:
    total = 0.0
    for token in tokens:
        total = total * 3 + token
    return total


def _memory(*states: float) -> StateMemory:
    memory = StateMemory([SPEC], len(states), torch.device("cpu"))
    memory.tensors[0][1:, 0] = torch.tensor(states)
    return memory


def _run(memory: StateMemory, spans: Sequence[Span]) -> tuple[StateStep, list[float]]:
    step = memory.begin(spans)
    row = torch.arange(1, 1 + sum(span.num_tokens for span in spans), dtype=torch.float64)
    return step, step.run(0, _add, (row,)).tolist()


def _slots(memory: StateMemory) -> list[float]:
    return memory.tensors[0][:, 0].tolist()


def test_spans_of_all_kinds_in_one_row() -> None:
    memory = _memory(5.0, 7.0, 0.5, 0.5)
    spans = [
        Span("a", 0, 9, 1, 1, state=StateUse(1, 1)),
        Span("b", 1, 0, 1, 1, state=StateUse(0, 2)),
        Span("c", 2, 4, 3, 0, state=StateUse(2, 3)),
    ]
    step, out = _run(memory, spans)
    assert out == [5 * 3 + 1, 2, 7 * 3 + 3, (7 * 3 + 3) * 3 + 4, ((7 * 3 + 3) * 3 + 4) * 3 + 5]
    assert _slots(memory) == [0, 5, 7, 0.5, 0.5], "nothing is written before the step counts"
    again, same = _run(memory, spans)
    assert same == out
    again.commit()
    again.settle()
    assert _slots(memory) == [0, 16, 2, out[-1], 0.5]
    del step


def test_a_span_without_slots_begins_and_leaves_nothing() -> None:
    memory = _memory(5.0)
    step, out = _run(memory, [Span("a", 0, 3, 2, 1), Span("b", 1, 3, 2, 1)])
    step.commit()
    assert out == [1, _of(1, 2), 3, _of(3, 4)]
    assert _slots(memory) == [0, 5]


def test_copies_on_the_way() -> None:
    """Before positions in the span, and at its end; to several slots."""
    memory = _memory(5.0, 0.0, 0.0, 0.0, 0.0)
    spans = [
        Span("a", 0, 10, 4, 0, state=StateUse(1, 1, ((12, 2), (12, 3), (14, 4)))),
        Span("b", 1, 0, 4, 0, state=StateUse(0, 5)),
    ]
    step, out = _run(memory, spans)
    step.commit()
    assert out[3] == ((((5 * 3 + 1) * 3 + 2) * 3 + 3) * 3) + 4
    assert _slots(memory) == [0, out[3], out[1], out[1], out[3], out[7]]


@pytest.mark.parametrize("commits_first", [False, True], ids=["replayed first", "committed first"])
def test_drafts_count_as_far_as_they_were_accepted(commits_first: bool) -> None:
    memory = _memory(5.0, 6.0, 7.0, 8.0)
    spans = [
        Span("plain", 0, 5, 1, 1, state=StateUse(1, 1)),
        Span("all", 1, 5, 3, 3, draft=(8, 9), state=StateUse(2, 2)),
        Span("one", 2, 5, 3, 3, draft=(8, 9), state=StateUse(3, 3)),
        Span("failed", 3, 5, 3, 3, draft=(8, 9), state=StateUse(4, 4)),
    ]
    step, out = _run(memory, spans)
    kept = {"plain": 1, "all": 3, "one": 2, "failed": 0}
    if commits_first:
        step.commit()
        step.replay(kept)
    else:
        step.replay(kept)
        step.commit()
    assert _slots(memory)[2:] == [6, 7, 8]
    step.settle()
    assert _slots(memory) == [0, out[0], out[3], out[5], 8]


def test_a_copy_outside_of_its_span_is_an_error() -> None:
    memory = _memory(5.0, 0.0)
    with pytest.raises(AssertionError, match="outside"):
        memory.begin([Span("a", 0, 10, 4, 0, state=StateUse(1, 1, ((10, 2),)))])
    with pytest.raises(AssertionError, match="draft"):
        memory.begin([Span("a", 0, 10, 4, 4, draft=(1, 2, 3), state=StateUse(1, 1, ((11, 2),)))])


def test_a_text_for_each_token() -> None:
    seen = TextPerToken()
    out = seen.run(4, _add, (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),))
    assert out.tolist() == [1, 2, 3]
    assert seen.specs == {4: SPEC}
    assert SPEC.num_bytes == 8
