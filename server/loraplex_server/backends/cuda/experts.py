"""Products of experts by a Triton kernel, all of a step in one launch.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests. Pairs of a row and one of its experts are
sorted by expert on the device; a program finds the expert of its block of pairs by itself. So the host waits for
nothing, and a CUDA graph of a launch holds wherever a router sends its rows. A pair's sum is taken in one order,
whatever else is in the step.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false
# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from loraplex_server.backends.cuda.kernel_shapes import SUPPORTED, next_power

# Experts in another dtype keep the model's own code: a tensor core would narrow them.
# The interpreter's dot cannot take bfloat16: it answers garbage.
INTERPRETED: bool = bool(knobs.runtime.interpret)
# Pairs of a block: the least that a tensor core takes, and as many as read a weight once where experts have many.
FEW_PAIRS, MANY_PAIRS = 16, 64
# One step of the loop over inputs, in bytes of a row: a line of the cache. It is the same for all blocks, and so is the
# order of sums.
BLOCK_IN_BYTES = 128
BLOCK_OUT = 64


@triton.jit(do_not_specialize=["num_experts"])
def experts_kernel(
    y_ptr,  # [num_pairs, out_features], contiguous
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    weight_ptr,  # [num_experts, out_features, in_features]
    order_ptr,  # int64 [num_pairs] numbers of pairs, sorted by expert
    ends_ptr,  # int64 [num_experts] behind each expert's last pair in that order
    num_experts,
    in_features,
    out_features,
    x_stride,
    expert_stride,
    out_stride,
    in_stride,
    NUM_STEPS: tl.constexpr,
    PER_ROW: tl.constexpr,  # pairs
    EXPERTS: tl.constexpr,  # the next power of two
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Products of pairs with their experts' weights. Grid: as many blocks of pairs as there may be x blocks of
    outputs."""
    block = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + e, mask=e < num_experts, other=0).to(tl.int32)
    starts = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e < num_experts), other=0).to(tl.int32)
    num_blocks = (ends - starts + BLOCK_ROWS - 1) // BLOCK_ROWS
    block_ends = tl.cumsum(num_blocks, 0)
    expert = tl.sum(((block_ends <= block) & (e < num_experts)).to(tl.int32), 0)
    if expert >= num_experts:
        return
    is_own = e == expert
    local = block - tl.sum(tl.where(is_own, block_ends - num_blocks, 0), 0)
    first = tl.sum(tl.where(is_own, starts, 0), 0) + local * BLOCK_ROWS
    end = tl.sum(tl.where(is_own, ends, 0), 0)

    m = first + tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    pair = tl.load(order_ptr + m, mask=m < end, other=0).to(tl.int64)
    x_at = x_ptr + (pair // PER_ROW)[:, None] * x_stride + k[None, :]
    # 64-bit: experts times outputs times inputs pass 2**31.
    weight_at = weight_ptr + expert.to(tl.int64) * expert_stride + n.to(tl.int64)[None, :] * out_stride
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for step in range(NUM_STEPS):
        start = step * BLOCK_IN
        inside = start + k < in_features
        x = tl.load(x_at + start, mask=(m < end)[:, None] & inside[None, :], other=0.0)
        inputs = (start + k)[:, None].to(tl.int64) * in_stride
        weight = tl.load(weight_at + inputs, mask=(n < out_features)[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    y_at = y_ptr + pair[:, None] * out_features + n[None, :]
    tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < out_features)[None, :])


_experts: Any = experts_kernel


class TritonExperts:
    """Implements ExpertProducts. Reads the weights where and how they lie."""

    __slots__ = ("_weight",)

    def __init__(self, weight: Tensor) -> None:
        """`weight`: [experts, out, in]."""
        self._weight = weight.detach()

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        num_experts, out_features, in_features = self._weight.shape
        num_pairs, per_row = experts.numel(), experts.shape[1]
        y = x.new_empty(num_pairs, out_features)
        if num_pairs == 0:
            return y
        if x.stride(1) != 1:
            x = x.contiguous()
        chosen = experts.reshape(-1)
        order = chosen.argsort(stable=True)
        counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)
        ends = counts.scatter_add_(0, chosen, torch.ones_like(chosen)).cumsum(0)
        block_rows = FEW_PAIRS if num_pairs <= FEW_PAIRS * num_experts else MANY_PAIRS
        # One block of each expert is not full, at most.
        num_blocks = min(num_pairs, num_pairs // block_rows + num_experts)
        _experts[(num_blocks, triton.cdiv(out_features, BLOCK_OUT))](
            *(y, x, self._weight, order, ends, num_experts, in_features, out_features, x.stride(0)),
            *self._weight.stride(), enable_fp_fusion=True,
            **tile_options(in_features, num_experts, per_row, block_rows, x.dtype),
        )  # fmt: skip
        return y


def tile_options(
    in_features: int, num_experts: int, per_row: int, block_rows: int, dtype: torch.dtype
) -> dict[str, int]:
    """Constants of a launch, and how the kernel is compiled for it. None has been timed on a GPU."""
    block_in = BLOCK_IN_BYTES // dtype.itemsize
    return {
        "NUM_STEPS": -(-in_features // block_in),
        "PER_ROW": per_row,
        "EXPERTS": next_power(num_experts),
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": BLOCK_OUT,
        "BLOCK_IN": block_in,
        "UPCAST": INTERPRETED,
        "num_stages": 4,
        "num_warps": 4,
    }


def make_experts(weight: Tensor) -> TritonExperts | None:
    """Products with a weight [experts, out, in]; None of one that the kernel does not know."""
    return TritonExperts(weight) if weight.dtype in SUPPORTED else None
