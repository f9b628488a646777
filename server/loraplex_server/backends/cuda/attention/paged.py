"""Paged attention with own Triton kernels.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests.

Owns the launch parameters. A span's result depends on the span alone, not on its neighbours in the step nor on whether
the step is replayed from a graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from loraplex_server.backends.cuda.attention.kernels import attend_kernel, combine_kernel, write_kernel
from loraplex_server.backends.cuda.attention.plan import (
    KEY_ALIGN,
    KernelPlan,
    Launch,
    Shape,
    build_plan,
    next_power,
    refill_plan,
    reserve_plan,
    shape_of,
)
from loraplex_server.backends.reference.attention import Plan as TorchPlan
from loraplex_server.backends.reference.attention import TorchPagedAttention
from loraplex_server.layers.attention import AttentionBatch, Reserved
from loraplex_server.layers.kv_memory import LayerKv
from loraplex_server.layers.spec import AttentionSpec

# Their types know neither launch options nor that a plain int becomes a constant.
_attend: Any = attend_kernel
_combine: Any = combine_kernel
_write: Any = write_kernel

# Anything else (float64, of checks) is computed by the reference: a tensor core would narrow it.
SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)
# Triton decides when it decorates, that is at import. The interpreter's dot cannot take bfloat16: it answers garbage.
INTERPRETED: bool = bool(knobs.runtime.interpret)
# Keys and values of one tile.
TILE_BYTES = 32 << 10
BLOCK_PARTS = 8
# A reserved plan launches so many programs per multiprocessor at most, whatever was refilled.
PROGRAMS_PER_SM = 6


class TritonPagedAttention:
    """Implements ReplayableAttention for a model with layers as in `specs`."""

    name = "triton"
    needs_clean_blocks = True

    def __init__(self, specs: Sequence[AttentionSpec]) -> None:
        self._specs = tuple(dict.fromkeys(specs))
        self._reference = TorchPagedAttention()

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> KernelPlan | TorchPlan:
        if dtype not in SUPPORTED:
            return self._reference.plan(batch, dtype, device)
        return build_plan(batch, self._shapes(dtype), dtype, device)

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> KernelPlan:
        """See ReplayableAttention. Raises ValueError on a dtype that the kernels do not compute in."""
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
                *(out, parts, stats, plan.buffer, work.partials_at, spec.v_dim, next_power(spec.v_dim), BLOCK_PARTS),
                num_warps=2,
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
    num_programs = launch.max_pieces
    if plan.reserved is not None:
        num_programs = min(num_programs, max(1, _num_programs(query.device) // spec.num_kv_heads))
    # Scores in base 2; a cap comes before that.
    log2e = math.log2(math.e)
    scale = spec.scaling * log2e if spec.softcap is None else spec.scaling / spec.softcap
    _attend[(spec.num_kv_heads, num_programs)](
        *(query, kv.k, kv.v, out, parts, stats, plan.buffer, launch.count_at, launch.pieces_at, plan.tables_at),
        *(scale, 0.0 if spec.softcap is None else spec.softcap * log2e, spec.window or 0),
        *(query.stride(0), query.stride(1)), GROUPS=spec.num_groups, K_DIM=spec.k_dim, V_DIM=spec.v_dim,
        PAGE=plan.block_size, BLOCK_ROWS=launch.block_rows, HAS_WINDOW=spec.window is not None,
        HAS_SOFTCAP=spec.softcap is not None, INTERPRETED=INTERPRETED,
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
    """In the interpreter few enough that each has several pieces to do."""
    if device.type != "cuda":
        return 4
    return PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
