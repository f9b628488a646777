"""Tiny random models of every supported family."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers as tf
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 101
MAX_LEN = 128
WINDOW = 6  # smaller than the texts
LIMIT = 21  # of tokens, behind which rotations are scaled: smaller than some texts

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
_NEOX: dict[str, Any] = {key: value for key, value in _COMMON.items() if key != "num_key_value_heads"}
_LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_SCALED_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 10,
    "llama_4_scaling_beta": 2.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": LIMIT,
}
_OPT: dict[str, Any] = {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 16, "init_std": 0.3}
_GPT2: dict[str, Any] = {"n_positions": MAX_LEN, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}


_SHARING: dict[str, Any] = _COMMON | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB_SIZE,
}


def _make(cls: type[PreTrainedConfig], base: dict[str, Any] | None = None, **changes: Any) -> PreTrainedConfig:
    return cls(**((base or _COMMON) | changes))


ZOO: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: _make(tf.LlamaConfig, rope_parameters=dict(_LLAMA3_ROPE), tie_word_embeddings=False),
    "mistral": lambda: _make(tf.MistralConfig, sliding_window=WINDOW),
    "qwen2": lambda: _make(tf.Qwen2Config, tie_word_embeddings=True),
    "qwen2-window": lambda: _make(tf.Qwen2Config, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": lambda: _make(tf.Qwen3Config, head_dim=16),
    "gemma": lambda: _make(tf.GemmaConfig, head_dim=16),
    "gemma2": lambda: _make(
        tf.Gemma2Config,
        head_dim=16,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=3.0,
    ),
    "gemma3": lambda: _make(
        tf.Gemma3TextConfig,
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    # The last layers take the keys and values of those before, and every layer has embeddings of its own.
    "gemma3n": lambda: _make(
        tf.Gemma3nTextConfig, _SHARING, laurel_rank=8, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]
    ),
    "gemma4": lambda: _make(
        tf.Gemma4TextConfig, _SHARING, global_head_dim=24, num_global_key_value_heads=1, attention_k_eq_v=False
    ),
    "phi3": lambda: _make(tf.Phi3Config, sliding_window=None),
    "gpt2": lambda: _make(tf.GPT2Config, _GPT2 | {"vocab_size": VOCAB_SIZE, "eos_token_id": None, "bos_token_id": 1}),
    "opt": lambda: _make(tf.OPTConfig, _NEOX | _OPT),
    "granite": lambda: _make(
        tf.GraniteConfig,
        embedding_multiplier=2.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "olmo2": lambda: _make(tf.Olmo2Config),
    "starcoder2": lambda: _make(tf.Starcoder2Config, sliding_window=WINDOW),
    "cohere": lambda: _make(tf.CohereConfig, logit_scale=0.25, use_qk_norm=True),
    "mixtral": lambda: _make(tf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2),
    "phi": lambda: _make(tf.PhiConfig, partial_rotary_factor=0.5),
    "gpt_neox": lambda: _make(tf.GPTNeoXConfig, _NEOX),
    "smollm3": lambda: _make(tf.SmolLM3Config, no_rope_layers=[1, 0]),
    "glm4": lambda: _make(tf.Glm4Config, head_dim=8),
    "exaone4": lambda: _make(
        tf.Exaone4Config, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "stablelm": lambda: _make(tf.StableLmConfig),
    "cohere2": lambda: _make(
        tf.Cohere2Config, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "olmo3": lambda: _make(tf.Olmo3Config, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": lambda: _make(
        tf.Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "deepseek_v3": lambda: _make(
        tf.DeepseekV3Config,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    ),
    "afmoe": lambda: _make(
        tf.AfmoeConfig,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_shared_experts=1,
        num_dense_layers=1,
        moe_intermediate_size=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "jetmoe": lambda: _make(
        tf.JetMoeConfig,
        _NEOX | {"num_key_value_heads": 2},
        kv_channels=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    # Temperatures of attention that grow with the position: by the cache's length, and by `position_ids`.
    "llama4": lambda: _make(
        tf.Llama4TextConfig,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[1, 0],
        attn_temperature_tuning=True,
        floor_scale=10,
        attn_scale=2.0,
    ),
    "llama4-chunks": lambda: _make(
        tf.Llama4TextConfig,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"],
        no_rope_layers=[1, 0],
        attention_chunk_size=WINDOW + 1,
    ),
    "gpt_oss": lambda: _make(
        tf.GptOssConfig,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "granite_swa": lambda: _make(
        tf.GraniteSWAConfig, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "mimo_v2_flash": lambda: _make(
        tf.MiMoV2FlashConfig,
        head_dim=8,
        v_head_dim=6,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    ),
    "flint": lambda: _make(tf.FlintConfig),
    # Rotations that depend on a text's length.
    "phi3-longrope": lambda: _make(
        tf.Phi3Config,
        sliding_window=None,
        rope_parameters=dict(_LONGROPE),
        original_max_position_embeddings=LIMIT,
    ),
    "phimoe-longrope": lambda: _make(
        tf.PhimoeConfig,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters=_LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
        original_max_position_embeddings=LIMIT,
    ),
    "llama-longrope": lambda: _make(tf.LlamaConfig, rope_parameters=dict(_LONGROPE)),
    "llama-dynamic": lambda: _make(
        tf.LlamaConfig,
        max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0},
    ),
    "ministral3": lambda: _make(
        tf.Ministral3Config, head_dim=8, sliding_window=None, rope_parameters=dict(_SCALED_YARN)
    ),
    # Attention in code of their own, with biases by the position of the key but for one.
    "bloom": lambda: _make(tf.BloomConfig, n_layer=2, n_head=4, tie_word_embeddings=False),
    "mpt": lambda: _make(
        tf.MptConfig,
        {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3},
        d_model=32,
        n_heads=4,
        n_layers=2,
        max_seq_len=MAX_LEN,
        attn_config={"clip_qkv": 2.0},
    ),
    "falcon": lambda: _make(tf.FalconConfig, num_kv_heads=2, new_decoder_architecture=True, ffn_hidden_size=48),
    "falcon-alibi": lambda: _make(
        tf.FalconConfig, alibi=True, multi_query=False, parallel_attn=False, bias=True, max_position_embeddings=512
    ),
}

SINKS = {"gpt_oss", "granite_swa", "mimo_v2_flash", "flint"}  # which attention has, by types of models
# Whose own softmax is in float32, in every dtype.
OWN_ATTENTION = ("bloom", "mpt", "falcon", "falcon-alibi")
# Like one of the others in all that is special about them; compared with the slow tests.
SLOW = {"granite_swa", "mimo_v2_flash", "flint", "llama-longrope", "deepseek_v2", "phimoe-longrope"}
# Families whose `generate()` gives other logits than the whole text at once.
BY_LENGTH = {"phi3-longrope", "phimoe-longrope", "llama-longrope", "llama-dynamic"}

_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# Families whose experts PEFT adapts as fused parameters, by its `all-linear`; then others with such experts.
MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": ZOO["mixtral"],
    "qwen3_moe": ZOO["qwen3_moe"],
    "olmoe": lambda: _make(tf.OlmoeConfig, num_experts=4, num_experts_per_tok=2),
    "deepseek_v2": lambda: _make(tf.DeepseekV2Config, **_ROUTED, **_LATENT, q_lora_rank=None),
    "deepseek_v3": ZOO["deepseek_v3"],
    "glm4_moe": lambda: _make(tf.Glm4MoeConfig, **_ROUTED, head_dim=8),
    "ernie4_5_moe": lambda: _make(
        tf.Ernie4_5_MoeConfig,
        moe_num_experts=4,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=1,
        moe_layer_start_index=1,
        head_dim=8,
    ),
    "dots1": lambda: _make(tf.Dots1Config, **_ROUTED, head_dim=8),
    "hunyuan_v1_moe": lambda: _make(
        tf.HunYuanMoEV1Config, num_experts=4, moe_topk=2, moe_intermediate_size=16, head_dim=8
    ),
    "exaone_moe": lambda: _make(
        tf.ExaoneMoeConfig,
        **(_ROUTED | {"num_shared_experts": 1, "num_experts": 4}),
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=WINDOW,
    ),
    "flex_olmo": lambda: _make(tf.FlexOlmoConfig, num_experts=4, num_experts_per_tok=2),
    "qwen2_moe": lambda: _make(tf.Qwen2MoeConfig, **_MOE, shared_expert_intermediate_size=16),
    "phimoe": lambda: _make(tf.PhimoeConfig, num_local_experts=4, num_experts_per_tok=2),
    "granitemoe": lambda: _make(tf.GraniteMoeConfig, num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": ZOO["gpt_oss"],  # with biases, and weights the other way round
    # Every expert is given every row, times what the router says of it.
    "llama4-experts": lambda: _make(
        tf.Llama4TextConfig,
        head_dim=8,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["full_attention", "full_attention"],
        no_rope_layers=[1, 0],
    ),
}
ZOO["deepseek_v2"] = MIXTURES["deepseek_v2"]
_CONV_LAYERS: dict[str, Any] = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "head_dim": 8,
}
_ROUTED_DELTA: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8}
# Families with mixers that keep a state of fixed size.
HYBRIDS: dict[str, Callable[[], PreTrainedConfig]] = {
    "lfm2": lambda: _make(tf.Lfm2Config, **_CONV_LAYERS, block_auto_adjust_ff_dim=False),
    "lfm2_moe": lambda: _make(
        tf.Lfm2MoeConfig,
        **_CONV_LAYERS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        num_dense_layers=1,
    ),
    "lfm3": lambda: _make(
        tf.Lfm3Config,
        head_dim=8,
        conv_L_cache=7,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "sliding_attention"],
        sliding_window=WINDOW,
    ),
    "qwen3_next": lambda: _make(tf.Qwen3NextConfig, **_DELTA, **_ROUTED_DELTA),
    "qwen3_5": lambda: _make(tf.Qwen3_5TextConfig, **_DELTA),
    "qwen3_5_moe": lambda: _make(tf.Qwen3_5MoeTextConfig, **_DELTA, **_ROUTED_DELTA),
    "olmo_hybrid": lambda: _make(tf.OlmoHybridConfig, **_DELTA),
    "kimi_linear": lambda: _make(
        tf.KimiLinearConfig,
        **_LATENT,
        **_ROUTED,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_num_heads=4,
        linear_head_dim=8,
        linear_conv_kernel_dim=4,
        q_lora_rank=None,
    ),
    "bailing_hybrid": lambda: _make(
        tf.BailingHybridConfig,
        **_LATENT,
        **_ROUTED,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=8,
        num_local_experts=4,
    ),
    "mamba2": lambda: _make(
        tf.Mamba2Config, num_heads=8, head_dim=8, state_size=8, n_groups=2, expand=2, chunk_size=16
    ),
    "bamba": lambda: _make(
        tf.BambaConfig, **_MAMBA2, num_hidden_layers=3, attn_layer_indices=[1], mamba_expand=2, mamba_chunk_size=16
    ),
    "granitemoehybrid": lambda: _make(
        tf.GraniteMoeHybridConfig,
        **_MAMBA2,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mamba_expand=2,
        mamba_chunk_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "nemotron_h": lambda: _make(
        tf.NemotronHConfig,
        num_hidden_layers=4,
        layer_types=["linear_attention", "moe", "full_attention", "mlp"],
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
        head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        n_group=1,
        topk_group=1,
    ),
    "falcon_h1": lambda: _make(
        tf.FalconH1Config, **_MAMBA2, mamba_d_ssm=64, mamba_expand=2, mamba_chunk_size=16, head_dim=8
    ),
    "zamba": lambda: _make(
        tf.ZambaConfig,
        num_hidden_layers=4,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        n_mamba_heads=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        attention_head_dim=16,
        attention_hidden_size=64,
    ),
    "zamba2": lambda: _make(
        tf.Zamba2Config,
        num_hidden_layers=4,
        num_key_value_heads=4,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        mamba_d_state=8,
        n_mamba_heads=8,
        mamba_ngroups=2,
        chunk_size=16,
        num_mem_blocks=1,  # both attention layers share their weights
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
    ),
    "minimax": lambda: _make(
        tf.MiniMaxConfig,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        block_size=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        head_dim=8,
        linear_attn_alpha_factor=1.5,
    ),
    "mamba": lambda: _make(tf.MambaConfig, state_size=8, expand=2, time_step_rank=4),
    "falcon_mamba": lambda: _make(tf.FalconMambaConfig, state_size=8, expand=2, time_step_rank=4),
    "jamba": lambda: _make(
        tf.JambaConfig,
        num_hidden_layers=3,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
}
# Families whose adapters are compared with PEFT: one for each way of laying out linears, heads and experts.
LORA_FAMILIES = (
    *("llama", "qwen2", "gemma2", "gemma3", "phi3", "gpt2", "opt", "mixtral", "cohere", "gpt_neox", "afmoe", "jetmoe"),
    *("falcon-alibi", "gpt_oss", "llama4-chunks", "deepseek_v2", "deepseek_v3", "gemma4", "bloom", "mpt", "falcon"),
)
SLOW_LORA = LORA_FAMILIES[-8:]  # of which the fast tests take one way of computing it
# Families that are checked on a device too: one for each way of computing attention (biases, windows, caps, sinks, keys
# of other layers, latent keys, biases by position), experts, linears and heads, and recurrent states.
ON_DEVICES = (
    *("qwen2", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "bloom", "llama4-chunks"),
    *("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"),
    *("lfm2", "qwen3_5", "kimi_linear", "mamba2", "bamba", "mamba", "minimax"),
)


def _changed(config: PreTrainedConfig, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration with these changes, as far as its family knows them."""
    values = config.to_dict()
    if values.pop("per_layer_config", None):  # derived from the others
        return type(config)(**(values | changes))
    for name, value in changes.items():
        if hasattr(config, name) and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, value)
    return config


def random_model(
    family: str, dtype: torch.dtype = torch.float64, seed: int = 0, changes: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """A model whose greedy text neither repeats one token nor hangs on the last bit; norms and biases are random.
    `changes`: of its configuration, as far as the family knows them."""
    torch.manual_seed(seed)
    config = _changed((ZOO | MIXTURES | HYBRIDS)[family](), changes or {})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.3)
        if family.startswith("gemma"):
            # Tied, scaled up and with normed branches, they would repeat their last token for ever.
            model.get_input_embeddings().weight.mul_(0.1)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # grouped products have no float64
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # the one that caps scores in every version of Transformers
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()
