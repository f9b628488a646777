"""Recurrent and convolution states: their memory, and how one step reads and changes them.

A slot is what plans name; a place is where its state lies. A step leaves the states that it begins with as they are and
writes to other places, and its slots get these once its results are known: so a step that raised can be run again, and
nothing is copied. A span with a draft gets its place as soon as it is known how far the draft was accepted: of one that
was accepted in part, the recurrence runs again over the inputs of the tokens that count, from the state before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from loraplex_contracts.plan import Span
from loraplex_server.kv.states import NO_STATE
from loraplex_server.layers.recurrences import NO_PLACE, Places, Recurrence, StateOps
from loraplex_server.layers.transfer import upload


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one mixer, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateMemory:
    """The states of all layers, by place. Place 0 is that of slot 0 and stays zero. Owned by the runner."""

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_slots: int,
        device: torch.device,
        *,
        num_spare: int | None = None,
        ops: StateOps | None = None,
    ) -> None:
        """`num_slots`: beside slot 0. `num_spare`: places beside those of the slots, one for each span of a step that
        goes on from a slot's state; as many as slots where nothing is said. `ops`: what the back end computes."""
        self.device = device
        self.num_slots = num_slots
        self.ops = ops
        num_places = 1 + num_slots + (num_slots if num_spare is None else num_spare)
        self.tensors = [torch.zeros(num_places, *spec.shape, dtype=spec.dtype, device=device) for spec in specs]
        self._place_of = list(range(1 + num_slots))  # by slot
        self._spare = list(range(1 + num_slots, num_places))

    def begin(self, spans: Sequence[Span]) -> StateStep:
        """A step with these spans, in the order of the flattened row. It changes nothing before its `commit`, so one
        that is dropped leaves no trace; the next one begins after that."""
        return StateStep(self, spans)

    def place_of(self, slot: int) -> int:
        """The place of the slot's state now."""
        return self._place_of[slot]

    def spare(self, number: int) -> int:
        """The place of one of a step's new states. Raises AssertionError where there are fewer."""
        assert number < len(self._spare), "a step has more spans than the memory of states was made for"
        return self._spare[number]

    def take(self, place: int) -> None:
        """Keeps a spare place out of what the next steps get, until it is `put` or given back."""
        self._spare.remove(place)

    def put(self, slot: int, place: int) -> None:
        """Puts the slot's state at `place` from here on; the place that it had is spare."""
        self._spare.append(self._place_of[slot])
        self._place_of[slot] = place

    def give_back(self, place: int) -> None:
        self._spare.append(place)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each place is a slot's or spare. Call it while no step waits for `settle`."""
        places = sorted(self._place_of + self._spare)
        assert places == list(range(len(self.tensors[0]))), "a place of a state is lost or used twice"
        assert self._place_of[NO_STATE] == NO_STATE, "the place of zeros is a sequence's"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A range of a span's tokens."""

    span: int
    start: int  # first token in the row
    length: int
    source: int  # place
    targets: tuple[int, ...]  # places that get the state behind it
    continues: bool  # the piece before it, whose state it begins with


@dataclass(frozen=True, slots=True)
class _Group:
    """Pieces that are computed at once, all of one length."""

    start: int
    count: int
    length: int
    tokens: Tensor | None  # [count * length] in the row; None: side by side from `start` on
    continues: bool
    sources: Tensor | None  # [count]; None: all begin with nothing
    kept: Tensor | None  # [pairs] which of the pieces go to
    targets: Tensor | None  # [pairs] these places
    is_in_order: bool  # one target for each piece, in order


@dataclass(frozen=True, slots=True)
class _Layout:
    """Pieces as the recurrences run over them."""

    groups: tuple[_Group, ...]
    places: Places  # the same for a back end's own operations
    copies: Tensor | None  # [2, n]: from places to places, behind those operations


