"""Segmented LoRA and dense products on a CPU in torch, in few calls.

Calls dominate the time of a small step.

Three ways to add a low-rank term, of which ranks, shapes and measured costs choose:

    native   x @ A.T, then y.addmm_: two calls in the factors' dtype
    upcast   the same in float32 from half-precision factors: torch's half-precision products go through oneDNN, which
             takes some 20 us to start one, longer than converting a small adapter
    packed   the factors of many small segments side by side as one A and one B: every row is multiplied by all of
             them and what is not its own is zeroed in between. More arithmetic, far fewer calls

A dense product is one call per segment, straight into its rows of the result: these weights are large (2 MB and more
each), so reading them is the cost. A batched product over the heads of one set took longer than its parts (oneDNN has
no fast batched product for one row), and packed copies would double the adapters' memory.

Owns the packed copies of small factors (they live as long as the step's adapters stay the same) and what else it
derives from a step and a table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.layers.lora import (
    DenseTable,
    DenseWeight,
    FactorTable,
    PreparedSegments,
    Segment,
    SegmentedLora,
    check_dense_segments,
    check_segments,
    join_neighbours,
)

# Longer segments are multiplied by themselves: a packed product would do their arithmetic once per neighbour.
MAX_PACKED_ROWS = 16
# A pack's arithmetic grows with the square of its segments, its calls do not grow at all: more than these are split.
MAX_PACKED_SEGMENTS = 32
# A pack is a second copy of its factors; a module's packs take this much at most.
MAX_PACKED_BYTES = 4 * 2**20
WORDS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
# torch's own loops take half-precision products up to this many multiply-adds, without oneDNN's start.
SMALL_PRODUCT = 4096
RECENT_STEPS = 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one low-rank term: to start it, per factor element read, per multiply-add."""

    start_us: float
    element_us: float
    multiply_add_us: float

    def of(self, num_rows: int, num_elements: int) -> float:
        return self.start_us + num_elements * (self.element_us + num_rows * self.multiply_add_us)


