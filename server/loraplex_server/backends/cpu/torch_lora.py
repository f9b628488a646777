"""Segmented LoRA and dense products on a CPU in torch.

One segment after the other. What computes where there are no native kernels, and the dtypes that they do not know.

Half precision goes through oneDNN, which takes some 50 us to start a product, and has fast ones for the dtypes of this
CPU alone. So few rows, and those of other dtypes, are computed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers.lora import (
    DenseTable,
    DenseWeight,
    PreparedSegments,
    Segment,
    check_dense_segments,
    check_segments,
    join_neighbours,
)

# Rows that are faster in float32, conversions included (rank 8, 1024 wide: 32 us instead of 60 for one row, as long for
# 16; two cores with AVX512-bf16).
FEW_ROWS = 4
HALF = torch.bfloat16, torch.float16


def has_fast_half(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies matrices of this half-precision dtype here. The check is private to torch: where it is
    missing the answer is False."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False


class CpuOps(ReferenceOps):
    """SegmentedLora for CPU tensors."""

    name = "cpu"

    def __init__(self) -> None:
        self._slow = {dtype for dtype in HALF if not has_fast_half(dtype)}

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(join_neighbours(segments)), num_rows)

    def add(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, factor: float) -> None:
        """y [rows, out] += factor * (x [rows, in] @ a.T) @ b.T"""
        if x.dtype in self._slow or (x.dtype in HALF and len(x) <= FEW_ROWS):
            y.add_(torch.mm(torch.mm(x.float(), a.t().float()), b.t().float()), alpha=factor)
        else:
            y.addmm_(torch.mm(x, a.t()), b.t(), alpha=factor)


# --- dense products ---------------------------------------------------------------------------------------------------


class CpuDense:
    """SegmentedDense for CPU tensors."""

    name = "cpu"

    def __init__(self) -> None:
        # One row of bfloat16 by a matrix-vector product takes 116 us where the matrix product takes 150 (1024 x 1024,
        # two cores). In float32 they are equal, in float16 it is four times slower.
        self._has_fast_vector = has_fast_half(torch.bfloat16)

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
