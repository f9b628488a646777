"""What changes scores before a token is drawn: logit bias, penalties, and bans of end-of-sequence before min_tokens.

Each function changes some rows of `scores` in place, for all rows of a step that use it at once. Definitions and order
are those of Transformers' `generate()`; frequency and presence penalties, which it lacks, come after its repetition
penalty and look at the output only.

Knows scores and histories; neither requests nor what drawing does with the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Elements of the table of counts at once. On a CPU more than stays in the cache is slower than several rounds.
_MAX_ELEMENTS_CPU, _MAX_ELEMENTS = 1 << 19, 1 << 26


@dataclass(frozen=True, slots=True)
class History:
    """The tokens before the one that is sampled, of some rows. All on the device of the scores."""

    tokens: Tensor  # [max_rows, max_len] every sequence's tokens, drafts included
    rows: Tensor  # [n] which of them
    num_prompt: Tensor  # [n, 1]
    positions: Tensor  # [n, 1] of the sampled token: the history ends before it
    max_position: int
    max_output: int  # of all rows: positions - num_prompt

    def all(self) -> tuple[Tensor, Tensor]:
        """Token ids `[n, max_position]` and which of them belong to the history."""
        places = torch.arange(self.max_position, device=self.tokens.device)
        ids = self.tokens[:, : self.max_position].index_select(0, self.rows).to(torch.int64)
        return ids, places < self.positions

    def output(self) -> tuple[Tensor, Tensor]:
        """Token ids `[n, max_output]` behind the prompt, and which of them belong to the history."""
        places = self.num_prompt + torch.arange(self.max_output, device=self.tokens.device)
        is_valid = places < self.positions
        places = places.clamp(max=self.tokens.shape[1] - 1)
        return self.tokens[self.rows.unsqueeze(1), places].to(torch.int64), is_valid


def add_bias(scores: Tensor, row_idx: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """Adds `values[i]` at `[row_idx[i], token_ids[i]]`. A row names a token at most once."""
    scores.index_put_((row_idx, token_ids), values.to(scores.dtype), accumulate=True)


def ban(scores: Tensor, row_idx: Tensor, token_ids: Tensor) -> None:
    """No token `token_ids[i]` in row `row_idx[i]`."""
    scores.index_put_((row_idx, token_ids), scores.new_full((), -torch.inf))


def penalize_repetition(scores: Tensor, row_idx: Tensor, history: History, penalty: Tensor) -> None:
    """Divides positive and multiplies negative scores of tokens in prompt or output by the row's penalty `[n, 1]`."""
    ids, is_valid = history.all()
    # What is past the history stands for its first token: one more mention changes nothing.
    places = _places(scores, row_idx, torch.where(is_valid, ids, ids[:, :1]))
    flat = scores.view(-1)
    old = flat[places]
    flat[places] = torch.where(old < 0, old * penalty, old / penalty)


def penalize_counts(scores: Tensor, row_idx: Tensor, history: History, frequency: Tensor, presence: Tensor) -> None:
    """Subtracts `frequency` per occurrence in the output and `presence` once, both `[n, 1]`."""
    if history.max_output <= 0:
        return
    ids, is_valid = history.output()
    # What is past the history stands for token 0, with whatever count that has.
    ids = ids.masked_fill(~is_valid, 0)
    weights = is_valid.to(scores.dtype)
    flat = scores.view(-1)
    limit = _MAX_ELEMENTS_CPU if scores.device.type == "cpu" else _MAX_ELEMENTS
    chunk = max(1, limit // scores.shape[1])
    for start in range(0, len(row_idx), chunk):
        part = slice(start, start + chunk)
        counts = scores.new_zeros(ids[part].shape[0], scores.shape[1]).scatter_add_(1, ids[part], weights[part])
        count = counts.gather(1, ids[part])
        places = _places(scores, row_idx[part], ids[part])
        flat[places] = flat[places] - frequency[part] * count - presence[part] * (count > 0)


def _places(scores: Tensor, row_idx: Tensor, token_ids: Tensor) -> Tensor:
    """Indices into flattened scores. Duplicates are written with equal values, so their order does not matter."""
    return row_idx.unsqueeze(1) * scores.shape[1] + token_ids


def flatten(entries: Sequence[tuple[int, Tensor]]) -> tuple[Tensor, Tensor]:
    """`(row, ids)` pairs as two parallel tensors, on the host."""
    counts = torch.tensor([len(ids) for _, ids in entries])
    rows = torch.tensor([row for row, _ in entries], dtype=torch.int64)
    return rows.repeat_interleave(counts), torch.cat([ids for _, ids in entries])
