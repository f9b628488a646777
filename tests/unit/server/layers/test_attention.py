"""Common suite of all paged attention implementations, and KV pages.

Here it runs over those that need no accelerator. The Triton kernels run in Triton's interpreter, which has to be chosen
before triton is imported: `backends/cuda/test_interpreter.py` runs this file once more, in a process of its
own. By hand: `OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/layers/test_attention.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.attention_cases import CPU, biases_of, make_problem, sinks_of, spec_of
from support.lora_cases import pairwise

from loraplex_server.backends.backend import Backend
from loraplex_server.backends.registry import attention_kernels, make_attention
from loraplex_server.layers.attention import (
    AttentionSpec,
    KvCache,
    ModelSpec,
    PagedAttention,
    ReplayableAttention,
    Reserved,
    kv_block_bytes,
    num_blocks_for,
)

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if IN_INTERPRETER else [one.name for one in attention_kernels(Backend()) if one.usable]

only_triton = pytest.mark.skipif(
    not IN_INTERPRETER, reason="a promise of the Triton kernels, which run in a process of their own"
)

STEPS = {
    "decode": [(5, 1), (0, 1), (30, 1)],
    "long decode": [(300, 1), (9, 1), (127, 1), (128, 1)],
    "prompts": [(0, 7), (0, 40), (0, 1)],
    "chunks": [(64, 33), (3, 6), (131, 20)],
    "long chunk": [(1100, 70), (40, 1)],
    "verification": [(10, 4), (200, 4), (6, 4)],
    "everything": [(5, 1), (0, 13), (150, 1), (17, 5), (12, 12), (100, 1)],
}
LONGEST = 1170  # context of these steps
# heads, KV heads: one each, grouped (three is no power of two), all on one
HEADS = [(2, 2), (4, 2), (6, 2), (5, 1)]
DIMS = [(8, 8), (16, 16), (20, 20), (24, 12), (32, 40)]
WINDOWS = [None, 1, 6, 70]
CHUNKS = [None, 1, 5, 64]
BLOCK_SIZES = [1, 3, 4, 16, 64]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def make(name: str, *specs: AttentionSpec) -> PagedAttention:
    if name == "triton":
        from loraplex_server.backends.cuda.attention.paged import TritonPagedAttention

        return TritonPagedAttention(specs)
    return make_attention(name, Backend(), specs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("step", "heads", "dims", "window", "softcap", "chunk", "has_sinks", "has_bias", "block_size", "dtype"),
    pairwise(list(STEPS), HEADS, DIMS, WINDOWS, [None, 2.0], CHUNKS, [False, True], [False, True], BLOCK_SIZES, DTYPES),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    name: str,
    step: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    chunk: int | None,
    has_sinks: bool,
    has_bias: bool,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads = heads
    wide = torch.promote_types(dtype, torch.float32)
    spec = spec_of(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_dim=dims[0],
        v_dim=dims[1],
        window=window,
        softcap=softcap,
        chunk=chunk,
        sinks=sinks_of(num_heads, wide) if has_sinks else None,
        key_bias=biases_of(num_heads, LONGEST, wide) if has_bias else None,
    )
    problem = make_problem(STEPS[step], spec, dtype, block_size=block_size)
    problem.check(problem.run(make(name, spec)))


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_several_shapes_share_a_plan(name: str) -> None:
    specs = (
        *(spec_of(), spec_of(window=40, num_heads=6), spec_of(num_heads=2, softcap=3.0)),
        *(spec_of(chunk=39), spec_of(sinks=sinks_of(4)), spec_of(sinks=-sinks_of(4)), spec_of(window=39)),
        *(spec_of(key_bias=biases_of(4, 141)), spec_of(key_bias=-biases_of(4, 141))),
    )
    backend = make(name, *specs, specs[0])
    problems = [make_problem([(0, 9), (140, 1), (77, 3)], spec, torch.float32) for spec in specs]
    plan = backend.plan(problems[0].batch, torch.float32, CPU)
    for problem in problems:
        problem.check(problem.run(backend, plan))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 9])
def test_what_others_left_in_their_pages_never_matters(name: str, window: int | None) -> None:
    # The runner clears a page when a sequence takes it; the kernels do not even need that.
    poison = float("nan") if name == "triton" else 0.0
    problem = make_problem([(20, 1), (0, 4), (140, 1)], spec_of(window=window), torch.float32, poison=poison)
    foreign = set(range(len(problem.kv.k)))
    for row, context in zip(problem.batch.block_tables, problem.batch.context_lens, strict=True):
        foreign -= set(row[: -(-context // problem.batch.block_size)].tolist())
    assert foreign
    for tensor in (problem.kv.k, problem.kv.v, problem.pages_k, problem.pages_v):
        tensor[sorted(foreign)] = float("nan")
    problem.check(problem.run(make(name, problem.spec)))


@pytest.mark.parametrize("name", NAMES)
def test_is_deterministic(name: str) -> None:
    problem = make_problem([(200, 1), (0, 20), (64, 3)], spec_of(window=90), torch.float32)
    backend = make(name, problem.spec)
    assert torch.equal(problem.run(backend), problem.run(backend))


@only_triton
def test_a_span_gets_the_same_bits_in_any_batch() -> None:
    spans = [(260, 1), (3, 1), (140, 4), (10, 30)]
    for changes in ({}, {"window": 100}, {"chunk": 70, "sinks": sinks_of(6)}, {"key_bias": biases_of(6, 261)}):
        together = make_problem(spans, spec_of(num_heads=6, **changes), torch.float32)
        backend = make("triton", together.spec)
        got = together.run(backend)
        at = 0
        for idx, (_, new) in enumerate(spans):
            batch = together.batch
            part = slice(at, at + new)
            alone = type(batch)(
                batch.query_lens[[idx]],
                batch.context_lens[[idx]],
                batch.block_tables[[idx]],
                batch.block_size,
                batch.slots[part],
            )
            q, k, v = together.query[part], together.key[part], together.value[part]
            plan = backend.plan(alone, torch.float32, CPU)
            assert torch.equal(backend.run(q, k, v, together.kv, together.spec, plan), got[part])
            at += new


# --- reserved plans ---------------------------------------------------------------------------------------------------


@only_triton
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("window", [None, 50])
def test_a_reserved_plan_takes_one_step_after_another(query_len: int, window: int | None) -> None:
    full = spec_of(num_heads=6, sinks=sinks_of(6), key_bias=biases_of(6, 303))
    other = spec_of(window=window, num_heads=2)
    backend = make("triton", full, other)
    assert isinstance(backend, ReplayableAttention)
    num_spans, block_size = 5, 4
    plan = backend.reserve(Reserved(num_spans, query_len, max_blocks=90), block_size, torch.float32, CPU)
    address = plan.buffer.data_ptr()
    for pasts in ([], [3, 300, 130, 0, 17], [5], [250, 250], [1, 2, 3, 4]):
        backend.refill(plan, make_problem([(past, query_len) for past in pasts or [0]], full, torch.float32).batch)
        for spec in (full, other):
            problem = make_problem([(past, query_len) for past in pasts or [0]], spec, torch.float32)
            count = len(problem.query)
            padding = num_spans * query_len - count
            padded = [
                torch.cat([tensor, torch.full((padding, *tensor.shape[1:]), float("nan"))])
                for tensor in (problem.query, problem.key, problem.value)
            ]
            backend.refill(plan, problem.batch)
            got = backend.run(*padded, problem.kv, spec, plan)
            problem.check(got[:count])
            assert (got[count:] == 0).all()
            assert torch.equal(got[:count], problem.run(backend))
    assert plan.buffer.data_ptr() == address


@only_triton
@pytest.mark.parametrize("window", [None, 50])
def test_a_ragged_plan_takes_one_step_after_another(window: int | None) -> None:
    spec = spec_of(window=window, num_heads=6, sinks=sinks_of(6))
    backend = make("triton", spec)
    assert isinstance(backend, ReplayableAttention)
    num_tokens = 40
    plan = backend.reserve(Reserved(4, 1, num_tokens, max_blocks=90), 4, torch.float32, CPU)
    address = plan.buffer.data_ptr()
    for spans in ([(3, 1), (300, 1), (0, 17)], [(130, 40)], [(5, 1), (250, 2), (9, 5), (260, 30)], [(0, 1)]):
        problem = make_problem(spans, spec, torch.float32)
        count = len(problem.query)
        padded = [
            torch.cat([tensor, torch.full((num_tokens - count, *tensor.shape[1:]), float("nan"))])
            for tensor in (problem.query, problem.key, problem.value)
        ]
        backend.refill(plan, problem.batch)
        got = backend.run(*padded, problem.kv, spec, plan)
        problem.check(got[:count])
        assert (got[count:] == 0).all()
        assert torch.equal(got[:count], problem.run(backend)), "a replay computes what a launch does"
    assert plan.buffer.data_ptr() == address


@only_triton
def test_as_reserved_nothing_is_written_and_the_output_is_zero() -> None:
    spec = spec_of()
    backend = make("triton", spec)
    assert isinstance(backend, ReplayableAttention)
    plan = backend.reserve(Reserved(4, 2, max_blocks=64), 4, torch.float32, CPU)
    problem = make_problem([(9, 2)] * 4, spec, torch.float32)
    before = problem.kv.k.clone()
    assert (problem.run(backend, plan) == 0).all()
    assert torch.equal(problem.kv.k, before)


@only_triton
def test_tokens_that_the_cache_has_are_attended_and_not_written() -> None:
    """Known tokens in front of a span that is shorter than the others, whatever is computed for them this time."""
    spec = spec_of()
    backend = make("triton", spec)
    assert isinstance(backend, ReplayableAttention)
    plan = backend.reserve(Reserved(3, 3, max_blocks=64), 4, torch.float32, CPU)
    short, padded = [(9, 1), (130, 2), (0, 3)], [(7, 3), (129, 3), (0, 3)]
    rows = [2, 4, 5, 6, 7, 8]  # of the padded step that are not padding
    want = make_problem(short, spec, torch.float32)
    query, key, value = (torch.full((9, *t.shape[1:]), 1e6) for t in (want.query, want.key, want.value))
    for tensor, source in ((query, want.query), (key, want.key), (value, want.value)):
        tensor[rows] = source
    slots = torch.full((9,), -1)
    slots[rows] = want.batch.slots
    batch = replace(want.batch, query_lens=np.array([length for _, length in padded]), slots=slots)
    backend.refill(plan, batch)
    got = backend.run(query, key, value, want.kv, spec, plan)[rows]
    want.check(got)


@only_triton
@pytest.mark.parametrize("spans", [[(3, 2)], [(3, 1)] * 5, [(300, 1)]], ids=["query length", "spans", "context"])
def test_what_does_not_fit_is_refused(spans: list[tuple[int, int]]) -> None:
    spec = spec_of()
    backend = make("triton", spec)
    assert isinstance(backend, ReplayableAttention)
    plan = backend.reserve(Reserved(4, 1, max_blocks=10), 4, torch.float32, CPU)
    with pytest.raises(ValueError, match="do not fit"):
        backend.refill(plan, make_problem(spans, spec, torch.float32).batch)
    with pytest.raises(ValueError, match="float64"):
        backend.reserve(Reserved(4, 1, max_blocks=10), 4, torch.float64, CPU)


LAYERS = (AttentionSpec(4, 2, 8, 8, 1.0), AttentionSpec(4, 1, 8, 4, 1.0), AttentionSpec(4, 2, 8, 8, 1.0))
SPEC = ModelSpec(LAYERS, 10, 10, 8, 64)


def cache(num_blocks: int = 6) -> KvCache:
    pages = KvCache(SPEC, num_blocks, 4, torch.float32, CPU)
    pages.clear_blocks(range(num_blocks))
    return pages


def test_layers_have_pages_of_their_own_shape() -> None:
    pages = cache()
    assert [tuple(layer.k.shape) for layer in pages.layers] == [(6, 4, 2, 8), (6, 4, 1, 8), (6, 4, 2, 8)]
    assert tuple(pages.layers[1].v.shape) == (6, 4, 1, 4)
    assert len({layer.k.data_ptr() for layer in pages.layers}) == 3
    assert pages.num_bytes == 6 * kv_block_bytes(SPEC, 4, 4)


def test_write_goes_to_its_slots_only() -> None:
    pages = cache()
    layer = pages.layers[2]
    layer.write(torch.ones(2, 2, 8), 2 * torch.ones(2, 2, 8), torch.tensor([5, 23]))
    assert layer.k.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [5, 23]
    assert layer.v[1, 1].eq(2).all()
    assert layer.v[5, 3].eq(2).all()
    assert not pages.layers[0].k.any()


def test_copies_read_before_they_write() -> None:
    pages = cache()
    for layer in pages.layers:
        for block in range(6):
            layer.k[block] = block
            layer.v[block] = -block
    pages.copy_blocks([1, 2], [2, 3])
    pages.clear_blocks([5])
    for layer in pages.layers:
        assert layer.k[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 0]
        assert layer.v[:, 0, 0, 0].tolist() == [0, -1, -1, -2, -4, 0]
    pages.copy_blocks([], [])
    pages.clear_blocks([])


def test_budget() -> None:
    block = kv_block_bytes(SPEC, 4, 2)
    assert num_blocks_for(SPEC, 4, torch.bfloat16, 10 * block + 1) == 10
    assert num_blocks_for(SPEC, 4, torch.bfloat16, block - 1) == 0
