"""Paged attention with own Triton kernels.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests. Causal by absolute position. The query heads
of a KV head are rows of one block, so that keys and values are read once. Accumulation is in float32, in an order that
depends on the piece alone: a span's result depends on the span alone, not on its neighbours in the step nor on whether
the step is replayed from a graph. Owns the launch parameters; `plan.py` makes the pieces.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false
# ruff: noqa: N803
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from loraplex_server.backends.cuda.attention.plan import (
    KEY_ALIGN,
    KernelPlan,
    Launch,
    Shape,
    build_plan,
    refill_plan,
    reserve_plan,
    shape_of,
)
from loraplex_server.backends.cuda.kernel_shapes import SUPPORTED, next_power
from loraplex_server.backends.reference import Plan as TorchPlan
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, Reserved

# --- kernels ----------------------------------------------------------------------------------------------------------


LOG2_E = tl.constexpr(1.4426950408889634)  # softmax by powers of two


# Slots begin anywhere in the plan's buffer.
@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
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
    bias_at,  # [rows] pointers, of position 0
    scale,
    softcap,
    window,
    chunk,
    k_stride,
    v_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Adds one tile of keys to the attention of a block of rows. A tile that a row cannot see changes nothing of it,
    bit for bit."""
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
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0))
    if HAS_BIAS:
        scores += tl.load(bias_at[:, None] + n[None, :], mask=inside[None, :], other=0.0) * LOG2_E
    seen = inside[None, :] & (n[None, :] <= position[:, None])
    if HAS_WINDOW:
        seen = seen & (n[None, :] > position[:, None] - window)
    if HAS_CHUNK:
        seen = seen & (n[None, :] >= position[:, None] // chunk * chunk)
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


# Numbers that change from step to step must not compile the kernel again when one happens to be a multiple of 16.
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
    chunk,
    sinks_ptr,  # float32 [heads]; read with HAS_SINKS only
    bias_ptr,  # float32 [heads, at least the positions]; read with HAS_BIAS only
    bias_stride,
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
    HAS_CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attention of pieces. Grid: KV heads x as many programs as there are pieces, or fewer; each goes on to the next
    piece of its own."""
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    num_pieces = tl.load(plan_ptr + count_at)
    row = tl.arange(0, BLOCK_ROWS)
    head = kv_head * GROUPS + row % GROUPS
    bias_at = head
    if HAS_BIAS:
        bias_at = bias_ptr + head.to(tl.int64) * bias_stride
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
        if HAS_SINKS:  # noqa: SIM102 - known when the kernel is compiled
            if partial < 0:  # else the sink is there once, where the parts are put together
                largest = tl.load(sinks_ptr + head) * LOG2_E
                total = tl.full((BLOCK_ROWS,), 1.0, dtype=tl.float32)
        acc = tl.zeros((BLOCK_ROWS, BLOCK_V), dtype=tl.float32)
        # fmt: off
        if INTERPRETED:  # it cannot take a loaded number as a range's end under every numpy
            while start < end:
                largest, total, acc = _tile(
                    query, largest, total, acc, k_ptr + kv_head * K_DIM, v_ptr + kv_head * V_DIM, table_ptr, start, end,
                    position, bias_at, scale, softcap, window, chunk, num_kv_heads * K_DIM, num_kv_heads * V_DIM,
                    K_DIM, V_DIM, BLOCK_K, BLOCK_V, PAGE, BLOCK_KEYS, HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS,
                    INTERPRETED,
                )
                start += BLOCK_KEYS
        else:  # only such a loop is pipelined
            for begin in range(start, end, BLOCK_KEYS):
                largest, total, acc = _tile(
                    query, largest, total, acc, k_ptr + kv_head * K_DIM, v_ptr + kv_head * V_DIM, table_ptr, begin, end,
                    position, bias_at, scale, softcap, window, chunk, num_kv_heads * K_DIM, num_kv_heads * V_DIM,
                    K_DIM, V_DIM, BLOCK_K, BLOCK_V, PAGE, BLOCK_KEYS, HAS_WINDOW, HAS_CHUNK, HAS_SOFTCAP, HAS_BIAS,
                    INTERPRETED,
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
    sinks_ptr,  # float32 [heads]; read with HAS_SINKS only
    partials_at,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Puts the parts of queries together. Grid: heads x tokens. Parts come in the order of their keys; those that see
    nothing change nothing."""
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
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + head) * LOG2_E
        total = tl.full((), 1.0, dtype=tl.float32)
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


