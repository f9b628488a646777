"""Many rows per adapter: products of tiles, a block of one adapter's rows against a tile of its factors.

    shrink_tiles   inner[split, position, term] = x[rows] @ a.T over one split of the inputs
    expand_tiles   y[rows] += sum over terms of weight * scale * (sum over splits of inner) @ b.T

A block's rows have the same terms (adapters). Ranks are each adapter's own, read on the device, as are pointers. Splits
are stored apart and added by the second half: deterministic, unlike atomic adds. Siblings are as in decode.py.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# Loops over numbers that were loaded are `while`: the interpreter cannot take such a number as a range's end.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from loraplex_server.backends.cuda.lora.loads import block_at, pointer_to, sibling_of, sum_of_ranks


# Numbers that change from step to step must not compile the kernel anew when one happens to be a multiple of 16.
@triton.jit(do_not_specialize=["num_positions", "max_rank", "inner_stride", "table_stride"])
def shrink_tiles_kernel(
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    inner_ptr,  # float32 [siblings, splits, num_positions, inner_stride]
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 4]
    term_slots_ptr,  # int32 [num_terms]
    a_ptrs,  # int64 [siblings, num_slots]
    ranks_ptr,  # int32 [siblings, num_slots]
    in_features,
    x_stride,
    num_positions,
    max_rank,
    inner_stride,  # terms times max_rank
    table_stride,
    NUM_SPLITS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    split = tl.program_id(1)
    lane = tl.program_id(2) % NUM_LANES
    sibling = tl.program_id(2) // NUM_LANES
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_IN)
    # 64-bit: rows times features pass 2**31 in long prefills of wide modules.
    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    inner_row = ((sibling * NUM_SPLITS + split) * num_positions + first + m).to(tl.int64)
    term = 0
    while term < num_terms:
        at = sibling * table_stride + tl.load(term_slots_ptr + first_term + term)
        rank = tl.load(ranks_ptr + at)
        a_ptr = pointer_to(tl.load(a_ptrs + at), x_ptr, IS_ALIGNED)
        start = lane * BLOCK_RANK
        while start < rank:
            r = start + tl.arange(0, BLOCK_RANK)
            a_at = a_ptr + r[None, :] * in_features + k[:, None]
            acc = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
            for step in range(NUM_STEPS):
                offset = (split * NUM_STEPS + step) * BLOCK_IN
                inside = offset + k < in_features
                x = tl.load(x_at + offset, mask=(m < num_rows)[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_at + offset, mask=(r < rank)[None, :] & inside[:, None], other=0.0)
                if UPCAST:
                    x = x.to(tl.float32)
                    a = a.to(tl.float32)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            inner_at = inner_ptr + inner_row[:, None] * inner_stride + term * max_rank + r[None, :]
            tl.store(inner_at, acc, mask=(m < num_rows)[:, None] & (r < rank)[None, :])
            start += NUM_LANES * BLOCK_RANK
        term += 1


@triton.jit(do_not_specialize=["num_positions", "max_rank", "inner_stride", "table_stride", "end_0", "end_1"])
def expand_tiles_kernel(
    y_ptr,  # [num_rows, out_features], last dimension contiguous
    inner_ptr,  # float32 [siblings, NUM_SPLITS, num_positions, inner_stride]
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 4]
    term_slots_ptr,  # int32 [num_terms]
    term_weights_ptr,  # float32 [num_terms]
    b_ptrs,  # int64 [siblings, num_slots]
    ranks_ptr,  # int32 [siblings, num_slots]
    scales_ptr,  # float32 [siblings, num_slots]
    end_0,
    end_1,
    out_features,
    y_stride,
    num_positions,
    max_rank,
    inner_stride,
    table_stride,
    NUM_SPLITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    sibling, column_block, out_start, out_end = sibling_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    table = sibling * table_stride
    if sum_of_ranks(ranks_ptr + table, term_slots_ptr, first_term, num_terms) == 0:
        return
    dtype = y_ptr.dtype.element_ty
    m = tl.arange(0, BLOCK_ROWS)
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    position = (sibling * NUM_SPLITS * num_positions + first + m).to(tl.int64)
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUT), dtype=tl.float32)
    term = 0
    while term < num_terms:
        at = table + tl.load(term_slots_ptr + first_term + term)
        rank = tl.load(ranks_ptr + at)
        b_ptr = pointer_to(tl.load(b_ptrs + at), y_ptr, IS_ALIGNED)
        factor = tl.load(term_weights_ptr + first_term + term) * tl.load(scales_ptr + at)
        start = 0
        while start < rank:
            r = start + tl.arange(0, BLOCK_RANK)
            inner_mask = (m < num_rows)[:, None] & (r < rank)[None, :]
            inner = tl.zeros((BLOCK_ROWS, BLOCK_RANK), dtype=tl.float32)
            for split in range(NUM_SPLITS):
                inner_row = split * num_positions + position
                inner_at = inner_ptr + inner_row[:, None] * inner_stride + term * max_rank + r[None, :]
                inner += tl.load(inner_at, mask=inner_mask, other=0.0)
            # The compiler loads a row of b in wide pieces where it knows the rank to be a multiple of 8.
            if rank % 8 == 0:
                even = (rank // 8) * 8
                b_mask = (r < even)[:, None] & n_mask[None, :]
                b = tl.load(b_ptr + n[None, :] * even + r[:, None], mask=b_mask, other=0.0)
            else:
                b_mask = (r < rank)[:, None] & n_mask[None, :]
                b = tl.load(b_ptr + n[None, :] * rank + r[:, None], mask=b_mask, other=0.0)
            narrow = inner.to(dtype)
            if UPCAST:
                narrow = narrow.to(tl.float32)
                b = b.to(tl.float32)
            total += factor * tl.dot(narrow, b, input_precision="ieee")
            start += BLOCK_RANK
        term += 1

    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    y_at = y_ptr + row[:, None] * y_stride + (out_start + n)[None, :]
    y_mask = (m < num_rows)[:, None] & n_mask[None, :]
    y = tl.load(y_at, mask=y_mask, other=0.0).to(tl.float32)
    tl.store(y_at, (y + total).to(dtype), mask=y_mask)
