"""Shortcuts of drawing equal the definition."""

from __future__ import annotations

import math

import pytest
import torch
from support.sampling_oracle import noise_field
from torch import Tensor

from loraplex_server.sampling import draw
from loraplex_server.sampling.draw import (
    BLOCK,
    DrawRows,
    block_ids,
    block_max,
    draw_dense,
    draw_narrow,
    draw_open,
    row_argmax,
)
from loraplex_server.sampling.noise import row_keys

NUM_ROWS = 24
SIZES = [1, 2, 63, 64, 65, 700, 2500]


def scores_of(shape: str, vocab_size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    normal = torch.randn(NUM_ROWS, vocab_size, generator=generator, dtype=torch.float64)
    match shape:
        case "normal":
            scores = normal * 3
        case "flat":
            scores = torch.zeros_like(normal)
        case "few levels":
            scores = (normal * 2).round() / 2
        case "peaked":
            scores = normal - 30
            scores[:, vocab_size // 3] = 10
        case "mostly -inf":
            scores = normal.masked_fill(torch.rand(normal.shape, generator=generator) < 0.97, -torch.inf)
            scores[:, -1] = 0
        case _:
            scores = normal * 1e4
    return scores.to(dtype)


def rows_of(top_k: list[int], top_p: list[float], min_p: list[float], dtype: torch.dtype) -> DrawRows:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat(NUM_ROWS)[:NUM_ROWS].unsqueeze(1)

    k, p = column([float(value) for value in top_k]).long(), column(top_p)
    return DrawRows(
        keys=row_keys(torch.arange(NUM_ROWS), torch.arange(NUM_ROWS) + 100),
        temperature=column([0.3, 1.0, 1.7, 1e-30]).to(dtype),
        top_k=k,
        top_p=p,
        log_min_p=column([math.log(value) if value else -math.inf for value in min_p]).to(dtype),
        max_top_k=int(k.max()),
        has_open_top_p=bool(((k == 0) & (p < 1)).any()),
    )


SHAPES = ["normal", "flat", "few levels", "peaked", "mostly -inf", "huge"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_open_rows(shape: str, vocab_size: int, dtype: torch.dtype) -> None:
    scores, rows = scores_of(shape, vocab_size, dtype), rows_of([0], [1.0], [0.0], dtype)
    noise = noise_field(vocab_size)
    expected = draw_dense(scores, rows, noise, truncates=False)
    found = draw_open(scores, rows, noise)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", SIZES)
def test_narrow_rows(shape: str, vocab_size: int, dtype: torch.dtype) -> None:
    scores, noise = scores_of(shape, vocab_size, dtype), noise_field(vocab_size)
    top_k = [min(k, vocab_size) for k in (0, 1, 5, 0, 60, 64, 70, 1500, 0)]
    top_p = [0.9, 0.5, 1.0, 1e-3, 0.99, 1.0, 0.999, 0.97]
    min_p = [0.0, 0.05, 1.0, 0.0, 0.3]
    for rows in (
        rows_of(top_k, top_p, min_p, dtype),
        rows_of(top_k, [1.0], [0.0], dtype),
        rows_of([0], top_p, [0.0], dtype),
        rows_of([0], [1.0], [0.1, 0.9, 1e-6], dtype),
        rows_of([0], [0.9999], [1e-4], dtype),
    ):
        expected = draw_dense(scores, rows, noise, truncates=True)
        found = draw_narrow(scores, rows, noise)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of("normal", 2500, torch.float32)
    noise = noise_field(2500)
    is_open, narrow = rows_of([0], [1.0], [0.0], scores.dtype), rows_of([0, 7, 300], [0.9, 1.0], [0.0], scores.dtype)
    expected = draw_open(scores, is_open, noise)[0], draw_narrow(scores, narrow, noise)[0]
    monkeypatch.setattr(draw, "_CHUNK_COLS", 3 * BLOCK)
    monkeypatch.setattr(draw, "_CHUNK_ROWS", 5)
    monkeypatch.setattr(draw, "_MAX_ELEMENTS", 7000)
    assert torch.equal(draw_open(scores, is_open, noise)[0], expected[0])
    assert torch.equal(draw_narrow(scores, narrow, noise)[0], expected[1])
    assert torch.equal(draw_dense(scores, is_open, noise, truncates=False)[0], expected[0])
    assert torch.equal(draw_dense(scores, narrow, noise, truncates=True)[0], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("num_values", [1, 64, 511, 512, 513, 1024, 1281])
def test_row_argmax(num_values: int, dtype: torch.dtype) -> None:
    """bfloat16 rounds to many ties, of which the lowest index wins."""
    values = torch.randn(50, num_values, generator=torch.Generator().manual_seed(1)).to(dtype)
    best, idx = row_argmax(values)
    for row in range(50):
        highest = max(values[row].tolist())
        assert float(best[row]) == highest
        assert int(idx[row]) == values[row].tolist().index(highest)


def test_row_argmax_of_a_view() -> None:
    values = torch.randn(6, 4000)[::2, 100:3100]
    assert torch.equal(row_argmax(values)[1], values.argmax(1))


def test_blocks_cover_a_row_once() -> None:
    values = torch.arange(150.0).unsqueeze(0)
    assert block_max(values).tolist() == [[63.0, 127.0, 149.0]]
    ids, exists = block_ids(torch.tensor([[0, 1, 2]]), 150)
    assert ids[exists].tolist() == list(range(150))
    assert int(ids.max()) == 149
