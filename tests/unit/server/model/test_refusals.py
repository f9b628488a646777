"""Refusals by configuration and class."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import transformers as tf
from support.zoo import MAX_LEN, VOCAB_SIZE
from transformers import AutoModelForCausalLM, PreTrainedConfig

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model.loader import adopt_model, load_model
from loraplex_server.model.refusals import refuse_config

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
REFUSED: dict[str, tuple[type[PreTrainedConfig], dict[str, Any], str]] = {
    "encoder-decoder": (tf.T5Config, {"vocab_size": 101, "d_model": 32, "num_layers": 2}, "encoder-decoder"),
    "own attention": (tf.OpenAIGPTConfig, {"n_embd": 32, "n_layer": 2, "n_head": 4}, "attention interface"),
    "unknown mixer": (tf.RecurrentGemmaConfig, SMALL | {"head_dim": 8, "lru_width": 32}, "RecurrentGemmaRecurrent"),
    "unknown layers": (tf.DeepseekV32Config, SMALL | {"num_key_value_heads": 4}, "indexed_attention"),
    "other rope": (
        tf.LlamaConfig,
        SMALL | {"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}},
        r"\(su\) is of",
    ),
    "unknown rope": (
        tf.LlamaConfig,
        SMALL | {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}},
        r"\(mrope\) is of .*; it has default, dynamic",
    ),
    "two calls": (tf.DiffLlamaConfig, SMALL, "several times"),
    "layers in loops": (tf.LlamaConfig, SMALL | {"n_recurrent_loops": 2}, "several times"),
    "quantised": (tf.LlamaConfig, SMALL | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised"),
    "quantised text": (
        tf.Qwen2_5_VLConfig,
        {"text_config": SMALL | {"quantization_config": {"quant_method": "fp8"}}},
        "quantised",
    ),
}


def test_rope_parameters_of_a_model_without_rope_mean_nothing() -> None:
    refuse_config(tf.GPT2Config(rope_parameters={"rope_type": "none"}), "gpt2")


def test_rope_parameters_that_a_family_sets_as_it_is_made_are_read() -> None:
    with pytest.raises(UnsupportedModel, match=r"\(su\) is of"):
        refuse_config(tf.Cohere2MoeConfig(rope_parameters={"rope_type": "su", "rope_theta": 1e4}), "cohere")


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_with_the_reason(case: str, tmp_path: Path) -> None:
    """A model is refused from a directory, as a user would load it: what its configuration tells needs no weights at
    all."""
    cls, fields, reason = REFUSED[case]
    config = cls(**fields)
    if case in ("two calls", "unknown mixer"):
        AutoModelForCausalLM.from_config(copy.deepcopy(config)).save_pretrained(tmp_path)
    else:
        config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load_model(str(tmp_path), device="cpu")
    assert "cannot be served" in caught.value.message


@pytest.mark.parametrize("base", [tf.MusicgenConfig, tf.MusicgenMelodyConfig])
def test_refuses_a_configuration_of_several_models(base: type[PreTrainedConfig], tmp_path: Path) -> None:
    """Asked for the configuration of its text model, Transformers raises ValueError."""
    config = base(text_encoder={"model_type": "t5"}, audio_encoder={"model_type": "encodec"}, decoder={})
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load_model(str(tmp_path), device="cpu")
    config.is_encoder_decoder = False
    with pytest.raises(UnsupportedModel, match=r"not describe one language model .Multiple valid text configs"):
        refuse_config(config, "x")


@pytest.mark.parametrize("family", ["own attention", "two calls"])
def test_refuses_a_model_in_memory_too(family: str) -> None:
    cls, fields, reason = REFUSED[family]
    with pytest.raises(UnsupportedModel, match=reason):
        adopt_model(AutoModelForCausalLM.from_config(cls(**fields)))
