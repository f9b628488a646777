"""Native draws against their definition, with each instruction set that runs here."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from support.draw_cases import NUM_ROWS, SHAPES, rows_of, scores_of
from support.guarded_memory import at_end, at_start
from support.sampling_oracle import noise_field, sequence

from loraplex_contracts.sampling import SamplingParams
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.sampling.draw import DrawRows, draw_dense
from loraplex_server.sampling.sampler import Sampler

# The last has enough blocks for a first look at the likely tokens.
SIZES = [1, 2, 15, 63, 64, 65, 700, 2500, 20_011]


def kinds_of(vocab_size: int) -> list[DrawRows]:
    top_k = [min(k, vocab_size) for k in (0, 1, 5, 0, 60, 64, 70, 1500, 0)]
    top_p = [0.9, 0.5, 1.0, 1e-3, 0.99, 1.0, 0.999, 0.97]
    kinds = (
        ([0], [1.0], [0.0]),
        (top_k, top_p, [0.0, 0.05, 1.0, 0.0, 0.3]),
        (top_k, [1.0], [0.0]),
        ([0], top_p, [0.0]),
        ([0], [1.0], [0.1, 0.9, 1e-6]),
        ([0], [0.9999, 1 - 1e-15], [1e-4, 0.0]),
    )
    return [rows_of(*kind, torch.float32) for kind in kinds]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_tokens_of_the_definition(kernels: NativeKernels, shape: str, vocab_size: int) -> None:
    scores, noise = scores_of(shape, vocab_size, torch.float32), noise_field(vocab_size)
    wide = torch.full((NUM_ROWS, vocab_size + 3), float("nan"))
    wide[:, :vocab_size] = scores
    for rows, truncates in product(kinds_of(vocab_size), (True, False)):
        expected = draw_dense(scores, rows, noise, truncates=truncates)
        for given in (at_end(scores), at_start(scores), wide[:, :vocab_size]):
            found = kernels.draw(given, rows, noise, truncates=truncates)
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])


def test_a_row_is_drawn_alike_in_any_company(kernels: NativeKernels) -> None:
    scores, noise = scores_of("normal", 20_011, torch.float32), noise_field(20_011)
    for rows in kinds_of(20_011):
        together = kernels.draw(scores, rows, noise, truncates=True)[0]
        for row in range(NUM_ROWS):
            alone = kernels.draw(scores[row : row + 1], rows.select(torch.tensor([row])), noise, truncates=True)[0]
            assert torch.equal(alone, together[row : row + 1])


def test_rows_without_a_finite_maximum_disturb_no_other(kernels: NativeKernels) -> None:
    """Their tokens are invalid, and their maxima say so."""
    scores, noise = scores_of("normal", 700, torch.float32), noise_field(700)
    for rows in kinds_of(700):
        expected = kernels.draw(scores, rows, noise, truncates=True)[0]
        broken = scores.clone()
        broken[3], broken[5], broken[7, 699], broken[9, 0] = float("nan"), -torch.inf, float("nan"), torch.inf
        found, tops = kernels.draw(broken, rows, noise, truncates=True)
        others = [row for row in range(NUM_ROWS) if row not in (3, 5, 7, 9)]
        assert torch.equal(found[others], expected[others])
        assert ((found >= 0) & (found < 700)).all()
        assert tops[[3, 7]].isnan().all()
        assert tops[[5, 9]].tolist() == [-torch.inf, torch.inf]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_what_top_p_keeps(kernels: NativeKernels, top_p: float) -> None:
    """Many draws of one row: no token outside the nucleus, and the last inside comes."""
    scores = scores_of("normal", 700, torch.float32)[:1].expand(4000, -1)
    rows = rows_of([0], [top_p], [0.0], torch.float32)
    one = rows.select(torch.zeros(4000, dtype=torch.int64))
    rows = replace(
        one, keys=torch.randint(-(2**31), 2**31, (4000, 3), dtype=torch.int32), temperature=one.temperature + 1
    )
    drawn = set(kernels.draw(scores, rows, noise_field(700), truncates=True)[0].tolist())
    weights = (scores[0].double() / rows.temperature[0].double()).softmax(0).sort(descending=True)
    kept = set(weights.indices[: int((weights.values.cumsum(0) - weights.values < top_p).sum())].tolist())
    assert drawn <= kept
    assert len(drawn) > len(kept) / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_sampler_draws_the_same_tokens_with_and_without(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Rows of every kind in one batch; scores in float64 are left to the definition."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0.8),
        SamplingParams(temperature=1.0, top_k=50),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05),
        SamplingParams(temperature=1.0, allowed_token_ids=tuple(range(0, 2500, 7))),
        SamplingParams(temperature=1.0, top_k=100, typical_p=0.6),
        SamplingParams(temperature=1.1, top_p=0.95, typical_p=0.7),
        SamplingParams(temperature=1.5, top_p=0.5, min_p=0.01, typical_p=0.9),
        SamplingParams(temperature=1.1, top_k=40, top_p=0.95, min_p=0.01, repetition_penalty=1.2),
    ]
    params = [params[row % len(params)] for row in range(NUM_ROWS)]
    logits = scores_of("normal", 2500, dtype)
    tokens = torch.randint(0, 2500, (NUM_ROWS, 64), generator=torch.Generator().manual_seed(1))
    found: list[tuple[int, ...]] = []
    for draw in (None, kernels.draw):
        sampler = Sampler(NUM_ROWS, 2500, "cpu", draw=draw)
        for row, sampling in enumerate(params):
            sampler.set_row(row, sequence([1] * 10, replace(sampling, seed=row), row=row))
        found.append(
            sampler.sample(logits, list(range(NUM_ROWS)), [20 + row for row in range(NUM_ROWS)], tokens)
            .to_host()
            .token_ids
        )
    assert found[0] == found[1]
