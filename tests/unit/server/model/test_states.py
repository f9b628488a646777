"""States of a step: written once, behind what counts, where the plan says."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
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
    memory.tensors[0][1 : 1 + len(states), 0] = torch.tensor(states)
    return memory


def _run(memory: StateMemory, spans: Sequence[Span]) -> tuple[StateStep, list[float]]:
    step = memory.begin(spans)
    row = torch.arange(1, 1 + sum(span.num_tokens for span in spans), dtype=torch.float64)
    return step, step.run(0, _add, (row,)).tolist()


def _slots(memory: StateMemory) -> list[float]:
    return [float(memory.tensors[0][memory.place_of(slot), 0]) for slot in range(memory.num_slots + 1)]


def test_spans_of_all_kinds_in_one_row() -> None:
    memory = _memory(5.0, 7.0, 0.5, 0.5)
    spans = [
        Span("a", 0, 9, 1, 1, state=StateUse(1, 1)),
        Span("b", 1, 0, 1, 1, state=StateUse(0, 2)),
        Span("c", 2, 4, 3, 0, state=StateUse(2, 3)),
    ]
    step, out = _run(memory, spans)
    assert out == [5 * 3 + 1, 2, 7 * 3 + 3, (7 * 3 + 3) * 3 + 4, ((7 * 3 + 3) * 3 + 4) * 3 + 5]
    assert _slots(memory)[:3] == [0, 5, 7], "what a step begins with stays until it counts"
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
    """A step copies states before positions in the span, and at its end; to several slots."""
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


def test_steps_of_all_kinds_take_no_place_with_them() -> None:
    """Copies, drafts, steps that are dropped or settled only after the next: each slot has the state of its text."""
    dice = random.Random(3)
    memory = _memory(*[0.0] * 8)
    texts: dict[int, list[float]] = {slot: [] for slot in range(1, 9)}  # 1 to 4: those of sequences; others: snapshots
    late: tuple[StateStep, dict[str, int], dict[int, list[float]]] | None = None
    for _ in range(500):
        spans: list[Span] = []
        row: list[float] = []
        after: dict[int, list[float]] = {}  # texts of slots behind the step
        taken = set() if late is None else set(late[2])
        for slot in range(1, 5):
            if slot in taken or dice.random() < 0.3:
                continue
            source = dice.choice((slot, slot, slot, 0, dice.randint(5, 8)))
            source = source if texts.get(source) and len(texts[source]) < 20 and source not in after else 0
            fresh = [float(dice.randint(1, 2)) for _ in range(dice.choice((1, 1, 2, 5)))]
            whole = [*(texts[source] if source else []), *fresh]
            start, copies = len(whole) - len(fresh), ()
            draft = (7,) * (len(fresh) - 1) if source == slot else ()
            if not draft and (copy := dice.randint(5, 12)) <= 8 and copy not in {source, *after}:
                at = start + dice.randint(1, len(fresh))
                copies, after[copy] = ((at, copy),), whole[:at]
            use = StateUse(source, slot, copies)
            spans.append(Span(str(slot), slot, start, len(fresh), 1, draft=draft, state=use))
            row += fresh
            after[slot] = whole
        read = {span.state.source for span in spans if span.state is not None}
        if read.intersection(slot for slot in after if slot > 4) or not spans:
            continue  # what is read is held, so that no plan writes to it
        step = memory.begin(spans)
        found = step.run(0, _add, (torch.tensor(row, dtype=torch.float64),)).tolist()
        ends = np.cumsum([span.num_tokens for span in spans])
        assert [found[end - 1] for end in ends] == [_of(*after[span.row]) for span in spans]
        if dice.random() < 0.2:  # it raised, and what it was to begin has nothing
            texts |= {slot: [] for slot in after if slot not in read}
            continue
        step.commit()
        kept = {span.sequence_id: dice.randint(0, span.num_tokens) for span in spans if span.draft}
        drafted = {int(name): after.pop(int(name)) for name in kept}
        starts = {span.row: span.start for span in spans}
        texts |= after
        if late is not None:
            late[0].replay(late[1])
            late[0].settle()
            texts |= late[2]
        late = step, kept, {slot: text[: starts[slot] + kept[str(slot)]] for slot, text in drafted.items()}
        for slot, text in texts.items():
            if text and slot not in late[2]:
                assert memory.tensors[0][memory.place_of(slot), 0] == _of(*text)
    assert late is not None
    late[0].replay(late[1])
    late[0].settle()
    memory.check_integrity()
    assert not memory.tensors[0][0].any()
