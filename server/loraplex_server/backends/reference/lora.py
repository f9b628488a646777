"""Reference segmented LoRA and dense products in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment, check_segments
from loraplex_server.layers.segmented_dense import DenseTable, check_dense_segments


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """y [rows, out] += factor * (x [rows, in] @ a.T [in, rank]) @ b.T [rank, out], at least in float32."""
    wide = torch.promote_types(y.dtype, torch.float32)
    term = (x.to(wide) @ a.to(wide).T) @ b.to(wide).T
    y.copy_(y.to(wide) + factor * term)


class ReferenceOps:
    """SegmentedLora, one segment after the other."""

    name = "reference"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        for segment in prepared.segments:
            factors = table.factors[segment.adapter_slot]
            if factors is None or factors.rank == 0 or segment.start == segment.end:
                continue
            rows = slice(segment.start, segment.end)
            add_low_rank(y[rows], x[rows], factors.a, factors.b, segment.weight * factors.scale)


class ReferenceDense:
    """SegmentedDense, one segment after the other."""

    name = "reference"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        wide = torch.promote_types(y.dtype, torch.float32)
        for segment in prepared.segments:
            dense = table.get(segment.adapter_slot)
            if dense is None or segment.start == segment.end:
                continue
            product = x[segment.start : segment.end].to(wide) @ dense.weight.to(wide).T  # [rows, out]
            if dense.bias is not None:
                product = product + dense.bias.to(wide)
            y[segment.start : segment.end, : dense.num_outputs] = product.to(y.dtype)
