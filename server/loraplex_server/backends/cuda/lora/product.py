"""y[row] = x[row] @ weight.T + bias, every block of rows with its own weight through the pointer table.

Reading weights is the cost of a few rows, so a program takes a block of rows and some outputs, and goes through all
inputs in one order: a row's result does not depend on its company. Sizes are the slots' own.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from loraplex_server.backends.cuda.lora.loads import pointer_to


@triton.jit
def product_kernel(
    y_ptr,  # [num_rows, columns], last dimension contiguous
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 4]: first position, number of rows, first term, 1
    term_slots_ptr,  # int32 [num_terms]
    weight_ptrs,  # int64 [num_slots], 0 where there is none
    bias_ptrs,  # int64 [num_slots], 0 where there is none
    sizes_ptr,  # int32 [num_slots]: outputs
    in_features,
    x_stride,
    y_stride,
    NUM_STEPS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block = tl.program_id(0)
    out_start = tl.program_id(1) * BLOCK_OUT
    slot = tl.load(term_slots_ptr + tl.load(blocks_ptr + block * 4 + 2))
    size = tl.load(sizes_ptr + slot)
    if out_start >= size:
        return
    first = tl.load(blocks_ptr + block * 4)
    num_rows = tl.load(blocks_ptr + block * 4 + 1)
    dtype = y_ptr.dtype.element_ty
    weight_ptr = pointer_to(tl.load(weight_ptrs + slot), y_ptr, IS_ALIGNED)
    bias_address = tl.load(bias_ptrs + slot)
    bias_ptr = pointer_to(bias_address, y_ptr, False)

    m = tl.arange(0, BLOCK_ROWS)
    n = out_start + tl.arange(0, BLOCK_OUT)
    k = tl.arange(0, BLOCK_IN)
    # 64-bit: outputs times inputs pass 2**31 in projections of wide models.
    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    weight_at = weight_ptr + n.to(tl.int64)[None, :] * in_features + k[:, None]
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    for step in range(NUM_STEPS):
        start = step * BLOCK_IN
        inside = start + k < in_features
        x = tl.load(x_at + start, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=(n < size)[None, :] & inside[:, None], other=0.0)
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")

    bias = tl.load(bias_ptr + n, mask=(n < size) & (bias_address != 0), other=0.0).to(tl.float32)
    y_at = y_ptr + row[:, None] * y_stride + n[None, :]
    tl.store(y_at, (acc + bias[None, :]).to(dtype), mask=(m < num_rows)[:, None] & (n < size)[None, :])
