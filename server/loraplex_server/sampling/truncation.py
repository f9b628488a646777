"""Which tokens may be drawn: top-k, top-p and min-p as thresholds on a row's scores.

A threshold keeps every token that ties with the last one kept, so that the kept set is a function of the scores and not
of how a device orders equal ones. Top-p counts within what top-k kept; min-p compares with the most likely token.
Sums are float64, so that it does not matter in which order they were made.

Knows scores and parameters; draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_server.sampling.blocks import BLOCK, block_ids

# Candidates looked up beyond the k-th, so that a few ties do not need a second look.
_SPARE = 16


@dataclass(frozen=True, slots=True)
class DrawRows:
    """What drawing needs to know of each row; on the device of the scores."""

    keys: Tensor  # [num_rows, 3] int32, of the noise
    temperature: Tensor  # [num_rows, 1] as the scores, > 0
    top_k: Tensor  # [num_rows, 1] int64, 0: off
    top_p: Tensor  # [num_rows, 1] float64, 1: off
    log_min_p: Tensor  # [num_rows, 1] as the scores, -inf: off
    max_top_k: int  # of all rows; known on the host
    has_open_top_p: bool  # a row has top-p without top-k

    def select(self, idx: Tensor) -> DrawRows:
        """Some of the rows. The two host values stay true as bounds."""
        columns = (self.keys, self.temperature, self.top_k, self.top_p, self.log_min_p)
        keys, temperature, top_k, top_p, log_min_p = (column.index_select(0, idx) for column in columns)
        return DrawRows(keys, temperature, top_k, top_p, log_min_p, self.max_top_k, self.has_open_top_p)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Each row's best tokens, best first; past a row's own share `is_kept` is False."""

    values: Tensor  # [num_rows, num_candidates] scores
    token_ids: Tensor  # [num_rows, num_candidates]
    is_kept: Tensor  # [num_rows, num_candidates]


def top_p_threshold(values: Tensor, weights: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """`[num_rows, 1]`: the score of the last token that top-p keeps, -inf where it is off.

    `values` are sorted, best first; `weights` their unnormalised float64 probabilities, 0 for what is out already;
    `mass` the sum over all that is not out.
    """
    before = weights.cumsum(-1) - weights
    # A token stays while the tokens before it have not reached p; the first always does.
    num_kept = (before < top_p * mass).sum(-1, keepdim=True).clamp_(min=1)
    threshold = values.gather(1, num_kept - 1)
    return threshold.masked_fill(top_p >= 1.0, -torch.inf)


def probability_weights(values: Tensor, tops: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities relative to the best token's, in float64."""
    return ((values - tops) / temperature).to(torch.float64).exp_()


def kept_mask(scores: Tensor, tops: Tensor, rows: DrawRows) -> Tensor:
    """Which of all tokens may be drawn: `[num_rows, vocab_size]`. Sorts where it must; waits for no device."""
    vocab_size = scores.shape[1]
    count = vocab_size if rows.has_open_top_p else max(1, min(rows.max_top_k, vocab_size))
    values = scores.topk(count, dim=-1).values if count < vocab_size else scores.sort(dim=-1, descending=True).values
    kth = values.gather(1, rows.top_k.clamp(1, count) - 1)
    threshold = kth.masked_fill(rows.top_k == 0, -torch.inf)
    # Ties of the k-th beyond `count` belong to the mass, so it is summed over everything.
    mass = probability_weights(scores, tops, rows.temperature).masked_fill_(scores < threshold, 0.0).sum(-1, True)
    weights = probability_weights(values, tops, rows.temperature).masked_fill_(values < threshold, 0.0)
    threshold = torch.maximum(threshold, top_p_threshold(values, weights, mass, rows.top_p))
    return (scores >= threshold) & ((scores - tops) / rows.temperature >= rows.log_min_p)


def find_candidates(scores: Tensor, maxima: Tensor, k: Tensor, floor: Tensor) -> Candidates:
    """Every token whose score is at least the row's k-th best (k > 0) and at least `floor`. For the CPU: it branches.

    `maxima` are `block_max(scores)`. The k largest of them are k different tokens' scores, so the k-th best token has
    no less than the k-th largest maximum, and everything sought lies in the blocks that reach it.
    """
    vocab_size = scores.shape[1]
    _, blocks, _ = _largest(maxima, k, floor)
    if 2 * blocks.shape[1] * BLOCK >= vocab_size:
        values, ids = scores, torch.arange(vocab_size).expand(scores.shape)
    else:
        ids, exists = block_ids(blocks, vocab_size)
        values = scores.gather(1, ids).masked_fill_(~exists, -torch.inf)
    kept, idx, threshold = _largest(values, k, floor)
    return Candidates(kept, ids.gather(1, idx), kept >= threshold)


def _largest(values: Tensor, k: Tensor, floor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values that are at least the row's k-th largest (k > 0) and at least `floor`, best first, with their indices, and
    that threshold `[num_rows, 1]`. Rows with fewer of them go on with lower ones."""
    max_k, num_values = int(k.max()), values.shape[1]
    count = min(max_k + _SPARE, num_values)
    best = values.topk(count)
    kth = best.values.gather(1, k.clamp(1, count) - 1)
    threshold = torch.maximum(kth.masked_fill((k == 0) | (k > num_values), -torch.inf), floor)
    num_found = max(1, int(((values >= threshold) & (values > -torch.inf)).sum(-1).max()))
    if num_found > count:
        best = values.topk(num_found)
    return best.values[:, :num_found], best.indices[:, :num_found], threshold


def total_mass(scores: Tensor, tops: Tensor, temperature: Tensor) -> Tensor:
    """`[num_rows, 1]` float64: the sum that normalises all tokens' probabilities; for the CPU."""
    masses = [
        block_sum(((row - top) / t).exp_())
        for row, top, t in zip(scores.split(4), tops.split(4), temperature.split(4), strict=True)
    ]
    return torch.cat(masses)


def block_sum(values: Tensor) -> Tensor:
    """Sums of rows, `[num_rows, 1]` float64: short runs in the values' own precision, these in float64."""
    num_whole = values.shape[1] // BLOCK * BLOCK
    total = values[:, :num_whole].unflatten(1, (-1, BLOCK)).sum(-1).to(torch.float64).sum(-1, keepdim=True)
    return total + values[:, num_whole:].to(torch.float64).sum(-1, keepdim=True)