class StateStep:
    """Computes one step's states. `run` writes to places that no slot has; `commit` and `settle` hand them out."""

    def __init__(self, memory: StateMemory, spans: Sequence[Span]) -> None:
        self._memory = memory
        self._spans = spans
        self._read = {span.state.source for span in spans if span.state is not None}
        self._new: dict[int, int] = {}  # place by slot, of what waits for `commit`
        self._drafted: dict[int, int] = {}  # place by span with a draft, of what waits for `settle`
        self._replayed: set[int] = set()  # spans with a draft whose place has what counts
        self._is_committed = False
        self._layout = _layout(self._cut(spans), memory.device)
        self._passes: dict[int, tuple[Recurrence, Sequence[Tensor]]] = {}  # by the state's index, where drafts are

    def run(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Runs a recurrence, whose state is the `idx`th, over the row: inputs [num_tokens, ...] each -> the outputs."""
        if self._drafted:
            self._passes[idx] = run, inputs
        return self._run(idx, run, inputs, self._layout)

    @property
    def places(self) -> Places:
        """See `StatesOfStep`, also for those below."""
        return self._layout.places

    @property
    def keeps_inputs(self) -> bool:
        return bool(self._drafted)

    def tensor(self, idx: int) -> Tensor:
        return self._memory.tensors[idx]

    def note(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> None:
        if self._drafted:
            self._passes[idx] = run, inputs
        _copy(self._memory.tensors[idx], self._layout)

    def _run(self, idx: int, run: Recurrence, inputs: Sequence[Tensor], layout: _Layout) -> Tensor:
        states, ops = self._memory.tensors[idx], self._memory.ops
        if ops is not None and (found := ops.run(run, inputs, states, layout.places)) is not None:
            _copy(states, layout)
            return found
        outs: list[Tensor] = []
        state: Tensor | None = None
        for group in layout.groups:
            end = group.start + group.count * group.length
            own = [x[group.start : end] if group.tokens is None else x.index_select(0, group.tokens) for x in inputs]
            parts = [x.unflatten(0, (group.count, group.length)) for x in own]
            if not group.continues:
                state = None if group.sources is None else states.index_select(0, group.sources)
            out, state = run(parts, state)
            if group.targets is not None and group.kept is not None:
                behind = state if group.is_in_order else state.index_select(0, group.kept)
                states.index_copy_(0, group.targets, behind.to(states.dtype))
            outs.append(out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def commit(self) -> None:
        """Makes the step count: its slots get the states behind it, except for those of spans with a draft."""
        for slot, place in self._new.items():
            self._memory.take(place)
            self._memory.put(slot, place)
        for place in self._drafted.values():
            self._memory.take(place)
        self._is_committed = True

    def replay(self, num_kept: Mapping[str, int]) -> None:
        """Computes the states of spans with a draft, of each behind so many of its tokens (by sequence id; 0: none).
        Called once the step's results are known."""
        starts = np.cumsum([0, *(span.num_tokens for span in self._spans)]).tolist()
        pieces: list[_Piece] = []
        for idx, place in self._drafted.items():
            span = self._spans[idx]
            count = num_kept.get(span.sequence_id, 0)
            if not count or span.state is None:
                continue
            if count < span.num_tokens:
                source = self._memory.place_of(span.state.source)
                pieces.append(_Piece(idx, starts[idx], count, source, (place,), False))
            self._replayed.add(idx)
        if pieces:
            layout = _layout(pieces, self._memory.device, gathers=True)
            for idx, (run, inputs) in self._passes.items():
                self._run(idx, run, inputs, layout)

    def settle(self) -> None:
        """Gives the slots of spans with a draft the states that `replay` has computed. Called after `commit`, once."""
        assert self._is_committed, "a step is settled after it was committed"
        for idx, place in self._drafted.items():
            use = self._spans[idx].state
            if idx in self._replayed and use is not None:
                self._memory.put(use.target, place)
            else:
                self._memory.give_back(place)
        self._drafted.clear()
        self._passes.clear()

    def _cut(self, spans: Sequence[Span]) -> list[_Piece]:
        pieces: list[_Piece] = []
        start = 0
        for idx, span in enumerate(spans):
            pieces += self._cut_one(idx, span, start)
            start += span.num_tokens
        return pieces

    def _cut_one(self, idx: int, span: Span, start: int) -> list[_Piece]:
        """The pieces of a span, which ends one wherever its state is copied on the way."""
        use = span.state
        if use is None:
            return [_Piece(idx, start, span.num_tokens, 0, (), False)]
        targets: dict[int, tuple[int, ...]] = {span.num_tokens: ()}  # by the number of tokens before it
        for position, slot in use.copies:
            assert span.start < position <= span.start + span.num_tokens, "a copy outside of its span"
            count = position - span.start
            targets[count] = (*targets.get(count, ()), self._place_for(slot))
        if span.draft:
            assert not use.copies, "a span with a draft has no copies"
            if use.target != NO_STATE:
                self._drafted[idx] = place = self._next_spare()
                targets[span.num_tokens] = (place,)
        elif use.target != NO_STATE:
            targets[span.num_tokens] = (self._place_for(use.target), *targets[span.num_tokens])
        pieces: list[_Piece] = []
        before = 0
        for end in sorted(targets):
            source = self._memory.place_of(use.source)
            pieces.append(_Piece(idx, start + before, end - before, source, targets[end], before > 0))
            before = end
        return pieces

    def _place_for(self, slot: int) -> int:
        """The place of the slot's new state: another one if its present one is read in this step."""
        if slot not in self._read:
            return self._memory.place_of(slot)
        if slot not in self._new:
            self._new[slot] = self._next_spare()
        return self._new[slot]

    def _next_spare(self) -> int:
        return self._memory.spare(len(self._new) + len(self._drafted))


def _copy(states: Tensor, layout: _Layout) -> None:
    """Copies states that go to several places, behind a back end's operations."""
    if layout.copies is not None:
        states[layout.copies[1]] = states[layout.copies[0]]


def _layout(pieces: Sequence[_Piece], device: torch.device, *, gathers: bool = False) -> _Layout:
    """The layout of these pieces. `gathers`: pieces that do not adjoin may be computed at once, as nobody wants their
    outputs."""
    cut = {piece.span for piece in pieces if piece.continues}
    runs: list[list[_Piece]] = []
    for piece in sorted(pieces, key=lambda piece: piece.length) if gathers else pieces:
        last = runs[-1][-1] if runs else None
        fits = last is not None and last.length == piece.length and cut.isdisjoint((last.span, piece.span))
        if last is not None and fits and (gathers or last.start + last.length == piece.start):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    groups: list[_Group] = []
    for found in runs:
        length, is_first = found[0].length, not found[0].continues
        tokens = [at for piece in found for at in range(piece.start, piece.start + length)] if gathers else []
        pairs = [(number, place) for number, piece in enumerate(found) for place in piece.targets]
        sources = [piece.source for piece in found]
        groups.append(
            _Group(
                start=found[0].start,
                count=len(found),
                length=length,
                tokens=_upload(tokens, device) if tokens else None,
                continues=not is_first,
                sources=_upload(sources, device) if any(sources) and is_first else None,
                kept=_upload([number for number, _ in pairs], device) if pairs else None,
                targets=_upload([place for _, place in pairs], device) if pairs else None,
                is_in_order=[number for number, _ in pairs] == list(range(len(found))),
            )
        )
    rows: list[tuple[int, int, int, int]] = []
    chains: list[int] = []
    copies: list[tuple[int, int]] = []
    for number, piece in enumerate(pieces):
        if not piece.continues:
            chains.append(number)
        source = rows[-1][3] if piece.continues else piece.source
        target = piece.targets[0] if piece.targets else NO_PLACE
        rows.append((piece.start, piece.length, source, target))
        copies += [(target, place) for place in piece.targets[1:]]
    places = Places(np.array(rows, dtype=np.int64).reshape(-1, 4), np.array([*chains, len(rows)], dtype=np.int32))
    return _Layout(tuple(groups), places, _upload(list(zip(*copies, strict=True)), device) if copies else None)


def _upload(numbers: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=torch.int64), device)


class TextPerToken:
    """Stands for a step in which every token is a text of its own. For the probe, which learns the states' shapes."""

    def __init__(self) -> None:
        self.specs: dict[int, StateSpec] = {}  # by the state's index

    def run(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Does what `StateStep.run` does, for a step of texts of one token each."""
        out, state = run([x.unsqueeze(1) for x in inputs], None)
        self.specs[idx] = StateSpec(tuple(state.shape[1:]), state.dtype)
        return out.squeeze(1)
