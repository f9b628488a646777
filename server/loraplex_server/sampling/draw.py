"""Draws one token per row: argmax of score / temperature + noise over the tokens that truncation keeps.

There is one definition (`draw_dense`) and two ways to reach the same token sooner on a CPU: rows that truncate look up
their few candidates first (`draw_narrow`), rows that do not compute bounds for all tokens and the exact value where it
could matter (`draw_open`). Ties go to the lowest token id.

Every function returns token ids and the rows' highest scores; where such a score is not finite, the id means nothing.
Knows no requests; owns nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_server.sampling.blocks import BLOCK, block_ids, block_max
from loraplex_server.sampling.noise import BOUND_SHIFT, NoiseField
from loraplex_server.sampling.truncation import (
    DrawRows,
    find_candidates,
    kept_mask,
    probability_weights,
    top_p_threshold,
    total_mass,
)

# Elements worked on at once: temporaries stay in a CPU core's cache.
_CHUNK_COLS = 512 * BLOCK
_CHUNK_ROWS = 4
# Elements in the larger temporaries of a dense draw or of a candidate search.
_MAX_ELEMENTS = 1 << 23
# Candidates looked up for a top-p that has no top-k, until they hold enough of the probability.
_TOP_P_SEARCHES = (64, 1024)


def draw_dense(scores: Tensor, rows: DrawRows, noise: NoiseField, *, truncates: bool) -> tuple[Tensor, Tensor]:
    """The definition. Does not wait for the device."""
    num_rows = max(1, _MAX_ELEMENTS // scores.shape[1])
    token_ids: list[Tensor] = []
    tops: list[Tensor] = []
    for start in range(0, scores.shape[0], num_rows):
        idx = torch.arange(start, min(start + num_rows, scores.shape[0]), device=scores.device)
        part, part_rows = scores[start : start + num_rows], rows.select(idx)
        top = part.amax(-1, keepdim=True)
        noisy = ((part - top) / part_rows.temperature).add_(noise.dense(part_rows.keys))
        if truncates:
            noisy.masked_fill_(~kept_mask(part, top, part_rows), -torch.inf)
        token_ids.append(noisy.max(dim=-1).indices)
        tops.append(top.squeeze(1))
    return torch.cat(token_ids), torch.cat(tops)


# --- rows that do not truncate, on a CPU ----------------------------------------------------------------------------


def draw_open(scores: Tensor, rows: DrawRows, noise: NoiseField) -> tuple[Tensor, Tensor]:
    """As `draw_dense` without truncation. Exact noise is computed only in blocks whose bound reaches the best found."""
    num_rows, vocab_size = scores.shape
    tops = scores.amax(-1, keepdim=True)
    bounds = _bounds(scores, tops, rows, noise)  # [num_rows, num_blocks]
    row_idx = torch.arange(num_rows)
    first = bounds.argmax(-1)
    best, token_ids = _best_of_blocks(scores, tops, rows, noise, row_idx, first)
    bounds[row_idx, first] = -torch.inf
    others = (bounds >= best.unsqueeze(1)).nonzero()
    if len(others):
        values, ids = _best_of_blocks(scores, tops, rows, noise, others[:, 0], others[:, 1])
        row_idx = torch.cat((row_idx, others[:, 0]))
        values, ids = torch.cat((best, values)), torch.cat((token_ids, ids))
        best = best.scatter_reduce(0, row_idx, values, "amax")
        ids = torch.where(values == best[row_idx], ids, vocab_size - 1)
        token_ids = torch.full_like(token_ids, vocab_size - 1).scatter_reduce(0, row_idx, ids, "amin")
    return token_ids, tops.squeeze(1)


def _bounds(scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField) -> Tensor:
    """Per block, a value that no score / temperature + noise in it exceeds."""
    num_rows, vocab_size = scores.shape
    bounds = scores.new_empty(num_rows, -(-vocab_size // BLOCK))
    for start in range(0, num_rows, _CHUNK_ROWS):
        part = slice(start, start + _CHUNK_ROWS)
        # Faster than dividing; the bounds' margin covers the difference.
        scale = 1.0 / rows.temperature[part]
        for begin in range(0, vocab_size, _CHUNK_COLS):
            end = min(begin + _CHUNK_COLS, vocab_size)
            chunk = scores[part, begin:end] - tops[part]
            chunk = noise.bounds(rows.keys[part], begin, end).to(chunk.dtype).addcmul_(chunk, scale)
            bounds[part, begin // BLOCK : -(-end // BLOCK)] = block_max(chunk)
    return bounds.add_(BOUND_SHIFT)


def _best_of_blocks(
    scores: Tensor, tops: Tensor, rows: DrawRows, noise: NoiseField, row_idx: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """The best value and its token in block `blocks[i]` of row `row_idx[i]`."""
    ids, exists = block_ids(blocks.unsqueeze(1), scores.shape[1])
    scaled = (scores[row_idx.unsqueeze(1), ids] - tops[row_idx]) / rows.temperature[row_idx]
    noisy = scaled.add_(noise.at(rows.keys[row_idx], ids)).masked_fill_(~exists, -torch.inf)
    best = noisy.max(dim=-1)  # ids ascend, so the first is the lowest
    return best.values, ids.gather(1, best.indices.unsqueeze(1)).squeeze(1)


# --- rows that truncate, on a CPU -----------------------------------------------------------------------------------


def draw_narrow(scores: Tensor, rows: DrawRows, noise: NoiseField) -> tuple[Tensor, Tensor]:
    """As `draw_dense` with truncation. Looks up as many candidates as each row needs, rows of like need together."""
    vocab_size = scores.shape[1]
    maxima = block_max(scores)
    tops = maxima.amax(-1, keepdim=True)
    token_ids = torch.zeros(scores.shape[0], dtype=torch.int64)
    is_open = (rows.top_k == 0) & (rows.top_p < 1.0)
    # How many candidates a row certainly needs; 0 where min-p alone decides.
    need = torch.where(is_open, _TOP_P_SEARCHES[0], rows.top_k).squeeze(1)
    pending = tops.isfinite().squeeze(1)
    for size in (*_TOP_P_SEARCHES, vocab_size):
        members = (pending & (need <= size)).nonzero().squeeze(1)
        if not len(members):
            continue
        for idx in members.split(max(1, _MAX_ELEMENTS // (min(size * BLOCK, vocab_size) + vocab_size))):
            everything = len(idx) == scores.shape[0]
            part = scores if everything else scores.index_select(0, idx)
            part_maxima = maxima if everything else maxima.index_select(0, idx)
            part_rows = rows if everything else rows.select(idx)
            ids, is_done = _draw_among(part, part_maxima, part_rows, noise, size)
            done = idx[is_done]
            token_ids[done] = ids[is_done]
            pending[done] = False
    return token_ids, tops.squeeze(1)


def _draw_among(scores: Tensor, maxima: Tensor, rows: DrawRows, noise: NoiseField, size: int) -> tuple[Tensor, Tensor]:
    """Token ids, and for which rows the `size` best tokens were enough to know them."""
    tops = maxima.amax(-1, keepdim=True)
    is_open = (rows.top_k == 0) & (rows.top_p < 1.0)
    k = torch.where(is_open, size, rows.top_k)
    # A little below what min-p keeps: the exact comparison follows.
    floor = tops + rows.temperature * (rows.log_min_p - 1e-3)
    found = find_candidates(scores, maxima, k, floor)
    weights = probability_weights(found.values, tops, rows.temperature).masked_fill_(~found.is_kept, 0.0)
    mass = weights.sum(-1, keepdim=True)
    is_done = torch.ones_like(is_open)
    if bool(is_open.any()):
        idx = is_open.squeeze(1).nonzero().squeeze(1)
        mass[idx] = total_mass(scores.index_select(0, idx), tops[idx], rows.temperature[idx])
        has_mass = weights.sum(-1, keepdim=True) >= rows.top_p * mass
        # Fewer than k: they end where min-p's threshold is, and what lies below does not matter.
        is_short = found.is_kept.sum(-1, keepdim=True) < k
        is_done = ~is_open | has_mass | is_short | (k >= scores.shape[1])
    threshold = top_p_threshold(found.values, weights, mass, rows.top_p)
    scaled = (found.values - tops) / rows.temperature
    keeps = found.is_kept & (found.values >= threshold) & (scaled >= rows.log_min_p)
    noisy = scaled.add_(noise.at(rows.keys, found.token_ids)).masked_fill_(~keeps, -torch.inf)
    ids = torch.where(noisy == noisy.amax(-1, keepdim=True), found.token_ids, scores.shape[1] - 1).amin(-1)
    return ids, is_done.squeeze(1)
