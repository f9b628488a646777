"""Medusa proposer: heads by adapter slot, and their guesses for a whole batch.

A *unit* is one head of one slot. A batch is laid out as one row per guess, sorted by unit, so that each block layer,
and the own projections, are one segmented product over all sets; what goes through the base model's head is one product
for all rows.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.weights import AdapterWeights, MedusaHead
from loraplex_contracts.adapters import AdapterKey
from loraplex_server.backends.cpu.medusa import BlockRows, GuessPlan, NativeGuesser
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.linear import AdaptedHead
from loraplex_server.layers.lora import DenseTable, DenseWeight, PreparedSegments, Segment, SegmentedDense
from loraplex_server.layers.transfer import upload
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.draw import row_argmax
from loraplex_server.sampling.sampler import Argmax
from loraplex_server.speculation.proposer import MEDUSA, OWN, Ask, Choice, Piece, Proposer, remember

log = logging.getLogger(__name__)

NOT_A_NUMBER = -1  # in the place of a token id
MAX_LAYOUTS = 64
# Rows for which the kernels on CUDA have blocks of each size, and a width that is a multiple of 16, as models' are.
WARM_ROWS, WARM_OUTPUTS = (1, 64), 16


class HeadAsk(NamedTuple):
    """A request for up to `num_tokens` guesses from the heads in `adapter_slot`."""

    adapter_slot: int
    num_tokens: int
    lora_slot: int | None = None  # of the LoRA whose part of the base model's head counts for this row


class _Guess(NamedTuple):
    """One head for one ask: one row of the batch. In the order in which they are laid out: deep heads first (the rows
    of a layer are then the first ones), in that by unit, as segments want it."""

    depth: int  # minus its number of blocks
    is_own: bool  # the head has a projection of its own
    unit: int
    lora_slot: int  # -1: none
    ask_idx: int
    head_idx: int


@dataclass(frozen=True, slots=True)
class _Layout:
    """The layout of the rows of one combination of asks, and their kernels. Right until a slot changes."""

    num_tokens: tuple[int, ...]  # of each ask's guess
    rows: Tensor  # [num_guesses] the ask that each row is of
    layers: tuple[tuple[DenseTable, PreparedSegments], ...]
    shared: slice | Tensor  # rows that go through the model's own head,
    lora_segments: tuple[Segment, ...]  # with these LoRAs in it
    own: slice | Tensor  # rows whose head has a projection of its own
    own_segments: PreparedSegments | None
    plan: GuessPlan | None  # in place of all these
    # Rows in the order `shared`, `own`: for each the ask, which of the ask's tokens it is, and the names of its
    # columns.
    places: tuple[tuple[int, int, npt.NDArray[np.int64] | None], ...]


_DEPTH, _UNIT, _LORA_SLOT = attrgetter("depth"), attrgetter("unit"), attrgetter("lora_slot")


class HeadSlots:
    """Medusa heads by slot, and their guesses. Slot numbers are those of AdapterSlots: one adapter, one number.
    Changed between steps only."""

    def __init__(
        self,
        loaded: LoadedModel,
        slots: AdapterSlots,
        dense: SegmentedDense,
        *,
        argmax: Argmax = row_argmax,
        guesser: NativeGuesser | None = None,
    ) -> None:
        """`argmax`: as the sampler's. `guesser`: used where it can be."""
        self._head = loaded.head
        self._context = loaded.context
        self._slots = slots
        self._dense = dense
        self._argmax = argmax
        self._guesser = guesser
        self._device = loaded.device
        self._hidden_size = loaded.spec.hidden_size
        self._vocab_size = loaded.spec.vocab_size
        self._dtype = loaded.dtype
        self._installed: list[AdapterWeights | None] = [None] * slots.num_slots
        # The first fields of the guesses of each slot's heads.
        self._places: list[list[tuple[int, bool, int]]] = [[] for _ in range(slots.num_slots)]
        self._num_units = 0
        self._layers: list[DenseTable] = []  # by block, each by unit
        self._projections = DenseTable(self._hidden_size)  # by unit
        self._token_ids: dict[int, npt.NDArray[np.int64]] = {}  # by unit: the token of each row of its projection
        self._layouts: dict[tuple[tuple[HeadAsk, ...], bool], _Layout] = {}  # the oldest first

    # --- what is where ------------------------------------------------------------------------------------------------

    def heads(self, slot: int) -> tuple[MedusaHead, ...]:
        """The heads in `slot`, none of an empty one."""
        weights = self._installed[slot]
        return weights.heads if weights is not None else ()

    def install(self, slot: int, weights: AdapterWeights | None) -> None:
        """Puts an adapter's heads into `slot`, or clears it. Between steps only."""
        heads = weights.heads if weights is not None else ()
        for idx, head in enumerate(heads):
            self._check(idx, head)
        self._layouts.clear()
        num_units = max(len(heads), len(self.heads(slot)))
        self._installed[slot] = weights  # first: where the memory is full, what was put in is cleared again
        for idx in range(num_units):
            self._put(self._unit(slot, idx), heads[idx] if idx < len(heads) else None)
        self._places[slot] = [
            (-len(head.layers), head.projection is not None, self._unit(slot, idx)) for idx, head in enumerate(heads)
        ]

    def _unit(self, slot: int, head_idx: int) -> int:
        """Number of a unit. Units go head by head, so that a set with more heads than any before it changes no
        number."""
        return head_idx * self._slots.num_slots + slot

    def _put(self, unit: int, head: MedusaHead | None) -> None:
        self._num_units = max(self._num_units, unit + 1)
        blocks = head.layers if head is not None else ()
        while len(self._layers) < len(blocks):
            self._layers.append(DenseTable(self._hidden_size))
        for layer, table in enumerate(self._layers):
            block = blocks[layer] if layer < len(blocks) else None
            table.set(unit, DenseWeight(block.weight, block.bias) if block is not None else None)
        projection = head.projection if head is not None else None
        self._projections.set(unit, DenseWeight(projection) if projection is not None else None)
        self._token_ids.pop(unit, None)
        if head is not None and head.token_ids is not None:
            self._token_ids[unit] = head.token_ids.cpu().numpy()

    def _check(self, idx: int, head: MedusaHead) -> None:
        hidden = self._hidden_size
        tensors: list[Tensor] = []
        for block in head.layers:
            if block.weight.shape != (hidden, hidden) or (block.bias is not None and block.bias.shape != (hidden,)):
                raise ValueError(f"a block of Medusa head {idx} has another width than the model ({hidden})")
            tensors += [block.weight] if block.bias is None else [block.weight, block.bias]
        num_rows = None
        if head.projection is not None:
            num_rows, width = head.projection.shape
            tensors.append(head.projection)
            if width != hidden:
                raise ValueError(f"the projection of Medusa head {idx} has another width than the model ({hidden})")
        if head.token_ids is not None and head.token_ids.shape != (num_rows,):
            raise ValueError(f"Medusa head {idx} has token ids for another number of rows than its projection")
        if any(tensor.dtype != self._dtype for tensor in tensors):
            raise ValueError(f"Medusa head {idx} has another dtype than the model ({self._dtype})")

    def warm_up(self) -> None:
        """Compiles the products of heads, where they are compiled, so that no request waits for it."""
        table = DenseTable(self._hidden_size)
        weight = torch.zeros(WARM_OUTPUTS, self._hidden_size, dtype=self._dtype, device=self._device)
        table.set(0, DenseWeight(weight))
        with torch.inference_mode():
            for num_rows in WARM_ROWS:
                prepared = self._dense.prepare([Segment(0, num_rows, 0)], num_rows, 1, self._device)
                x = weight.new_zeros(num_rows, self._hidden_size)
                self._dense.apply(x.new_empty(num_rows, WARM_OUTPUTS), x, table, prepared)

    # --- guessing -----------------------------------------------------------------------------------------------------

    def guess(self, hidden: Tensor, asks: Sequence[HeadAsk]) -> list[tuple[int, ...]]:
        """The tokens that each ask's heads hold most likely behind the next one, in order. `hidden` [len(asks),
        hidden]: the rows that the model's head made the next tokens of.

        An ask gets none where the slot has no heads or they compute NaN; its tokens end before one that the model does
        not know.
        """
        layout = self._layout(tuple(asks))
        chains = [[NOT_A_NUMBER] * num_tokens for num_tokens in layout.num_tokens]
        if layout.places:
            for (ask_idx, head_idx, names), column in zip(layout.places, self._columns(hidden, layout), strict=True):
                if names is not None and column != NOT_A_NUMBER:
                    column = int(names[column])
                chains[ask_idx][head_idx] = column
        return [self._chain(chain) for chain in chains]

    def _layout(self, asks: tuple[HeadAsk, ...]) -> _Layout:
        """The layout of these asks, kept from before where there is one: decoding asks for the same again and again."""
        has_lora = isinstance(self._head, AdaptedHead) and self._head.num_installed > 0
        layout = self._layouts.get((asks, has_lora))
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            layout = self._layouts[asks, has_lora] = self._lay_out(asks, has_lora)
        return layout

    def _lay_out(self, asks: Sequence[HeadAsk], has_lora: bool) -> _Layout:
        """The layout of these asks: one row for each head and each ask that wants it."""
        guesses = [
            _Guess(*place, -1 if ask.lora_slot is None else ask.lora_slot, ask_idx, head_idx)
            for ask_idx, ask in enumerate(asks)
            for head_idx, place in enumerate(self._places[ask.adapter_slot][: ask.num_tokens])
        ]
        guesses.sort()
        shared = [i for i, guess in enumerate(guesses) if not guess.is_own]
        own = [i for i, guess in enumerate(guesses) if guess.is_own]
        if has_lora:
            shared.sort(key=lambda i: guesses[i].lora_slot)
        found = [guesses[i] for i in (*shared, *own)]
        lora_segments = tuple(_segments([guesses[i] for i in shared], _LORA_SLOT)) if has_lora else ()
        layers = self._layers_of(guesses)
        return _Layout(
            num_tokens=tuple(min(ask.num_tokens, len(self.heads(ask.adapter_slot))) for ask in asks),
            rows=upload(torch.tensor([guess.ask_idx for guess in guesses], dtype=torch.int64), self._device),
            layers=layers,
            shared=self._selected(shared),
            lora_segments=lora_segments,
            own=self._selected(own),
            own_segments=self._prepared([guesses[i] for i in own]) if own else None,
            plan=self._plan(guesses, layers) if shared and not own and not lora_segments else None,
            places=tuple((guess.ask_idx, guess.head_idx, self._token_ids.get(guess.unit)) for guess in found),
        )

    def _layers_of(self, guesses: Sequence[_Guess]) -> tuple[tuple[DenseTable, PreparedSegments], ...]:
        """Each layer's weights, and its rows: those of heads with more blocks than that."""
        layers: list[tuple[DenseTable, PreparedSegments]] = []
        for layer, table in enumerate(self._layers):
            num_rows = bisect_left(guesses, -layer, key=_DEPTH)
            if num_rows == 0:
                break
            is_same = layers and layers[-1][1].num_rows == num_rows
            layers.append((table, layers[-1][1] if is_same else self._prepared(guesses[:num_rows])))
        return tuple(layers)

    def _plan(
        self, guesses: Sequence[_Guess], layers: Sequence[tuple[DenseTable, PreparedSegments]]
    ) -> GuessPlan | None:
        if self._guesser is None:
            return None
        rows = [
            [
                BlockRows(segment.start, segment.end, weight)
                for segment in prepared.segments
                if (weight := table.get(segment.adapter_slot)) is not None
            ]
            for table, prepared in layers
        ]
        return self._guesser.plan([guess.ask_idx for guess in guesses], rows)

    def _prepared(self, guesses: Sequence[_Guess]) -> PreparedSegments:
        return self._dense.prepare(_segments(guesses, _UNIT), len(guesses), self._num_units, self._device)

    def _selected(self, rows: Sequence[int]) -> slice | Tensor:
        """Rows as what they are looked up by: without a copy where they lie together."""
        if not rows:
            return slice(0, 0)
        if list(rows) == list(range(rows[0], rows[-1] + 1)):
            return slice(rows[0], rows[-1] + 1)
        return upload(torch.tensor(rows, dtype=torch.int64), self._device)

    def _columns(self, hidden: Tensor, layout: _Layout) -> list[int]:
        """The column of the largest logit for each of the layout's places, or NOT_A_NUMBER."""
        if layout.plan is not None:
            assert self._guesser is not None
            return _numbers(*self._guesser.run(hidden, layout.plan))
        with torch.inference_mode():
            x = hidden.index_select(0, layout.rows)  # [num_guesses, hidden], a copy
            for table, prepared in layout.layers:
                rows = x if prepared.num_rows == len(x) else x[: prepared.num_rows]
                inner = torch.empty_like(rows)
                self._dense.apply(inner, rows, table, prepared)
                rows += F.silu(inner, inplace=True)
            # Each kind of projection sends its columns to the host once.
            found: list[int] = []
            shared = _select(x, layout.shared)
            if len(shared):
                found += self._largest(self._base_logits(shared, layout.lora_segments))
            if layout.own_segments is not None:
                found += self._largest(self._own_logits(_select(x, layout.own), layout.own_segments))
            return found

    def _largest(self, logits: Tensor) -> list[int]:
        """[num_rows, columns] -> the first largest of each row, NOT_A_NUMBER where any is NaN."""
        best, columns = self._argmax(logits)
        if self._device.type != "cpu":
            return columns.masked_fill_(best.isnan(), NOT_A_NUMBER).tolist()
        return _numbers(best.tolist(), columns.tolist())

    def _base_logits(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Logits [num_rows, num_logits] of the model's own head, with each row's LoRA where that reaches so far."""
        if not segments:
            return self._head(x)
        try:
            ops, num_slots = self._slots.ops, self._slots.num_slots
            self._context.head_segments = ops.prepare(segments, len(x), num_slots, x.device)
            return self._head(x)
        finally:
            self._context.clear()

    def _own_logits(self, x: Tensor, prepared: PreparedSegments) -> Tensor:
        """Logits [num_rows, columns of the largest] of the heads' own projections; rows of a smaller one end in
        -inf."""
        projections = [self._projections.get(segment.adapter_slot) for segment in prepared.segments]
        sizes = {projection.num_outputs for projection in projections if projection is not None}
        logits = x.new_empty(x.shape[0], max(sizes))
        if len(sizes) > 1:
            logits.fill_(-torch.inf)
        self._dense.apply(logits, x, self._projections, prepared)
        return logits

    def _chain(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Tokens up to the first that the model does not know; none where a head has computed NaN."""
        if NOT_A_NUMBER in token_ids:
            return ()
        vocab_size = self._vocab_size
        return tuple(takewhile(lambda token_id: 0 <= token_id < vocab_size, token_ids))


def _segments(guesses: Sequence[_Guess], slot_of: Callable[[_Guess], int]) -> list[Segment]:
    """Segments of guesses: neighbours with the same slot are one segment; -1 is none."""
    segments: list[Segment] = []
    start = 0
    for slot, group in groupby(guesses, slot_of):
        end = start + sum(1 for _ in group)
        if slot >= 0:
            segments.append(Segment(start, end, slot))
        start = end
    return segments


def _select(x: Tensor, rows: slice | Tensor) -> Tensor:
    if isinstance(rows, Tensor):
        return x.index_select(0, rows)
    return x if rows.stop - rows.start == len(x) else x[rows]


def _numbers(best: Sequence[float], columns: Sequence[int]) -> list[int]:
    return [NOT_A_NUMBER if math.isnan(value) else column for value, column in zip(best, columns, strict=True)]


class MedusaProposer(Proposer):
    """Drafts by the heads of adapters. Keeps no state of sequences: a hidden state is all that heads read.

    Heads are adapters: the cache has them in device slots, and one is borrowed for the time of a `propose`, between two
    steps, when nothing moves. A sequence whose heads are not there yet gets no draft and runs on, and so does one of
    whose prompt the last token is still to be computed.
    """

    name = MEDUSA
    drafts_at_once = True
    reads_hidden = True

    def __init__(self, runner: ModelRunner, cache: AdapterManager, head_slots: HeadSlots) -> None:
        self._runner = runner
        self._cache = cache
        self._heads = head_slots
        self._missing: set[AdapterKey] = set()  # heads that cannot be borrowed, in the log already
        self._num_heads: dict[AdapterKey, int] = {}  # as seen when they were borrowed

    def pieces(self, ask: Ask) -> Sequence[Piece]:
        num_tokens = ask.num_tokens
        if ask.medusa_key is not None:
            num_tokens = min(num_tokens, self._num_heads.get(ask.medusa_key, num_tokens))
        return (Piece(OWN, num_tokens),)

    def rates_key(self, choice: Choice) -> AdapterKey | None:
        return choice.medusa_key

    def propose(self, asks: Sequence[Ask]) -> Sequence[tuple[int, ...]]:
        slots = {key: self._borrow(key) for key in dict.fromkeys(ask.medusa_key for ask in asks) if key is not None}
        wanted: dict[int, HeadAsk] = {}  # by position in `asks`
        for idx, ask in enumerate(asks):
            slot = slots[ask.medusa_key] if ask.medusa_key is not None else None
            if slot is not None and self._heads.heads(slot) and self._runner.has_hidden(ask.candidate.row):
                wanted[idx] = HeadAsk(slot, ask.num_tokens, ask.candidate.adapter_slot)
        drafts: list[tuple[int, ...]] = [()] * len(asks)
        if wanted:
            hidden = self._runner.last_hidden([asks[idx].candidate.row for idx in wanted])
            for idx, guess in zip(wanted, self._heads.guess(hidden, list(wanted.values())), strict=True):
                drafts[idx] = guess
        return drafts

    def _borrow(self, key: AdapterKey) -> int | None:
        """The slot of these heads; None where they are not there, also of heads that the cache does not have any more:
        default heads may be unloaded while they serve. Their requests draft in another way, or not at all."""
        try:
            slot = self._cache.borrow(key)
        except Exception as error:
            if key not in self._missing:
                self._missing.add(key)
                fields = {"proposer": MEDUSA, "error_type": type(error).__name__}
                log.error("the heads %s cannot be used: %s", key, error, exc_info=error, extra=fields)
            return None
        self._missing.discard(key)
        if slot is not None and key not in self._num_heads and (heads := self._heads.heads(slot)):
            remember(self._num_heads, key, len(heads))
        return slot
