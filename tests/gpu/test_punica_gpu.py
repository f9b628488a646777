"""The real Punica package on a CUDA device, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from support.lora_cases import POPULARITIES, pairwise, random_problem, random_segments, random_table

from loraplex_server.backends.registry import choose_backend, lora_operations
from loraplex_server.layers.lora import Segment

STATUS = next(status for status in lora_operations() if status.name == "punica")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STATUS.usable, reason=f"Punica's kernels cannot run here: {STATUS.reason}"),
]
DTYPES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("dtype", "rank", "popularity", "num_rows", "idle_rows", "shape"),
    pairwise(DTYPES, [8, 13, 16, 32, 64, 96, 128], POPULARITIES, [1, 7, 64], (False, True), [(4096, 4096), (256, 384)]),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    dtype: torch.dtype, rank: int, popularity: str, num_rows: int, idle_rows: bool, shape: tuple[int, int]
) -> None:
    torch.manual_seed(rank + num_rows)
    random.seed(rank + num_rows)
    table = random_table([rank] * 6, *shape, dtype, "cuda")
    segments = random_segments(popularity, num_rows, 6, idle_rows=idle_rows)
    problem = random_problem(segments, table, num_rows, dtype, "cuda")
    problem.check(problem.run(choose_backend("cuda").lora(name="punica")))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_ranks_weights_and_prefill(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = random_table([64, 8, None, 13, 16, 256], 4096, 1024, dtype, "cuda")
    segments = [Segment(0, 200, 0), Segment(200, 201, 3), Segment(201, 202, 1), Segment(202, 220, 2)]
    segments += [Segment(240, 260, 4, 0.5), Segment(240, 260, 1, 0.5), Segment(260, 300, 5)]
    problem = random_problem(segments, table, 320, dtype, "cuda")
    problem.check(problem.run(choose_backend("cuda").lora(name="punica")))
