"""Paged attention by FlashInfer. The package is handed in, not imported.

Owns its wrappers and their workspace. One wrapper per kind of layer, because FlashInfer plans for one. Spans of few
tokens go to the kernels that split long contexts over programs, the others to the best ones for prompts. How contexts
are split depends on the whole step, so the last bits of a result do too; where that matters there is `triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from loraplex_server.backends.cuda.attention.plan import Spans, host_copy, no_spans, read_spans
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, Reserved
from loraplex_server.layers.transfer import host_ints

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# Spans of up to so many tokens are decoded or verified, longer ones are prompts.
SHORT_QUERIES = 16
SHORT, LONG = "fa2", "auto"
# Memory for the partial results of contexts that are split; a plan that needs more fails.
WORKSPACE_BYTES = 384 << 20

WritePages = Callable[[Tensor, Tensor, LayerKv, Tensor], None]


def reason_against(specs: Sequence[AttentionSpec], dtype: torch.dtype | None = None) -> str:
    """The reason that FlashInfer cannot compute such layers; empty if it can."""
    if dtype is not None and dtype not in DTYPES:
        return f"it computes in bfloat16 and float16, not in {str(dtype).removeprefix('torch.')}"
    for spec in specs:
        if spec.k_dim != spec.v_dim or spec.k_dim not in HEAD_DIMS:
            dims = str(spec.k_dim) if spec.k_dim == spec.v_dim else f"{spec.k_dim} and {spec.v_dim}"
            return f"it has kernels for head dimensions 64, 128 and 256, and the model has {dims}"
        terms = {"chunks": spec.chunk, "sinks": spec.sinks, "biases by key": spec.key_bias}
        if has := [term for term, value in terms.items() if value is not None]:
            return f"its kernels for pages have no {has[0]}"
    return ""


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring spans, planned together for each kind of layer."""

    tokens: slice
    wrappers: dict[AttentionSpec, _Wrapper]


