"""Recurrent and convolution states: their memory, and how one step reads and changes them.

A step reads the states of its sequences and writes none until its results are known, so that a step that raised can be
run again. A span with a draft is written then, as far as the draft was accepted: from a state in which all of it is, or
else by running the recurrence again over the inputs of the accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from loraplex_contracts.plan import Span
from loraplex_server.kv.states import NO_STATE
from loraplex_server.layers.transfer import upload

# Runs pieces of texts, inputs [pieces, tokens, ...], from a state for each [pieces, ...] (None: the beginning).
# Returns outputs [pieces, tokens, ...] and the states behind the pieces.
Recurrence = Callable[[Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One state of one mixer, for one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class StateMemory:
    """The states of all layers, by slot. Slot 0 stays zero. Owned by the runner."""

    def __init__(self, specs: Sequence[StateSpec], num_slots: int, device: torch.device) -> None:
        """`num_slots`: beside slot 0."""
        self.device = device
        self.num_slots = num_slots
        self.tensors = [torch.zeros(num_slots + 1, *spec.shape, dtype=spec.dtype, device=device) for spec in specs]

    def begin(self, spans: Sequence[Span]) -> StateStep:
        """A step with these spans, in the order of the flattened row."""
        return StateStep(self, spans)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Equally long ranges of tokens, of `count` spans that lie side by side. One that continues the piece before it,
    in the same span, begins with the state behind that one."""

    first: int  # span
    count: int
    start: int  # first token in the row
    length: int
    continues: bool
    sources: Tensor | None  # [count] slots; None: all begin with nothing
    copies: tuple[int, ...]  # slots that get the state behind it; only where `count` is 1


@dataclass(slots=True)
class _Pass:
    """What one recurrence left behind in a step."""

    run: Recurrence
    inputs: Sequence[Tensor]  # [num_tokens, ...] each
    states: list[Tensor] = field(default_factory=list[Tensor])  # behind each piece


