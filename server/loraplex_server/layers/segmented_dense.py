"""Segmented dense products: interface, full-rank weights by slot.

    y[start:end, :out] = x[start:end] @ weight.T + bias      for each segment, with its slot's weight

What Medusa heads are made of: the blocks and projections of many sets in one operation, rows sorted by slot. Unlike
LoRA's terms, which add up, a row has one weight: segments may not overlap. Slots may differ in their number of outputs
(truncated vocabularies): columns of `y` behind a slot's own are not touched, nor are rows outside all segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from loraplex_server.layers.lora import PreparedSegments, Segment, check_segments


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One slot's weight and bias: contiguous, of one dtype and on one device."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]


class DenseTable:
    """Weights by slot, as many slots as were ever set. Its user owns it and changes it only between steps.

    `derived` belongs to the implementation that applies the table. Every change drops it.
    """

    def __init__(self, in_features: int) -> None:
        self.in_features = in_features
        self.weights: list[DenseWeight | None] = []
        self.derived: object | None = None

    def get(self, slot: int) -> DenseWeight | None:
        return self.weights[slot] if slot < len(self.weights) else None

    def set(self, slot: int, weight: DenseWeight | None) -> None:
        """Puts `weight` into `slot`, or clears it. Keeps the tensors alive."""
        if weight is not None and weight.weight.shape[1] != self.in_features:
            raise ValueError(f"a weight for {weight.weight.shape[1]} inputs in a table for {self.in_features}")
        self.weights += [None] * (slot + 1 - len(self.weights))
        self.weights[slot] = weight
        self.derived = None


class SegmentedDense(Protocol):
    """One implementation. Stateless apart from caches of its own."""

    @property
    def name(self) -> str: ...

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        """Builds what all tables of a step share. Host work only, no device synchronisation.

        Raises ValueError on segments that overlap, lie outside `0..num_rows`, name a slot outside `0..num_slots`, or
        have a weight.
        """
        ...

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        """Writes every segment's product into `y` in place. A slot without weight leaves its rows alone.

        x [num_rows, in], y [num_rows, at least the largest out], the weights' dtype; last dimensions contiguous;
        accumulation at least in float32. A row's result does not depend on other rows, whatever they hold.
        """
        ...


def check_dense_segments(segments: Sequence[Segment], num_rows: int, num_slots: int) -> None:
    """Raises ValueError on what `SegmentedDense.prepare` refuses."""
    check_segments(segments, num_rows, num_slots)
    end = 0
    for segment in sorted(segments, key=lambda s: s.start):
        if segment.start == segment.end:
            continue
        if segment.start < end:
            raise ValueError(f"Segment {segment} overlaps another: a row has one weight.")
        if segment.weight != 1.0:
            raise ValueError(f"Segment {segment} has a weight, which dense products do not know.")
        end = segment.end