# --- operation --------------------------------------------------------------------------------------------------------

# Their types know neither launch options nor that a plain int becomes a constant.
_attend: Any = attend_kernel
_combine: Any = combine_kernel
_write: Any = write_kernel

# Triton decides when it decorates, that is at import. The interpreter's dot cannot take bfloat16: it answers garbage.
INTERPRETED: bool = bool(knobs.runtime.interpret)
# Keys and values of one tile.
TILE_BYTES = 32 << 10
BLOCK_PARTS = 8
# A reserved plan launches so many programs per multiprocessor at most, whatever was refilled.
PROGRAMS_PER_SM = 6
MAX_GRID = 65535  # CUDA's limit of a grid's second dimension


class TritonPagedAttention:
    """Implements ReplayableAttention for a model with layers as in `specs`."""

    name = "triton"
    needs_clean_blocks = True
    replays_ragged = True

    def __init__(self, specs: Sequence[AttentionSpec]) -> None:
        self._specs = tuple(dict.fromkeys(specs))
        self._reference = TorchPagedAttention()

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> KernelPlan | TorchPlan:
        if dtype not in SUPPORTED:
            return self._reference.plan(batch, dtype, device)
        return build_plan(batch, self._shapes(dtype), dtype, device)

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> KernelPlan:
        """The reserved plan, see ReplayableAttention. Raises ValueError on a dtype that the kernels do not compute
        in."""
        if dtype not in SUPPORTED:
            raise ValueError(f"the kernels do not compute in {dtype}")
        return reserve_plan(reserved, block_size, self._shapes(dtype), dtype, device)

    def _shapes(self, dtype: torch.dtype) -> tuple[Shape, ...]:
        return tuple(dict.fromkeys(shape_of(spec, dtype) for spec in self._specs))

    def refill(self, plan: KernelPlan, batch: AttentionBatch) -> None:
        refill_plan(plan, batch)

    def run(
        self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: KernelPlan | TorchPlan
    ) -> Tensor:
        if isinstance(plan, TorchPlan):
            return self._reference.run(query, key, value, kv, spec, plan)
        write_pages(key, value, kv, plan.slots)
        if query.stride(2) != 1:
            query = query.contiguous()
        work = plan.works[shape_of(spec, plan.dtype)]
        device = query.device
        out = torch.empty(plan.num_tokens, spec.num_heads, spec.v_dim, dtype=kv.v.dtype, device=device)
        parts = torch.empty(work.num_partials, spec.num_heads, spec.v_dim, dtype=torch.float32, device=device)
        stats = torch.empty(work.num_partials, spec.num_heads, 2, dtype=torch.float32, device=device)
        for launch in work.launches:
            _launch(query, kv, out, parts, stats, spec, plan, launch)
        if work.num_partials:
            _combine[(spec.num_heads, plan.num_tokens)](
                *(out, parts, stats, plan.buffer, spec.sinks, work.partials_at),
                *(spec.v_dim, next_power(spec.v_dim), BLOCK_PARTS, spec.sinks is not None),
                num_warps=2,
                enable_fp_fusion=True,
            )
        return out


