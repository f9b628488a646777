"""Segmented LoRA and dense products: interfaces, weights by slot, segments of rows.

    y[start:end] += weight * scale * (x[start:end] @ a.T) @ b.T      for each segment, with its slot's factors

Semantics of Punica's SGMV and BGMV (arXiv 2310.18547) in one operation, with the true rank and scale of each adapter;
rows in no segment are not touched. Segments may overlap (several adapters on the same rows add up).

An adapter's gain and shift (DoRA, biases) come after that, in `rescale`, the same for all implementations.

    y[start:end, :out] = x[start:end] @ weight.T + bias              the same with full-rank weights

What Medusa heads are made of: the blocks and projections of many sets in one operation, rows sorted by slot. Here a row
has one weight: segments may not overlap. Slots may differ in their number of outputs (truncated vocabularies): columns
of `y` behind a slot's own are not touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from loraplex_adapters.weights import LoraFactors


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows `start` to `end` (exclusive) of the step use the adapter in `adapter_slot`, times `weight`."""

    start: int
    end: int
    adapter_slot: int
    weight: float = 1.0


class Derived(Protocol):
    """An implementation's own form of a table's factors (pointers, views, terms)."""

    def without(self, slot: int) -> Derived | None:
        """The part that is still valid when `slot` changes, without references to the slot's tensors."""
        ...


class FactorTable:
    """One module's factors by device slot. Owned by the module that applies them; changed only between steps.

    Beside the Python list it keeps what kernels read, at fixed addresses (CUDA graphs): pointers, ranks and scales.
    A slot without factors has rank 0: the adapter leaves this module alone.

    `derived` belongs to the implementation that applies the table. A change of a slot drops what was derived from it;
    what was derived from other slots stays.
    """

    def __init__(self, num_slots: int, in_features: int, out_features: int, device: torch.device | str) -> None:
        self.in_features = in_features
        self.out_features = out_features
        self.factors: list[LoraFactors | None] = [None] * num_slots
        self.a_ptrs = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.b_ptrs = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.ranks = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self.scales = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.derived: Derived | None = None
        self.rescaled: set[int] = set()  # slots with a gain or a shift
        # Pointers of gains and shifts, on the host: only native code of CPUs reads them.
        self.gain_ptrs = torch.zeros(num_slots, dtype=torch.int64)
        self.shift_ptrs = torch.zeros(num_slots, dtype=torch.int64)
        # Products in the place of the base's, [4, num_slots]: addresses of weights and of blocks on the diagonal of
        # what inputs are multiplied with, 0: none; rows of a block, and elements between blocks.
        self.own = torch.zeros(4, num_slots, dtype=torch.int64)

    def set(self, slot: int, factors: LoraFactors | None) -> None:
        """Puts `factors` into `slot`, or clears it. The caller keeps the tensors alive while the slot is in use."""
        self.put(slot, factors)
        self.a_ptrs[slot] = factors.a.data_ptr() if factors is not None else 0
        self.b_ptrs[slot] = factors.b.data_ptr() if factors is not None else 0
        self.ranks[slot] = factors.rank if factors is not None else 0
        self.scales[slot] = factors.scale if factors is not None else 0.0

    def put(self, slot: int, factors: LoraFactors | None) -> None:
        """The host's half of `set`, where what kernels read of many tables is filled in at once."""
        if factors is None and self.factors[slot] is None:
            return
        self.factors[slot] = factors
        if slot in self.rescaled:
            self.rescaled.discard(slot)
            self.gain_ptrs[slot] = self.shift_ptrs[slot] = 0
        if factors is not None and not factors.is_plain:
            self.rescaled.add(slot)
            self.gain_ptrs[slot] = factors.gain.data_ptr() if factors.gain is not None else 0
            self.shift_ptrs[slot] = factors.shift.data_ptr() if factors.shift is not None else 0
        if self.derived is not None:
            self.derived = self.derived.without(slot)


