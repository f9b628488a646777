"""Medusa heads in their slots, and what they guess: all sets of a batch at once.

Owns which heads are in which slot (the slot numbers are those of AdapterSlots: one adapter, one number). A *unit* is
one head of one slot. A batch is laid out as one row per guess, sorted by unit, so that each block layer, and the own
projections, are one segmented product over all sets; what goes through the base model's head is one product for all
rows. Deliberately knows no sequences and no tokens that were accepted: rows of hidden states in, token ids out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_adapters.ops.base import Segment
from loraplex_adapters.ops.dense import DenseTable, DenseWeight, SegmentedDense
from loraplex_adapters.weights import AdapterWeights, MedusaHead
from loraplex_server.model.adapt import AdapterSlots
from loraplex_server.model.linear import AdaptedHead
from loraplex_server.model.loaded import LoadedModel

NOT_A_NUMBER = -1  # in the place of a token id
# numpy finds a largest float32 in a fifth of torch's time, conversion from bfloat16 included: 20 us against 97 for four
# rows of 32,000. So many rows at once stay in the CPU's cache.
HOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class HeadAsk:
    """Up to `num_tokens` guesses are wanted from the heads in `slot`."""

    slot: int
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


_DEPTH, _UNIT, _LORA_SLOT = attrgetter("depth"), attrgetter("unit"), attrgetter("lora_slot")


class HeadSlots:
    """Which Medusa heads are in which slot, and their guesses. Changed between steps only."""

    def __init__(self, loaded: LoadedModel, slots: AdapterSlots, dense: SegmentedDense) -> None:
        self._head = cast(nn.Module, loaded.model.get_output_embeddings())
        self._context = loaded.context
        self._slots = slots
        self._dense = dense
        self._hidden_size = loaded.spec.hidden_size
        self._vocab_size = loaded.spec.vocab_size
        self._dtype = loaded.dtype
        self._installed: list[AdapterWeights | None] = [None] * slots.num_slots
        # Of each slot's heads the first fields of their guesses.
        self._places: list[list[tuple[int, bool, int]]] = [[] for _ in range(slots.num_slots)]
        self._num_units = 0
        self._layers: list[DenseTable] = []  # by block, each by unit
        self._projections = DenseTable(self._hidden_size)  # by unit
        self._token_ids: dict[int, npt.NDArray[np.int64]] = {}  # by unit: the token of each row of its projection

    # --- what is where ------------------------------------------------------------------------------------------------

    def heads(self, slot: int) -> tuple[MedusaHead, ...]:
        """The heads in `slot`, none of an empty one."""
        weights = self._installed[slot]
        return weights.heads if weights is not None else ()

    def install(self, slot: int, weights: AdapterWeights | None) -> None:
        """Puts an adapter's heads into `slot`, or clears it. Between steps only. Implements InstallFn."""
        heads = weights.heads if weights is not None else ()
        for idx, head in enumerate(heads):
            self._check(idx, head)
        for idx in range(max(len(heads), len(self.heads(slot)))):
            self._put(self._unit(slot, idx), heads[idx] if idx < len(heads) else None)
        self._installed[slot] = weights
        self._places[slot] = [
            (-len(head.blocks), head.projection is not None, self._unit(slot, idx)) for idx, head in enumerate(heads)
        ]

    def _unit(self, slot: int, head_idx: int) -> int:
        """Head by head, so that a set with more heads than any before it changes no number."""
        return head_idx * self._slots.num_slots + slot

    def _put(self, unit: int, head: MedusaHead | None) -> None:
        self._num_units = max(self._num_units, unit + 1)
        blocks = head.blocks if head is not None else ()
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
        for block in head.blocks:
            if block.weight.shape != (hidden, hidden) or (block.bias is not None and block.bias.shape != (hidden,)):
                raise ValueError(f"a block of Medusa head {idx} has another width than the model ({hidden})")
        tensors = [block.weight for block in head.blocks]
        tensors += [block.bias for block in head.blocks if block.bias is not None]
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

    # --- guessing -----------------------------------------------------------------------------------------------------

    def guess(self, hidden: Tensor, asks: Sequence[HeadAsk]) -> list[tuple[int, ...]]:
        """For each ask the tokens that its heads hold most likely behind the next one, in order; its hidden state
        [len(asks), hidden] is the row that the model's head made the next token of.

        Empty where the slot has no heads or they compute NaN; ends before a token that the model does not know.
        """
        guesses = self._lay_out(asks)
        chains = [[NOT_A_NUMBER] * self._num_wanted(ask) for ask in asks]
        if guesses:
            with torch.inference_mode():
                rows = torch.tensor([guess.ask_idx for guess in guesses], dtype=torch.int64).to(hidden.device)
                x = hidden.index_select(0, rows)  # [num_guesses, hidden], a copy
                self._run_blocks(x, guesses)
                token_ids = self._best(x, guesses)
            for guess, token_id in zip(guesses, token_ids, strict=True):
                chains[guess.ask_idx][guess.head_idx] = token_id
        return [self._chain(chain) for chain in chains]

    def _num_wanted(self, ask: HeadAsk) -> int:
        return min(ask.num_tokens, len(self.heads(ask.slot)))

    def _lay_out(self, asks: Sequence[HeadAsk]) -> list[_Guess]:
        """Only heads that somebody wants, and of each only the rows of those who do."""
        guesses = [
            _Guess(*place, -1 if ask.lora_slot is None else ask.lora_slot, ask_idx, head_idx)
            for ask_idx, ask in enumerate(asks)
            for head_idx, place in enumerate(self._places[ask.slot][: ask.num_tokens])
        ]
        guesses.sort()
        return guesses

    def _run_blocks(self, x: Tensor, guesses: Sequence[_Guess]) -> None:
        """x [num_guesses, hidden] becomes what the projections read, in place."""
        prepared = None
        for layer, table in enumerate(self._layers):
            num_rows = bisect_left(guesses, -layer, key=_DEPTH)  # of heads with more blocks than that
            if num_rows == 0:
                return
            if prepared is None or prepared.num_rows != num_rows:
                segments = _segments(guesses[:num_rows], _UNIT)
                prepared = self._dense.prepare(segments, num_rows, self._num_units, x.device)
            rows = x[:num_rows]
            inner = torch.empty_like(rows)
            self._dense.apply(inner, rows, table, prepared)
            rows += F.silu(inner, inplace=True)

    def _best(self, x: Tensor, guesses: Sequence[_Guess]) -> list[int]:
        """The most likely token of each guess, or NOT_A_NUMBER. One transfer to the host."""
        shared = [i for i, guess in enumerate(guesses) if not guess.is_own]
        own = [i for i, guess in enumerate(guesses) if guess.is_own]
        if self._head_has_lora:
            shared.sort(key=lambda i: guesses[i].lora_slot)
        found: list[Tensor] = []
        if shared:
            found.append(_argmax(self._base_logits(_rows(x, shared), [guesses[i] for i in shared])))
        if own:
            found.append(_argmax(self._own_logits(_rows(x, own), [guesses[i] for i in own])))
        columns: list[int] = (found[0] if len(found) == 1 else torch.cat(found)).tolist()
        best = [NOT_A_NUMBER] * len(guesses)
        for i, column in zip([*shared, *own], columns, strict=True):
            names = self._token_ids.get(guesses[i].unit)
            best[i] = column if names is None or column == NOT_A_NUMBER else int(names[column])
        return best

    @property
    def _head_has_lora(self) -> bool:
        return isinstance(self._head, AdaptedHead) and self._head.num_installed > 0

    def _base_logits(self, x: Tensor, guesses: Sequence[_Guess]) -> Tensor:
        """Of the model's own head, with each row's LoRA where that reaches so far [num_rows, num_logits]."""
        try:
            if self._head_has_lora:
                segments = _segments(guesses, _LORA_SLOT)
                if segments:
                    ops, num_slots = self._slots.ops, self._slots.num_slots
                    self._context.head_segments = ops.prepare(segments, len(guesses), num_slots, x.device)
            return self._head(x)
        finally:
            self._context.clear()

    def _own_logits(self, x: Tensor, guesses: Sequence[_Guess]) -> Tensor:
        """Of the heads' own projections [num_rows, columns of the largest]; a smaller one ends in -inf."""
        segments = _segments(guesses, _UNIT)
        projections = [self._projections.get(segment.slot) for segment in segments]
        sizes = {projection.num_outputs for projection in projections if projection is not None}
        logits = x.new_empty(x.shape[0], max(sizes))
        if len(sizes) > 1:
            logits.fill_(-torch.inf)
        prepared = self._dense.prepare(segments, x.shape[0], self._num_units, x.device)
        self._dense.apply(logits, x, self._projections, prepared)
        return logits

    def _chain(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        if NOT_A_NUMBER in token_ids:
            return ()
        known = [0 <= token_id < self._vocab_size for token_id in token_ids]
        return tuple(token_ids[: known.index(False) if False in known else None])


def _segments(guesses: Sequence[_Guess], slot_of: Callable[[_Guess], int]) -> list[Segment]:
    """Neighbours with the same slot as one segment; -1 is none."""
    segments: list[Segment] = []
    start = 0
    for slot, group in groupby(guesses, slot_of):
        end = start + sum(1 for _ in group)
        if slot >= 0:
            segments.append(Segment(start, end, slot))
        start = end
    return segments


def _rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """Without a copy where they lie together."""
    first, last = rows[0], rows[-1]
    if list(rows) == list(range(first, last + 1)):
        return x[first : last + 1]
    return x.index_select(0, torch.tensor(rows, dtype=torch.int64).to(x.device))


def _argmax(logits: Tensor) -> Tensor:
    """[num_rows, columns] -> [num_rows] int64: the first largest, NOT_A_NUMBER where any is NaN."""
    if logits.device.type != "cpu":
        values, columns = logits.max(dim=-1)
        return columns.masked_fill_(values.isnan(), NOT_A_NUMBER)
    found = [_host_argmax(part) for part in logits.split(HOST_ROWS)]
    return torch.from_numpy(found[0] if len(found) == 1 else np.concatenate(found))


def _host_argmax(logits: Tensor) -> npt.NDArray[np.int64]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).numpy()
    columns = wide.argmax(axis=-1)  # of the first NaN, where there is one
    columns[np.isnan(wide[np.arange(len(columns)), columns])] = NOT_A_NUMBER
    return columns
