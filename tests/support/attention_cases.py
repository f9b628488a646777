"""Steps of paged attention with what a dense float64 computation says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, PagedAttention

CPU = torch.device("cpu")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def spec_of(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {"num_heads": 4, "num_kv_heads": 2, "k_dim": 8, "v_dim": 8, "scaling": 0.3}
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


@dataclass
class Problem:
    """A step: sequences with a past in the pages, and spans that are run now."""

    spans: Sequence[tuple[int, int]]  # (past tokens, query tokens)
    spec: AttentionSpec
    kv: LayerKv
    batch: AttentionBatch
    query: Tensor
    key: Tensor
    value: Tensor
    want: Tensor  # float64 [num_tokens, heads, v_dim]
    # What the pages should hold afterwards.
    pages_k: Tensor = field(repr=False)
    pages_v: Tensor = field(repr=False)

    @property
    def pages(self) -> tuple[Tensor, Tensor]:
        return self.kv.k, self.kv.v

    def run(self, backend: PagedAttention, plan: object = None) -> Tensor:
        device = self.query.device
        if plan is None:
            plan = backend.plan(self.batch, self.kv.k.dtype, device)
        return backend.run(self.query, self.key, self.value, self.kv, self.spec, plan)

    def check(self, got: Tensor, tolerance: float | None = None) -> None:
        if tolerance is None:
            tolerance = TOLERANCES[self.kv.k.dtype]
        torch.testing.assert_close(got.double(), self.want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(self.kv.k, self.pages_k, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(self.kv.v, self.pages_v, rtol=0, atol=0, equal_nan=True)


def make_problem(
    spans: Sequence[tuple[int, int]],
    spec: AttentionSpec,
    dtype: torch.dtype,
    *,
    block_size: int = 4,
    device: torch.device = CPU,
    poison: float = 77.0,
    seed: int = 0,
) -> Problem:
    """Random content. `poison` is what all other pages, and the rest of the last ones, hold."""
    rng = torch.Generator().manual_seed(seed + sum(past * 31 + new for past, new in spans))
    contexts = np.array([past + new for past, new in spans], dtype=np.int64)
    needed = [-(-int(context) // block_size) for context in contexts]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, generator=rng).tolist()
    tables = np.full((len(spans), max(needed) + 1), num_blocks - 1, dtype=np.int64)  # somebody's, must never matter
    pages_k = torch.full((num_blocks, block_size, spec.num_kv_heads, spec.k_dim), poison, dtype=torch.float64)
    pages_v = torch.full((num_blocks, block_size, spec.num_kv_heads, spec.v_dim), -poison, dtype=torch.float64)
    pages_k, pages_v = pages_k.to(device, dtype), pages_v.to(device, dtype)
    kv = LayerKv(pages_k.clone(), pages_v.clone())
    queries, keys, values, slots, wants = [], [], [], [], []
    for idx, ((past, new), count) in enumerate(zip(spans, needed, strict=True)):
        own = [order.pop() for _ in range(count)]
        tables[idx, :count] = own
        k = torch.randn(past + new, spec.num_kv_heads, spec.k_dim, generator=rng).to(device, dtype)
        v = torch.randn(past + new, spec.num_kv_heads, spec.v_dim, generator=rng).to(device, dtype)
        q = torch.randn(new, spec.num_heads, spec.k_dim, generator=rng).to(device, dtype)
        where = torch.tensor([own[i // block_size] * block_size + i % block_size for i in range(past + new)])
        where = where.to(device)
        kv.write(k[:past], v[:past], where[:past])
        LayerKv(pages_k, pages_v).write(k, v, where)
        queries.append(q)
        keys.append(k[past:])
        values.append(v[past:])
        slots.append(where[past:])
        wants.append(oracle(q, k, v, past, spec))
    lens = np.array([new for _, new in spans], dtype=np.int64)
    return Problem(
        spans,
        spec,
        kv,
        AttentionBatch(lens, contexts, tables, block_size, torch.cat(slots)),
        # As a model gives them: [heads, tokens, dim] seen as [tokens, heads, dim].
        *(torch.cat(parts).transpose(0, 1).contiguous().transpose(0, 1) for parts in (queries, keys, values)),
        torch.cat(wants),
        pages_k,
        pages_v,
    )


def oracle(q: Tensor, k: Tensor, v: Tensor, past: int, spec: AttentionSpec) -> Tensor:
    """One span, densely. q [query_len, heads, dim], k and v [context, kv_heads, dim] -> [query_len, heads, v_dim]."""
    k = k.double().repeat_interleave(spec.num_groups, dim=1)
    v = v.double().repeat_interleave(spec.num_groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if spec.key_bias is not None:
        scores = scores + spec.key_bias[:, None, : k.shape[0]].double()
    query_pos = past + torch.arange(q.shape[0], device=q.device)[:, None]
    key_pos = torch.arange(k.shape[0], device=q.device)[None, :]
    hidden = key_pos > query_pos
    if spec.window is not None:
        hidden |= key_pos <= query_pos - spec.window
    if spec.chunk is not None:
        hidden |= key_pos // spec.chunk != query_pos // spec.chunk
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        scores = torch.cat([scores, spec.sinks.double()[:, None, None].expand(-1, q.shape[0], 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1)[..., : k.shape[0]], v)


def biases_of(num_heads: int, num_positions: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A slope for each head, as ALiBi has, with a wave in it: rows of a multiple of 32."""
    slopes = 2.0 ** -torch.arange(1, num_heads + 1)
    positions = torch.arange(-(-num_positions // 32) * 32)
    return (slopes[:, None] * (positions + torch.sin(positions.double()))).to(dtype)


def sinks_of(num_heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A sink of its own for each head: as large as the largest scores, as the smallest, and beyond both."""
    return torch.linspace(-9.0, 4.0, num_heads).to(dtype)
