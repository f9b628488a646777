"""Lookahead training of the base model, together with temporary Medusa heads.

A model that learns only the next token looks up what it copies one token at a time. Its hidden state says little about
the token after that, so no Medusa head can predict it. Trained together with heads for a while, the model looks
further ahead in all formats, and its answers stay the same. The temporary heads are thrown away; the served heads are
trained later, for one adapter each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_demo.datasets import Batch
from loraplex_training.heads import MedusaHeads
from loraplex_training.hidden_states import NOTHING

_FIRST_WEIGHT = 0.3  # weight of the first head's loss; the next token's loss has weight 1
_DECAY = 0.8  # from head to head: tokens further ahead can be predicted less often


class ModelWithHeads(nn.Module):
    """A model and its temporary heads."""

    def __init__(self, model: Any, num_heads: int) -> None:
        super().__init__()
        self.model = model
        self.heads = MedusaHeads(num_heads, 1, model.config.hidden_size)


def lookahead_loss(both: ModelWithHeads, batch: Batch) -> Tensor:
    """Cross entropy of the next token plus the weighted cross entropies of the heads' tokens."""
    hidden = both.model.model(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    counts = batch.counts[:, 1:]
    states = hidden[:, :-1][counts]  # [num_rows, hidden]
    loss = F.cross_entropy(both.model.lm_head(states), batch.token_ids[:, 1:][counts])
    logits = both.model.lm_head(both.heads(states))  # [heads, num_rows, vocab]
    labels = later_tokens(batch, both.heads.num_heads)[counts]  # [num_rows, heads]
    for idx, of_head in enumerate(logits):
        # Sum, not mean: far heads may have no label at all in a batch of very short answers.
        missed = F.cross_entropy(of_head, labels[:, idx], ignore_index=NOTHING, reduction="sum")
        loss = loss + _FIRST_WEIGHT * _DECAY**idx * missed / labels[:, idx].ne(NOTHING).sum().clamp(min=1)
    return loss


def later_tokens(batch: Batch, num_heads: int) -> Tensor:
    """int64 [num_rows, length - 1, num_heads]: at position p and head i the token of p + 2 + i, if it counts."""
    tokens = torch.where(batch.counts, batch.token_ids, NOTHING)
    tokens = F.pad(tokens, (0, num_heads), value=NOTHING)
    return tokens[:, 2:].unfold(1, num_heads, 1)
