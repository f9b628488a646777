"""Segmented LoRA in the plainest torch: the definition that every other implementation is tested against.

Works on any device and dtype. `sgmv` and `bgmv` state Punica's two operators (arXiv 2310.18547) in its own layouts.
Deliberately knows nothing of speed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment
from loraplex_server.layers.segments import check_segments


def add_low_rank(y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
    """y [rows, out] += factor * (x [rows, in] @ a.T [in, rank]) @ b.T [rank, out], at least in float32."""
    wide = torch.promote_types(y.dtype, torch.float32)
    term = (x.to(wide) @ a.to(wide).T) @ b.to(wide).T
    y.copy_(y.to(wide) + factor * term)


class ReferenceOps:
    """SegmentedLora, one segment after the other."""

    @property
    def name(self) -> str:
        return "reference"

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


def sgmv(
    y: Tensor,
    x: Tensor,
    wa: Sequence[Tensor],
    wb: Sequence[Tensor],
    s: Sequence[int],
    layer_idx: int,
    scale: float = 1.0,
) -> None:
    """y[s[i]:s[i+1]] += scale * x[s[i]:s[i+1]] @ wa[i][layer].T @ wb[i][layer], with wa [layers, rank, in] and
    wb [layers, rank, out]: one pair per segment, the segments side by side."""
    for i in range(len(s) - 1):
        rows = slice(s[i], s[i + 1])
        add_low_rank(y[rows], x[rows], wa[i][layer_idx], wb[i][layer_idx].T, scale)


def bgmv(y: Tensor, x: Tensor, wa: Tensor, wb: Tensor, indices: Tensor, layer_idx: int, scale: float = 1.0) -> None:
    """y[i] += scale * x[i] @ wa[indices[i], layer].T @ wb[indices[i], layer].T, with wa [slots, layers, rank, in] and
    wb [slots, layers, out, rank]: every row has its own slot."""
    for i, slot in enumerate(indices.tolist()):
        add_low_rank(y[i : i + 1], x[i : i + 1], wa[slot, layer_idx], wb[slot, layer_idx], scale)
