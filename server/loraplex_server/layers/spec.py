"""A loaded model as plain data: attention layers, vocabulary, context. The probe finds them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One attention layer."""

    num_heads: int
    num_kv_heads: int
    k_dim: int  # of one head; queries have the same
    v_dim: int
    scaling: float
    window: int | None = None  # a query sees itself and the window-1 tokens before it; None: everything before it
    softcap: float | None = None

    @property
    def num_groups(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What runner, cache and front end need to know of the model."""

    layers: tuple[AttentionSpec, ...]
    vocab_size: int  # token ids that may go in
    num_logits: int  # token ids that may come out
    hidden_size: int  # at the head's input
    max_context_tokens: int
    eos_token_ids: tuple[int, ...] = ()


def kv_block_bytes(spec: ModelSpec, block_size: int, itemsize: int) -> int:
    """Bytes of one KV block in all layers. `itemsize` is that of the cache's dtype."""
    per_token = sum(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in spec.layers)
    return per_token * block_size * itemsize
