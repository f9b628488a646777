"""Paged attention on a CUDA device against dense float64 computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from support.attention_cases import Problem, make_problem, spec_of
from support.lora_cases import pairwise

from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.backends.registry import attention_kernels
from loraplex_server.layers.attention import (
    AttentionBatch,
    AttentionSpec,
    LayerKv,
    PagedAttention,
    ReplayableAttention,
    Reserved,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

NAMES = ["triton", "flashinfer"]
STEPS = {
    "decode": [(5, 1), (0, 1), (511, 1), (512, 1), (1300, 1)],
    "long decode": [(20_000, 1), (40, 1)],
    "prompts": [(0, 700), (0, 64), (0, 1)],
    "chunks": [(1024, 512), (3, 60), (4000, 33)],
    "verification": [(10, 5), (2000, 5), (511, 5)],
    "everything": [(5, 1), (900, 1), (17, 5), (0, 130), (800, 300)],
}
HEADS = [(8, 8), (32, 8), (28, 4), (9, 1)]
DIMS = [(64, 64), (128, 128), (256, 256), (80, 80), (192, 128)]
WINDOWS = [None, 1, 300]
CAPS = [None, 20.0]
BLOCK_SIZES = [1, 16, 24]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# A single result of attention is a mean of values around 1: what is left is rounding of weights and of the result.
TOLERANCES = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-4}


def backend_of(name: str, *specs: AttentionSpec, dtype: torch.dtype = torch.bfloat16) -> PagedAttention:
    """Skips where it cannot be used, and says why."""
    found = next(one for one in attention_kernels(CudaBackend(), specs, dtype) if one.name == name)
    if not found.usable or found.make is None:
        pytest.skip(f"{name}: {found.reason}")
    return found.make(specs)


def layer(**changes: object) -> AttentionSpec:
    return spec_of(**({"num_heads": 32, "num_kv_heads": 8, "k_dim": 128, "v_dim": 128, "scaling": 0.09} | changes))


def problem_of(
    step: Sequence[tuple[int, int]], spec: AttentionSpec, dtype: torch.dtype, name: str, block_size: int = 16
) -> Problem:
    # The runner clears a page when a sequence takes it; our kernels do not even need that.
    poison = float("nan") if name == "triton" else 7.0
    return make_problem(step, spec, dtype, block_size=block_size, device=torch.device("cuda"), poison=poison, seed=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("step", "heads", "dims", "window", "softcap", "block_size", "dtype"),
    pairwise(list(STEPS), HEADS, DIMS, WINDOWS, CAPS, BLOCK_SIZES, DTYPES),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    name: str,
    step: str,
    heads: tuple[int, int],
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    spec = layer(
        num_heads=heads[0], num_kv_heads=heads[1], k_dim=dims[0], v_dim=dims[1], window=window, softcap=softcap
    )
    backend = backend_of(name, spec, dtype=dtype)
    problem = problem_of(STEPS[step], spec, dtype, name, block_size)
    got = problem.run(backend)
    problem.check(got, TOLERANCES[dtype])
    assert torch.equal(problem.run(backend), got), "not deterministic"


@pytest.mark.parametrize("window", [None, 300])
def test_a_span_gets_the_same_bits_in_any_batch(window: int | None) -> None:
    spec = layer(window=window)
    backend = backend_of("triton", spec)
    together = problem_of([(3000, 1), (40, 1), (700, 5), (100, 300)], spec, torch.bfloat16, "triton")
    got = together.run(backend)
    batch, at = together.batch, 0
    for idx, (_, new) in enumerate(together.spans):
        part = slice(at, at + new)
        alone = AttentionBatch(
            *(rows[[idx]] for rows in (batch.query_lens, batch.context_lens, batch.block_tables)),
            batch.block_size,
            batch.slots[part],
        )
        plan = backend.plan(alone, torch.bfloat16, torch.device("cuda"))
        q, k, v = together.query[part], together.key[part], together.value[part]
        assert torch.equal(backend.run(q, k, v, together.kv, spec, plan), got[part])
        at += new


@pytest.mark.parametrize("name", NAMES)
def test_pages_beyond_31_bits(name: str) -> None:
    spec = layer()
    backend = backend_of(name, spec)
    small = problem_of([(500, 1), (0, 70)], spec, torch.bfloat16, name)
    num_small = len(small.kv.k)
    num_blocks = (1 << 31) // small.kv.k[0].numel() + 2 * num_small
    shift = num_blocks - num_small
    free = torch.cuda.mem_get_info()[0]
    needed = 2 * num_blocks * small.kv.k[0].numel() * 2
    if free < needed + (1 << 30):
        pytest.skip(f"{free >> 20} MiB are free, {needed >> 20} MiB of pages are needed")
    kv = LayerKv(
        *(torch.empty(num_blocks, *pages.shape[1:], dtype=pages.dtype, device="cuda") for pages in small.pages)
    )
    for pages, own in zip((kv.k, kv.v), small.pages, strict=True):
        pages[shift:] = own
    slots = small.batch.slots + shift * small.batch.block_size
    batch = replace(small.batch, block_tables=small.batch.block_tables + shift, slots=slots)
    plan = backend.plan(batch, torch.bfloat16, torch.device("cuda"))
    got = backend.run(small.query, small.key, small.value, kv, spec, plan)
    torch.testing.assert_close(got.double(), small.want, rtol=1.5e-2, atol=1.5e-2)
    for pages, wanted in zip((kv.k, kv.v), (small.pages_k, small.pages_v), strict=True):
        torch.testing.assert_close(pages[shift:], wanted, rtol=0, atol=0, equal_nan=True)


# Tokens in front of each span of a step, and ragged steps.
PASTS = [[3, 4000, 130, 0, 17, 511, 512, 1], [5], [2500, 2500], list(range(7))]
RAGGED = [[(4000, 1), (3, 1), (0, 300)], [(0, 700)], [(5, 1), (2500, 2), (2500, 40), (17, 600)], [(9, 33)]]


@pytest.mark.parametrize(
    ("name", "query_len"), [*((name, query_len) for name in NAMES for query_len in (1, 5)), ("triton", None)]
)
@pytest.mark.parametrize("window", [None, 300])
def test_a_captured_plan_takes_one_step_after_another(name: str, query_len: int | None, window: int | None) -> None:
    """Spans of one length, or (None) ragged ones."""
    spec, num_spans, cuda = layer(window=window), 8, torch.device("cuda")
    backend = backend_of(name, spec)
    assert isinstance(backend, ReplayableAttention)
    max_blocks = 260
    bounds = Reserved(num_spans, query_len or 1, 0 if query_len else 700, max_blocks=max_blocks)
    num_tokens = bounds.num_tokens
    plan = backend.reserve(bounds, 16, torch.bfloat16, cuda)
    pages = [torch.zeros(num_spans * max_blocks, 16, 8, 128, dtype=torch.bfloat16, device=cuda) for _ in range(2)]
    kv = LayerKv(*pages)
    query = torch.zeros(num_tokens, 32, 128, dtype=torch.bfloat16, device=cuda)
    key, value = (torch.zeros(num_tokens, 8, 128, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        backend.run(query, key, value, kv, spec, plan)  # compiles
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.run(query, key, value, kv, spec, plan)
    assert not any(bool(one.any()) for one in pages), "nothing is written for a span that is empty"
    uniform = [[(past, query_len or 0) for past in pasts] for pasts in PASTS]
    for step in uniform if query_len else RAGGED:
        problem = problem_of(step, spec, torch.bfloat16, name)
        count = len(problem.query)
        for ours, theirs in zip(pages, problem.pages, strict=True):
            ours[: len(theirs)] = theirs
        for ours, theirs in zip((query, key, value), (problem.query, problem.key, problem.value), strict=True):
            ours.fill_(float("nan"))[:count] = theirs
        backend.refill(plan, problem.batch)
        graph.replay()
        torch.testing.assert_close(out[:count].double(), problem.want, rtol=1.5e-2, atol=1.5e-2)
        assert (out[count:] == 0).all()
        for ours, wanted in zip(pages, (problem.pages_k, problem.pages_v), strict=True):
            torch.testing.assert_close(ours[: len(wanted)], wanted, rtol=0, atol=0, equal_nan=True)
        kept = out.clone()
        key.fill_(float("nan"))
        backend.refill(plan, replace(problem.batch, slots=torch.full((count,), -1)))
        graph.replay()
        torch.testing.assert_close(out, kept, rtol=1e-2, atol=1e-2, msg="what its pages have is not written again")
        if name == "triton":
            assert torch.equal(out[:count], problem.run(backend)), "a replay computes what a launch does"


def test_a_plan_waits_for_nothing() -> None:
    """A plan, a refill and a run while the device is busy leave it busy."""
    spec = layer()
    backend = backend_of("triton", spec)
    assert isinstance(backend, ReplayableAttention)
    problem = problem_of([(500, 1)] * 8, spec, torch.bfloat16, "triton")
    reserved = backend.reserve(Reserved(8, 1, max_blocks=64), 16, torch.bfloat16, torch.device("cuda"))
    problem.run(backend)
    problem.run(backend, reserved)
    big = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(20):
        big @ big
    done = torch.cuda.Event()
    done.record()
    problem.run(backend)
    backend.refill(reserved, problem.batch)
    problem.run(backend, reserved)
    assert not done.query(), "something waited for the device, or it is faster than any known"
    torch.cuda.synchronize()
