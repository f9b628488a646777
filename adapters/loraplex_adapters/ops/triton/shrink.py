"""The first half: inner[split, position] = x[row] @ a.T over one split of the input features.

Every block of rows reads its own adapter through the pointer table, at its true rank. Splits are stored apart and added
by the second half: deterministic, unlike atomic adds. How many there are depends on the module alone, so that a row's
result does not depend on its company.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


# Numbers that change from step to step must not compile the kernel anew when one happens to be a multiple of 16.
@triton.jit(do_not_specialize=["num_positions", "max_rank"])
def shrink_kernel(
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    inner_ptr,  # float32 [splits, num_positions, max_rank]
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 3]
    a_ptrs,  # int64 [num_slots]
    ranks_ptr,  # int32 [num_slots]
    in_features,
    x_stride,
    num_positions,
    max_rank,
    NUM_STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block = tl.program_id(0)
    rank_start = tl.program_id(1) * BLOCK_RANK
    split = tl.program_id(2)
    slot = tl.load(blocks_ptr + block * 3 + 2)
    rank = tl.load(ranks_ptr + slot)
    if rank_start >= rank:
        return
    first = tl.load(blocks_ptr + block * 3)
    num_rows = tl.load(blocks_ptr + block * 3 + 1)
    a_ptr = tl.load(a_ptrs + slot).to(tl.pointer_type(x_ptr.dtype.element_ty))

    m = tl.arange(0, BLOCK_ROWS)
    r = rank_start + tl.arange(0, BLOCK_RANK)
    k = tl.arange(0, BLOCK_IN)
    # 64-bit: rows times features passes 2**31 in long prefills of wide modules.
    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    a_at = a_ptr + r[None, :] * in_features + k[:, None]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
    for step in range(NUM_STEPS):
        start = (split * NUM_STEPS + step) * BLOCK_IN
        inside = start + k < in_features
        x = tl.load(x_at + start, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
        a = tl.load(a_at + start, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            a = a.to(tl.float32)
        acc = tl.dot(x, a, acc, input_precision="ieee")

    inner_row = (split * num_positions + first + m).to(tl.int64)
    inner_at = inner_ptr + inner_row[:, None] * max_rank + r[None, :]
    tl.store(inner_at, acc, mask=(m < num_rows)[:, None] & (r < rank)[None, :])
