"""Paged attention by the native CPU kernels.

Keys and values are read in their pages, once for all query heads of a KV head. A query's result does not depend on what
else is in the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.cpu.native.library import Spans
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv

MIN_DIM = 32  # narrower heads are those of toy models; torch computes them
MAX_DIM = 512  # the widest heads that models have: Gemma 4 in layers of full attention


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's spans as the kernels read them, with what keeps their arrays alive."""

    batch: AttentionBatch
    spans: Spans
    arrays: tuple[Any, ...]


class NativePagedAttention:
    """Implements PagedAttention."""

    name = "native"
    needs_clean_blocks = False

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> Plan:
        return plan_spans(batch)

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Plan) -> Tensor:
        kv.write(key, value, plan.batch.slots)
        return self._kernels.attend(
            query.to(kv.k.dtype),
            kv.k,
            kv.v,
            plan.spans,
            scaling=spec.scaling,
            softcap=spec.softcap,
            window=spec.window,
            chunk=spec.chunk,
            sinks=spec.sinks,
            key_bias=spec.key_bias,
        )


def reason_against(spec: AttentionSpec, dtype: torch.dtype | None) -> str:
    """The reason that the kernels do not compute this attention; empty where they do."""
    if dtype is not None and dtype not in DTYPES:
        return f"not in {str(dtype).removeprefix('torch.')}"
    if not MIN_DIM <= spec.v_dim <= spec.k_dim <= MAX_DIM:
        dims = f"heads of {spec.k_dim} and {spec.v_dim}"
        return f"{dims}; it needs {MIN_DIM} to {MAX_DIM}, and values no wider than keys"
    if spec.sinks is not None and spec.sinks.dtype != torch.float32:
        return "sinks in another dtype than float32"
    if spec.key_bias is not None and spec.key_bias.dtype != torch.float32:
        return "biases in another dtype than float32"
    if spec.scaling <= 0:
        return f"scores times {spec.scaling}; it needs a factor above 0"
    return ""


def native_plan(plan: Any) -> Plan:
    """The native plan of a step from any back end's: every plan keeps the batch."""
    return plan if isinstance(plan, Plan) else plan_spans(plan.batch)


def plan_spans(batch: AttentionBatch) -> Plan:
    """A step's plan for the native kernels."""
    starts = np.ascontiguousarray(batch.query_starts)
    contexts = np.ascontiguousarray(batch.context_lens)
    tables = np.ascontiguousarray(batch.block_tables)
    spans = Spans(
        num_spans=len(contexts), block_size=batch.block_size, table_stride=tables.shape[1],
        query_starts=starts.ctypes.data, context_lens=contexts.ctypes.data, block_tables=tables.ctypes.data,
        slots=batch.slots.data_ptr(),
    )  # fmt: skip
    return Plan(batch, spans, (starts, contexts, tables, batch.slots))
