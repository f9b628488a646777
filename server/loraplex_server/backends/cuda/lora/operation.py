"""Segmented LoRA and dense products by Triton kernels.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests. `plan.py` lays out the step and chooses
kernels and block sizes. Owns what it derives from a table (in its `derived`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from loraplex_server.backends.cuda.kernel_shapes import SUPPORTED, next_power
from loraplex_server.backends.cuda.lora.kernels import (
    expand_rows_kernel,
    expand_tiles_kernel,
    fused_rows_kernel,
    product_kernel,
    shrink_rows_kernel,
    shrink_tiles_kernel,
)
from loraplex_server.backends.cuda.lora.plan import (
    ALIGN_BYTES,
    KernelPlan,
    Launch,
    Variant,
    build_plan,
    choose_block_rows,
    choose_dense_launch,
    choose_dense_rows,
    choose_launch,
    refill_plan,
    reserve_plan,
)
from loraplex_server.backends.reference import ReferenceDense, ReferenceOps
from loraplex_server.layers.lora import (
    DenseTable,
    FactorTable,
    PreparedSegments,
    ReplayableLora,
    Segment,
    check_dense_segments,
    check_segments,
)

# Their types know neither launch options nor that a plain int becomes a constant.
_shrink_rows: Any = shrink_rows_kernel
_expand_rows: Any = expand_rows_kernel
_fused_rows: Any = fused_rows_kernel
_shrink_tiles: Any = shrink_tiles_kernel
_expand_tiles: Any = expand_tiles_kernel
_product: Any = product_kernel

MAX_MERGED = 3

# Triton decides when it decorates, that is at import. The interpreter's dot cannot take bfloat16: it answers garbage.
INTERPRETED: bool = bool(knobs.runtime.interpret)


@dataclass(frozen=True, slots=True)
class _Known:
    """Properties of a table's factors that launches need. Any change of the table drops it."""

    max_rank: int
    is_aligned: bool

    def without(self, slot: int) -> None:
        """Implements `layers.lora.Derived`."""


