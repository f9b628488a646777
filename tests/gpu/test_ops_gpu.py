"""The op suite's cases on a CUDA device: the Triton kernels as compiled, against the same float64 answers."""

from __future__ import annotations

import random

import pytest
import torch
from support.lora_cases import POPULARITIES, RANKS, bits, pairwise, random_problem, random_segments, random_table

from loraplex_adapters.ops.base import Segment
from loraplex_adapters.ops.registry import available_ops, choose_ops

STATUS = next(status for status in available_ops() if status.name == "triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STATUS.usable, reason=f"the Triton kernels cannot run here: {STATUS.reason}"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


@pytest.mark.parametrize(
    ("dtype", "rank", "popularity", "num_rows", "idle_rows", "shape"),
    pairwise(DTYPES, RANKS, POPULARITIES, [1, 7, 64, 300], (False, True), [(256, 384), (4096, 1024), (1000, 72)]),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    dtype: torch.dtype, rank: int, popularity: str, num_rows: int, idle_rows: bool, shape: tuple[int, int]
) -> None:
    table = random_table([rank] * 12, *shape, dtype, "cuda")
    segments = random_segments(popularity, num_rows, 12, idle_rows=idle_rows)
    problem = random_problem(segments, table, num_rows, dtype, "cuda")
    got = problem.run(choose_ops("cuda"))
    problem.check(got)
    assert torch.equal(bits(problem.run(choose_ops("cuda"))), bits(got))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_and_decode_with_mixed_ranks_and_a_mixture(dtype: torch.dtype) -> None:
    table = random_table([64, 1, None, 13, 16, 256], 2048, 2048, dtype, "cuda")
    segments = [Segment(0, 500, 0), Segment(500, 501, 3), Segment(501, 502, 1), Segment(502, 520, 2)]
    segments += [Segment(600, 700, 4, 0.5), Segment(600, 700, 5, 0.5), Segment(700, 4000, 5)]
    problem = random_problem(segments, table, 4096, dtype, "cuda")
    problem.y[:, :4] = float("nan")
    problem.check(problem.run(choose_ops("cuda")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_column_slice_of_y(dtype: torch.dtype) -> None:
    table = random_table([8, 16], 256, 128, dtype, "cuda")
    problem = random_problem([Segment(0, 2, 0), Segment(2, 3, 1), Segment(4, 6, 0)], table, 7, dtype, "cuda")
    wide = torch.randn(7, 512, device="cuda").to(dtype)
    wide[:, 128:256] = problem.y
    before = wide.clone()
    ops = choose_ops("cuda")
    ops.apply(wide[:, 128:256], problem.x, table, problem.prepared(ops))
    problem.check(wide[:, 128:256])
    assert torch.equal(bits(wide[:, :128]), bits(before[:, :128]))
    assert torch.equal(bits(wide[:, 256:]), bits(before[:, 256:]))
