"""Tiny copies of configurations."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers import AutoModelForCausalLM

from loraplex_server.model.tiny import VOCAB_SIZE, Widths, tiny_config


def test_keeps_what_decides_how_layers_compute() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 8192}
    config = tf.LlamaConfig(num_attention_heads=32, num_key_value_heads=8, rope_parameters=rope, attention_bias=True)
    tiny = tiny_config(config)
    assert isinstance(tiny, tf.LlamaConfig)
    assert (tiny.hidden_size, tiny.num_attention_heads, tiny.num_key_value_heads) == (32, 4, 2)
    assert (tiny.vocab_size, tiny.num_hidden_layers, tiny.attention_bias) == (VOCAB_SIZE, 2, True)
    assert tiny.rope_parameters == config.rope_parameters
    assert tiny.max_position_embeddings == config.max_position_embeddings
    assert config.hidden_size == 4096, "the original stays"


def test_keeps_the_first_layer_of_each_kind_and_the_last() -> None:
    tiny = tiny_config(tf.Gemma3TextConfig(sliding_window=512))
    assert tiny.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert tiny.sliding_window == 512
    moe = tiny_config(tf.Llama4TextConfig(interleave_moe_layer_step=2, num_hidden_layers=8))
    assert moe.moe_layers == [1, 2, 3]  # of the layers 0, 1, 3 and 7
    assert moe.layer_types == ["chunked_attention", "chunked_attention", "full_attention", "full_attention"]


def test_numbers_of_layers_follow_those_that_stay() -> None:
    fields: dict[str, Any] = {"head_dim": 256, "global_head_dim": 512, "num_hidden_layers": 12}
    config = tf.Gemma4TextConfig(**fields)
    tiny = tiny_config(config, Widths(head_dim=16))
    assert tiny.layer_types == ["sliding_attention", "full_attention", "full_attention"]
    assert [one.head_dim for one in tiny.per_layer_config] == [16, 32, 32]


def test_layers_with_the_keys_of_others_stay_behind_these() -> None:
    tiny = tiny_config(tf.Gemma4TextConfig(num_kv_shared_layers=10, num_hidden_layers=30))
    assert tiny.layer_types == ["sliding_attention", "full_attention", "sliding_attention", *["full_attention"] * 2]
    assert tiny.kv_sharing_modes == ["store", "store", "reuse", "reuse", "reuse"]


def test_copies_can_be_built_of_nested_configurations() -> None:
    tiny = tiny_config(tf.Qwen3_5Config())
    model = AutoModelForCausalLM.from_config(tiny)
    assert model.num_parameters() < 100_000
    assert tiny.vision_start_token_id < tiny.text_config.vocab_size == VOCAB_SIZE


def test_amendments_reach_every_part() -> None:
    seen: list[str] = []
    tiny_config(tf.Qwen2VLConfig(), amend=lambda fields: seen.append(fields["model_type"]))
    assert sorted(seen) == ["qwen2_vl", "qwen2_vl_text", "qwen2_vl_vision"]


def test_sections_of_rotations_fill_the_narrow_head() -> None:
    """Those of GLM-4.1V, which rotates half of each head, and of ERNIE 4.5 VL, whose first two are equal."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    half = rope | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    glm = tiny_config(tf.Glm4vConfig(text_config={"rope_parameters": half}), Widths(head_dim=64))
    assert glm.text_config.rope_parameters["mrope_section"] == [4, 6, 6]
    equal = rope | {"mrope_section": [22, 22, 20]}
    ernie = tiny_config(tf.Ernie4_5_VLMoeConfig(text_config={"rope_parameters": equal}))
    assert ernie.text_config.rope_parameters["mrope_section"] == [1, 1, 2]


def test_heads_with_two_parts_are_as_wide_as_both() -> None:
    tiny = tiny_config(tf.Mistral4Config())
    assert tiny.head_dim == tiny.qk_nope_head_dim + tiny.qk_rope_head_dim == 16
    assert tiny_config(tf.DeepseekV3Config()).head_dim == 8  # of the rotated part alone
