"""Segmented LoRA on a CPU, in torch alone: as few calls as a step allows, because calls are what a small step costs.

Owns the packed copies of small factors (they live as long as the step's adapters stay the same) and what else it
derives from a step and a table.
Deliberately does not choose: `cpu_layout.py` says which segments share a product.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.torch_lora_layout import Alone, Packed, Piece, Profile, lay_out
from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment
from loraplex_server.layers.segments import check_segments, join_neighbours

# Decoding repeats itself, step after step: the same adapters for the same rows, for all rows and for those of the head.
RECENT_STEPS = 4


def has_fast_half(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this half-precision dtype here. Private to torch, so absence means no."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}.get(dtype)
    if name is None or not torch.backends.mkldnn.is_available():
        return False
    try:
        return bool(getattr(torch.ops.mkldnn, name)())
    except (AttributeError, RuntimeError):
        return False


@dataclass(frozen=True, slots=True)
class _OwnProduct:
    """y[start:end] += alpha * (x[start:end] @ a.T) @ b.T"""

    start: int
    num_rows: int
    a_t: Tensor  # [in, rank], a view
    b_t: Tensor  # [rank, out], a view
    alpha: float

    def add(self, y: Tensor, x: Tensor) -> None:
        if self.num_rows != x.shape[0]:
            x = x.narrow(0, self.start, self.num_rows)
            y = y.narrow(0, self.start, self.num_rows)
        y.addmm_(torch.mm(x, self.a_t), self.b_t, alpha=self.alpha)


@dataclass(frozen=True, slots=True)
class _UpcastProduct:
    """The same, computed in float32."""

    start: int
    num_rows: int
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    alpha: float

    def add(self, y: Tensor, x: Tensor) -> None:
        if self.num_rows != x.shape[0]:
            x = x.narrow(0, self.start, self.num_rows)
            y = y.narrow(0, self.start, self.num_rows)
        y.add_(torch.mm(torch.mm(x.float(), self.a.float().t()), self.b.float().t()), alpha=self.alpha)


@dataclass(frozen=True, slots=True)
class _PackedFactors:
    """Several slots' factors side by side: a copy, or one slot's own tensors."""

    a_t: Tensor  # [in, sum of ranks]
    b_t: Tensor  # [sum of ranks, out]


@dataclass(frozen=True, slots=True)
class _SharedProduct:
    """Several segments in one product; each row keeps only its own slots' columns in between."""

    piece: Packed
    packed: _PackedFactors

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
        piece, a_t, b_t = self.piece, self.packed.a_t, self.packed.b_t
        if piece.upcast:
            x, a_t = x.float(), a_t.float()
        inner = torch.mm(x, a_t)  # [rows, sum of ranks]
        # Bits, because a neighbour's infinity times 0 is not 0, and `masked_fill_` takes six times as long.
        inner.view(piece.keep.dtype).bitwise_and_(piece.keep)
        if piece.factors is not None:
            inner.mul_(piece.factors)
        if piece.upcast:
            y.add_(torch.mm(inner, b_t.float()), alpha=piece.alpha)
        else:
            y.addmm_(inner, b_t, alpha=piece.alpha)


_Product = _OwnProduct | _UpcastProduct | _SharedProduct


class _Plan:
    """A step's segments for all modules, and the layouts that their profiles led to."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = join_neighbours(segments)
        self.slots = sorted({s.adapter_slot for s in self.segments})
        self.layouts: dict[Profile, tuple[Piece, ...]] = {}


@dataclass(frozen=True, slots=True)
class _Bound:
    """One module's products for one plan; lives in the table until one of its slots changes or another plan comes. Of
    what a change leaves behind only the packs are of use, and the plan is None."""

    plan: _Plan | None
    products: tuple[_Product, ...]
    packs: Mapping[tuple[int, ...], _PackedFactors]

    def without(self, slot: int) -> _Bound | None:
        """Implements base.Derived."""
        if self.plan is not None and slot not in self.plan.slots:
            return self  # packs are of the plan's slots
        packs = {slots: pack for slots, pack in self.packs.items() if slot not in slots}
        return _Bound(None, (), packs) if packs else None


class CpuOps:
    """SegmentedLora for CPU tensors."""

    def __init__(self) -> None:
        self._fast_half = {dtype: has_fast_half(dtype) for dtype in (torch.bfloat16, torch.float16)}
        self._recent: deque[PreparedSegments] = deque(maxlen=RECENT_STEPS)

    @property
    def name(self) -> str:
        return "cpu"

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        wanted = tuple(segments)
        for recent in self._recent:
            if recent.num_rows == num_rows and recent.segments == wanted:
                return recent
        prepared = PreparedSegments(wanted, num_rows, _Plan(wanted))
        self._recent.appendleft(prepared)
        return prepared

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
        packs: dict[tuple[int, ...], _PackedFactors] = {}
        products: list[_Product] = []
        for piece in layout:
            if isinstance(piece, Alone):
                products.append(_own_product(piece, _present(factors[piece.adapter_slot])))
                continue
            pack = old.get(piece.slots) or _pack([_present(factors[slot]) for slot in piece.slots])
            if pack is None:
                products += [_own_product(part, _present(factors[part.adapter_slot])) for part in piece.apart]
            else:
                packs[piece.slots] = pack
                products.append(_SharedProduct(piece, pack))
        return _Bound(plan, tuple(products), packs)


def _present(factors: LoraFactors | None) -> LoraFactors:
    assert factors is not None, "a layout names only slots with factors"
    return factors


def _pack(factors: Sequence[LoraFactors]) -> _PackedFactors | None:
    """The factors side by side; None where one's infinity would reach its neighbours' rows."""
    if len(factors) == 1:
        return _PackedFactors(factors[0].a.t(), factors[0].b.t())
    b = torch.cat([f.b for f in factors], dim=1)
    # A row's zeroed columns meet the neighbours' B as zeros: with an infinity there they would not stay zero.
    if not math.isfinite(b.sum().item()):
        return None
    return _PackedFactors(torch.cat([f.a for f in factors]).t(), b.t())


def _own_product(piece: Alone, factors: LoraFactors) -> _OwnProduct | _UpcastProduct:
    num_rows = piece.end - piece.start
    if piece.upcast:
        return _UpcastProduct(piece.start, num_rows, factors.a, factors.b, piece.alpha)
    return _OwnProduct(piece.start, num_rows, factors.a.t(), factors.b.t(), piece.alpha)
