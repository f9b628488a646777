"""Dense attention oracle: Transformers' own code in the model's dtype.

Transformers' eager attention takes its softmax in float32, which in a float64 comparison is the larger error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

NAME = "dense_oracle"


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """query, key, value [batch, heads, tokens, dim] -> [batch, tokens, heads, dim]."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scaling = options.get("scaling") or query.shape[-1] ** -0.5
    scores = query @ key.transpose(-1, -2) * scaling
    if options.get("softcap"):
        scores = torch.tanh(scores / options["softcap"]) * options["softcap"]
    assert attention_mask is not None
    scores = scores + attention_mask
    if options.get("s_aux") is not None:
        sinks = options["s_aux"].to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return (torch.softmax(scores, -1)[..., : key.shape[2]] @ value).transpose(1, 2).contiguous(), None


def make_dense(model: PreTrainedModel) -> PreTrainedModel:
    """Switches a model to the oracle's attention."""
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)
    return model


def dense_logits(model: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits that `tokens` behind `prompt` were drawn from [num_tokens, vocab]."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1]


def check_logits(got: Tensor, want: Tensor, tokens: Sequence[int], tolerance: float = 1e-4) -> None:
    """Checks that logits are as far apart as rounding explains; a text may differ only where the two best are closer
    than that. `tolerance`: of the largest logit."""
    allowed = tolerance * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=allowed)
    best = want.topk(2).values
    for i, token in enumerate(tokens):
        assert token == int(want[i].argmax()) or best[i, 0] - best[i, 1] < 2 * allowed


def generated_logits(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> Tensor:
    """Logits of `generate()` [num_tokens, vocab], in float32; the whole text at once may give other logits."""
    forget_lengths(model)
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False}
    out = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, **options
    )
    return torch.cat(out.logits).double()


def forget_lengths(model: nn.Module) -> None:
    """Rotary embeddings with dynamic frequencies keep those of the longest text so far: back to a fresh model's."""
    for module in model.modules():
        if "dynamic" in str(getattr(module, "rope_type", "")):
            module.max_seq_len_cached = module.original_max_seq_len
            module.inv_freq = module.original_inv_freq.clone()


def greedy(
    model: nn.Module, prompt: Sequence[int], num_tokens: int, allowed: Sequence[int] = (), *, min_tokens: int = 0
) -> list[int]:
    """`generate()` without sampling: the new tokens, of those allowed where some are named."""
    forget_lengths(model)
    ids = torch.tensor([list(prompt)])
    options: dict[str, Any] = {"prefix_allowed_tokens_fn": lambda *_: list(allowed)} if allowed else {}
    options |= {"min_new_tokens": min_tokens} if min_tokens else {}
    out = model.generate(  # type: ignore[operator]
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()