@dataclass(frozen=True, slots=True)
class Call:
    """One launch's or two launches' arguments, except for y."""

    x: Tensor  # [num_rows, in]
    tables: Sequence[FactorTable]  # 1 to MAX_MERGED, evenly spaced in memory
    plan: KernelPlan
    max_rank: int
    is_aligned: bool
    launch: Launch
    stride: int  # from one table to the next, in entries

    def inner(self) -> Tensor:
        """The tensor between the two halves. It is not zeroed: a kernel reads only what the other wrote."""
        shape = len(self.tables), self.launch.num_splits, self.plan.num_positions, self.inner_stride
        return torch.empty(shape, dtype=torch.float32, device=self.x.device)

    @property
    def inner_stride(self) -> int:
        return self.plan.max_terms * self.max_rank

    def ends(self) -> tuple[int, int, int]:
        """The ends of the merged modules' columns; missing modules have none."""
        ends = list(accumulate(table.out_features for table in self.tables))
        return ends[0], ends[min(1, len(ends) - 1)], ends[-1]

    def constants(self) -> dict[str, int]:
        """Constants of all kernels of the two halves."""
        launch = self.launch
        return {"NUM_SPLITS": launch.num_splits, "BLOCK_RANK": launch.block_rank, "IS_ALIGNED": self.is_aligned}

    def tile_options(self) -> dict[str, int]:
        return {"BLOCK_ROWS": self.plan.block_rows, "UPCAST": INTERPRETED}

    def sizes(self) -> tuple[int, int, int, int]:
        return self.plan.num_positions, self.max_rank, self.inner_stride, self.stride

    def num_column_blocks(self) -> int:
        return sum(-(-table.out_features // self.launch.block_out) for table in self.tables)


class TritonOps(ReplayableLora):
    """ReplayableLora for CUDA: kernels in bfloat16, float16 and float32."""

    name = "triton"

    def __init__(self, max_rank: int = 256, variant: Variant | None = None) -> None:
        """`variant` is for tests and measurements: None takes what the table says."""
        self.max_rank = max_rank  # of anything installed; more than that only in what is prepared
        self._variant: Variant | None = variant
        self._reference = ReferenceOps()
        self._branch: torch.cuda.Stream | None = None

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows, build_plan(segments, num_slots, device, self._block_rows))

    def reserve(self, num_rows: int, num_slots: int, device: torch.device) -> PreparedSegments:
        return PreparedSegments((), num_rows, reserve_plan(num_rows, num_slots, device, self._block_rows(num_rows)))

    def refill(self, reserved: PreparedSegments, segments: Sequence[Segment]) -> None:
        plan: KernelPlan = reserved.data
        assert plan.slots is None, "only what was reserved can be refilled"
        check_segments(segments, reserved.num_rows, plan.num_slots)
        refill_plan(plan, segments)

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        if x.dtype not in SUPPORTED:
            self._reference.apply(y, x, table, prepared)
        elif (call := self._call(x, [table], prepared.data, 0)) is not None:
            _launch(call, y)

    def apply_merged(self, y: Tensor, x: Tensor, tables: Sequence[FactorTable], prepared: PreparedSegments) -> None:
        """Adds the terms of all members in as few launches as one module takes, where the tables are evenly spaced
        (AdapterSlots makes them so)."""
        if (stride := table_stride(x, tables)) is None:
            super().apply_merged(y, x, tables, prepared)
        elif (call := self._call(x, tables, prepared.data, stride)) is not None:
            _launch(call, y)

    def apply_over(
        self, base: Callable[[], Tensor], x: Tensor, tables: Sequence[FactorTable], prepared: PreparedSegments
    ) -> Tensor:
        """The base's product with the terms added. In a CUDA graph the first half (shrink) runs in a branch, beside the
        base's product, which waits for memory. The branch is recorded behind the product: recorded in front of it, it
        held the product up. Without a graph there is no branch: there the host is what takes time."""
        is_captured = x.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        stride = table_stride(x, tables) if is_captured else None
        call = None if stride is None else self._call(x, tables, prepared.data, stride)
        if call is None or call.launch.variant == "fused":
            return super().apply_over(base, x, tables, prepared)
        stream = torch.cuda.current_stream(x.device)
        if self._branch is None:
            self._branch = torch.cuda.Stream(x.device)
        inner = call.inner()  # of the main stream's memory, on which it is free again after the second half
        self._branch.wait_stream(stream)
        y = base()
        with torch.cuda.stream(self._branch):
            shrink(call, inner)
        stream.wait_stream(self._branch)
        expand(call, y, inner)
        return y

    def _block_rows(self, num_rows: int) -> int:
        return choose_block_rows(num_rows, self._variant)

    def _call(self, x: Tensor, tables: Sequence[FactorTable], plan: KernelPlan, stride: int) -> Call | None:
        """The arguments of the launches; None where nothing is to be added."""
        if plan.num_blocks == 0:
            return None
        known = [_known(table) for table in tables]
        max_rank, is_aligned = max(k.max_rank for k in known), all(k.is_aligned for k in known)
        if plan.slots is not None and not any(
            table.factors[slot] is not None for table in tables for slot in plan.slots
        ):
            return None
        if plan.slots is None and (max_rank > self.max_rank or not is_aligned):
            raise ValueError(
                f"a reserved plan takes ranks up to {self.max_rank} and factors that begin at a multiple of "
                f"{ALIGN_BYTES} bytes; here is rank {max_rank}"
            )
        # Kernels for the largest rank that may come: fewer variants, and none to compile for a new adapter.
        max_rank = max(max_rank, self.max_rank)
        if x.stride(1) != 1:
            x = x.contiguous()
        launch = choose_launch(
            plan.block_rows,
            plan.num_blocks,
            tables[0].in_features,
            sum(table.out_features for table in tables),
            max_rank,
            x.element_size(),
            self._variant,
        )
        return Call(x, tables, plan, max_rank, is_aligned, launch, stride)


def _known(table: FactorTable) -> _Known:
    known = table.derived
    if not isinstance(known, _Known):
        present = [f for f in table.factors if f is not None]
        known = table.derived = _Known(
            max_rank=max((f.rank for f in present), default=0),
            is_aligned=all((f.a.data_ptr() | f.b.data_ptr()) % ALIGN_BYTES == 0 for f in present),
        )
    return known


def _spacing(tables: Sequence[FactorTable]) -> int:
    """Distance in entries from one table to the next, in all that kernels read of them; 0 if it varies."""
    found: set[int] = set()
    for one, other in pairwise(tables):
        for a, b in (
            (one.a_ptrs, other.a_ptrs),
            (one.b_ptrs, other.b_ptrs),
            (one.ranks, other.ranks),
            (one.scales, other.scales),
        ):
            found.add((b.data_ptr() - a.data_ptr()) // a.element_size())
    return found.pop() if len(found) == 1 and min(found) > 0 else 0


def table_stride(x: Tensor, tables: Sequence[FactorTable]) -> int | None:
    """The distance of the tables where one launch takes them all, which it does of one table; else None."""
    if x.dtype not in SUPPORTED or len(tables) > MAX_MERGED:
        return None
    return 0 if len(tables) == 1 else _spacing(tables) or None


def _launch(call: Call, y: Tensor) -> None:
    """Adds the update to y [num_rows, sum of outputs]."""
    if call.launch.variant == "fused":
        _fuse(call, y)
        return
    inner = call.inner()
    shrink(call, inner)
    expand(call, y, inner)


def shrink(call: Call, inner: Tensor) -> None:
    """The first half: x @ a.T into `inner`, which `Call.inner` makes."""
    plan, launch, table = call.plan, call.launch, call.tables[0]
    kernel, rows, options = _shrink_rows, (), {}
    if launch.variant == "tiles":
        kernel, rows, options = _shrink_tiles, (plan.rows,), {**call.tile_options(), "NUM_STEPS": launch.num_steps}
        options["num_stages"] = launch.num_stages
    kernel[(plan.num_blocks, launch.num_splits, launch.num_lanes * len(call.tables))](
        *(call.x, inner, *rows, plan.blocks, plan.term_slots, table.a_ptrs, table.ranks, table.in_features),
        *(call.x.stride(0), *call.sizes()),
        NUM_LANES=launch.num_lanes,
        BLOCK_IN=launch.block_in,
        num_warps=launch.shrink_warps,
        enable_fp_fusion=True,
        **call.constants(),
        **options,
    )


def expand(call: Call, y: Tensor, inner: Tensor) -> None:
    """The second half: adds inner @ b.T to y [num_rows, sum of outputs]."""
    plan, launch, table = call.plan, call.launch, call.tables[0]
    kernel, rows, options = _expand_rows, (), {"SPLITS": next_power(launch.num_splits)}
    if launch.variant == "tiles":
        # Pipelined, Hopper's wgmma with its left operand in registers (inner, narrowed here) is miscompiled by ptxas
        # before 13.3.
        kernel, rows, options = _expand_tiles, (plan.rows,), {**call.tile_options(), "num_stages": 1}
    kernel[(plan.num_blocks, call.num_column_blocks())](
        *(y, inner, *rows, plan.blocks, plan.term_slots, plan.term_weights),
        *(table.b_ptrs, table.ranks, table.scales, *call.ends(), y.stride(0), *call.sizes()),
        BLOCK_OUT=launch.block_out,
        num_warps=launch.expand_warps,
        enable_fp_fusion=True,
        **call.constants(),
        **options,
    )


def _fuse(call: Call, y: Tensor) -> None:
    plan, launch, table = call.plan, call.launch, call.tables[0]
    _fused_rows[(plan.num_blocks, call.num_column_blocks())](
        *(y, call.x, plan.blocks, plan.term_slots, plan.term_weights),
        *(table.a_ptrs, table.b_ptrs, table.ranks, table.scales, table.in_features, *call.ends()),
        *(call.x.stride(0), y.stride(0), call.stride), NUM_STEPS=launch.num_steps,
        BLOCK_RANK=launch.block_rank, BLOCK_IN=launch.block_in, BLOCK_OUT=launch.block_out,
        NUM_STAGES=launch.num_stages, IS_ALIGNED=call.is_aligned, enable_fp_fusion=True,
    )  # fmt: skip


# --- dense products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Pointers:
    """A table as the kernel reads it, by slot."""

    num_slots: int
    max_size: int
    is_aligned: bool
    weights: Tensor  # int64
    biases: Tensor  # int64
    sizes: Tensor  # int32


class TritonDense:
    """SegmentedDense for CUDA: a kernel in bfloat16, float16 and float32."""

    name = "triton"

    def __init__(self) -> None:
        self._reference = ReferenceDense()

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(segments), num_rows, build_plan(segments, num_slots, device, choose_dense_rows))

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        if x.dtype not in SUPPORTED:
            self._reference.apply(y, x, table, prepared)
            return
        plan: KernelPlan = prepared.data
        if not plan.slots:
            return
        pointers = table.derived
        if not isinstance(pointers, _Pointers) or pointers.num_slots <= max(plan.slots):
            pointers = table.derived = _pointers(table, max(plan.slots) + 1, x.device)
        if pointers.max_size == 0:
            return
        if x.stride(1) != 1:
            x = x.contiguous()
        launch = choose_dense_launch(plan.block_rows, x.element_size())
        _product[(plan.num_blocks, triton.cdiv(pointers.max_size, launch.block_out))](
            y, x, plan.rows, plan.blocks, pointers.weights, pointers.biases, pointers.sizes,
            table.in_features, x.stride(0), y.stride(0), NUM_STEPS=triton.cdiv(table.in_features, launch.block_in),
            BLOCK_ROWS=plan.block_rows, BLOCK_OUT=launch.block_out, BLOCK_IN=launch.block_in,
            IS_ALIGNED=pointers.is_aligned, UPCAST=INTERPRETED, num_stages=launch.num_stages, enable_fp_fusion=True,
        )  # fmt: skip


def _pointers(table: DenseTable, min_slots: int, device: torch.device) -> _Pointers:
    weights = [*table.weights, *[None] * (min_slots - len(table.weights))]
    sizes = [dense.num_outputs if dense is not None else 0 for dense in weights]
    columns = (
        [dense.weight.data_ptr() if dense is not None else 0 for dense in weights],
        [dense.bias.data_ptr() if dense is not None and dense.bias is not None else 0 for dense in weights],
        sizes,
    )
    packed = torch.tensor(columns, dtype=torch.int64).to(device)
    return _Pointers(
        num_slots=len(weights),
        max_size=max(sizes, default=0),
        is_aligned=all(address % ALIGN_BYTES == 0 for address in columns[0]),
        weights=packed[0],
        biases=packed[1],
        sizes=packed[2].to(torch.int32),
    )