# Measured with benchmarks/kernel_times.py on one core of a server CPU with AVX512-bf16, factors read from memory. Only
# their order matters, and an old machine keeps it: what is expensive here is a call, not a flop.
NATIVE_COSTS: Mapping[torch.dtype, Cost] = {
    torch.float64: Cost(5.0, 20e-5, 4e-5),
    torch.float32: Cost(5.0, 10e-5, 2e-5),
}
SMALL_COST = Cost(5.0, 20e-5, 20e-5)
ONEDNN_COST = Cost(48.0, 20e-5, 0.4e-5)
UPCAST_COST = Cost(15.0, 25e-5, 2.5e-5)
MASK_US, MASK_US_PER_ELEMENT = 3.0, 20e-5
GATHER_US = 12.0
SLICE_US = 2.0
COPY_US, COPY_US_PER_BYTE = 25.0, 25e-5
# Cost of the reference for a segment beyond that of our own product. A pack that only lasts a step may cost that much.
REFERENCE_US = 8.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The facts of a module that decide its layout. Modules of equal profile share one, within and across steps."""

    dtype: torch.dtype
    num_features: int  # in + out
    widest: int  # max(in, out)
    ranks: tuple[int, ...]  # by position in the step's distinct slots
    scales: tuple[float, ...]
    fast_half: bool  # oneDNN has kernels for this half-precision dtype on this machine


@dataclass(frozen=True, slots=True)
class Piece:
    """One product for one segment, or a pack for several."""

    rows: tuple[int, int] | Tensor  # a range, or positions where it has gaps
    slots: tuple[int, ...]
    alpha: float  # weight * scale
    upcast: bool
    # Of a pack, integers of the dtype's width [num_rows, sum of ranks]: all ones where a row uses a column, else 0.
    keep: Tensor | None = None
    factors: Tensor | None = None  # float [num_rows, sum of ranks], instead of alpha where weights or scales differ
    apart: tuple[Piece, ...] = ()  # a pack's segments, each by itself: for factors that cannot be packed


def lay_out(segments: Sequence[Segment], slots: Sequence[int], profile: Profile) -> tuple[Piece, ...]:
    """Cheap products for `segments` (joined, in row order).

    Depends on nothing else, in particular not on earlier steps, so that equal steps compute equal bits.
    """
    ranks = dict(zip(slots, profile.ranks, strict=True))
    scales = dict(zip(slots, profile.scales, strict=True))
    chooser = _Chooser(ranks, scales, profile)
    live = [s for s in segments if ranks[s.adapter_slot]]
    small = [s for s in live if s.end - s.start <= MAX_PACKED_ROWS]
    pieces: list[Piece] = [chooser.alone(s)[1] for s in live if s.end - s.start > MAX_PACKED_ROWS]
    num_packs = -(-len(small) // MAX_PACKED_SEGMENTS)
    bytes_left = MAX_PACKED_BYTES
    for i in range(num_packs):
        part = small[len(small) * i // num_packs : len(small) * (i + 1) // num_packs]
        found, num_bytes = chooser.cheaper(part, bytes_left)
        pieces += found
        bytes_left -= num_bytes
    return tuple(pieces)


class _Chooser:
    """The choice for one profile."""

    def __init__(self, ranks: Mapping[int, int], scales: Mapping[int, float], profile: Profile) -> None:
        self.ranks = ranks
        self.scales = scales
        self.profile = profile

    def alone(self, segment: Segment) -> tuple[float, Piece]:
        cost_us, upcast = self._product_us(segment.end - segment.start, self.ranks[segment.adapter_slot])
        alpha = segment.weight * self.scales[segment.adapter_slot]
        return SLICE_US + cost_us, Piece((segment.start, segment.end), (segment.adapter_slot,), alpha, upcast)

    def cheaper(self, segments: Sequence[Segment], max_bytes: int) -> tuple[Sequence[Piece], int]:
        """These segments as one pack, or each by itself; and the bytes that are copied for it.

        A pack's copy lasts while the step's adapters stay the same, and how long that is cannot be known here. So a
        pack must be cheaper than its parts once it is made, and cheaper than the reference even if made for one step.
        """
        parts = [self.alone(s) for s in segments]
        apart = tuple(piece for _, piece in parts)
        if len(segments) == 1:
            return apart, 0
        slots = sorted({s.adapter_slot for s in segments})
        rows = sorted({row for s in segments for row in range(s.start, s.end)})
        num_columns = sum(self.ranks[slot] for slot in slots)
        has_gaps = rows[-1] - rows[0] >= len(rows)
        product_us, upcast = self._product_us(len(rows), num_columns)
        packed_us = SLICE_US + MASK_US + len(rows) * num_columns * MASK_US_PER_ELEMENT + product_us
        if has_gaps:
            packed_us += GATHER_US
        num_bytes = copy_us = 0
        if len(slots) > 1:  # else the factors are read where they are
            num_bytes = num_columns * self.profile.num_features * self.profile.dtype.itemsize
            copy_us = COPY_US + num_bytes * COPY_US_PER_BYTE
        parts_us = sum(cost_us for cost_us, _ in parts)
        too_dear = packed_us >= parts_us or packed_us + copy_us >= parts_us + REFERENCE_US * len(parts)
        if too_dear or num_bytes > max_bytes:
            return apart, 0
        keep, factors = self._uses(segments, slots, rows, upcast)
        alphas = factors[keep != 0]
        uniform = bool((alphas == alphas[0]).all())
        pack = Piece(
            rows=torch.tensor(rows) if has_gaps else (rows[0], rows[-1] + 1),
            slots=tuple(slots),
            alpha=float(alphas[0]) if uniform else 1.0,
            upcast=upcast,
            keep=keep,
            factors=None if uniform else factors,
            apart=apart,
        )
        return [pack], num_bytes

    def _product_us(self, num_rows: int, rank: int) -> tuple[float, bool]:
        """The cost of one product, and whether it is cheaper in float32."""
        profile, num_elements = self.profile, rank * self.profile.num_features
        if profile.dtype in NATIVE_COSTS:
            return NATIVE_COSTS[profile.dtype].of(num_rows, num_elements), False
        upcast_us = UPCAST_COST.of(num_rows, num_elements)
        native_us = float("inf")
        if num_rows * rank * profile.widest <= SMALL_PRODUCT:
            native_us = SMALL_COST.of(num_rows, num_elements)
        elif profile.fast_half:
            native_us = ONEDNN_COST.of(num_rows, num_elements)
        return min(native_us, upcast_us), upcast_us < native_us

    def _uses(
        self, segments: Sequence[Segment], slots: Sequence[int], rows: Sequence[int], upcast: bool
    ) -> tuple[Tensor, Tensor]:
        """Masks of the columns that each row uses (see Piece.keep), and the weights they are multiplied by: both [rows,
        sum of ranks]."""
        row_idx = {row: i for i, row in enumerate(rows)}
        slot_idx = {slot: i for i, slot in enumerate(slots)}
        uses = [(row_idx[row], slot_idx[s.adapter_slot], s) for s in segments for row in range(s.start, s.end)]
        at = (torch.tensor([row for row, _, _ in uses]), torch.tensor([slot for _, slot, _ in uses]))
        wide = torch.promote_types(self.profile.dtype, torch.float32)
        alphas = torch.tensor([s.weight * self.scales[s.adapter_slot] for _, _, s in uses], dtype=wide)
        weights = torch.zeros(len(rows), len(slots), dtype=wide).index_put_(at, alphas, accumulate=True)
        used = torch.zeros(len(rows), len(slots), dtype=WORDS[torch.float32 if upcast else self.profile.dtype])
        used[at] = -1
        owner = torch.tensor([i for i, slot in enumerate(slots) for _ in range(self.ranks[slot])])  # [sum of ranks]
        return used.index_select(1, owner), weights.index_select(1, owner)


# --- products ---------------------------------------------------------------------------------------------------------


def has_fast_half(dtype: torch.dtype) -> bool:
    """True if oneDNN multiplies matrices of this half-precision dtype here. The check is private to torch: where it is
    missing the answer is False."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False


