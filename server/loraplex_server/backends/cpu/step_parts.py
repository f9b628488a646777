"""Part of a step: some of its spans, with their rows, segments and pages.

Spans are computed independently of each other, so that a step may go through a layer in two parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from loraplex_server.layers.attention import AttentionBatch
from loraplex_server.layers.lora import Segment


@dataclass(frozen=True, slots=True)
class StepPart:
    """Spans of a step, whose rows follow each other."""

    rows: Tensor  # [num_rows] int64: which rows of the step they are
    attention: AttentionBatch
    segments: tuple[Segment, ...]


def split_step(
    batch: AttentionBatch, segments: Sequence[Segment], is_apart: Callable[[Segment], bool]
) -> tuple[StepPart | None, StepPart | None]:
    """The spans without a segment that is apart, and those with one; None where there are none."""
    starts = batch.query_starts
    apart = np.zeros(len(batch.query_lens), np.bool_)
    for segment in segments:
        if segment.start < segment.end and is_apart(segment):
            apart |= (starts[:-1] < segment.end) & (starts[1:] > segment.start)
    return _part(batch, segments, ~apart), _part(batch, segments, apart)


def _part(batch: AttentionBatch, segments: Sequence[Segment], kept: npt.NDArray[np.bool_]) -> StepPart | None:
    if not kept.any():
        return None
    places = np.repeat(kept, batch.query_lens)
    rows = torch.from_numpy(np.flatnonzero(places))
    own = AttentionBatch(
        query_lens=batch.query_lens[kept],
        context_lens=batch.context_lens[kept],
        block_tables=batch.block_tables[kept],
        block_size=batch.block_size,
        slots=batch.slots.index_select(0, rows.to(batch.slots.device)),
    )
    # Rows of the part before each row of the step. A segment may begin and end among rows of the other part.
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(places)])
    moved = (replace(s, start=int(before[s.start]), end=int(before[s.end])) for s in segments)
    return StepPart(rows, own, tuple(s for s in moved if s.start < s.end))


def take_rows(value: Any, rows: Tensor, num_rows: int) -> Any:
    """A layer's argument for some of a step's rows: tensors [1, num_rows, ...] and [num_rows], alone or in a tuple;
    anything else as it is."""
    if isinstance(value, tuple):
        return tuple(take_rows(one, rows, num_rows) for one in value)
    if not isinstance(value, Tensor):
        return value
    dim = min(value.ndim - 1, 1)
    return value.index_select(dim, rows) if dim >= 0 and value.shape[dim] == num_rows else value