def rescale(y: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
    """y[start:end] = gain * y[start:end] + shift of each segment whose slot has them, in place. y [num_rows, out]."""
    for segment in prepared.segments:
        factors = table.factors[segment.adapter_slot] if segment.adapter_slot in table.rescaled else None
        if factors is None or segment.start == segment.end:
            continue
        rows = y[segment.start : segment.end]
        if factors.gain is not None:
            rows.mul_(factors.gain)
        if factors.shift is not None:
            rows.add_(factors.shift)


@dataclass(frozen=True, slots=True)
class PreparedSegments:
    """A step's segments, once per step for all modules. `data` is the implementation's own (index tensors, groups)."""

    segments: tuple[Segment, ...]
    num_rows: int
    data: Any = None


class SegmentedLora(ABC):
    """One implementation of segmented LoRA. Stateless apart from caches of its own; safe to call for many modules of a
    step in turn."""

    name: ClassVar[str]

    @abstractmethod
    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        """Builds what all modules of the step share. Host work only, no device synchronisation.

        Raises ValueError on a segment outside `0..num_rows` or a slot outside `0..num_slots`.
        """

    @abstractmethod
    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        """Adds every segment's term to `y` in place.

        x [num_rows, in], y [num_rows, out], the factors' dtype; accumulation at least in float32. Deterministic.
        `y` may be a column slice (last dimension contiguous, any row stride).
        """

    def apply_merged(self, y: Tensor, x: Tensor, tables: Sequence[FactorTable], prepared: PreparedSegments) -> None:
        """Does what `apply` does, for modules that read the same x and whose outputs lie side by side in y [num_rows,
        sum of outputs]. Overridden where it takes fewer launches: the same to the last bit."""
        start = 0
        for table in tables:
            self.apply(y[:, start : start + table.out_features], x, table, prepared)
            start += table.out_features

    def apply_over(
        self, base: Callable[[], Tensor], x: Tensor, tables: Sequence[FactorTable], prepared: PreparedSegments
    ) -> Tensor:
        """y [num_rows, sum of outputs] that `base` computes, with what `apply_merged` adds to it. Overridden where a
        part of that can be computed beside the base."""
        y = base()
        if len(tables) == 1:
            self.apply(y, x, tables[0], prepared)
        else:
            self.apply_merged(y, x, tables, prepared)
        return y

    def dense(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """y [rows, out] = x [rows, in] @ weight.T + bias, in place, with an adapter's own weight [out, in] as it
        lies. Last dimensions of x and y contiguous."""
        product = x @ weight.t()
        y.copy_(product if bias is None else product + bias)


class ReplayableLora(SegmentedLora):
    """An implementation whose launches can be replayed from a CUDA graph with other segments and factors.

    Between capture and replay slots may change as they like, to ranks no larger than the implementation was made for
    and to factors that begin at a multiple of 16 bytes, as adapters' layouts do.
    """

    @abstractmethod
    def reserve(self, num_rows: int, num_slots: int, device: torch.device) -> PreparedSegments:
        """Fixed buffers for steps of `num_rows` rows; as reserved, no row has an adapter.

        `apply` with it launches the same kernels on the same addresses whatever was refilled: rows and slots without
        an adapter leave early on the device. Its `segments` are () and say nothing.
        """

    @abstractmethod
    def refill(self, reserved: PreparedSegments, segments: Sequence[Segment]) -> None:
        """Puts a step's segments into reserved buffers: host work and one asynchronous copy on the current stream, no
        synchronisation.

        Every composition of whole adapters fits, mixtures fit up to a bound of the implementation. Raises ValueError,
        and leaves the buffers as they were, on segments that do not fit and on what `prepare` refuses; such a step is
        prepared instead.
        """


def check_segments(segments: Sequence[Segment], num_rows: int, num_slots: int) -> None:
    """Raises ValueError on a segment outside `0..num_rows` or a slot outside `0..num_slots`."""
    for segment in segments:
        if not 0 <= segment.start <= segment.end <= num_rows:
            raise ValueError(f"Segment {segment} is not inside the step's {num_rows} rows.")
        if not 0 <= segment.adapter_slot < num_slots:
            raise ValueError(f"Segment {segment} names a slot outside 0..{num_slots - 1}.")


def join_neighbours(segments: Sequence[Segment]) -> list[Segment]:
    """The segments in row order, without empty ones; adjacent rows of one slot and weight are one segment.

    Overlapping segments stay apart, so their terms still add up.
    """
    joined: list[Segment] = []
    open_idx: dict[tuple[int, float], int] = {}  # where in `joined` the latest rows of a slot and weight are
    for segment in sorted(segments, key=lambda s: (s.start, s.end, s.adapter_slot, s.weight)):
        if segment.start == segment.end:
            continue
        key = (segment.adapter_slot, segment.weight)
        idx = open_idx.get(key)
        if idx is not None and joined[idx].end == segment.start:
            joined[idx] = Segment(joined[idx].start, segment.end, segment.adapter_slot, segment.weight)
        else:
            open_idx[key] = len(joined)
            joined.append(segment)
    return joined


# --- dense products ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """One slot's weight and bias: contiguous, of one dtype and on one device."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[0]


class DenseTable:
    """Weights by slot, as many slots as were ever set. Its user owns it and changes it only between steps.

    `derived` belongs to the implementation that applies the table. Every change drops it.
    """

    def __init__(self, in_features: int) -> None:
        self.in_features = in_features
        self.weights: list[DenseWeight | None] = []
        self.derived: object | None = None

    def get(self, slot: int) -> DenseWeight | None:
        return self.weights[slot] if slot < len(self.weights) else None

    def set(self, slot: int, weight: DenseWeight | None) -> None:
        """Puts `weight` into `slot`, or clears it. Keeps the tensors alive."""
        if weight is not None and weight.weight.shape[1] != self.in_features:
            raise ValueError(f"a weight for {weight.weight.shape[1]} inputs in a table for {self.in_features}")
        self.weights += [None] * (slot + 1 - len(self.weights))
        self.weights[slot] = weight
        self.derived = None


class SegmentedDense(Protocol):
    """One implementation of dense products. Stateless apart from caches of its own."""

    @property
    def name(self) -> str: ...

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        """Builds what all tables of a step share. Host work only, no device synchronisation.

        Raises ValueError on segments that overlap, lie outside `0..num_rows`, name a slot outside `0..num_slots`, or
        have a weight.
        """
        ...

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        """Writes every segment's product into `y` in place. A slot without weight leaves its rows alone.

        x [num_rows, in], y [num_rows, at least the largest out], the weights' dtype; last dimensions contiguous;
        accumulation at least in float32. A row's result does not depend on other rows, whatever they hold.
        """
        ...


def check_dense_segments(segments: Sequence[Segment], num_rows: int, num_slots: int) -> None:
    """Raises ValueError on what `SegmentedDense.prepare` refuses."""
    check_segments(segments, num_rows, num_slots)
    end = 0
    for segment in sorted(segments, key=lambda s: s.start):
        if segment.start == segment.end:
            continue
        if segment.start < end:
            raise ValueError(f"Segment {segment} overlaps another: a row has one weight.")
        if segment.weight != 1.0:
            raise ValueError(f"Segment {segment} has a weight, which dense products do not know.")
        end = segment.end
