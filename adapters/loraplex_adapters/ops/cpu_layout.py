"""Which matrix products a step's segments become on a CPU: the choice, from ranks, shapes and measured costs.

Three ways to add a low-rank term, all in torch:

    native   x @ A.T, then y.addmm_: two calls in the factors' dtype
    upcast   the same in float32 from half-precision factors: torch's half-precision products go through oneDNN, which
             takes some 20 us to start one, longer than converting a small adapter
    packed   the factors of many small segments side by side as one A and one B: every row is multiplied by all of
             them and what is not its own is blanked in between. More arithmetic, far fewer calls

Owns the cost model. Deliberately knows no factor tensors: `cpu.py` fills them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.ops.base import Segment

# Larger segments are multiplied by themselves: a packed product would do their arithmetic once per neighbour.
MAX_PACKED_ROWS = 64
# torch's own loops take half-precision products up to this many multiply-adds, without oneDNN's start.
SMALL_PRODUCT = 4096


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one low-rank term: to start it, per factor element read, per multiply-add."""

    start_us: float
    element_us: float
    multiply_add_us: float

    def of(self, num_rows: int, num_elements: int) -> float:
        return self.start_us + num_elements * (self.element_us + num_rows * self.multiply_add_us)


# Measured with benchmarks/kernels.py on one core of a server CPU with AVX512-bf16. Only the order matters, and an old
# machine keeps it: what is expensive here is a call, not a flop.
NATIVE_COSTS: Mapping[torch.dtype, Cost] = {
    torch.float64: Cost(5.0, 10e-5, 4e-5),
    torch.float32: Cost(5.0, 6e-5, 2e-5),
}
SMALL_COST = Cost(5.0, 20e-5, 20e-5)
ONEDNN_COST = Cost(48.0, 7e-5, 0.4e-5)
UPCAST_COST = Cost(14.0, 12e-5, 2.5e-5)
MASK_US = 3.0
GATHER_US = 12.0
SLICE_US = 2.0


@dataclass(frozen=True, slots=True)
class Profile:
    """What of a module decides its layout. Modules of equal profile share one, within a step and across steps."""

    dtype: torch.dtype
    num_features: int  # in + out
    widest: int  # max(in, out)
    ranks: tuple[int, ...]  # by position in the step's distinct slots
    scales: tuple[float, ...]
    fast_half: bool  # oneDNN has kernels for this half-precision dtype on this machine


@dataclass(frozen=True, slots=True)
class Alone:
    """One segment's own product."""

    start: int
    end: int
    slot: int
    alpha: float  # weight * scale
    upcast: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """One product for several segments. `rows` holds either a range or, where it has gaps, positions."""

    rows: tuple[int, int] | Tensor
    slots: tuple[int, ...]
    blank: Tensor  # bool [num_rows, sum of ranks], True where a row does not use a column
    alpha: float
    factors: Tensor | None  # float [num_rows, sum of ranks], instead of alpha where weights or scales differ
    upcast: bool
    apart: tuple[Alone, ...]  # the same segments, each by itself: for factors that cannot be packed


Piece = Alone | Packed


def lay_out(segments: Sequence[Segment], slots: Sequence[int], profile: Profile) -> tuple[Piece, ...]:
    """The cheapest way that this module finds to add the terms of `segments` (joined, in row order)."""
    ranks = dict(zip(slots, profile.ranks, strict=True))
    chooser = _Chooser(ranks, dict(zip(slots, profile.scales, strict=True)), profile)
    live = [s for s in segments if ranks[s.slot]]
    small = [s for s in live if s.end - s.start <= MAX_PACKED_ROWS]
    large = [s for s in live if s.end - s.start > MAX_PACKED_ROWS]
    pieces: list[Piece] = [chooser.alone(s)[1] for s in large]
    if small:
        pieces += chooser.cheapest(small)[1]
    return tuple(pieces)


class _Chooser:
    """The choice for one profile. Halves the small segments until a pack is cheaper than its parts."""

    def __init__(self, ranks: Mapping[int, int], scales: Mapping[int, float], profile: Profile) -> None:
        self.ranks = ranks
        self.scales = scales
        self.profile = profile

    def alone(self, segment: Segment) -> tuple[float, Alone]:
        cost_us, upcast = self._product_us(segment.end - segment.start, self.ranks[segment.slot])
        alpha = segment.weight * self.scales[segment.slot]
        return SLICE_US + cost_us, Alone(segment.start, segment.end, segment.slot, alpha, upcast)

    def cheapest(self, segments: Sequence[Segment]) -> tuple[float, list[Piece]]:
        if len(segments) == 1:
            cost, piece = self.alone(segments[0])
            return cost, [piece]
        middle = len(segments) // 2
        left_us, left = self.cheapest(segments[:middle])
        right_us, right = self.cheapest(segments[middle:])
        packed_us = self._packed_us(segments)
        if packed_us < left_us + right_us:
            return packed_us, [self._pack(segments)]
        return left_us + right_us, left + right

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

    def _packed_us(self, segments: Sequence[Segment]) -> float:
        rows = {row for s in segments for row in range(s.start, s.end)}
        gather_us = GATHER_US if max(rows) - min(rows) >= len(rows) else 0.0
        return SLICE_US + MASK_US + gather_us + self._product_us(len(rows), self._columns(segments))[0]

    def _columns(self, segments: Sequence[Segment]) -> int:
        return sum(self.ranks[slot] for slot in {s.slot for s in segments})

    def _pack(self, segments: Sequence[Segment]) -> Packed:
        rows = sorted({row for s in segments for row in range(s.start, s.end)})
        row_idx = {row: i for i, row in enumerate(rows)}
        slots = tuple(sorted({s.slot for s in segments}))
        first_column: dict[int, int] = {}
        num_columns = 0
        for slot in slots:
            first_column[slot] = num_columns
            num_columns += self.ranks[slot]
        factors = torch.zeros(len(rows), num_columns, dtype=torch.promote_types(self.profile.dtype, torch.float32))
        blank = torch.ones(len(rows), num_columns, dtype=torch.bool)
        for s in segments:
            block = (
                slice(row_idx[s.start], row_idx[s.end - 1] + 1),
                slice(first_column[s.slot], first_column[s.slot] + self.ranks[s.slot]),
            )
            blank[block] = False
            factors[block] += s.weight * self.scales[s.slot]
        alphas = factors[~blank]
        uniform = bool((alphas == alphas[0]).all())
        contiguous = rows[-1] - rows[0] + 1 == len(rows)
        return Packed(
            rows=(rows[0], rows[-1] + 1) if contiguous else torch.tensor(rows),
            slots=slots,
            blank=blank,
            alpha=float(alphas[0]) if uniform else 1.0,
            factors=None if uniform else factors,
            upcast=self._product_us(len(rows), num_columns)[1],
            apart=tuple(self.alone(s)[1] for s in segments),
        )
