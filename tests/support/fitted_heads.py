"""Medusa heads fitted to given texts within a moment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def text_states(model: Any, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """The states that the head makes each token of `text` of [len(text), hidden]."""
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False)
    hook.remove()
    return seen[0][0, len(prompt) - 1 : -1].clone()


def fit_heads(
    examples: Sequence[tuple[Tensor, Sequence[int]]],
    num_heads: int,
    *,
    vocab_size: int,
    base_head: Tensor | None = None,
    num_layers: int = 1,
) -> dict[str, Tensor]:
    """Heads as files have them that know these texts by heart: `examples` are the states and tokens of each. With
    `base_head` [vocab, hidden] they go through that, else each has a projection of its own."""
    torch.manual_seed(0)
    hidden = examples[0][0].shape[1]
    tensors: dict[str, Tensor] = {}
    for idx in range(num_heads):
        x = torch.cat([states[: len(text) - 1 - idx] for states, text in examples])
        y = torch.tensor([token_id for _, text in examples for token_id in text[idx + 1 :]])
        blocks = [
            (torch.randn(hidden, hidden, dtype=x.dtype) * 0.3 / hidden**0.5, torch.zeros(hidden, dtype=x.dtype))
            for _ in range(num_layers)
        ]
        projection = torch.zeros(vocab_size, hidden, dtype=x.dtype) if base_head is None else base_head
        trained = [tensor for block in blocks for tensor in block] + ([projection] if base_head is None else [])
        optimizer = torch.optim.Adam([tensor.requires_grad_() for tensor in trained], lr=0.05)
        for _ in range(150):
            z = x
            for weight, bias in blocks:
                z = z + F.silu(F.linear(z, weight, bias))
            loss = F.cross_entropy(F.linear(z, projection), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for layer, (weight, bias) in enumerate(blocks):
            tensors[f"{idx}.{layer}.linear.weight"] = weight.detach()
            tensors[f"{idx}.{layer}.linear.bias"] = bias.detach()
        if base_head is None:
            tensors[f"{idx}.{num_layers}.weight"] = projection.detach()
    return tensors