Factors = tuple[Tensor, Tensor]  # A.T [in, sum of ranks], B.T [sum of ranks, out]: one slot's own, or a pack's copy


@dataclass(frozen=True, slots=True)
class _Product:
    """y[rows] += alpha * (x[rows] @ a.T) @ b.T; in a pack each row keeps only its own slots' columns in between."""

    piece: Piece
    a_t: Tensor
    b_t: Tensor

    def add(self, y: Tensor, x: Tensor) -> None:
        rows = self.piece.rows
        if isinstance(rows, Tensor):
            own = y.index_select(0, rows)
            self._add(own, x.index_select(0, rows))
            y.index_copy_(0, rows, own)
            return
        start, end = rows
        if end - start != x.shape[0]:
            x = x.narrow(0, start, end - start)
            y = y.narrow(0, start, end - start)
        self._add(y, x)

    def _add(self, y: Tensor, x: Tensor) -> None:
        piece, a_t, b_t = self.piece, self.a_t, self.b_t
        if piece.upcast:
            x, a_t = x.float(), a_t.float()
        inner = torch.mm(x, a_t)  # [rows, sum of ranks]
        if piece.keep is not None:
            # Bits, because a neighbour's infinity times 0 is not 0, and `masked_fill_` takes six times as long.
            inner.view(piece.keep.dtype).bitwise_and_(piece.keep)
        if piece.factors is not None:
            inner.mul_(piece.factors)
        if piece.upcast:
            y.add_(torch.mm(inner, b_t.float()), alpha=piece.alpha)
        else:
            y.addmm_(inner, b_t, alpha=piece.alpha)


