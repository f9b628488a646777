"""Attention modules whose code does not call Transformers' attention interface.

Older families compute scores and softmax in the module's own forward. A module of a known form gets a forward beside
its own: projections and the layout of heads stay the module's, and what lies between them goes through the interface.
Without a handle on the module its own code runs, which the self-test at loading compares with.

Biases by the position of the key (ALiBi) are taken from the family's own functions, for all positions of the context,
because families round them: Falcon to bfloat16, BLOOM to the model's dtype.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from loraplex_server.layers.attention import HANDLE, attend

EAGER = "eager"
IMPLEMENTATION = "_attn_implementation"  # the attribute of a configuration
KEY_BIAS = "loraplex_key_bias"  # the attribute of an attention module: as in AttentionSpec, or None
LOADED_WITH = "loraplex_loaded_with"  # the attribute of a model: its attention implementation when it was loaded
BIAS_MULTIPLE = 32

Forward = Callable[..., tuple[Tensor, None]]


@dataclass(frozen=True, slots=True)
class Form:
    """One form of attention module, as its class shows it."""

    arguments: frozenset[str]  # of its forward
    names: frozenset[str]  # that its forward uses
    forward: Forward  # of the module and the arguments of its own
    # Makes biases [heads, positions] from a module, the Python module that defines it, a number of positions and a
    # dtype.
    biases: Callable[[Any, Any, int, torch.dtype], Tensor | None]
    wants_mask: bool = False  # the model does not run without a mask, which its attention ignores

    def fits(self, module_class: type) -> bool:
        if not issubclass(module_class, nn.Module):
            return False
        forward = inspect.unwrap(module_class.forward)
        code = getattr(forward, "__code__", None)
        return (
            code is not None
            and self.names <= set(code.co_names)
            and self.arguments <= set(inspect.signature(forward).parameters)
        )


def form_of(module_class: type) -> Form | None:
    return next((form for form in FORMS if form.fits(module_class)), None)


def has_known_form(model_class: type) -> bool:
    """True if Transformers' code for this class of models has attention modules of a known form."""
    classes = [one for one in vars(sys.modules[model_class.__module__]).values() if isinstance(one, type)]
    return any(form_of(one) is not None for one in classes)


def install_attention(model: PreTrainedModel, num_positions: int) -> None:
    """Gives attention modules of a known form their other forward, with biases for so many positions."""
    found = [(module, form) for module in model.modules() if (form := form_of(type(module))) is not None]
    if not found:
        return
    first, form = cast(Any, found[0][0]), found[0][1]
    if getattr(first, "slow_but_exact", False) and first.pretraining_tp > 1:
        return  # it reads slices of its output's weight, past any adapter
    dtype = next(first.parameters()).dtype
    biases = form.biases(first, sys.modules[type(first).__module__], num_positions, dtype)
    if biases is not None:
        biases = biases.to(next(first.parameters()).device, torch.promote_types(dtype, torch.float32))
        biases = F.pad(biases, (0, -num_positions % BIAS_MULTIPLE)).contiguous()
    for module, form in found:
        setattr(module, KEY_BIAS, biases)  # the same in all layers
        module.forward = partial(_forward, module, form.forward, module.forward)
    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).__module__ == type(first).__module__:
            module.__class__ = nn.Linear  # a family's own does the same in two operations
    setattr(model, LOADED_WITH, getattr(model.config, IMPLEMENTATION))
    if form.wants_mask:
        model.register_forward_pre_hook(_add_mask, with_kwargs=True)


def use_attention(model: PreTrainedModel, name: str) -> bool:
    """Switches a model to the attention of this name. True if the model has it. `EAGER` is Transformers' own."""
    own: str | None = getattr(model, LOADED_WITH, None)
    if own is not None:
        setattr(model.config, IMPLEMENTATION, own if name == EAGER else name)
        return True
    model.set_attn_implementation(name)
    return getattr(model.config.get_text_config(), IMPLEMENTATION, None) == name


def _forward(module: nn.Module, forward: Forward, own: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return forward(module, *args, **options) if hasattr(module, HANDLE) else own(*args, **options)


def _add_mask(model: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if getattr(model.config, IMPLEMENTATION) != getattr(model, LOADED_WITH):
        options = {**options, "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool)}
    return args, options


# --- forms ------------------------------------------------------------------------------------------------------------


def _bloom(module: Any, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    options = {"scaling": module.inv_norm_factor, KEY_BIAS: getattr(module, KEY_BIAS)}
    out, _weights = attend(module, query, key, value, None, **options)
    return module.dense(out.flatten(2)) + residual, None


def _bloom_biases(module: Any, origin: Any, num_positions: int, dtype: torch.dtype) -> Tensor:
    ones = torch.ones(1, num_positions, dtype=torch.int64)
    return origin.build_alibi_tensor(ones, module.num_heads, dtype)[:, 0]


def _falcon(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    parts = module._split_heads(module.query_key_value(hidden_states))
    query, key, value = (part.transpose(1, 2) for part in parts)
    groups = module.num_heads // module.num_kv_heads
    if module.new_decoder_architecture:  # it repeats them for all heads of a group
        key, value = key[:, ::groups], value[:, ::groups]
    if alibi is None:
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *(position_embeddings or ()))
    options = {"scaling": module.inv_norm_factor, KEY_BIAS: getattr(module, KEY_BIAS)}
    out, _weights = attend(module, query, key, value, None, **options)
    return module.dense(out.flatten(2)), None


def _falcon_biases(module: Any, origin: Any, num_positions: int, dtype: torch.dtype) -> Tensor | None:
    if not module.config.alibi:
        return None
    return _bloom_biases(module, origin, num_positions, dtype) / math.sqrt(module.head_dim)


def _mpt(module: Any, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    mixed = module.Wqkv(hidden_states)
    if module.clip_qkv:
        mixed = mixed.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    parts = mixed.chunk(3, dim=2)
    query, key, value = (part.unflatten(2, (module.n_heads, module.head_dim)).transpose(1, 2) for part in parts)
    options = {"scaling": module.softmax_scale, KEY_BIAS: getattr(module, KEY_BIAS)}
    out, _weights = attend(module, query, key, value, None, **options)
    return module.out_proj(out.flatten(2)), None


def _mpt_biases(module: Any, origin: Any, num_positions: int, dtype: torch.dtype) -> Tensor:
    # Its own count from the last position backwards, which gives the same weights. Near position 0, where most texts
    # lie, float32 has more digits counted forwards.
    slopes = -origin.build_mpt_alibi_tensor(module.n_heads, 2)[:, :, 0]
    return slopes * torch.arange(num_positions)


FORMS = (
    Form(frozenset({"alibi", "residual"}), frozenset({"query_key_value", "_reshape"}), _bloom, _bloom_biases),
    Form(
        frozenset({"alibi", "position_embeddings"}),
        frozenset({"query_key_value", "_split_heads"}),
        _falcon,
        _falcon_biases,
    ),
    Form(frozenset({"position_bias"}), frozenset({"Wqkv", "clip_qkv"}), _mpt, _mpt_biases, wants_mask=True),
)
