"""Tiny models and rigs for the native CPU kernels."""

from __future__ import annotations

import copy
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from loraplex_server.backends.cpu.attention import NativePagedAttention, reason_against
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.quantization import INT8, WeightFormat
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.rounding import round_weights
from support.driver import Rig, make_rig
from support.zoo import random_model

# Heads of 32, and features that pack in bfloat16.
SIZES: Final = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
# Families whose layers are of the kinds that a stack computes, and some of all other kinds.
STACKED: Final = (
    *("llama", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma2", "gemma3", "granite", "phi3"),
    *("smollm3", "exaone4", "olmo2", "olmo3", "mixtral", "qwen3_moe", "starcoder2", "cohere2", "gpt_oss"),
    *("gpt_neox", "gpt_neox-sequential", "phi", "glm4", "ministral3"),
    *("gemma4", "gemma4-keys"),
    *("llama-40", "qwen3-40", "olmo2-40", "phi3-40", "gpt_neox-40", "stablelm-40"),
    *("qwen3_5", "qwen3_next", "granite4", "granite4-experts", "bamba"),
)
NOT_STACKED: Final = ("cohere", "gpt2", "llama4-chunks", "bloom", "mpt", "falcon", "falcon-alibi")
# Those whose attention, or what is in its place, stays the model's own module.
OWN_MIXERS: Final = ("deepseek_v2", "qwen3_5-channels", "granite4-channels")
_KEYS_AS_VALUES: Final[dict[str, Any]] = {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
_MAMBA2: Final[dict[str, Any]] = {"mamba_n_heads": 16, "mamba_d_head": 16}
# Families, and their changes.
VARIANTS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 32}),
    # Rows of states that the kernels know. A stack needs channels that fill panels.
    "qwen3_5": ("qwen3_5", {"linear_value_head_dim": 16}),
    "qwen3_next": ("qwen3_next", {"linear_value_head_dim": 16, "moe_intermediate_size": 32}),
    "qwen3_5-channels": ("qwen3_5", {"linear_value_head_dim": 16, "linear_key_head_dim": 6}),
    "granite4": ("granitemoehybrid", _MAMBA2 | {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_groups": 2}),
    "granite4-experts": ("granitemoehybrid", _MAMBA2),
    "granite4-channels": ("granitemoehybrid", _MAMBA2 | {"num_local_experts": 0, "mamba_d_state": 6}),
    "bamba": ("bamba", _MAMBA2),
    # Values of 64 features, and keys of 96.
    "deepseek_v2": (
        "deepseek_v2",
        {
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "moe_intermediate_size": 32,
        },
    ),
    "gemma4": ("gemma4", {"global_head_dim": 64, "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True}),
    # Values are keys in layers of full attention, which have fewer; no layer has an input of its own.
    "gemma4-keys": ("gemma4", _KEYS_AS_VALUES),
    "gpt_neox-sequential": ("gpt_neox", {"use_parallel_residual": False, "rotary_pct": 0.5}),
    # Heads of 40, which fill no bands: 160 and 80 outputs of queries and of keys.
    **{f"{family}-40": (family, {"head_dim": 40}) for family in ("llama", "qwen3")},
    **{f"{family}-40": (family, {"hidden_size": 160}) for family in ("olmo2", "phi3", "gpt_neox", "stablelm")},
}


def native_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    family, own = VARIANTS.get(family, (family, {}))
    return random_model(family, dtype, seed, SIZES | own | changes)


def rounded_model(model: PreTrainedModel, form: WeightFormat = INT8) -> PreTrainedModel:
    """A copy of the model with its weights rounded to few bits: the model that is served then."""
    rounded = copy.deepcopy(model)
    round_weights(rounded, form)
    return rounded


def native_rig(model: PreTrainedModel, kernels: NativeKernels, form: WeightFormat | None = None, **options: Any) -> Rig:
    """A rig of the native kernels, assembled as the engine does. The model itself stays as it is."""
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(kernels), form=form)
    is_known = not any(reason_against(spec, loaded.dtype) for spec in loaded.spec.layers)
    attention = NativePagedAttention(kernels) if is_known else "auto"
    return make_rig(loaded, ops=NativeOps(kernels), attention=attention, **options)