class StateStep:
    """One step's states. `run` and `replay` compute; `commit` and `settle` write."""

    def __init__(self, memory: StateMemory, spans: Sequence[Span]) -> None:
        self._memory = memory
        self._spans = spans
        self._pieces = list(self._cut(spans))
        self._passes: dict[int, _Pass] = {}  # by the state's index
        self._replayed: list[tuple[int, Tensor, Tensor]] = []  # index, slots and states of spans with a draft
        self._drafts = {idx for idx, span in enumerate(spans) if span.draft and span.state is not None}

    def run(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """Runs a recurrence, whose state is the `idx`th, over the row: inputs [num_tokens, ...] each -> the outputs."""
        done = self._passes[idx] = _Pass(run, inputs)
        outs: list[Tensor] = []
        for piece in self._pieces:
            end = piece.start + piece.count * piece.length
            parts = [x[piece.start : end].unflatten(0, (piece.count, piece.length)) for x in inputs]
            if piece.continues:
                state = done.states[-1]
            elif piece.sources is None:
                state = None
            else:
                state = self._memory.tensors[idx].index_select(0, piece.sources)
            out, state = run(parts, state)
            done.states.append(state)
            outs.append(out.flatten(0, 1))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def commit(self) -> None:
        """Writes the states of spans without a draft, and all copies."""
        writes: list[tuple[int, list[int], list[int]]] = []  # piece, places in it, slots
        for at, piece in enumerate(self._pieces):
            places: list[int] = []
            slots: list[int] = []
            is_last = at + 1 == len(self._pieces) or not self._pieces[at + 1].continues
            for place in range(piece.count if is_last else 0):
                use = self._spans[piece.first + place].state
                if use is not None and use.target != NO_STATE and piece.first + place not in self._drafts:
                    places.append(place)
                    slots.append(use.target)
            places += [0] * len(piece.copies)
            slots += piece.copies
            if slots:
                writes.append((at, places, slots))
        for at, places, slots in writes:
            count = self._pieces[at].count
            is_whole = places == list(range(count))
            to, of = upload(torch.tensor([slots, places], dtype=torch.int64), self._memory.device)
            for idx, done in self._passes.items():
                states = done.states[at] if is_whole else done.states[at].index_select(0, of)
                self._memory.tensors[idx].index_copy_(0, to, states)

    def settle(self) -> None:
        """Writes the states of spans with a draft, as `replay` has computed them."""
        for idx, targets, state in self._replayed:
            self._memory.tensors[idx].index_copy_(0, targets, state)
        self._replayed.clear()

    def replay(self, num_kept: Mapping[str, int]) -> None:
        """Computes the states of spans with a draft, of each behind so many of its tokens (by sequence id; 0: none).
        Once the step's results are known."""
        by_length: dict[tuple[int, int], list[int]] = {}  # spans by piece and number of tokens
        for at, piece in enumerate(self._pieces):
            for span_idx in range(piece.first, piece.first + piece.count):
                count = num_kept.get(self._spans[span_idx].sequence_id, 0)
                if span_idx in self._drafts and count:
                    by_length.setdefault((at, count), []).append(span_idx)
        for (at, count), members in by_length.items():
            piece = self._pieces[at]
            uses = [use for idx in members if (use := self._spans[idx].state) is not None]
            places = [idx - piece.first for idx in members]
            packed = torch.tensor([places, [use.source for use in uses], [use.target for use in uses]])
            of, sources, targets = upload(packed, self._memory.device)
            for idx, done in self._passes.items():
                if count == piece.length:
                    state = done.states[at].index_select(0, of)
                else:
                    end = piece.start + piece.count * piece.length
                    shape = (piece.count, piece.length)
                    parts = [
                        x[piece.start : end].unflatten(0, shape).index_select(0, of)[:, :count] for x in done.inputs
                    ]
                    _, state = done.run(parts, self._memory.tensors[idx].index_select(0, sources))
                self._replayed.append((idx, targets, state))

    def _cut(self, spans: Sequence[Span]) -> list[_Piece]:
        pieces: list[_Piece] = []
        start = idx = 0
        while idx < len(spans):
            span = spans[idx]
            copies = span.state.copies if span.state is not None else ()
            if copies:
                pieces += self._cut_one(idx, span, start)
                idx, start = idx + 1, start + span.num_tokens
                continue
            end = idx
            while end < len(spans) and spans[end].num_tokens == span.num_tokens and not _copies(spans[end]):
                end += 1
            sources = self._sources(spans[idx:end])
            pieces.append(_Piece(idx, end - idx, start, span.num_tokens, False, sources, ()))
            start += (end - idx) * span.num_tokens
            idx = end
        return pieces

    def _cut_one(self, idx: int, span: Span, start: int) -> list[_Piece]:
        """The pieces of a span whose state is copied on the way."""
        assert span.state is not None
        slots: dict[int, tuple[int, ...]] = {}
        for position, slot in span.state.copies:
            assert span.start < position <= span.start + span.num_tokens, "a copy outside of its span"
            slots[position - span.start] = (*slots.get(position - span.start, ()), slot)
        assert not span.draft, "a span with a draft has no copies"
        ends = sorted({*slots, span.num_tokens})
        pieces: list[_Piece] = []
        before = 0
        for end in ends:
            sources = self._sources([span]) if not before else None
            pieces.append(_Piece(idx, 1, start + before, end - before, before > 0, sources, slots.get(end, ())))
            before = end
        return pieces

    def _sources(self, spans: Sequence[Span]) -> Tensor | None:
        slots = [NO_STATE if span.state is None else span.state.source for span in spans]
        if not any(slots):
            return None
        return upload(torch.tensor(slots, dtype=torch.int64), self._memory.device)


def _copies(span: Span) -> bool:
    return span.state is not None and bool(span.state.copies)


class TextPerToken:
    """Stands for a step in which every token is a text of its own. For the probe, which learns the states' shapes."""

    def __init__(self) -> None:
        self.specs: dict[int, StateSpec] = {}  # by the state's index

    def run(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> Tensor:
        """As `StateStep.run`."""
        out, state = run([x.unsqueeze(1) for x in inputs], None)
        self.specs[idx] = StateSpec(tuple(state.shape[1:]), state.dtype)
        return out.squeeze(1)
