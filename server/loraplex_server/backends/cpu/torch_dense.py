"""Segmented dense products on a CPU: one call per segment, straight into its rows of the result.

These weights are large (2 MB and more each), so reading them is the cost, and a call's own some tens of microseconds
are little beside it. A batched product over the heads of one set took longer than its parts (oneDNN has no fast
batched product for one row), and packed copies would double the adapters' memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.torch_lora import has_fast_half
from loraplex_server.layers.lora import PreparedSegments, Segment
from loraplex_server.layers.segmented_dense import DenseTable, DenseWeight, check_dense_segments
from loraplex_server.layers.segments import join_neighbours


class CpuDense:
    """SegmentedDense for CPU tensors."""

    def __init__(self) -> None:
        # One row of bfloat16 by a matrix-vector product takes 116 us where the matrix product takes 150 (1024 x 1024,
        # two cores). In float32 they are equal, in float16 it is four times slower.
        self._has_fast_vector = has_fast_half(torch.bfloat16)

    @property
    def name(self) -> str:
        return "cpu"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(join_neighbours(segments)), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        uses_vector = self._has_fast_vector and x.dtype == torch.bfloat16
        for segment in prepared.segments:
            dense = table.get(segment.adapter_slot)
            if dense is None:
                continue
            start, end = segment.start, segment.end
            if uses_vector and end - start == 1:
                _vector_product(dense, x[start], _cut(y[start], dense))
            else:
                _product(dense, x[start:end], _cut(y[start:end], dense))


def _cut(y: Tensor, dense: DenseWeight) -> Tensor:
    """The columns that are this weight's [..., out]."""
    return y if y.shape[-1] == dense.num_outputs else y[..., : dense.num_outputs]


def _vector_product(dense: DenseWeight, x: Tensor, out: Tensor) -> None:
    """x [in] -> out [out]"""
    if dense.bias is None:
        torch.mv(dense.weight, x, out=out)
    else:
        torch.addmv(dense.bias, dense.weight, x, out=out)


def _product(dense: DenseWeight, x: Tensor, out: Tensor) -> None:
    """x [rows, in] -> out [rows, out]"""
    if dense.bias is None:
        torch.mm(x, dense.weight.t(), out=out)
    else:
        torch.addmm(dense.bias, x, dense.weight.t(), out=out)
