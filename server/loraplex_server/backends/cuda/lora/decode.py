"""Few rows per adapter: factors are read once, as wide as memory gives them, and no tensor core is asked.

    shrink_rows   inner[split, position, term] = x[row] @ a.T over one split of the inputs
    expand_rows   y[row] += sum over terms of weight * scale * (sum over splits of inner) @ b.T
    fused_rows    both in one launch, each program for its own columns

A block's rows have the same terms (adapters). Ranks are each adapter's own, read on the device, as are pointers: a
launch says nothing about who is in a step, so a CUDA graph of it holds for every composition. Sums are taken in one
order, without atomics. *Siblings* are modules with the same input whose outputs lie side by side in y (q, k and v);
their tables are rows of one, `table_stride` apart.
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
def shrink_rows_kernel(
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
    NUM_LANES: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    split = tl.program_id(1)
    lane = tl.program_id(2) % NUM_LANES
    sibling = tl.program_id(2) // NUM_LANES
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    k = split * BLOCK_IN + tl.arange(0, BLOCK_IN)
    term = 0
    while term < num_terms:
        at = sibling * table_stride + tl.load(term_slots_ptr + first_term + term)
        rank = tl.load(ranks_ptr + at)
        a_ptr = pointer_to(tl.load(a_ptrs + at), x_ptr, IS_ALIGNED)
        start = lane * BLOCK_RANK
        while start < rank:
            r = start + tl.arange(0, BLOCK_RANK)
            a_mask = (r < rank)[:, None] & (k < in_features)[None, :]
            a = tl.load(a_ptr + r[:, None] * in_features + k[None, :], mask=a_mask, other=0.0).to(tl.float32)
            m = 0
            while m < num_rows:
                # 64-bit: rows times features pass 2**31 in long steps of wide modules.
                row = tl.load(rows_ptr + first + m).to(tl.int64)
                x = tl.load(x_ptr + row * x_stride + k, mask=k < in_features, other=0.0).to(tl.float32)
                inner_row = ((sibling * NUM_SPLITS + split) * num_positions + first + m).to(tl.int64)
                inner_at = inner_ptr + inner_row * inner_stride + term * max_rank + r
                tl.store(inner_at, tl.sum(a * x[None, :], axis=1), mask=r < rank)
                m += 1
            start += NUM_LANES * BLOCK_RANK
        term += 1


@triton.jit
def add_columns(
    acc,
    b_ptr,
    n,
    n_mask,
    inner_at,
    split_stride,
    rank,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """acc [BLOCK_OUT] += (sum over splits of inner) @ b.T, all in float32."""
    s = tl.arange(0, SPLITS)
    start = 0
    while start < rank:
        r = start + tl.arange(0, BLOCK_RANK)
        mask = (s < NUM_SPLITS)[:, None] & (r < rank)[None, :]
        parts = tl.load(inner_at + s.to(tl.int64)[:, None] * split_stride + r[None, :], mask=mask, other=0.0)
        b_mask = n_mask[:, None] & (r < rank)[None, :]
        b = tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=b_mask, other=0.0).to(tl.float32)
        acc += tl.sum(b * tl.sum(parts, axis=0)[None, :], axis=1)
        start += BLOCK_RANK
    return acc


@triton.jit(do_not_specialize=["num_positions", "max_rank", "inner_stride", "table_stride", "end_0", "end_1"])
def expand_rows_kernel(
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
    SPLITS: tl.constexpr,  # the next power of two
    BLOCK_RANK: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    sibling, column_block, out_start, out_end = sibling_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    table = sibling * table_stride
    if sum_of_ranks(ranks_ptr + table, term_slots_ptr, first_term, num_terms) == 0:
        return
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    split_stride = num_positions.to(tl.int64) * inner_stride
    m = 0
    while m < num_rows:
        # Asked for at once, while the factors are on their way. 64-bit: see above.
        row = tl.load(rows_ptr + first + m).to(tl.int64)
        y_at = y_ptr + row * y_stride + out_start + n
        y = tl.load(y_at, mask=n_mask, other=0.0).to(tl.float32)
        inner_row = (sibling * NUM_SPLITS * num_positions + first + m).to(tl.int64)
        total = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
        term = 0
        while term < num_terms:
            at = table + tl.load(term_slots_ptr + first_term + term)
            rank = tl.load(ranks_ptr + at)
            b_ptr = pointer_to(tl.load(b_ptrs + at), y_ptr, IS_ALIGNED)
            inner_at = inner_ptr + inner_row * inner_stride + term * max_rank
            acc = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
            # The compiler loads a row of b in one piece where it knows the rank to be a multiple of 8.
            if rank % 8 != 0:
                acc = add_columns(acc, b_ptr, n, n_mask, inner_at, split_stride, rank, NUM_SPLITS, SPLITS, BLOCK_RANK)
            elif rank <= BLOCK_RANK:
                even = (rank // 8) * 8
                acc = add_columns(acc, b_ptr, n, n_mask, inner_at, split_stride, even, NUM_SPLITS, SPLITS, BLOCK_RANK)
            else:
                even = (rank // 8) * 8
                wide: tl.constexpr = 4 * BLOCK_RANK
                acc = add_columns(acc, b_ptr, n, n_mask, inner_at, split_stride, even, NUM_SPLITS, SPLITS, wide)
            total += tl.load(term_weights_ptr + first_term + term) * tl.load(scales_ptr + at) * acc
            term += 1
        tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), mask=n_mask)
        m += 1


@triton.jit(do_not_specialize=["table_stride", "end_0", "end_1"])
def fused_rows_kernel(
    y_ptr,  # [num_rows, out_features], last dimension contiguous
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 4]
    term_slots_ptr,  # int32 [num_terms]
    term_weights_ptr,  # float32 [num_terms]
    a_ptrs,  # int64 [siblings, num_slots]
    b_ptrs,  # int64 [siblings, num_slots]
    ranks_ptr,  # int32 [siblings, num_slots]
    scales_ptr,  # float32 [siblings, num_slots]
    in_features,
    end_0,
    end_1,
    out_features,
    x_stride,
    y_stride,
    table_stride,
    NUM_STEPS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    sibling, column_block, out_start, out_end = sibling_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    table = sibling * table_stride
    if sum_of_ranks(ranks_ptr + table, term_slots_ptr, first_term, num_terms) == 0:
        return
    k = tl.arange(0, BLOCK_IN)
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    m = 0
    while m < num_rows:
        row = tl.load(rows_ptr + first + m).to(tl.int64)
        x_at = x_ptr + row * x_stride + k
        y_at = y_ptr + row * y_stride + out_start + n
        y = tl.load(y_at, mask=n_mask, other=0.0).to(tl.float32)
        total = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
        term = 0
        while term < num_terms:
            at = table + tl.load(term_slots_ptr + first_term + term)
            rank = tl.load(ranks_ptr + at)
            a_ptr = pointer_to(tl.load(a_ptrs + at), x_ptr, IS_ALIGNED)
            b_ptr = pointer_to(tl.load(b_ptrs + at), x_ptr, IS_ALIGNED)
            factor = tl.load(term_weights_ptr + first_term + term) * tl.load(scales_ptr + at)
            start = 0
            while start < rank:
                r = start + tl.arange(0, BLOCK_RANK)
                products = tl.zeros((BLOCK_RANK, BLOCK_IN), dtype=tl.float32)
                for step in tl.range(NUM_STEPS, num_stages=NUM_STAGES):
                    inside = step * BLOCK_IN + k < in_features
                    a_at = a_ptr + r[:, None] * in_features + (step * BLOCK_IN + k)[None, :]
                    a = tl.load(a_at, mask=(r < rank)[:, None] & inside[None, :], other=0.0).to(tl.float32)
                    x = tl.load(x_at + step * BLOCK_IN, mask=inside, other=0.0).to(tl.float32)
                    products += a * x[None, :]
                inner = tl.sum(products, axis=1)
                # Ranks behind the last have a row of zeros in a; times an infinity in x that is no zero.
                inner = tl.where(r < rank, inner, 0.0)
                b_mask = n_mask[:, None] & (r < rank)[None, :]
                b = tl.load(b_ptr + n[:, None] * rank + r[None, :], mask=b_mask, other=0.0).to(tl.float32)
                total += factor * tl.sum(b * inner[None, :], axis=1)
                start += BLOCK_RANK
            term += 1
        tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), mask=n_mask)
        m += 1
