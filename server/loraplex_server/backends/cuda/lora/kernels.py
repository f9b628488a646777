"""Triton kernels of segmented LoRA and of dense products.

Few rows per adapter: a program for each row reads factors as wide as memory gives them, and asks no tensor core.

    shrink_rows   inner[split, position, term] = x[row] @ a.T over one split of the inputs
    expand_rows   y[row] += sum over terms of weight * scale * (sum over splits of inner) @ b.T
    fused_rows    both in one launch, each program for its own columns

Many rows per adapter: products of tiles, a block of one adapter's rows against a tile of its factors.

    shrink_tiles, expand_tiles   the same two halves

Dense products, every block of rows with its own weight through the pointer table:

    product       y[row] = x[row] @ weight.T + bias

A block's rows have the same terms (adapters). Ranks are each adapter's own, read on the device, as are pointers: a
launch says nothing about who is in a step, so a CUDA graph of it holds for every composition. Sums are taken in one
order, without atomics: splits are stored apart and added by the second half. Members of a merged linear have the same
input, and their outputs lie side by side in y (q, k and v); their tables are rows of one, `table_stride` apart.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# Loops over numbers that were loaded are `while`: the interpreter cannot take such a number as a range's end.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pointer_to(address, like, IS_ALIGNED: tl.constexpr):
    """A factor's address as a pointer to what `like` points to. Only a known alignment makes loads wide."""
    pointer = address.to(tl.pointer_type(like.dtype.element_ty))
    if IS_ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def sum_of_ranks(ranks_ptr, term_slots_ptr, first_term, num_terms):
    """Sum of the terms' ranks. 0: their adapters leave this module alone, and y must stay as it is: even adding nothing
    would turn a -0.0 into 0.0."""
    total = 0
    term = 0
    while term < num_terms:
        total += tl.load(ranks_ptr + tl.load(term_slots_ptr + first_term + term))
        term += 1
    return total


@triton.jit
def block_at(blocks_ptr, block):
    """A block's first position, number of rows, first term, number of terms."""
    at = blocks_ptr + block * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def firsts_at(blocks_ptr, block):
    """A block's first row and the slot of its first term, which most blocks have alone. In their lists they would be
    found a load later, and everything else waits for them."""
    at = blocks_ptr + block * 6
    return tl.load(at + 4), tl.load(at + 5)


@triton.jit
def member_of(column_block, end_0, end_1, out_features, BLOCK_OUT: tl.constexpr):
    """The member that a block of columns belongs to, the block's number in it, and the member's first and last
    column."""
    num_0 = tl.cdiv(end_0, BLOCK_OUT)
    num_1 = tl.cdiv(end_1 - end_0, BLOCK_OUT)
    member = (column_block >= num_0).to(tl.int32) + (column_block >= num_0 + num_1).to(tl.int32)
    before = tl.where(member == 0, 0, tl.where(member == 1, num_0, num_0 + num_1))
    start = tl.where(member == 0, 0, tl.where(member == 1, end_0, end_1))
    end = tl.where(member == 0, end_0, tl.where(member == 1, end_1, out_features))
    return member, column_block - before, start, end


# --- few rows ---------------------------------------------------------------------------------------------------------


# Numbers that change from step to step must not compile the kernel again when one happens to be a multiple of 16.
@triton.jit(do_not_specialize=["num_positions", "max_rank", "inner_stride", "table_stride"])
def shrink_rows_kernel(
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    inner_ptr,  # float32 [members, splits, num_positions, inner_stride]
    blocks_ptr,  # int32 [num_blocks, 6]
    term_slots_ptr,  # int32 [num_terms]
    a_ptrs,  # int64 [members, num_slots]
    ranks_ptr,  # int32 [members, num_slots]
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
    member = tl.program_id(2) // NUM_LANES
    position, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    row, slot = firsts_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    k = split * BLOCK_IN + tl.arange(0, BLOCK_IN)
    # 64-bit: rows times features pass 2**31 in long steps of wide modules.
    x_at = x_ptr + row.to(tl.int64) * x_stride + k
    inner_row = ((member * NUM_SPLITS + split) * num_positions + position).to(tl.int64)
    term = 0
    while term < num_terms:
        at = member * table_stride + slot
        rank = tl.load(ranks_ptr + at)
        a_ptr = pointer_to(tl.load(a_ptrs + at), x_ptr, IS_ALIGNED)
        start = lane * BLOCK_RANK
        while start < rank:
            r = start + tl.arange(0, BLOCK_RANK)
            a_mask = (r < rank)[:, None] & (k < in_features)[None, :]
            a = tl.load(a_ptr + r[:, None] * in_features + k[None, :], mask=a_mask, other=0.0).to(tl.float32)
            x = tl.load(x_at, mask=k < in_features, other=0.0).to(tl.float32)
            inner_at = inner_ptr + inner_row * inner_stride + term * max_rank + r
            tl.store(inner_at, tl.sum(a * x[None, :], axis=1), mask=r < rank)
            start += NUM_LANES * BLOCK_RANK
        term += 1
        slot = tl.load(term_slots_ptr + first_term + term, mask=term < num_terms, other=0)


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
    inner_ptr,  # float32 [members, NUM_SPLITS, num_positions, inner_stride]
    blocks_ptr,  # int32 [num_blocks, 6]
    term_slots_ptr,  # int32 [num_terms]
    term_weights_ptr,  # float32 [num_terms]
    b_ptrs,  # int64 [members, num_slots]
    ranks_ptr,  # int32 [members, num_slots]
    scales_ptr,  # float32 [members, num_slots]
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
    position, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    row, slot = firsts_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    member, column_block, out_start, out_end = member_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    # Asked for at once, while the factors are on their way. 64-bit: see above.
    y_at = y_ptr + row.to(tl.int64) * y_stride + out_start + n
    y = tl.load(y_at, mask=n_mask, other=0.0).to(tl.float32)
    split_stride = num_positions.to(tl.int64) * inner_stride
    inner_row = (member * NUM_SPLITS * num_positions + position).to(tl.int64)
    total = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
    num_ranks = 0
    term = 0
    while term < num_terms:
        at = member * table_stride + slot
        rank = tl.load(ranks_ptr + at)
        b_ptr = pointer_to(tl.load(b_ptrs + at), y_ptr, IS_ALIGNED)
        factor = tl.load(term_weights_ptr + first_term + term) * tl.load(scales_ptr + at)
        inner_at = inner_ptr + inner_row * inner_stride + term * max_rank
        acc = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
        # The compiler loads a row of b in one piece where it knows the rank to be a multiple of 8. More ranks at a time
        # would take registers from all programs: half as many would run at once.
        if rank % 8 != 0:
            acc = add_columns(acc, b_ptr, n, n_mask, inner_at, split_stride, rank, NUM_SPLITS, SPLITS, BLOCK_RANK)
        else:
            even = (rank // 8) * 8
            acc = add_columns(acc, b_ptr, n, n_mask, inner_at, split_stride, even, NUM_SPLITS, SPLITS, BLOCK_RANK)
        total += factor * acc
        num_ranks += rank
        term += 1
        slot = tl.load(term_slots_ptr + first_term + term, mask=term < num_terms, other=0)
    # Where the terms' adapters leave this module alone, y stays: even adding nothing turns a -0.0 into 0.0.
    tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), mask=n_mask & (num_ranks > 0))


