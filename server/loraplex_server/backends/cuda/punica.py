"""Segmented LoRA by the Punica package (arXiv 2310.18547), where it is installed.

Punica has kernels for a few ranks, takes one rank per call and neither weights nor rows without adapter; its segmented
operator takes no scale. So rows are gathered for each call, the scale is folded into a copy of B, and another
implementation computes the rest. Owns the folded copies. Not for CUDA graphs: its calls allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.layers.lora import (
    Derived,
    FactorTable,
    PreparedSegments,
    Segment,
    SegmentedLora,
    check_segments,
    join_neighbours,
)

DTYPES = (torch.float16, torch.bfloat16)
SGMV_RANKS, BGMV_RANKS = (16, 32, 64, 96, 128), (8, 16, 32, 64)
UNCOMPILED = "No suitable kernel"  # how Punica refuses a shape that it was built without


class PunicaFunctions(Protocol):
    """The module punica.ops; here there is one layer."""

    # (y, x, pointers to A [layers, rank, in], B [layers, rank, out], s, layer, rank): y[s[i]:s[i+1]] += x[..] @ A.T @ B
    add_lora_sgmv_custom_cutlass: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Any]
    # (y, x, A [n, layers, rank, in], B [n, layers, out, rank], idx, layer, scale): y[i] += scale * x[i] @ A.T @ B.T
    add_lora_bgmv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, float], Any]


@dataclass(slots=True)
class _Folded:
    """One table's B, times the scale of each slot, as Punica reads it. `other`: what the other implementation
    derived."""

    pointers: Tensor  # [num_slots] int64, on the device
    by_slot: dict[int, Tensor] = field(default_factory=dict[int, Tensor])  # [rank, out]
    other: Derived | None = None

    def without(self, slot: int) -> _Folded:
        self.by_slot.pop(slot, None)
        self.other = self.other.without(slot) if self.other is not None else None
        return self

    def add(self, slot: int, factors: LoraFactors | None) -> None:
        if factors is not None and slot not in self.by_slot:
            self.by_slot[slot] = (factors.b.float() * factors.scale).to(factors.b.dtype).T.contiguous()
            self.pointers[slot] = self.by_slot[slot].data_ptr()


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call of Punica."""

    segments: tuple[Segment, ...]  # of one rank, or of one adapter and weight; no row twice
    rank: int
    rows: Tensor  # [num_rows] int64
    slots: Tensor  # [num_segments] int64
    starts: Tensor  # [num_segments + 1] int32, within `rows`


class PunicaOps(SegmentedLora):
    """SegmentedLora over punica.ops; `other` computes what Punica does not."""

    name = "punica"

    def __init__(self, functions: PunicaFunctions, other: SegmentedLora) -> None:
        self._functions = functions
        self._other = other
        self._uncompiled: set[tuple[int, int, int]] = set()  # (in, out, rank) that Punica was built without

    def prepare(
        self, segments: Sequence[Segment], num_rows: int, num_slots: int, device: torch.device
    ) -> PreparedSegments:
        check_segments(segments, num_rows, num_slots)
        return PreparedSegments(tuple(join_neighbours(segments)), num_rows, {})

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        # Modules whose adapters have the same ranks share calls; rank 0 is what is not for Punica.
        ranks = tuple(self._rank(table, segment.adapter_slot, x.dtype) for segment in prepared.segments)
        if ranks not in prepared.data:
            calls, rest = _cut(prepared.segments, ranks, x.device)
            prepared.data[ranks] = calls, self._other.prepare(rest, prepared.num_rows, len(table.factors), x.device)
        calls, others = prepared.data[ranks]
        found = table.derived
        own = found if isinstance(found, _Folded) else _Folded(table.b_ptrs.clone(), other=found)
        table.derived = own.other
        self._other.apply(y, x, table, others)
        own.other, table.derived = table.derived, own
        for call in calls:
            try:
                self._call(y, x, table, own, call)
            except RuntimeError as error:
                if UNCOMPILED not in str(error):
                    raise
                self._uncompiled.add((table.in_features, table.out_features, call.rank))
                self.apply(y, x, table, PreparedSegments(call.segments, prepared.num_rows, {}))

    def _rank(self, table: FactorTable, slot: int, dtype: torch.dtype) -> int:
        factors = table.factors[slot]
        if factors is None or dtype not in DTYPES or (table.in_features | table.out_features) % 8:
            return 0  # it loads 16 bytes at a time
        return 0 if (table.in_features, table.out_features, factors.rank) in self._uncompiled else factors.rank

    def _call(self, y: Tensor, x: Tensor, table: FactorTable, folded: _Folded, call: _Call) -> None:
        part, x = y.index_select(0, call.rows), x.index_select(0, call.rows)
        first = call.segments[0]
        if call.rank in SGMV_RANKS and first.weight == 1.0:
            for segment in call.segments:
                folded.add(segment.adapter_slot, table.factors[segment.adapter_slot])
            a, b = (pointers.index_select(0, call.slots) for pointers in (table.a_ptrs, folded.pointers))
            self._functions.add_lora_sgmv_custom_cutlass(part, x, a, b, call.starts, 0, call.rank)
        elif factors := table.factors[first.adapter_slot]:
            a, b, only = factors.a[None, None], factors.b[None, None], torch.zeros_like(call.rows)
            self._functions.add_lora_bgmv(part, x, a, b, only, 0, first.weight * factors.scale)
        y.index_copy_(0, call.rows, part)


def _cut(segments: Sequence[Segment], ranks: Sequence[int], device: torch.device) -> tuple[list[_Call], list[Segment]]:
    groups: dict[tuple[float, ...], list[Segment]] = {}
    rest: list[Segment] = []
    for segment, rank in zip(segments, ranks, strict=True):
        is_plain = segment.weight == 1.0 and rank in SGMV_RANKS
        group = groups.setdefault((rank,) if is_plain else (rank, segment.adapter_slot, segment.weight), [])
        is_free = not group or group[-1].end <= segment.start  # segments come in the order of their rows
        (group if is_free and (is_plain or rank in BGMV_RANKS) else rest).append(segment)
    return [_call_of(group, int(key[0]), device) for key, group in groups.items() if group], rest


def _call_of(segments: Sequence[Segment], rank: int, device: torch.device) -> _Call:
    rows = torch.cat([torch.arange(segment.start, segment.end) for segment in segments])
    starts = torch.tensor([0, *(segment.end - segment.start for segment in segments)]).cumsum(0).int()
    slots = torch.tensor([segment.adapter_slot for segment in segments])
    return _Call(tuple(segments), rank, rows.to(device), slots.to(device), starts.to(device))
