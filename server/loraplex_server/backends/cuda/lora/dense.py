"""Launches the dense product of one table. Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests.

Owns the launch parameters, and what the kernel reads of a table (in its `derived`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from loraplex_server.backends.cuda.lora.operation import ALIGN_BYTES, INTERPRETED, SUPPORTED
from loraplex_server.backends.cuda.lora.plan import KernelPlan, build_plan
from loraplex_server.backends.cuda.lora.product import product_kernel
from loraplex_server.backends.cuda.lora.variants import choose_dense_launch, choose_dense_rows
from loraplex_server.backends.reference.lora import ReferenceDense
from loraplex_server.layers.lora import PreparedSegments, Segment
from loraplex_server.layers.segmented_dense import DenseTable, check_dense_segments

_product: Any = product_kernel


@dataclass(frozen=True, slots=True)
class _Pointers:
    """A table as the kernel reads it, by slot."""

    num_slots: int
    max_size: int
    is_aligned: bool
    weights: Tensor  # int64
    biases: Tensor  # int64
    sizes: Tensor  # int32


class TritonDense:
    """SegmentedDense for CUDA: a kernel in bfloat16, float16 and float32."""

    def __init__(self) -> None:
        self._reference = ReferenceDense()

    @property
    def name(self) -> str:
        return "triton"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows, build_plan(segments, num_slots, device, choose_dense_rows))

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        if x.dtype not in SUPPORTED:
            self._reference.apply(y, x, table, prepared)
            return
        plan: KernelPlan = prepared.data
        if not plan.slots:
            return
        pointers = table.derived
        if not isinstance(pointers, _Pointers) or pointers.num_slots <= max(plan.slots):
            pointers = table.derived = _pointers(table, max(plan.slots) + 1, x.device)
        if pointers.max_size == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        launch = choose_dense_launch(plan.block_rows, x.element_size())
        _product[(plan.num_blocks, triton.cdiv(pointers.max_size, launch.block_out))](
            y,
            x,
            plan.rows,
            plan.blocks,
            plan.term_slots,
            pointers.weights,
            pointers.biases,
            pointers.sizes,
            table.in_features,
            x.stride(0),
            y.stride(0),
            NUM_STEPS=triton.cdiv(table.in_features, launch.block_in),
            BLOCK_ROWS=plan.block_rows,
            BLOCK_OUT=launch.block_out,
            BLOCK_IN=launch.block_in,
            IS_ALIGNED=pointers.is_aligned,
            UPCAST=INTERPRETED,
            num_stages=launch.num_stages,
        )


def _pointers(table: DenseTable, min_slots: int, device: torch.device) -> _Pointers:
    weights = [*table.weights, *[None] * (min_slots - len(table.weights))]
    sizes = [dense.num_outputs if dense is not None else 0 for dense in weights]
    columns = (
        [dense.weight.data_ptr() if dense is not None else 0 for dense in weights],
        [dense.bias.data_ptr() if dense is not None and dense.bias is not None else 0 for dense in weights],
        sizes,
    )
    packed = torch.tensor(columns, dtype=torch.int64).to(device)
    return _Pointers(
        num_slots=len(weights),
        max_size=max(sizes, default=0),
        is_aligned=all(address % ALIGN_BYTES == 0 for address in columns[0]),
        weights=packed[0],
        biases=packed[1],
        sizes=packed[2].to(torch.int32),
    )
