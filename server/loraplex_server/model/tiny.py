"""Tiny copies of model configurations.

A copy has few layers, one of each kind, and narrow ones; what decides how layers compute stays. With random weights it
shows in a moment whether a model can be served. Fields are known by names that Transformers' families share.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from transformers import PreTrainedConfig

VOCAB_SIZE = 101
MAX_LAYERS = 8
Fields = dict[str, Any]  # of a configuration, as its file has them


@dataclass(frozen=True, slots=True)
class Widths:
    """Sizes of a tiny model."""

    head_dim: int = 8
    num_heads: int = 4

    @property
    def hidden(self) -> int:
        return self.head_dim * self.num_heads


# A new value for a field: from the sizes, its old value and the old values of all fields beside it.
Rule = Callable[[Widths, int, Mapping[str, Any]], int]


def _fixed(value: int) -> Rule:
    return lambda _widths, _old, _fields: value


def _at_most(value: int) -> Rule:
    return lambda _widths, old, _fields: min(old, value)


def _hidden(widths: Widths, _old: int, _fields: Mapping[str, Any]) -> int:
    return widths.hidden


def _between(widths: Widths, _old: int, _fields: Mapping[str, Any]) -> int:
    return widths.hidden * 3 // 2


def _head_dim(widths: Widths, _old: int, fields: Mapping[str, Any]) -> int:
    return _mixer_dim(widths, _old, fields) if "state_size" in fields else widths.head_dim


def _whole_head_dim(widths: Widths, old: int, fields: Mapping[str, Any]) -> int:
    """Some families with latent attention say how wide both parts of a head are together."""
    parts = [fields.get(name) or 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim")]
    return 2 * widths.head_dim if all(parts) and sum(parts) == old else _head_dim(widths, old, fields)


def _heads(widths: Widths, _old: int, fields: Mapping[str, Any]) -> int:
    return _MIXER_HEADS if "state_size" in fields else widths.num_heads


def _kv_heads(widths: Widths, old: int, fields: Mapping[str, Any]) -> int:
    names = ("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads")
    num_heads = next((fields[name] for name in names if isinstance(fields.get(name), int)), None)
    return 1 if old == 1 else widths.num_heads if old == num_heads else widths.num_heads // 2


def _mixer_dim(widths: Widths, _old: int, fields: Mapping[str, Any]) -> int:
    expand = fields.get("mamba_expand") or fields.get("expand") or 2
    return int(expand * widths.hidden) // _MIXER_HEADS


_MIXER_HEADS = 8
# The first that matches a field's whole name decides.
_RULES: tuple[tuple[str, Rule], ...] = (
    (r".*vocab(_size)?(_.*)?", _fixed(VOCAB_SIZE)),
    (r"(mamba_)?(n|num)_?groups|mamba_n_groups", _at_most(2)),
    (r"mamba_(n|num)_heads", _fixed(_MIXER_HEADS)),
    (r"n_mamba_heads", _at_most(_MIXER_HEADS)),
    (r"mamba_d_head|mamba_head_?dim", _mixer_dim),
    (r"mamba_d_ssm", lambda widths, _old, _fields: 2 * widths.hidden),
    (r"mamba_d_state|ssm_state_size|state_size", _fixed(8)),
    (r"time_step_rank|mamba_dt_rank", _fixed(4)),
    (r"linear_num_(key_|kv_)heads", _fixed(2)),
    (r"linear_num_(value_)?heads", _fixed(4)),
    (r"linear_(key_|value_)?head_dim", _fixed(16)),
    (r"index_head_dim|(qk_)?rope_head_dim|qk_nope_head_dim|v_head_dim", _head_dim),
    (r"qk_head_dim", lambda widths, _old, _fields: 2 * widths.head_dim),
    (r"index_n_heads", _fixed(2)),
    (r".*(_lora_|hc_low|laurel_|_norm_|adapter_)rank|d_rel|(pronunciation|shape)_embed_dim", _fixed(16)),
    (r"attention_hidden_size", lambda widths, old, fields: widths.hidden * (old // fields.get("hidden_size", old))),
    (r"attention_head_dim", lambda widths, _old, fields: widths.head_dim * (1 + ("attention_hidden_size" in fields))),
    (r"(mlp_|router_|backbone_|out_|text_)?hidden_size(_global)?|d_model|n_embd|lru_width", _hidden),
    (r"(word_)?embed(ding)?_(proj_)?dim|emb_dim|.*embedding_size|dim|input_size|projection_dim", _hidden),
    (r"hidden_size_per_layer_input", _fixed(16)),
    (r".*(num_key_value|num_kv|kv_n)_heads|num_query_groups", _kv_heads),
    (r".*attention_heads|n_heads?|num_heads", _heads),
    (r"head_dim", _whole_head_dim),
    (r"(swa_|global_)head_dim|kv_channels|d_kv|dim_head|d_head|attention_head_size", _head_dim),
    (r"rotary_dim", lambda widths, _old, _fields: widths.head_dim // 2),
    (r".*intermediate_size.*|.*ffn_(dim|hidden_size)|feed_forward_size", _between),
    (r"dff|d_ff|dim_ff|mlp_dim|d_inner|n_inner", _between),
    (r"(n_routed|num|num_local|moe_num|n)_experts", _at_most(4)),
    (r"num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|num_selected_experts|zero_expert_num", _at_most(2)),
    (r"n_group|topk_group|num_expert_group|o_groups|.*shared_experts", _at_most(1)),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|max_window_layers", _at_most(1)),
    (r"image_size", _fixed(28)),
    (r"patch_size", _fixed(14)),
)  # fmt: skip
RULES = tuple((re.compile(pattern), rule) for pattern, rule in _RULES)
# Numbers of layers: the first that is there is that of the language model's own.
_LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers", "depth"),
)
_OTHER_LAYER_COUNT = re.compile(
    r"((num_)?(en|de)coder|conf_num_hidden|n_encoder)_layers|num_blocks|num_layers_per_stack"
)
_SHARING = "num_kv_shared_layers"
_PERIOD = re.compile(r".*_(period|interval|freq|frequency|group_size|step|pattern)")
_TOKEN_ID = re.compile(r".*_token_(id|index)s?|mask_index")
_KNOWN_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tiny_config(
    config: PreTrainedConfig, widths: Widths | None = None, amend: Callable[[Fields], None] | None = None
) -> PreTrainedConfig:
    """A tiny copy. `amend` may change the fields of every part further. Raises what the family's class raises."""
    fields = config.to_dict()
    _shrink(fields, widths or Widths(), amend)
    return type(config).from_dict(fields)


