"""Triton kernels of paged attention: write pages, attend, combine parts.

Causal by absolute position. The query heads of a KV head are rows of one block, so that keys and values are read once.
Accumulation is in float32, in an order that depends on the piece alone. Metadata: see triton_plan.py.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    key_ptr,  # [num_tokens, kv_heads, k_dim], last dimension contiguous
    value_ptr,  # [num_tokens, kv_heads, v_dim], likewise
    k_ptr,  # [num_slots, kv_heads, k_dim]
    v_ptr,  # [num_slots, kv_heads, v_dim]
    slots_ptr,  # [num_tokens]; below 0: nowhere
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot < 0:
        return
    num_heads = tl.num_programs(0)
    kd = tl.arange(0, BLOCK_K)
    key = tl.load(key_ptr + token * key_token_stride + head * key_head_stride + kd, mask=kd < K_DIM, other=0.0)
    tl.store(k_ptr + (slot * num_heads + head) * K_DIM + kd, key.to(k_ptr.dtype.element_ty), mask=kd < K_DIM)
    vd = tl.arange(0, BLOCK_V)
    value = tl.load(value_ptr + token * value_token_stride + head * value_head_stride + vd, mask=vd < V_DIM, other=0.0)
    tl.store(v_ptr + (slot * num_heads + head) * V_DIM + vd, value.to(v_ptr.dtype.element_ty), mask=vd < V_DIM)


@triton.jit
def _tile(
    query,  # [rows, k_dim]
    largest,  # [rows] of the scores so far
    total,  # [rows]
    acc,  # [rows, v_dim]
    k_ptr,  # of this KV head
    v_ptr,
    table_ptr,  # of this span
    start,
    end,
    position,  # [rows]
    scale,
    softcap,
    window,
    k_stride,
    v_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One tile of keys. A tile that a row cannot see changes nothing of it, bit for bit."""
    n = tl.multiple_of(start, BLOCK_KEYS) + tl.arange(0, BLOCK_KEYS)
    inside = n < end
    page = tl.load(table_ptr + n // PAGE, mask=inside, other=0)
    slot = page.to(tl.int64) * PAGE + n % PAGE  # 64-bit: a cache has more elements than 2**31
    kd = tl.arange(0, BLOCK_K)
    vd = tl.arange(0, BLOCK_V)
    k = tl.load(k_ptr + slot[:, None] * k_stride + kd[None, :], mask=inside[:, None] & (kd < K_DIM)[None, :], other=0.0)
    v = tl.load(v_ptr + slot[:, None] * v_stride + vd[None, :], mask=inside[:, None] & (vd < V_DIM)[None, :], other=0.0)
    dtype = v.dtype
    if INTERPRETED:
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    if HAS_SOFTCAP:
        # tanh, in a form that neither overflows nor divides by zero. `softcap` brings the logarithm's base along.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * 1.4426950408889634)) + 1.0))
    seen = inside[None, :] & (n[None, :] <= position[:, None])
    if HAS_WINDOW:
        seen = seen & (n[None, :] > position[:, None] - window)
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(weights, 1)
    narrow = weights.to(dtype)
    if INTERPRETED:
        narrow = narrow.to(tl.float32)
    acc = tl.dot(narrow, v, acc * shrink[:, None], input_precision="ieee")
    return new_largest, total, acc


# Numbers that change from step to step must not compile the kernel anew when one happens to be a multiple of 16.
@triton.jit(do_not_specialize=["count_at", "pieces_at", "tables_at"])
def attend_kernel(
    query_ptr,  # [num_tokens, heads, k_dim], last dimension contiguous
    k_ptr,  # [num_slots, kv_heads, k_dim]
    v_ptr,  # [num_slots, kv_heads, v_dim]
    out_ptr,  # [num_tokens, heads, v_dim]
    parts_ptr,  # float32 [num_partials, heads, v_dim]
    stats_ptr,  # float32 [num_partials, heads, 2]: largest score, sum of the weights
    plan_ptr,  # int32
    count_at,
    pieces_at,
    tables_at,
    scale,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    GROUPS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Grid: KV heads x as many programs as there are pieces, or fewer; each goes on to the next piece of its own."""
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    num_pieces = tl.load(plan_ptr + count_at)
    row = tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUPS + row % GROUPS
    kd = tl.arange(0, BLOCK_K)
    vd = tl.arange(0, BLOCK_V)
    piece = tl.program_id(1)
    while piece < num_pieces:
        at = plan_ptr + pieces_at + piece * 8
        token = tl.load(at)
        num_queries = tl.load(at + 1)
        first_position = tl.load(at + 2)
        start = tl.load(at + 3)
        end = tl.load(at + 4)
        table_ptr = plan_ptr + tables_at + tl.load(at + 5)
        partial = tl.load(at + 6)

        is_row = row // GROUPS < num_queries
        tokens = (token + row // GROUPS).to(tl.int64)
        query_at = query_ptr + tokens[:, None] * query_token_stride + head[:, None] * query_head_stride + kd[None, :]
        query = tl.load(query_at, mask=is_row[:, None] & (kd < K_DIM)[None, :], other=0.0)
        query = query.to(k_ptr.dtype.element_ty)
        if INTERPRETED:
            query = query.to(tl.float32)
        position = first_position + row // GROUPS
        largest = tl.full((BLOCK_ROWS,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_V), dtype=tl.float32)
        # fmt: off
        if INTERPRETED:  # it cannot take a loaded number as a range's end under every numpy
            while start < end:
                largest, total, acc = _tile(
                    query, largest, total, acc, k_ptr + kv_head * K_DIM, v_ptr + kv_head * V_DIM, table_ptr, start, end,
                    position, scale, softcap, window, num_kv_heads * K_DIM, num_kv_heads * V_DIM,
                    K_DIM, V_DIM, BLOCK_K, BLOCK_V, PAGE, BLOCK_KEYS, HAS_WINDOW, HAS_SOFTCAP, INTERPRETED,
                )
                start += BLOCK_KEYS
        else:  # only such a loop is pipelined
            for begin in range(start, end, BLOCK_KEYS):
                largest, total, acc = _tile(
                    query, largest, total, acc, k_ptr + kv_head * K_DIM, v_ptr + kv_head * V_DIM, table_ptr, begin, end,
                    position, scale, softcap, window, num_kv_heads * K_DIM, num_kv_heads * V_DIM,
                    K_DIM, V_DIM, BLOCK_K, BLOCK_V, PAGE, BLOCK_KEYS, HAS_WINDOW, HAS_SOFTCAP, INTERPRETED,
                )
        # fmt: on

        num_heads = num_kv_heads * GROUPS
        out_mask = is_row[:, None] & (vd < V_DIM)[None, :]
        if partial < 0:
            out = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # a span without context: 0
            out_at = out_ptr + (tokens * num_heads + head)[:, None] * V_DIM + vd[None, :]
            tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=out_mask)
        else:
            parts = (partial + row // GROUPS).to(tl.int64) * num_heads + head
            tl.store(parts_ptr + parts[:, None] * V_DIM + vd[None, :], acc, mask=out_mask)
            tl.store(stats_ptr + parts * 2, largest, mask=is_row)
            tl.store(stats_ptr + parts * 2 + 1, total, mask=is_row)
        piece += tl.num_programs(1)


@triton.jit(do_not_specialize=["partials_at"])
def combine_kernel(
    out_ptr,  # [num_tokens, heads, v_dim]
    parts_ptr,  # float32 [num_partials, heads, v_dim]
    stats_ptr,  # float32 [num_partials, heads, 2]
    plan_ptr,  # int32
    partials_at,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
):
    """Grid: heads x tokens. Parts come in the order of their keys; those that see nothing change nothing."""
    head = tl.program_id(0)
    num_heads = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    at = plan_ptr + partials_at + token * 3
    num_parts = tl.load(at + 2)
    if num_parts == 0:
        return
    first = tl.load(at)
    step = tl.load(at + 1)
    vd = tl.arange(0, BLOCK_V)
    largest = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.full((), 0.0, dtype=tl.float32)
    acc = tl.zeros((BLOCK_V,), dtype=tl.float32)
    done = 0
    while done < num_parts:
        part = done + tl.arange(0, BLOCK_PARTS)
        is_part = part < num_parts
        place = (first + part * step).to(tl.int64) * num_heads + head
        scores = tl.load(stats_ptr + place * 2, mask=is_part, other=float("-inf"))
        totals = tl.load(stats_ptr + place * 2 + 1, mask=is_part, other=0.0)
        parts_mask = is_part[:, None] & (vd < V_DIM)[None, :]
        parts = tl.load(parts_ptr + place[:, None] * V_DIM + vd[None, :], mask=parts_mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(scores, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(totals * weights, 0)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        largest = new_largest
        done += BLOCK_PARTS
    out = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (token * num_heads + head) * V_DIM + vd, out.to(out_ptr.dtype.element_ty), mask=vd < V_DIM)
