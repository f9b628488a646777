"""A trial run of a model: attention is replaced by something that shows each layer's call and passes values on.

Every token is then computed by itself, and shows its queries and keys in each layer, and its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from loraplex_server.layers import attention_interface as interface
from loraplex_server.layers.spec import AttentionSpec

NUM_TOKENS = 9
# Arguments that change attention in a way that AttentionSpec does not describe.
UNKNOWN_TERMS = ("s_aux", "sinks", "position_bias", "attn_bias", "attention_bias", "alibi", "head_mask")


class Refusal(Exception):
    """Raised inside a forward; becomes UnsupportedModel with the model's name."""


class Recorder:
    """Stands for attention during the probe: records its call and passes each token's own value on."""

    def __init__(self, module: nn.Module, owner: Recording) -> None:
        self.module = module
        self.owner = owner

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        self.owner.saw(self.module, query, key, value, attention_mask, options)
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2).contiguous()


class Recording:
    """What one run has shown. `has_plain_positions` is False where positions jump: Transformers takes that for packed
    sequences and makes masks of another kind."""

    def __init__(self, text_config: Any, has_plain_positions: bool = True) -> None:
        self.layer_types: list[str | None] = list(getattr(text_config, "layer_types", None) or ())
        self.config_window: int | None = getattr(text_config, "sliding_window", None)
        self.has_plain_positions = has_plain_positions
        self.attention: list[tuple[nn.Module, AttentionSpec]] = []
        self.states: list[Tensor] = []  # queries and keys of each layer [heads, NUM_TOKENS, dim]
        self.logits = torch.empty(0)  # [len(kept), num_logits]
        self.kept: tuple[int, ...] = ()  # tokens whose logits these are

    def saw(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> None:
        if any(known is module for known, _ in self.attention):
            raise Refusal("an attention layer runs several times per token")
        if query.shape[0] != 1 or query.shape[2] != NUM_TOKENS or key.shape[2] != NUM_TOKENS:
            raise Refusal("its attention does not see the step's tokens as one row")
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1] or query.shape[3] != key.shape[3]:
            raise Refusal("its attention heads have a shape that paged attention does not know")
        for name in UNKNOWN_TERMS:
            if options.get(name) is not None:
                raise Refusal(f"its attention has a term ({name}) that paged attention does not compute yet")
        if options.get("is_causal") is False:
            raise Refusal("it attends to later tokens")
        scaling = options.get("scaling")
        if isinstance(scaling, Tensor):
            raise Refusal("the scaling of its attention is computed for each call")
        softcap = options.get("softcap")
        spec = AttentionSpec(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            k_dim=key.shape[3],
            v_dim=value.shape[3],
            scaling=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            window=self._window(len(self.attention), mask, options.get("sliding_window")),
            softcap=float(softcap) if softcap else None,
        )
        self.attention.append((module, spec))
        self.states += [query[0].clone(), key[0].clone()]

    @property
    def specs(self) -> list[AttentionSpec]:
        return [spec for _, spec in self.attention]

    def is_same_as(self, other: Recording, place: int) -> bool:
        """Whether the token at `place`, of those whose logits were asked for, was computed as in the other run."""
        states = zip(self.states, other.states, strict=True)
        logits = [run.logits[run.kept.index(place)] for run in (self, other)]
        return _same(*logits) and all(_same(a[:, place], b[:, place]) for a, b in states)

    def _window(self, layer_idx: int, mask: Tensor | None, keyword: Any) -> int | None:
        """The mask that Transformers makes for the layer decides; without one the keyword, then the configuration."""
        if mask is not None and self.has_plain_positions:
            if not hasattr(mask, interface.WINDOW):
                raise Refusal("it builds attention masks of its own")
            found = getattr(mask, interface.WINDOW)
            if isinstance(found, str):
                raise Refusal(f"its attention uses {found}")
            return found
        if keyword is not None:
            return int(keyword)
        layer_type = self.layer_types[layer_idx] if layer_idx < len(self.layer_types) else None
        return self.config_window if layer_type == "sliding_attention" else None


def trial_run(
    model: PreTrainedModel,
    recording: Recording,
    ids: Tensor,
    positions: Tensor,
    kept: Sequence[int],
    past: Cache | None = None,
) -> Recording:
    """Fills `recording`; `kept`: tokens whose logits are asked for. Raises Refusal, for whatever the model raises."""
    modules = list(model.modules())
    for module in modules:
        setattr(module, interface.HANDLE, Recorder(module, recording))
    options: dict[str, Any] = {"use_cache": False} if past is None else {"use_cache": True, "past_key_values": past}
    try:
        with torch.inference_mode():
            rows = torch.tensor(kept, device=ids.device)
            logits: Tensor = model(input_ids=ids, position_ids=positions, logits_to_keep=rows, **options).logits
    except (Refusal, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise Refusal(f"a trial run raised {type(error).__name__}: {error}") from error
    finally:
        for module in modules:
            delattr(module, interface.HANDLE)
    if logits.shape[:2] != (1, len(kept)):
        raise Refusal("it computes logits for other rows than it is asked for")
    recording.logits, recording.kept = logits[0], tuple(kept)
    return recording


def vocab_size(model: PreTrainedModel) -> int:
    return cast(Tensor, model.get_input_embeddings().weight).shape[0]


def plain_inputs(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Token ids and positions, both [1, NUM_TOKENS]."""
    positions = torch.arange(NUM_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    return positions.remainder(max(1, vocab_size(model) - 1)), positions


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of a differently blocked product."""
    tolerance = 1e-4 if one.dtype.itemsize >= 4 else 3e-2
    return bool((one - other).abs().max() <= tolerance * one.abs().max().clamp_min(1e-6))
