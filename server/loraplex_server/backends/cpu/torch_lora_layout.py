"""Which matrix products a step's segments become on a CPU: the choice, from ranks, shapes and measured costs.

Three ways to add a low-rank term, all in torch:

    native   x @ A.T, then y.addmm_: two calls in the factors' dtype
    upcast   the same in float32 from half-precision factors: torch's half-precision products go through oneDNN, which
             takes some 20 us to start one, longer than converting a small adapter
    packed   the factors of many small segments side by side as one A and one B: every row is multiplied by all of
             them and what is not its own is zeroed in between. More arithmetic, far fewer calls

Owns the cost model. Deliberately knows no factor tensors: `cpu.py` fills them in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_server.layers.lora import Segment

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


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of one low-rank term: to start it, per factor element read, per multiply-add."""

    start_us: float
    element_us: float
    multiply_add_us: float

    def of(self, num_rows: int, num_elements: int) -> float:
        return self.start_us + num_elements * (self.element_us + num_rows * self.multiply_add_us)


# Measured with benchmarks/kernels.py on one core of a server CPU with AVX512-bf16, factors read from memory. Only their
# order matters, and an old machine keeps it: what is expensive here is a call, not a flop.
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
# What the reference takes for a segment beyond our own product of it. A pack that only lasts a step may cost that much.
REFERENCE_US = 8.0


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
    adapter_slot: int
    alpha: float  # weight * scale
    upcast: bool


@dataclass(frozen=True, slots=True)
class Packed:
    """One product for several segments. `rows` holds either a range or, where it has gaps, positions."""

    rows: tuple[int, int] | Tensor
    slots: tuple[int, ...]
    keep: Tensor  # integers of the dtype's width [num_rows, sum of ranks]: all ones where a row uses a column, else 0
    alpha: float
    factors: Tensor | None  # float [num_rows, sum of ranks], instead of alpha where weights or scales differ
    upcast: bool
    apart: tuple[Alone, ...]  # the same segments, each by itself: for factors that cannot be packed


Piece = Alone | Packed


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

    def alone(self, segment: Segment) -> tuple[float, Alone]:
        cost_us, upcast = self._product_us(segment.end - segment.start, self.ranks[segment.adapter_slot])
        alpha = segment.weight * self.scales[segment.adapter_slot]
        return SLICE_US + cost_us, Alone(segment.start, segment.end, segment.adapter_slot, alpha, upcast)

    def cheaper(self, segments: Sequence[Segment], max_bytes: int) -> tuple[Sequence[Piece], int]:
        """These segments as one pack, or each by itself; and the bytes that are copied for it.

        A pack's copy lasts while the step's adapters stay the same, and how long that is nobody knows here. So a pack
        must be cheaper than its parts once it is made, and cheaper than the reference even if made for one step.
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
        pack = Packed(
            rows=torch.tensor(rows) if has_gaps else (rows[0], rows[-1] + 1),
            slots=tuple(slots),
            keep=keep,
            alpha=float(alphas[0]) if uniform else 1.0,
            factors=None if uniform else factors,
            upcast=upcast,
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
        """Which columns a row uses (see Packed.keep), and times what: both [rows, sum of ranks]."""
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
