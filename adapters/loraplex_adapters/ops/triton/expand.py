"""The second half: y[row] += weight * scale * (sum of the splits of inner[position]) @ b.T, one launch per layer.

Blocks of a layer share no row, so plain loads and stores are enough; layers follow each other on the stream.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


# Numbers that change from step to step must not compile the kernel anew when one happens to be a multiple of 16.
@triton.jit(do_not_specialize=["first_block", "num_positions", "max_rank"])
def expand_kernel(
    y_ptr,  # [num_rows, out_features], last dimension contiguous
    inner_ptr,  # float32 [num_splits, num_positions, max_rank]
    rows_ptr,  # int32 [num_positions]
    weights_ptr,  # float32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 3]
    b_ptrs,  # int64 [num_slots]
    ranks_ptr,  # int32 [num_slots]
    scales_ptr,  # float32 [num_slots]
    first_block,
    out_features,
    y_stride,
    num_positions,
    max_rank,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    block = first_block + tl.program_id(0)
    slot = tl.load(blocks_ptr + block * 3 + 2)
    rank = tl.load(ranks_ptr + slot)
    if rank == 0:
        return
    first = tl.load(blocks_ptr + block * 3)
    num_rows = tl.load(blocks_ptr + block * 3 + 1)
    dtype = y_ptr.dtype.element_ty
    b_ptr = tl.load(b_ptrs + slot).to(tl.pointer_type(dtype))

    m = tl.arange(0, BLOCK_ROWS)
    n = tl.program_id(1) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    position = (first + m).to(tl.int64)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    # `while`: the interpreter cannot take a loaded number as a range's end under every numpy, and a pipelined loop is
    # not wanted here (see the launch).
    start = 0
    while start < rank:
        r = start + tl.arange(0, BLOCK_RANK)
        inner_mask = (m < num_rows)[:, None] & (r < rank)[None, :]
        inner = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
        for split in range(NUM_SPLITS):
            inner_row = split * num_positions + position
            inner += tl.load(inner_ptr + inner_row[:, None] * max_rank + r[None, :], mask=inner_mask, other=0.0)
        b_mask = (r < rank)[:, None] & (n < out_features)[None, :]
        b = tl.load(b_ptr + n[None, :] * rank + r[:, None], mask=b_mask, other=0.0)
        narrow = inner.to(dtype)
        if UPCAST:
            narrow = narrow.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(narrow, b, acc, input_precision="ieee")
        start += BLOCK_RANK

    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    factor = tl.load(weights_ptr + first + m, mask=m < num_rows, other=0.0) * tl.load(scales_ptr + slot)
    y_at = y_ptr + row[:, None] * y_stride + n[None, :]
    y_mask = (m < num_rows)[:, None] & (n < out_features)[None, :]
    y = tl.load(y_at, mask=y_mask, other=0.0).to(tl.float32)
    tl.store(y_at, (y + factor[:, None] * acc).to(dtype), mask=y_mask)
