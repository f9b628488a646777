"""Scores and parameters of rows that draw."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from loraplex_server.sampling.draw import DrawRows, row_keys

SHAPES = ["normal", "flat", "few levels", "peaked", "mostly -inf", "huge"]
NUM_ROWS = 24


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
