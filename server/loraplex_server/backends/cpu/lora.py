"""Segmented LoRA and dense products by the native CPU kernels.

Factors are read where they lie; nothing is packed.

A step's segments become runs of rows that use the same adapters, which all modules share. Dtypes that the kernels do
not know go to the torch implementation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels, RunsOfRows
from loraplex_server.backends.cpu.native.library import Runs, Table
from loraplex_server.backends.cpu.torch_lora import CpuDense, CpuOps
from loraplex_server.layers.lora import (
    DenseTable,
    Derived,
    FactorTable,
    PreparedSegments,
    Segment,
    check_segments,
)

# Rows of one call of the kernel for a weight that is read as it lies. Of more rows torch's product is faster, twice in
# bfloat16: `NativeDense` takes it; `NativeOps` takes pieces, so that bits do not depend on the number of rows.
MAX_DENSE_ROWS = 16
RECENT_STEPS = 4


class NativeOps(CpuOps):
    """SegmentedLora on a CPU by native kernels. What it prepares is a step's RunsOfRows."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self.kernels = kernels
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
        prepared = PreparedSegments(wanted, num_rows, runs_of(wanted))
        self._recent.appendleft((key, prepared))
        return prepared

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        if x.dtype not in DTYPES:
            super().apply(y, x, table, prepared)
            return
        runs = cast(RunsOfRows, prepared.data)
        native = native_table(table)
        if native.max_rank and runs.max_uses:
            rows = x if x.is_contiguous() else x.contiguous()
            self.kernels.add_lora(y, rows, native.table, runs, native.max_rank)

    def dense(self, y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if x.dtype not in DTYPES or not weight.is_contiguous():
            super().dense(y, x, weight, bias)
            return
        for start in range(0, len(x), MAX_DENSE_ROWS):  # also of many rows: torch's bits depend on their number
            self.kernels.dense(x, weight, bias, y, start, min(start + MAX_DENSE_ROWS, len(x)))


@dataclass(frozen=True, slots=True)
class NativeTable:
    """A table as the kernels see it. Implements `layers.lora.Derived`: the pointers stay, the ranks do not."""

    table: Table
    max_rank: int

    def without(self, slot: int) -> Derived | None:
        return None


def native_table(table: FactorTable) -> NativeTable:
    """The table as the kernels see it, kept until a slot changes."""
    if table.derived is None:
        table.derived = NativeTable(table_of(table), int(table.ranks.max()))
    return cast(NativeTable, table.derived)


def table_of(table: FactorTable) -> Table:
    """A module's factors and own products as the kernels read them; right for as long as the table lives."""
    columns = table.a_ptrs, table.b_ptrs, table.ranks, table.scales, table.gain_ptrs, table.shift_ptrs, *table.own
    return Table(*(column.data_ptr() for column in columns))


def runs_of(segments: Sequence[Segment]) -> RunsOfRows:
    """Runs of rows which use the same adapters. Segments may overlap: their terms add up in the order given."""
    live = [s for s in segments if s.start < s.end]
    bounds = sorted({bound for s in live for bound in (s.start, s.end)})
    starts: list[int] = []
    ends: list[int] = []
    first_uses = [0]
    slots: list[int] = []
    weights: list[float] = []
    max_uses = 0
    begin_at: dict[int, list[int]] = {}
    for idx, segment in enumerate(live):
        begin_at.setdefault(segment.start, []).append(idx)
    here: list[int] = []  # segments of these rows, in the order given
    for start, end in pairwise(bounds):
        here = sorted([idx for idx in here if live[idx].end > start] + begin_at.get(start, []))
        if not here:
            continue
        uses = [live[idx] for idx in here]
        starts.append(start)
        ends.append(end)
        slots += [s.adapter_slot for s in uses]
        weights += [s.weight for s in uses]
        first_uses.append(len(slots))
        max_uses = max(max_uses, len(uses))
    arrays = (
        *(torch.tensor(values, dtype=torch.int32) for values in (starts, ends, first_uses, slots)),
        torch.tensor(weights, dtype=torch.float32),
    )
    struct = Runs(len(starts), 0, *(array.data_ptr() for array in arrays))
    return RunsOfRows(struct, max_uses, arrays)


class NativeDense(CpuDense):
    """SegmentedDense on a CPU: weights are read where they lie."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        super().__init__()
        self._kernels = kernels

    def apply(self, y: Tensor, x: Tensor, table: DenseTable, prepared: PreparedSegments) -> None:
        if x.dtype not in DTYPES:
            super().apply(y, x, table, prepared)
            return
        for segment in prepared.segments:
            dense = table.get(segment.adapter_slot)
            if dense is None:
                continue
            if segment.end - segment.start > MAX_DENSE_ROWS:
                super().apply(y, x, table, PreparedSegments((segment,), prepared.num_rows))
            else:
                self._kernels.dense(x, dense.weight, dense.bias, y, segment.start, segment.end)
