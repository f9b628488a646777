"""Random cases of segmented LoRA with float64 answers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment, SegmentedLora

POPULARITIES = ("identical", "distinct", "uniform", "skewed")
RANKS = (1, 4, 8, 13, 16, 32, 64, 128, 256)
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
WORDS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


@dataclass
class Problem:
    table: FactorTable
    segments: list[Segment]
    x: Tensor  # [num_rows, in]
    y: Tensor  # [num_rows, out]

    @property
    def num_rows(self) -> int:
        return self.x.shape[0]

    def run(self, ops: SegmentedLora) -> Tensor:
        """The result, on a copy of y."""
        y = self.y.clone()
        ops.apply(y, self.x, self.table, self.prepared(ops))
        return y

    def prepared(self, ops: SegmentedLora) -> PreparedSegments:
        return ops.prepare(self.segments, self.num_rows, len(self.table.factors), self.x.device)

    def expected(self) -> Tensor:
        """float64, row by row: shares no code with any implementation."""
        y = self.y.double().clone()
        for segment in self.segments:
            factors = self.table.factors[segment.adapter_slot]
            if factors is None:
                continue
            for row in range(segment.start, segment.end):
                inner = factors.a.double() @ self.x[row].double()
                y[row] += segment.weight * factors.scale * (factors.b.double() @ inner)
        return y

    def check(self, got: Tensor) -> None:
        """`got` is right, and bit-identical to y on rows that no adapter touches."""
        torch.testing.assert_close(
            got.double(), self.expected(), rtol=TOLERANCES[got.dtype], atol=TOLERANCES[got.dtype], equal_nan=True
        )
        idle = [row for row in range(self.num_rows) if not self.is_touched(row)]
        assert torch.equal(bits(got[idle]), bits(self.y[idle]))

    def is_touched(self, row: int) -> bool:
        def has_rank(slot: int) -> bool:
            factors = self.table.factors[slot]
            return factors is not None and factors.rank > 0

        return any(s.start <= row < s.end and has_rank(s.adapter_slot) for s in self.segments)


def bits(values: Tensor) -> Tensor:
    """Comparable bit by bit: -0.0 is not 0.0, and one NaN is not another."""
    return values.contiguous().view(WORDS[values.dtype])


def random_factors(
    rank: int, in_features: int, out_features: int, dtype: torch.dtype, device: str = "cpu", scale: float | None = None
) -> LoraFactors:
    """Terms of about the size of y, so that a missing or a wrong one is far outside every tolerance."""
    a = torch.randn(rank, in_features, dtype=torch.float64) / in_features**0.5
    b = torch.randn(out_features, rank, dtype=torch.float64) / max(rank, 1) ** 0.5
    if scale is None:
        scale = random.choice((0.5, 1.0, 2.0, 1.3))
    return LoraFactors(a.to(dtype).to(device), b.to(dtype).to(device), scale)


def random_table(
    ranks: Sequence[int | None], in_features: int, out_features: int, dtype: torch.dtype, device: str = "cpu"
) -> FactorTable:
    table = FactorTable(len(ranks), in_features, out_features, device)
    for slot, rank in enumerate(ranks):
        if rank is not None:
            table.set(slot, random_factors(rank, in_features, out_features, dtype, device))
    return table


def random_segments(popularity: str, num_rows: int, num_slots: int, *, idle_rows: bool) -> list[Segment]:
    """One-row segments where each row draws its slot; with `idle_rows` about every fourth row has none."""
    weights = [0.6**slot for slot in range(num_slots)]
    segments: list[Segment] = []
    for row in range(num_rows):
        if idle_rows and random.random() < 0.25:
            continue
        slot = {
            "identical": 0,
            "distinct": row % num_slots,
            "uniform": random.randrange(num_slots),
            "skewed": random.choices(range(num_slots), weights)[0],
        }[popularity]
        segments.append(Segment(row, row + 1, slot))
    return segments


def random_problem(
    segments: list[Segment], table: FactorTable, num_rows: int, dtype: torch.dtype, device: str = "cpu"
) -> Problem:
    x = torch.randn(num_rows, table.in_features, dtype=torch.float64).to(dtype).to(device)
    y = torch.randn(num_rows, table.out_features, dtype=torch.float64).to(dtype)
    y[:, ::3] = -0.0  # adding nothing must not even change a sign
    return Problem(table, segments, x, y.to(device))


def pairwise(*axes: Sequence[object]) -> list[tuple[object, ...]]:
    """A small set of rows in which every pair of values of every two axes occurs (greedy, always the same)."""
    numbers = range(len(axes))
    wanted = {
        (i, j, u, v)
        for i, j in itertools.combinations(numbers, 2)
        for u in range(len(axes[i]))
        for v in range(len(axes[j]))
    }
    chooser = random.Random(0)
    chosen: list[tuple[int, ...]] = []
    while wanted:
        first = min(wanted)
        best: tuple[int, ...] = ()
        best_new = -1
        for _ in range(60):
            row = [chooser.randrange(len(axis)) for axis in axes]
            row[first[0]], row[first[1]] = first[2], first[3]
            new = sum((i, j, row[i], row[j]) in wanted for i, j in itertools.combinations(numbers, 2))
            if new > best_new:
                best, best_new = tuple(row), new
        chosen.append(best)
        wanted -= {(i, j, best[i], best[j]) for i, j in itertools.combinations(numbers, 2)}
    return [tuple(axes[i][row[i]] for i in numbers) for row in chosen]
