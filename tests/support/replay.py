"""Stand-ins for CUDA graphs in plain torch.

Fixed plans are refilled, and a capture's replay calls the captured function again on the present buffers.

Every row of a product is computed by itself, so that padding cannot change the bits of its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_server.backends.reference import Plan, ReferenceOps, TorchPagedAttention
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, Reserved
from loraplex_server.layers.linear import BaseLinear
from loraplex_server.layers.lora import FactorTable, PreparedSegments, ReplayableLora, Segment


class RowwiseLinear:
    """BaseLinear, row by row."""

    is_copy = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = [F.linear(row, self.weight, self.bias) for row in x.reshape(-1, x.shape[-1])]
        return torch.stack(rows).view(*x.shape[:-1], -1) if rows else F.linear(x, self.weight, self.bias)


def rowwise(weight: Tensor, bias: Tensor | None) -> BaseLinear:
    return RowwiseLinear(weight, bias)


@dataclass
class Segments:
    """Segments that a reserved plan holds now."""

    segments: tuple[Segment, ...] = ()


class ReplayableReference(ReferenceOps, ReplayableLora):
    """Takes up to `max_terms` adapters on one row in a replay."""

    def __init__(self, max_terms: int = 2) -> None:
        super().__init__()
        self.max_terms = max_terms
        self.num_applied = 0  # by what was reserved

    def reserve(self, num_rows: int, num_slots: int, device: torch.device) -> PreparedSegments:
        return PreparedSegments((), num_rows, Segments())

    def refill(self, reserved: PreparedSegments, segments: Sequence[Segment]) -> None:
        for row in range(reserved.num_rows):
            if sum(s.start <= row < s.end for s in segments) > self.max_terms:
                raise ValueError("too many adapters on a row")
        assert all(0 <= s.start <= s.end <= reserved.num_rows for s in segments)
        reserved.data.segments = tuple(segments)

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        if isinstance(prepared.data, Segments):
            assert x.shape[0] == y.shape[0] == prepared.num_rows
            self.num_applied += 1
            prepared = PreparedSegments(prepared.data.segments, prepared.num_rows)
        super().apply(y, x, table, prepared)


@dataclass
class ReservedPlan:
    bounds: Reserved
    dtype: torch.dtype
    device: torch.device
    plan: Plan | None = None
    num_filled: int = 0  # tokens


class ReplayableTorch(TorchPagedAttention):
    """Implements ReplayableAttention. A missing span gives zeros; for what is not written there is block 0."""

    replays_ragged = True

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> ReservedPlan:
        return ReservedPlan(reserved, dtype, device)

    def refill(self, plan: ReservedPlan, batch: AttentionBatch) -> None:
        if len(batch.query_lens) > plan.bounds.num_spans or batch.block_tables.shape[1] > plan.bounds.max_blocks:
            raise ValueError("more than was reserved")
        assert plan.bounds.is_ragged or (batch.query_lens == plan.bounds.query_len).all()
        assert (batch.context_lens >= batch.query_lens).all()
        plan.num_filled = int(batch.query_lens.sum())
        assert len(batch.slots) == plan.num_filled
        batch = replace(batch, slots=batch.slots.clamp(min=0))
        plan.plan = self.plan(batch, plan.dtype, plan.device)

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Any) -> Tensor:
        if not isinstance(plan, ReservedPlan):
            return super().run(query, key, value, kv, spec, plan)
        assert query.shape[0] == plan.bounds.num_tokens
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.v_dim)
        num = plan.num_filled
        if plan.plan is not None:
            out[:num] = super().run(query[:num], key[:num], value[:num], kv, spec, plan.plan)
        return out


def calls_again(launch: Callable[[], object]) -> Callable[[], None]:
    """A capture. Runs the function once, as a capture does, and again for each replay."""

    def replay() -> None:
        launch()

    replay()
    return replay
