"""Model shape, adapters and batches of the GPU benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

POPULARITIES = ("identical", "uniform", "skewed", "distinct")


@dataclass(frozen=True)
class Shape:
    """One benchmark. `batches` in the order of their importance: what time is left out of is the end."""

    name: str
    fields: dict[str, Any] = field(repr=False)  # of the LlamaConfig
    dtype: torch.dtype = torch.bfloat16
    rank: int = 16
    max_rank: int | None = None  # what the server is told to take at most; None: its default
    context: int = 512  # tokens before the step
    batches: tuple[int, ...] = (8, 32, 1, 64)
    num_draft_tokens: int = 4
    verify_batch: int = 8
    prompts: tuple[tuple[int, int], ...] = (
        (1, 100),
        (1, 512),
        (1, 520),
        (2, 512),
    )  # of one step: how many, tokens of each
    num_rounds: int = 7
    num_steps: int = 16  # of a round, the untimed first ones come on top

    @property
    def max_batch(self) -> int:
        return max(*self.batches, self.verify_batch)

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the longest step."""
        return max(self.max_batch * (self.num_draft_tokens + 1), *(num * tokens for num, tokens in self.prompts))

    @property
    def max_context(self) -> int:
        """Longest context in tokens, with room for those that a round's steps add, rejected drafts included."""
        return self.context + (self.num_draft_tokens + 1) * (self.num_steps + 8)


SHAPES = {
    "llama-8b": Shape(
        "llama-8b",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "tiny": Shape(
        "tiny",
        {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        context=24,
        rank=4,
        batches=(8, 2),
        verify_batch=2,
        prompts=((1, 24), (2, 20)),
        num_rounds=2,
        num_steps=3,
    ),
}


def make_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """Random weights, made on the device: nothing is read from a disk. The head's are its own, not the embedding's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **shape.fields,
        max_position_embeddings=max(4096, shape.max_context),
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=shape.dtype)