def _shrink(fields: Fields, widths: Widths, amend: Callable[[Fields], None] | None) -> None:
    _choose_layers(fields)
    old = copy.deepcopy(fields)
    num_tokens = len(_KNOWN_TOKENS)
    for name, value in old.items():
        if name == "per_layer_config":
            fields[name] = {idx: _narrowed_layer(layer, widths, old) for idx, layer in (value or {}).items()}
        elif isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            _shrink(fields[name], widths, amend)
        elif isinstance(value, dict):
            _shrink_rope(fields[name], widths)
        elif _TOKEN_ID.fullmatch(name):
            if isinstance(value, list):
                fields[name] = [_KNOWN_TOKENS["eos_token_id"]]
            elif isinstance(value, int) and value >= 0:
                fields[name] = _KNOWN_TOKENS.get(name, num_tokens)
                num_tokens += name not in _KNOWN_TOKENS
    _narrow(fields, widths, old)
    if amend is not None:
        amend(fields)


def _narrow(fields: Fields, widths: Widths, old: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        rule = next((rule for pattern, rule in RULES if pattern.fullmatch(name)), None)
        if rule is None:
            continue
        if _is_count(value):
            fields[name] = rule(widths, value, old)
        elif isinstance(value, list) and value and all(_is_count(one) for one in value):
            fields[name] = [rule(widths, one, old) for one in value]


def _narrowed_layer(own: Fields, widths: Widths, old: Mapping[str, Any]) -> Fields:
    """Fields of one layer, in the proportion that they had to those of all layers."""
    shared = {name: old[name] for name in own if name in old}
    narrowed = dict(shared)
    _narrow(narrowed, widths, old)
    return {
        name: max(1, narrowed[name] * value // shared[name])
        if _is_count(value) and _is_count(shared.get(name))
        else value
        for name, value in own.items()
    }


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _shrink_rope(fields: Fields, widths: Widths) -> None:
    """Shrinks the factors of each frequency, and sections of them, in rope parameters."""
    num_frequencies = round(widths.head_dim // 2 * (fields.get("partial_rotary_factor") or 1.0))
    for name, value in fields.items():
        if isinstance(value, dict):
            _shrink_rope(value, widths)
        elif name in ("mrope_section", "xdrope_section") and isinstance(value, list):
            *first, _ = (part * num_frequencies // (sum(value) or 1) for part in value)
            fields[name] = [*first, num_frequencies - sum(first)]
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            fields[name] = value[:num_frequencies]


def _choose_layers(fields: Fields) -> None:
    """Keeps the first layer of each kind and the last of all, two at least."""
    count_name = next((name for name in _LAYER_COUNTS if _is_count(fields.get(name))), "")
    count: int = fields.get(count_name, 0)
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and len(value) == count > 2}
    indices = {name: value for name, value in fields.items() if _is_of_indices(value, count)}
    # Fields by layer number: {"5": {"head_dim": 512}}.
    own: dict[int, Any] = {int(idx): value for idx, value in (fields.get("per_layer_config") or {}).items()}
    num_sharing: int = fields.get(_SHARING) or 0  # the last layers, which take keys and values of those before
    kinds: dict[str, int] = {}
    for idx in range(count):
        kind = [repr(value[idx]) for name, value in lists.items() if name not in indices]
        kind += [str(idx in value) for value in indices.values()] + [repr(own.get(idx)), str(idx < count - num_sharing)]
        kinds.setdefault("|".join(kind), idx)
    chosen = sorted({*list(kinds.values())[: MAX_LAYERS - 1], *range(count)[-1:]})
    wanted = 2
    if not lists and not indices:
        periods = [value for name, value in fields.items() if _PERIOD.fullmatch(name) and _is_count(value)]
        wanted = max([2, *(one for one in periods if one <= MAX_LAYERS)])
    chosen = sorted([*chosen, *(idx for idx in range(count) if idx not in chosen)][: max(wanted, len(chosen))])
    for name, value in fields.items():
        if name in indices:
            fields[name] = [chosen.index(idx) for idx in value if idx in chosen]
        elif name in lists:
            fields[name] = [value[idx] for idx in chosen]
        elif name == count_name:
            fields[name] = len(chosen)
        elif name == _SHARING:
            fields[name] = sum(idx >= count - num_sharing for idx in chosen)
        elif _is_count(value) and (name in _LAYER_COUNTS or _OTHER_LAYER_COUNT.fullmatch(name)):
            fields[name] = len(chosen) if value == count else min(value, 2)
    if own:
        fields["per_layer_config"] = {idx: own[old] for idx, old in enumerate(chosen) if old in own}


def _is_of_indices(value: Any, count: int) -> bool:
    """True if the value may be a list of layers' numbers, in order."""
    if not isinstance(value, list) or not value:
        return False
    numbers: Sequence[Any] = value
    return all(type(one) is int and 0 <= one < count for one in numbers) and all(
        first < second for first, second in pairwise(numbers)
    )