@triton.jit(do_not_specialize=["table_stride", "end_0", "end_1"])
def fused_rows_kernel(
    y_ptr,  # [num_rows, out_features], last dimension contiguous
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    blocks_ptr,  # int32 [num_blocks, 6]
    term_slots_ptr,  # int32 [num_terms]
    term_weights_ptr,  # float32 [num_terms]
    a_ptrs,  # int64 [members, num_slots]
    b_ptrs,  # int64 [members, num_slots]
    ranks_ptr,  # int32 [members, num_slots]
    scales_ptr,  # float32 [members, num_slots]
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
    _, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    row, slot = firsts_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    member, column_block, out_start, out_end = member_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    table = member * table_stride
    if sum_of_ranks(ranks_ptr + table, term_slots_ptr, first_term, num_terms) == 0:
        return
    k = tl.arange(0, BLOCK_IN)
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    x_at = x_ptr + row.to(tl.int64) * x_stride + k
    y_at = y_ptr + row.to(tl.int64) * y_stride + out_start + n
    y = tl.load(y_at, mask=n_mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_OUT,), dtype=tl.float32)
    term = 0
    while term < num_terms:
        at = table + slot
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
        slot = tl.load(term_slots_ptr + first_term + term, mask=term < num_terms, other=0)
    tl.store(y_at, (y + total).to(y_ptr.dtype.element_ty), mask=n_mask)


# --- many rows --------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_positions", "max_rank", "inner_stride", "table_stride"])
def shrink_tiles_kernel(
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    inner_ptr,  # float32 [members, splits, num_positions, inner_stride]
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 6]
    term_slots_ptr,  # int32 [num_terms]
    a_ptrs,  # int64 [members, num_slots]
    ranks_ptr,  # int32 [members, num_slots]
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
    member = tl.program_id(2) // NUM_LANES
    first, num_rows, first_term, num_terms = block_at(blocks_ptr, tl.program_id(0))
    if num_rows == 0:
        return
    m = tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_IN)
    # 64-bit: rows times features pass 2**31 in long prefills of wide modules.
    row = tl.load(rows_ptr + first + m, mask=m < num_rows, other=0).to(tl.int64)
    x_at = x_ptr + row[:, None] * x_stride + k[None, :]
    inner_row = ((member * NUM_SPLITS + split) * num_positions + first + m).to(tl.int64)
    term = 0
    while term < num_terms:
        at = member * table_stride + tl.load(term_slots_ptr + first_term + term)
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
    inner_ptr,  # float32 [members, NUM_SPLITS, num_positions, inner_stride]
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 6]
    term_slots_ptr,  # int32 [num_terms]
    term_weights_ptr,  # float32 [num_terms]
    b_ptrs,  # int64 [members, num_slots]
    ranks_ptr,  # int32 [members, num_slots]
    scales_ptr,  # float32 [members, num_slots]
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
    member, column_block, out_start, out_end = member_of(tl.program_id(1), end_0, end_1, out_features, BLOCK_OUT)
    table = member * table_stride
    if sum_of_ranks(ranks_ptr + table, term_slots_ptr, first_term, num_terms) == 0:
        return
    dtype = y_ptr.dtype.element_ty
    m = tl.arange(0, BLOCK_ROWS)
    n = column_block * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    n_mask = n < out_end - out_start
    position = (member * NUM_SPLITS * num_positions + first + m).to(tl.int64)
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


# --- dense products ---------------------------------------------------------------------------------------------------


# A table's pointers lie behind those of its weights, however many these are.
@triton.jit(do_not_specialize_on_alignment=["bias_ptrs"])
def product_kernel(
    y_ptr,  # [num_rows, columns], last dimension contiguous
    x_ptr,  # [num_rows, in_features], last dimension contiguous
    rows_ptr,  # int32 [num_positions]
    blocks_ptr,  # int32 [num_blocks, 6]
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
    first, num_rows, _, _ = block_at(blocks_ptr, block)
    _, slot = firsts_at(blocks_ptr, block)
    size = tl.load(sizes_ptr + slot)
    if out_start >= size:
        return
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