@dataclass(slots=True)
class Plan:
    """The plan of a step. `reserved` has buffers at fixed addresses."""

    slots: Tensor  # [num_tokens]
    parts: tuple[Part, ...]
    reserved: _Buffers | None = None


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The buffers of a reserved plan."""

    shape: Reserved
    ints: Tensor  # int32: slots, then the concatenated block tables
    outs: dict[tuple[int, int], Tensor]  # [num_tokens, heads, v_dim] by heads and dimension; layers share them


class FlashInferAttention:
    """Implements ReplayableAttention for a model with layers as in `specs`. A plan holds until the next one is made."""

    name = "flashinfer"
    needs_clean_blocks = True
    replays_ragged = False  # its wrappers take short and long spans apart

    def __init__(self, specs: Sequence[AttentionSpec], flashinfer: Any, write: WritePages) -> None:
        """`write` stores keys and values, and leaves out tokens whose slot is -1."""
        self._specs = tuple(dict.fromkeys(specs))
        self._flashinfer = flashinfer
        self._write = write
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[str, AttentionSpec], _Wrapper] = {}

    def plan(self, batch: AttentionBatch, dtype: torch.dtype, device: torch.device) -> Plan:
        spans = read_spans(batch)
        num_tokens = len(spans.slots)
        ints = host_copy(np.concatenate([spans.slots, spans.tables]), device).to(device, non_blocking=True)
        tables = ints[num_tokens:]
        is_long = spans.query_lens > SHORT_QUERIES
        # From the first long span on; a step's spans come in the order of their lengths.
        cut = int(is_long.argmax()) if is_long.any() else len(is_long)
        parts: list[Part] = []
        for kind, first, end in ((SHORT, 0, cut), (LONG, cut, len(is_long))):
            if first < end:
                wrappers = {spec: self._wrapper(kind, spec, device) for spec in self._specs}
                tokens = _plan_all(wrappers, spans, first, end, tables, batch.block_size, dtype, device)
                parts.append(Part(tokens, wrappers))
        return Plan(ints[:num_tokens], tuple(parts))

    def reserve(self, reserved: Reserved, block_size: int, dtype: torch.dtype, device: torch.device) -> Plan:
        """The reserved plan, see ReplayableAttention; what is captured before the first refill has an output of no
        meaning."""
        if dtype not in DTYPES:
            raise ValueError(f"FlashInfer does not compute in {dtype}")
        num_tokens, num_spans, query_len = reserved.num_tokens, reserved.num_spans, reserved.query_len
        ints = torch.zeros(num_tokens + num_spans * reserved.max_blocks, dtype=torch.int32, device=device)
        ints[:num_tokens] = -1
        sizes = {(spec.num_heads, spec.v_dim) for spec in self._specs}
        outs = {size: torch.zeros(num_tokens, *size, dtype=dtype, device=device) for size in sizes}
        indptrs = [torch.zeros(num_spans + 1, dtype=torch.int32, device=device) for _ in range(2)]
        last_page = torch.zeros(num_spans, dtype=torch.int32, device=device)
        wrappers = {
            spec: _Wrapper(
                spec,
                self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                    self._shared_workspace(device),
                    "NHD",
                    use_cuda_graph=True,
                    qo_indptr_buf=indptrs[0],
                    paged_kv_indptr_buf=indptrs[1],
                    paged_kv_indices_buf=ints[num_tokens:],
                    paged_kv_last_page_len_buf=last_page,
                    backend=SHORT,
                ),
            )
            for spec in self._specs
        }
        # The first plan says how many tokens there will ever be. It reads block 0, and nothing is written.
        lens = np.full(num_spans, query_len, np.int64)
        blocks = np.zeros((num_spans, -(-query_len // block_size)), np.int64)
        spans = read_spans(replace(no_spans(block_size), query_lens=lens, context_lens=lens, block_tables=blocks))
        tables = ints[num_tokens : num_tokens + len(spans.tables)]
        tokens = _plan_all(wrappers, spans, 0, num_spans, tables, block_size, dtype, device)
        return Plan(ints[:num_tokens], (Part(tokens, wrappers),), _Buffers(reserved, ints, outs))

    def refill(self, plan: Plan, batch: AttentionBatch) -> None:
        buffers = plan.reserved
        assert buffers is not None
        ints, num_tokens = buffers.ints, buffers.shape.num_tokens
        spans = read_spans(batch, buffers.shape)
        host = host_ints(num_tokens + len(spans.tables), ints.device)
        host.numpy()[:num_tokens] = spans.slots
        host.numpy()[num_tokens:] = spans.tables
        ints[: len(host)].copy_(host, non_blocking=True)
        # An empty span has no queries for FlashInfer, so its output stays what it is: zero from here on.
        is_empty = spans.context_lens == 0
        spans = replace(spans, query_lens=np.where(is_empty, 0, spans.query_lens))
        part = plan.parts[0]
        tables = ints[num_tokens : len(host)]
        dtype = next(iter(buffers.outs.values())).dtype
        end = len(spans.query_lens)
        tokens = _plan_all(part.wrappers, spans, 0, end, tables, batch.block_size, dtype, ints.device)
        plan.parts = (Part(tokens, part.wrappers),)
        for out in buffers.outs.values():
            out[tokens.stop :].zero_()

    def run(self, query: Tensor, key: Tensor, value: Tensor, kv: LayerKv, spec: AttentionSpec, plan: Plan) -> Tensor:
        self._write(key, value, kv, plan.slots)
        query = query.to(kv.k.dtype).contiguous()
        reserved = plan.reserved
        out = torch.empty_like(query) if reserved is None else reserved.outs[spec.num_heads, spec.v_dim]
        for part in plan.parts:
            part.wrappers[spec].wrapper.run(query[part.tokens], (kv.k, kv.v), out=out[part.tokens])
        return out

    def _wrapper(self, kind: str, spec: AttentionSpec, device: torch.device) -> _Wrapper:
        found = self._wrappers.get((kind, spec))
        if found is None:
            make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
            found = _Wrapper(spec, make(self._shared_workspace(device), "NHD", backend=kind))
            self._wrappers[kind, spec] = found
        return found

    def _shared_workspace(self, device: torch.device) -> Tensor:
        """The workspace, one for all wrappers: launches that use it follow each other on the stream."""
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspace


class _Wrapper:
    """FlashInfer's wrapper for one kind of layer."""

    def __init__(self, spec: AttentionSpec, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._spec = spec
        self._copied: torch.cuda.Event | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        tables: Tensor,
        last_page: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        # It writes its plan into its own page-locked memory and copies from there: the copy before must be complete. It
        # is, unless the host is more than a step ahead.
        if self._copied is not None:
            self._copied.synchronize()
        spec = self._spec
        self.wrapper.plan(
            qo_indptr, kv_indptr, tables, last_page, spec.num_heads, spec.num_kv_heads, spec.k_dim,
            block_size, causal=True, sm_scale=spec.scaling,
            window_left=-1 if spec.window is None else spec.window - 1, logits_soft_cap=spec.softcap,
            q_data_type=dtype, kv_data_type=dtype,
        )  # fmt: skip
        if tables.device.type == "cuda":
            self._copied = self._copied or torch.cuda.Event()
            self._copied.record()


def _plan_all(
    wrappers: dict[AttentionSpec, _Wrapper],
    spans: Spans,
    first: int,
    end: int,
    tables: Tensor,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> slice:
    """Plans spans `first` to `end` for every kind of layer; returns their tokens. `tables` lies on the device."""
    lens, contexts = spans.query_lens[first:end], spans.context_lens[first:end]
    num_blocks = -(-contexts // block_size)
    zero = np.zeros(1, np.int64)
    qo_indptr = np.concatenate([zero, np.cumsum(lens)])
    kv_indptr = np.concatenate([zero, np.cumsum(num_blocks)])
    last_page = contexts - np.maximum(num_blocks - 1, 0) * block_size
    begin = int(spans.table_starts[first])
    tables = tables[begin : begin + int(kv_indptr[-1])]
    for wrapper in wrappers.values():
        indptrs = host_copy(qo_indptr, device), host_copy(kv_indptr, device)
        wrapper.plan(*indptrs, tables, host_copy(last_page, device), block_size, dtype)
    token = int(spans.first_tokens[first])
    return slice(token, token + int(qo_indptr[-1]))
