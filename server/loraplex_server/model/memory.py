"""How much memory a step takes beside the weights and the KV cache.

A bound by shapes, for whoever sizes the KV cache: memory that the cache takes cannot be had back when a long prompt
comes. It counts tensors that live at the same time in a decoder layer, in the gathered contexts of one attention layer
and behind the head; what of it a model really needs depends on kernels, so whoever uses it leaves some slack.
"""

from __future__ import annotations

from loraplex_server.backends.reference.attention import MAX_GROUP_TOKENS
from loraplex_server.layers.linear import AdaptedHead, AdaptedLinear
from loraplex_server.model.loaded_model import LoadedModel

# Tensors of a layer at once: the residual, its norm (in float32), queries, keys, values and their rotations; and in the
# MLP gate, its activation, up and their product.
NUM_HIDDEN, NUM_WIDE = 10, 4
# Contexts as gathered, and as a kernel lays them out.
NUM_CONTEXTS = 2
# Scores in float32: as they are, tempered, sorted (with ids of 8 bytes), truncated, with noise.
SCORE_BYTES = 4 * 8
# Scores that are made logprobs at once, or all of the rows that draw.
NUM_LOGPROBS = 1 << 24


def step_bytes(loaded: LoadedModel, num_tokens: int, max_rows: int) -> int:
    """Of a step of `num_tokens` tokens, each of which may want its logits, and up to `max_rows` sequences that draw."""
    spec, itemsize = loaded.spec, loaded.dtype.itemsize
    wide = [
        module.out_features
        for module in loaded.targets.values()
        if isinstance(module, AdaptedLinear) and not isinstance(module, AdaptedHead)
    ]
    # Every token goes through so many experts at once.
    num_experts: int = getattr(loaded.model.config.get_text_config(), "num_experts_per_tok", None) or 1
    num_elements = NUM_HIDDEN * spec.hidden_size + NUM_WIDE * num_experts * max(wide, default=spec.hidden_size)
    num_context_tokens = min(MAX_GROUP_TOKENS, max_rows * spec.max_context_tokens)
    num_context_elements = max(layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in spec.layers)
    num_scores = max(min(max_rows, num_tokens) * spec.num_logits, min(num_tokens * spec.num_logits, NUM_LOGPROBS))
    return (
        num_tokens * num_elements * itemsize
        + NUM_CONTEXTS * num_context_tokens * num_context_elements * itemsize
        + num_tokens * spec.num_logits * itemsize
        + num_scores * SCORE_BYTES
    )
