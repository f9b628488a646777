"""Handmade Medusa heads and their answers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_adapters.weights import AdapterWeights, LoraFactors, MedusaHead, ResidualLayer
from loraplex_contracts.adapters import AdapterKey


def random_head(
    hidden: int,
    num_blocks: int = 1,
    *,
    num_rows: int | None = None,
    vocab_size: int | None = None,
    has_bias: bool = True,
    dtype: torch.dtype = torch.float64,
) -> MedusaHead:
    """Strong enough to change the most likely token. With `num_rows` a projection of its own; with `vocab_size` its
    rows are that many tokens at random."""
    blocks = tuple(
        ResidualLayer(
            (torch.randn(hidden, hidden, dtype=torch.float64) * 2 / hidden**0.5).to(dtype),
            torch.randn(hidden, dtype=torch.float64).to(dtype) if has_bias else None,
        )
        for _ in range(num_blocks)
    )
    if num_rows is None:
        return MedusaHead(blocks)
    projection = torch.randn(num_rows, hidden, dtype=torch.float64).to(dtype)
    return MedusaHead(blocks, projection, torch.randperm(vocab_size)[:num_rows] if vocab_size else None)


def head_weights(
    name: str, heads: Sequence[MedusaHead], factors: dict[str, LoraFactors] | None = None
) -> AdapterWeights:
    """An adapter of these heads; `name` is a hexadecimal digit."""
    key = AdapterKey("combined" if factors else "medusa", name * 64)
    return AdapterWeights(key, torch.zeros(0, dtype=torch.uint8), factors or {}, tuple(heads))


def head_logits(head: MedusaHead, lm_head: nn.Module, x: Tensor) -> Tensor:
    """x [hidden] -> what its most likely token is read from, by row of the projection."""
    for block in head.layers:
        x = x + F.silu(F.linear(x, block.weight, block.bias))
    return lm_head(x) if head.projection is None else F.linear(x, head.projection)


def best_token(head: MedusaHead, logits: Tensor) -> int:
    best = int(logits.argmax())
    return best if head.token_ids is None else int(head.token_ids[best])


def expected_draft(heads: Sequence[MedusaHead], lm_head: nn.Module, x: Tensor, num_tokens: int) -> tuple[int, ...]:
    with torch.inference_mode():
        return tuple(best_token(head, head_logits(head, lm_head, x)) for head in heads[:num_tokens])


def last_hidden(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Hidden state [hidden] at the last of `token_ids`, after the final norm: the head makes the next token of it."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False, output_hidden_states=True)
        found = out.hidden_states[-1][0, -1]
        head = model.get_output_embeddings()
        assert head is not None
        logits = head(found)
        # Scales and caps behind the head change no order.
        assert int(logits.argmax()) == int(out.logits[0, -1].argmax()), "not the state that the head reads"
    return found
