"""Triton kernel of a draw: scaled scores plus noise, and the largest of them.

Needs triton; runs on CUDA, and on a CPU in Triton's interpreter for tests. One pass over the scores takes the place of
some twenty tensor operations, to the last bit: each product, sum and quotient is rounded by itself, as theirs are.
"""

# Triton evaluates annotations, so parameters have none but `constexpr`; constants are upper case by its custom.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false
# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from loraplex_server.sampling.draw import DrawRows, NoiseField

# Scores of one program, in which a thread has eight: 32 programs a row of a large vocabulary.
BLOCK = 4096
NUM_WARPS = 16


# Scores may come in parts, whose rows may begin at any address.
@triton.jit(do_not_specialize_on_alignment=["scores_ptr"])
def best_kernel(
    best_ptr,  # float32 [num_rows, num_blocks]
    ids_ptr,  # int64 [num_rows, num_blocks]
    scores_ptr,  # float32 [num_rows, vocab_size]
    tops_ptr,  # float32 [num_rows]
    temperatures_ptr,  # float32 [num_rows]
    thresholds_ptr,  # float32 [num_rows], read with TRUNCATES only, as the next one
    log_min_p_ptr,  # float32 [num_rows]
    keys_ptr,  # int32 [num_rows, 3]
    mixed_ids_ptr,  # int32 [vocab_size]
    values_ptr,  # float32 [cells]
    slopes_ptr,  # float32 [cells]
    vocab_size,
    score_stride,
    TRUNCATES: tl.constexpr,
    LOW_BITS: tl.constexpr,
    LOW_MASK: tl.constexpr,
    HALF_CELLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of each block of a row. Grid: rows x blocks."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    n = start + tl.arange(0, BLOCK)
    inside = n < vocab_size
    score = tl.load(scores_ptr + row * score_stride + n, mask=inside, other=float("-inf"))
    scaled = tl.div_rn(score - tl.load(tops_ptr + row), tl.load(temperatures_ptr + row))
    hashed = tl.load(mixed_ids_ptr + n, mask=inside, other=0) ^ tl.load(keys_ptr + row * 3)
    hashed = hashed * tl.load(keys_ptr + row * 3 + 1)
    hashed = hashed ^ (hashed >> 15)
    hashed = hashed * tl.load(keys_ptr + row * 3 + 2)
    bits = hashed.to(tl.float32).to(tl.int32, bitcast=True)
    cell = (bits >> LOW_BITS) + HALF_CELLS
    low = (bits & LOW_MASK).to(tl.float32)
    noise = tl.load(slopes_ptr + cell) * low + tl.load(values_ptr + cell)
    noisy = scaled + noise
    if TRUNCATES:
        is_kept = (score >= tl.load(thresholds_ptr + row)) & (scaled >= tl.load(log_min_p_ptr + row))
        noisy = tl.where(is_kept, noisy, float("-inf"))
    noisy = tl.where(inside, noisy, float("-inf"))
    best, place = tl.max(noisy, axis=0, return_indices=True, return_indices_tie_break_left=True)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + at, best)
    # In a row of NaN the place that is left may lie behind the last token.
    tl.store(ids_ptr + at, tl.minimum(start + place, vocab_size - 1).to(tl.int64))


# Its type knows neither launch options nor that a plain int becomes a constant.
_best: Any = best_kernel


def draw_noisy(scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField, threshold: Tensor | None) -> Tensor:
    """Implements NoisyArgmax, in float32."""
    num_rows, vocab_size = scores.shape
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    num_blocks = -(-vocab_size // BLOCK)
    best = torch.empty(num_rows, num_blocks, dtype=torch.float32, device=scores.device)
    ids = torch.empty(num_rows, num_blocks, dtype=torch.int64, device=scores.device)
    _best[(num_rows, num_blocks)](
        *(best, ids, scores, tops.contiguous(), rows.temperature.contiguous(), threshold, rows.log_min_p.contiguous()),
        *(rows.keys.contiguous(), noise.mixed_ids, noise.values, noise.slopes, vocab_size, scores.stride(0)),
        TRUNCATES=threshold is not None,
        LOW_BITS=noise.low_bits,
        LOW_MASK=(1 << noise.low_bits) - 1,
        HALF_CELLS=len(noise.values) // 2,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        enable_fp_fusion=False,  # a product in one instruction with the sum is not rounded by itself
    )
    return ids.gather(1, best.max(dim=1, keepdim=True).indices).squeeze(1)
