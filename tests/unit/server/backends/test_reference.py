"""Paged attention against a dense oracle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.backends import reference as torch_paged
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.registry import attention_kernels, make_attention
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv

BLOCK = 4
USABLE = [backend.name for backend in attention_kernels(Backend()) if backend.usable]


@dataclass
class Case:
    """Sequences with a past in the pages and a span that is run now."""

    spans: list[tuple[int, int]]  # (past tokens, query tokens)
    spec: AttentionSpec
    dtype: torch.dtype = torch.float64


def oracle(q: Tensor, k: Tensor, v: Tensor, start: int, spec: AttentionSpec) -> Tensor:
    """One span, one query and one head at a time. q [query_len, heads, dim], k and v [context, kv_heads, dim]."""
    out = torch.zeros(q.shape[0], spec.num_heads, spec.v_dim, dtype=torch.float64)
    for i in range(q.shape[0]):
        first = 0 if spec.window is None else max(0, start + i - spec.window + 1)
        for head in range(spec.num_heads):
            kv_head = head // spec.num_groups
            keys = k[first : start + i + 1, kv_head].double()
            scores = keys @ q[i, head].double() * spec.scaling
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            out[i, head] = torch.softmax(scores, 0) @ v[first : start + i + 1, kv_head].double()
    return out


def run_case(case: Case, name: str) -> tuple[Tensor, Tensor]:
    """(what the back end computed, what the oracle says), both [num_tokens, heads, v_dim]."""
    torch.manual_seed(sum(past * 31 + new for past, new in case.spans))
    spec, dtype = case.spec, case.dtype
    contexts = [past + new for past, new in case.spans]
    needed = [-(-context // BLOCK) for context in contexts]
    num_blocks = sum(needed) + 3
    # Poison: nothing but what was written may be read into a result.
    kv = LayerKv(
        torch.full((num_blocks, BLOCK, spec.num_kv_heads, spec.k_dim), 77.0, dtype=dtype),
        torch.full((num_blocks, BLOCK, spec.num_kv_heads, spec.v_dim), -55.0, dtype=dtype),
    )
    order = torch.randperm(num_blocks).tolist()
    tables = np.zeros((len(case.spans), max(needed)), dtype=np.int64)
    keys, values, slots, news = [], [], [], []
    for idx, ((past, new), count) in enumerate(zip(case.spans, needed, strict=True)):
        own = [order.pop() for _ in range(count)]
        tables[idx, :count] = own
        tables[idx, count:] = num_blocks - 1  # another sequence's, or nobody's: must never matter
        k = torch.randn(past + new, spec.num_kv_heads, spec.k_dim).to(dtype)
        v = torch.randn(past + new, spec.num_kv_heads, spec.v_dim).to(dtype)
        where = torch.tensor([own[pos // BLOCK] * BLOCK + pos % BLOCK for pos in range(past + new)])
        kv.write(k[:past], v[:past], where[:past])
        keys.append(k)
        values.append(v)
        slots.append(where[past:])
        news.append(torch.randn(new, spec.num_heads, spec.k_dim).to(dtype))
    batch = AttentionBatch(
        query_lens=np.array([new for _, new in case.spans]),
        context_lens=np.array(contexts),
        block_tables=tables,
        block_size=BLOCK,
        slots=torch.cat(slots),
    )
    backend = make_attention(name, Backend())
    plan = backend.plan(batch, dtype, torch.device("cpu"))
    fresh_k = torch.cat([k[past:] for k, (past, _) in zip(keys, case.spans, strict=True)])
    fresh_v = torch.cat([v[past:] for v, (past, _) in zip(values, case.spans, strict=True)])
    # As a model gives them: [heads, tokens, dim] seen as [tokens, heads, dim].
    query = torch.cat(news).transpose(0, 1).contiguous().transpose(0, 1)
    got = backend.run(query, fresh_k, fresh_v, kv, spec, plan)
    want = [oracle(q, k, v, past, spec) for q, k, v, (past, _) in zip(news, keys, values, case.spans, strict=True)]
    return got.double(), torch.cat(want)


def spec(**changes: object) -> AttentionSpec:
    base: dict[str, object] = {"num_heads": 4, "num_kv_heads": 2, "k_dim": 8, "v_dim": 8, "scaling": 0.3}
    return AttentionSpec(**(base | changes))  # type: ignore[arg-type]


MIXES = {
    "decode": [(5, 1), (9, 1), (1, 1), (30, 1)],
    "one decode": [(11, 1)],
    "first token": [(0, 1), (0, 1)],
    "prompts": [(0, 7), (0, 7), (0, 3)],
    "chunks": [(8, 6), (3, 6)],
    "verification": [(10, 4), (21, 4), (6, 4)],
    "everything": [(5, 1), (0, 13), (40, 1), (17, 5), (2, 5), (12, 12), (100, 1), (0, 2)],
}


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(
    "layer",
    [
        spec(),
        spec(num_kv_heads=4),
        spec(num_kv_heads=1),
        spec(window=5),
        spec(window=1),
        spec(softcap=2.0),
        spec(softcap=2.0, window=6, num_kv_heads=1),
        spec(v_dim=4),
        spec(scaling=1.0),
    ],
    ids=["gqa", "mha", "mqa", "window", "window1", "softcap", "softcap-window", "narrow-values", "scaling"],
)
def test_equals_dense_oracle(name: str, mix: str, layer: AttentionSpec) -> None:
    got, want = run_case(Case(MIXES[mix], layer), name)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", USABLE)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("layer", [spec(), spec(window=5), spec(softcap=2.0)], ids=["plain", "window", "softcap"])
def test_other_dtypes(name: str, dtype: torch.dtype, tolerance: float, layer: AttentionSpec) -> None:
    got, want = run_case(Case(MIXES["everything"], layer, dtype), name)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_group_and_score_limits_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "MAX_GROUP_TOKENS", 16)
    monkeypatch.setattr(torch_paged, "MAX_SCORES", 64)
    for layer in (spec(), spec(softcap=2.0, window=6)):
        got, want = run_case(Case(MIXES["everything"], layer), "torch")
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_was_left_in_foreign_blocks_never_matters() -> None:
    """NaN in a neighbour's pages stays there, padding included."""
    layer = spec()
    kv = LayerKv(
        torch.full((8, BLOCK, 2, 8), float("nan"), dtype=torch.float64),
        torch.full((8, BLOCK, 2, 8), float("nan"), dtype=torch.float64),
    )
    for pages in (kv.k, kv.v):
        pages[[1, 2, 3, 4]] = 0.0  # what the runner does when a sequence takes blocks
    backend = make_attention("torch", Backend())
    tables = np.array([[1, 2, 3], [4, 7, 7]], dtype=np.int64)
    slots = torch.tensor([3 * BLOCK + 1, 4 * BLOCK + 2])
    batch = AttentionBatch(np.array([1, 1]), np.array([10, 3]), tables, BLOCK, slots)
    plan = backend.plan(batch, torch.float64, torch.device("cpu"))
    new = torch.randn(2, 2, 8, dtype=torch.float64)
    out = backend.run(torch.randn(2, 4, 8, dtype=torch.float64), new, new, kv, layer, plan)
    assert out.isfinite().all()


def test_unknown_back_end_names_the_known() -> None:
    with pytest.raises(InvalidArgument, match="torch"):
        make_attention("flash", Backend())