def write_pages(key: Tensor, value: Tensor, kv: LayerKv, slots: Tensor) -> None:
    """Stores key, value [num_tokens, kv_heads, dim] at slots [num_tokens]; a token whose slot is -1 is left out."""
    if key.stride(2) != 1:
        key = key.contiguous()
    if value.stride(2) != 1:
        value = value.contiguous()
    num_tokens, num_heads, k_dim = key.shape
    v_dim = value.shape[2]
    _write[(num_heads, num_tokens)](
        *(key, value, kv.k, kv.v, slots),
        *(key.stride(0), key.stride(1), value.stride(0), value.stride(1)),
        *(k_dim, v_dim, next_power(k_dim), next_power(v_dim)),
        num_warps=1,
        enable_fp_fusion=True,
    )


def _launch(
    query: Tensor,
    kv: LayerKv,
    out: Tensor,
    parts: Tensor,
    stats: Tensor,
    spec: AttentionSpec,
    plan: KernelPlan,
    launch: Launch,
) -> None:
    assert kv.k.is_contiguous()
    assert kv.v.is_contiguous()
    is_reserved = plan.reserved is not None
    most = max(1, _num_programs(query.device) // spec.num_kv_heads) if is_reserved else MAX_GRID
    # Scores in base 2; a cap comes before that.
    log2e = math.log2(math.e)
    bias = spec.key_bias
    scale = spec.scaling * log2e if spec.softcap is None else spec.scaling / spec.softcap
    _attend[(spec.num_kv_heads, min(launch.max_pieces, most))](
        *(query, kv.k, kv.v, out, parts, stats, plan.buffer, launch.count_at, launch.pieces_at, plan.tables_at),
        *(scale, 0.0 if spec.softcap is None else spec.softcap * log2e, spec.window or 0, spec.chunk or 0, spec.sinks),
        *(bias, 0 if bias is None else bias.stride(0), query.stride(0), query.stride(1)),
        GROUPS=spec.num_groups, K_DIM=spec.k_dim, V_DIM=spec.v_dim, PAGE=plan.block_size,
        BLOCK_ROWS=launch.block_rows, HAS_WINDOW=spec.window is not None, HAS_CHUNK=spec.chunk is not None,
        HAS_SOFTCAP=spec.softcap is not None, HAS_SINKS=spec.sinks is not None, HAS_BIAS=bias is not None,
        INTERPRETED=INTERPRETED, enable_fp_fusion=True,
        **tile_options(spec, plan.dtype, launch.block_rows, _has_wgmma(query.device)),
    )  # fmt: skip


def tile_options(spec: AttentionSpec, dtype: torch.dtype, block_rows: int, has_wgmma: bool) -> dict[str, int]:
    """Size of a tile of keys, and how the kernel is compiled for it."""
    block_k, block_v = next_power(spec.k_dim), next_power(spec.v_dim)
    # Small blocks wait for memory, so two tiles are on their way. Of tall ones registers and shared memory hold one.
    num_stages = 3 if block_rows <= 32 and max(block_k, block_v) * dtype.itemsize <= 512 else 2
    if has_wgmma and block_rows >= 64 and dtype.itemsize == 2:
        # Pipelined, Hopper's wgmma with its left operand in registers (the weights, narrowed there) is miscompiled by
        # ptxas before 13.3.
        num_stages = 1
    fitting = TILE_BYTES // ((block_k + block_v) * dtype.itemsize)
    block_keys = min(KEY_ALIGN, max(16, 1 << max(0, fitting.bit_length() - 1)))
    return {
        "BLOCK_K": max(16, block_k),
        "BLOCK_V": max(16, block_v),
        "BLOCK_KEYS": block_keys,
        "num_stages": num_stages,
        "num_warps": 8 if block_rows >= 128 else 4,
    }


def _has_wgmma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _num_programs(device: torch.device) -> int:
    """Most programs that a reserved plan starts, over all KV heads. In Triton's interpreter they are so few that each
    has several pieces to do."""
    if device.type != "cuda":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
