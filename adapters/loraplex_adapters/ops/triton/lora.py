"""Launches the two kernels for one module. Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests.

Owns the launch parameters. Deliberately plain: correct at every rank and shape first, speed is measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from loraplex_adapters.ops.base import FactorTable, PreparedSegments, Segment
from loraplex_adapters.ops.reference import ReferenceOps
from loraplex_adapters.ops.segments import check_segments
from loraplex_adapters.ops.triton.expand import expand_kernel
from loraplex_adapters.ops.triton.plan import KernelPlan, build_plan
from loraplex_adapters.ops.triton.shrink import shrink_kernel

# Their types know neither launch options nor that a plain int becomes a constant.
_shrink: Any = shrink_kernel
_expand: Any = expand_kernel

# Anything else (float64, of checks) is computed by the reference: a tensor core would narrow it.
SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)
BLOCK_RANK = 16  # the least that a tensor core takes; smaller ranks are masked
BLOCK_IN = 128
BLOCK_OUT = 64

# Triton decides when it decorates, that is at import. The interpreter's dot cannot take bfloat16: it answers garbage.
INTERPRETED: bool = bool(knobs.runtime.interpret)


def splits_for(in_features: int) -> int:
    """Over how many programs the input features of one block are spread: a decode step has few blocks."""
    return 1 if in_features < 1024 else 4 if in_features < 8192 else 8


class TritonOps:
    """SegmentedLora for CUDA: kernels in bfloat16, float16 and float32."""

    def __init__(self) -> None:
        self._reference = ReferenceOps()

    @property
    def name(self) -> str:
        return "triton"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows, build_plan(segments, device))

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        if x.dtype not in SUPPORTED:
            self._reference.apply(y, x, table, prepared)
            return
        plan: KernelPlan = prepared.data
        present = [table.factors[slot] for slot in plan.slots]
        max_rank = max((f.rank for f in present if f is not None), default=0)
        if max_rank == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        num_splits = splits_for(table.in_features)
        inner = torch.empty(num_splits, plan.num_positions, max_rank, dtype=torch.float32, device=x.device)
        _shrink[(plan.num_blocks, triton.cdiv(max_rank, BLOCK_RANK), num_splits)](
            x,
            inner,
            plan.rows,
            plan.blocks,
            table.a_ptrs,
            table.ranks,
            table.in_features,
            x.stride(0),
            plan.num_positions,
            max_rank,
            NUM_STEPS=triton.cdiv(table.in_features, num_splits * BLOCK_IN),
            BLOCK_ROWS=plan.block_rows,
            BLOCK_RANK=BLOCK_RANK,
            BLOCK_IN=BLOCK_IN,
            UPCAST=INTERPRETED,
        )
        for first_block, num_blocks in plan.layers:
            _expand[(num_blocks, triton.cdiv(table.out_features, BLOCK_OUT))](
                y,
                inner,
                plan.rows,
                plan.weights,
                plan.blocks,
                table.b_ptrs,
                table.ranks,
                table.scales,
                first_block,
                table.out_features,
                y.stride(0),
                plan.num_positions,
                max_rank,
                NUM_SPLITS=num_splits,
                BLOCK_ROWS=plan.block_rows,
                BLOCK_RANK=BLOCK_RANK,
                BLOCK_OUT=BLOCK_OUT,
                UPCAST=INTERPRETED,
                # Pipelined, Hopper's wgmma with its left operand in registers (inner, narrowed here) is miscompiled
                # by ptxas before 13.3.
                num_stages=1,
            )
