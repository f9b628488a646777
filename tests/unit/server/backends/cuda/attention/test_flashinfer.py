"""FlashInfer back end over a stand-in for the package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import fake_flashinfer
from support.attention_cases import CPU, biases_of, make_problem, sinks_of, spec_of
from torch import Tensor

from loraplex_server.backends.cuda.attention import flashinfer
from loraplex_server.backends.cuda.attention.flashinfer import FlashInferAttention, Plan, reason_against
from loraplex_server.layers.attention import AttentionSpec, LayerKv, ReplayableAttention, Reserved

BF16 = torch.bfloat16


def write(key: Tensor, value: Tensor, kv: LayerKv, slots: Tensor) -> None:
    real = slots >= 0
    kv.write(key[real], value[real], slots[real].long())


def layer(**changes: object) -> AttentionSpec:
    return spec_of(**({"k_dim": 64, "v_dim": 64, "scaling": 0.1} | changes))


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)


def make(*specs: AttentionSpec) -> FlashInferAttention:
    return FlashInferAttention(specs, fake_flashinfer, write)


def wrappers_of(plan: Plan) -> list[Any]:
    return [one.wrapper for part in plan.parts for one in part.wrappers.values()]


@pytest.mark.parametrize(
    "spans",
    [
        [(5, 1), (40, 1), (0, 1)],
        [(0, 40), (0, 17)],
        [(10, 4), (21, 4)],
        [(5, 1), (17, 5), (0, 33), (100, 20)],
        [(0, 33), (5, 1), (17, 5)],
    ],
    ids=["decode", "prompts", "verification", "mixed", "not in order"],
)
@pytest.mark.parametrize(
    "spec",
    [layer(), layer(num_kv_heads=4), layer(window=7), layer(softcap=2.0, scaling=1.0), layer(k_dim=128, v_dim=128)],
    ids=["gqa", "mha", "window", "softcap", "wide"],
)
@pytest.mark.parametrize("block_size", [1, 16])
def test_equals_the_dense_computation(spans: list[tuple[int, int]], spec: AttentionSpec, block_size: int) -> None:
    problem = make_problem(spans, spec, BF16, block_size=block_size)
    problem.check(problem.run(make(spec)))


def test_short_spans_and_prompts_get_kernels_of_their_own() -> None:
    full, windowed = layer(), layer(window=9)
    backend = make(full, windowed, full)
    problems = [make_problem([(5, 1), (17, 5), (0, 33), (100, 20)], spec, BF16) for spec in (full, windowed)]
    plan = backend.plan(problems[0].batch, BF16, CPU)
    assert [part.tokens for part in plan.parts] == [slice(0, 6), slice(6, 59)]
    assert [wrapper.backend for wrapper in wrappers_of(plan)] == ["fa2", "fa2", "auto", "auto"]
    for problem in problems:
        problem.check(problem.run(backend, plan))
    again = backend.plan(problems[0].batch, BF16, CPU)
    assert wrappers_of(again) == wrappers_of(plan), "wrappers own much memory and stay"


@pytest.mark.parametrize("query_len", [1, 3])
def test_a_reserved_plan_takes_one_step_after_another(query_len: int) -> None:
    full, windowed = layer(), layer(window=9, num_heads=2)
    backend = make(full, windowed)
    assert isinstance(backend, ReplayableAttention)
    num_spans = 4
    plan = backend.reserve(Reserved(num_spans, query_len, max_blocks=80), 4, BF16, CPU)
    wrappers = wrappers_of(plan)
    addresses = [buffer.data_ptr() for wrapper in wrappers for buffer in wrapper.buffers]
    outs: set[int] = set()
    for pasts in ([3, 300, 130, 17], [5], [250, 250], [1, 2, 3]):
        for spec in (full, windowed):
            problem = make_problem([(past, query_len) for past in pasts], spec, BF16)
            count = len(problem.query)
            padded = [
                torch.cat(
                    [tensor, torch.full((num_spans * query_len - count, *tensor.shape[1:]), float("nan")).to(BF16)]
                )
                for tensor in (problem.query, problem.key, problem.value)
            ]
            backend.refill(plan, problem.batch)
            got = backend.run(*padded, problem.kv, spec, plan)
            problem.check(got[:count])
            assert (got[count:] == 0).all()
            outs.add(got.data_ptr())
    assert wrappers_of(plan) == wrappers
    assert [buffer.data_ptr() for wrapper in wrappers for buffer in wrapper.buffers] == addresses
    assert len(outs) == 2, "one output at a fixed address per shape of a layer"


def test_what_is_in_its_page_already_is_not_written_again() -> None:
    problem = make_problem([(9, 3), (20, 3)], layer(), BF16)
    backend = make(layer())
    plan = backend.reserve(Reserved(2, 3, max_blocks=64), 4, BF16, CPU)
    slots = problem.batch.slots.clone()
    slots[0] = slots[3] = -1
    for pages, whole in zip(problem.pages, (problem.pages_k, problem.pages_v), strict=True):
        pages.copy_(whole)
    problem.key[[0, 3]] = problem.value[[0, 3]] = float("nan")
    backend.refill(plan, replace(problem.batch, slots=slots))
    problem.check(problem.run(backend, plan))


def test_as_reserved_it_can_be_run_and_writes_nothing() -> None:
    spec = layer()
    backend = make(spec)
    problem = make_problem([(9, 5)] * 3, spec, BF16, poison=0.5)
    before = problem.kv.k.clone()
    got = problem.run(backend, backend.reserve(Reserved(3, 5, max_blocks=10), 4, BF16, CPU))
    assert got.shape == problem.want.shape
    assert torch.equal(problem.kv.k, before)


def test_what_does_not_fit_is_refused() -> None:
    backend = make(layer())
    plan = backend.reserve(Reserved(4, 1, max_blocks=10), 4, BF16, CPU)
    for spans in ([(3, 2)], [(3, 1)] * 5, [(300, 1)]):
        with pytest.raises(ValueError, match="do not fit"):
            backend.refill(plan, make_problem(spans, layer(), BF16).batch)
    with pytest.raises(ValueError, match="float32"):
        backend.reserve(Reserved(4, 1, max_blocks=10), 4, torch.float32, CPU)


@pytest.mark.parametrize(
    ("specs", "dtype", "said"),
    [
        ([layer(), layer(k_dim=256, v_dim=256)], BF16, ""),
        ([], None, ""),
        ([layer()], torch.float32, "not in float32"),
        ([layer(), layer(k_dim=80, v_dim=80)], BF16, "the model has 80"),
        ([layer(k_dim=192, v_dim=128)], None, "192 and 128"),
        ([layer(), layer(sinks=sinks_of(4))], BF16, "no sinks"),
        ([layer(), layer(key_bias=biases_of(4, 9))], BF16, "no biases by key"),
        ([layer(), layer(chunk=8192)], BF16, "no chunks"),
    ],
)
def test_says_why_it_cannot(specs: list[AttentionSpec], dtype: torch.dtype | None, said: str) -> None:
    reason = reason_against(specs, dtype)
    assert (said in reason) if said else not reason