class _Plan:
    """A step's segments for all modules, and the layouts that their profiles led to."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = join_neighbours(segments)
        self.slots = sorted({s.adapter_slot for s in self.segments})
        self.layouts: dict[Profile, tuple[Piece, ...]] = {}


@dataclass(frozen=True, slots=True)
class _Bound:
    """One module's products for one plan, kept until one of its slots changes or another plan comes. After a change of
    a slot the plan is None and only the packs are used again."""

    plan: _Plan | None
    products: tuple[_Product, ...]
    packs: Mapping[tuple[int, ...], Factors]

    def without(self, slot: int) -> _Bound | None:
        """Implements `layers.lora.Derived`."""
        if self.plan is not None and slot not in self.plan.slots:
            return self  # packs are of the plan's slots
        packs = {slots: pack for slots, pack in self.packs.items() if slot not in slots}
        return _Bound(None, (), packs) if packs else None


class CpuOps(SegmentedLora):
    """SegmentedLora for CPU tensors."""

    name = "cpu"

    def __init__(self) -> None:
        self._fast_half = {dtype: has_fast_half(dtype) for dtype in (torch.bfloat16, torch.float16)}
        # By segments, rows and slots. Decoding repeats itself: the same step after step, for all rows and for those of
        # the head.
        self._recent: deque[tuple[object, PreparedSegments]] = deque(maxlen=RECENT_STEPS)

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        wanted = tuple(segments)
        key = wanted, num_rows, num_slots
        for known, recent in self._recent:
            if known == key:
                return recent
        check_segments(segments, num_rows, num_slots)
        prepared = PreparedSegments(wanted, num_rows, self._plan(wanted))
        self._recent.appendleft((key, prepared))
        return prepared

    def _plan(self, segments: Sequence[Segment]) -> Any:
        return _Plan(segments)

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        bound = table.derived
        if not isinstance(bound, _Bound) or bound.plan is not prepared.data:
            bound = table.derived = self._bind(table, prepared.data, x.dtype)
        for product in bound.products:
            product.add(y, x)

    def _bind(self, table: FactorTable, plan: _Plan, dtype: torch.dtype) -> _Bound:
        factors = {slot: table.factors[slot] for slot in plan.slots}
        profile = Profile(
            dtype=dtype,
            num_features=table.in_features + table.out_features,
            widest=max(table.in_features, table.out_features),
            ranks=tuple(f.rank if f else 0 for f in factors.values()),
            scales=tuple(f.scale if f else 0.0 for f in factors.values()),
            fast_half=self._fast_half.get(dtype, False),
        )
        layout = plan.layouts.get(profile)
        if layout is None:
            layout = plan.layouts[profile] = lay_out(plan.segments, plan.slots, profile)
        old = table.derived.packs if isinstance(table.derived, _Bound) else {}
        packs: dict[tuple[int, ...], Factors] = {}
        products: list[_Product] = []
        for piece in layout:
            found = old.get(piece.slots) or _side_by_side([_present(factors[slot]) for slot in piece.slots])
            if found is None:
                for part in piece.apart:
                    own = _present(factors[part.slots[0]])
                    products.append(_Product(part, own.a.t(), own.b.t()))
                continue
            if len(piece.slots) > 1:
                packs[piece.slots] = found
            products.append(_Product(piece, *found))
        return _Bound(plan, tuple(products), packs)


def _present(factors: LoraFactors | None) -> LoraFactors:
    assert factors is not None, "a layout names only slots with factors"
    return factors


def _side_by_side(factors: Sequence[LoraFactors]) -> Factors | None:
    """Factors side by side as one A and one B. None where one's infinity would reach its neighbours' rows."""
    if len(factors) == 1:
        return factors[0].a.t(), factors[0].b.t()
    b = torch.cat([f.b for f in factors], dim=1)
    # A row's zeroed columns meet the neighbours' B as zeros: with an infinity there they would not stay zero.
    if not math.isfinite(b.sum().item()):
        return None
    return torch.cat([f.a for f in factors]).t(), b.t()


# --- dense products ---------------------------------------------------------------------------------------------------


class CpuDense:
    """SegmentedDense for CPU tensors."""

    name = "cpu"

    def __init__(self) -> None:
        # One row of bfloat16 by a matrix-vector product takes 116 us where the matrix product takes 150 (1024 x 1024,
        # two cores). In float32 they are equal, in float16 it is four times slower.
        self._has_fast_vector = has_fast_half(torch.bfloat16)

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_dense_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(join_neighbours(segments)), num_rows)

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        uses_vector = self._has_fast_vector and x.dtype == torch.bfloat16
        for segment in prepared.segments:
            dense = table.get(segment.adapter_slot)
            if dense is None:
                continue
            start, end = segment.start, segment.end
            if uses_vector and end - start == 1:
                _vector_product(dense, x[start], _cut(y[start], dense))
            else:
                _product(dense, x[start:end], _cut(y[start:end], dense))


def _cut(y: Tensor, dense: DenseWeight) -> Tensor:
    """The columns that are this weight's [..., out]."""
    return y if y.shape[-1] == dense.num_outputs else y[..., : dense.num_outputs]


def _vector_product(dense: DenseWeight, x: Tensor, out: Tensor) -> None:
    """x [in] -> out [out]"""
    if dense.bias is None:
        torch.mv(dense.weight, x, out=out)
    else:
        torch.addmv(dense.bias, dense.weight, x, out=out)


def _product(dense: DenseWeight, x: Tensor, out: Tensor) -> None:
    """x [rows, in] -> out [rows, out]"""
    if dense.bias is None:
        torch.mm(x, dense.weight.t(), out=out)
    else:
        torch.addmm(dense.bias, x, dense.weight.t(), out=out)
