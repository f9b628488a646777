"""Language models of checkpoints with other parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from support.zoo import random_model
from transformers import AutoModel

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.model.language import absent_parts, make_language_model
from loraplex_server.model.loader import load_model
from loraplex_server.model.tiny import tiny_config


def test_a_tower_needs_no_package() -> None:
    """Gemma 3n's is timm's, which the server does not need."""
    own = vars(AutoModel)["from_config"]
    model = make_language_model(tiny_config(tf.Gemma3nConfig()))
    assert absent_parts(model) == ("model.vision_tower", "model.audio_tower")
    assert vars(AutoModel)["from_config"] is own


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "weight.SCB"])
def test_quantised_weights_are_refused_where_the_configuration_is_silent(scale: str, tmp_path: Path) -> None:
    """Transformers would take the numbers of FP8 for weights, and leave out their scales with a warning."""
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    weights |= {
        name: weights[name].to(torch.float8_e4m3fn),
        f"{name.removesuffix('weight')}{scale}": torch.ones(1),
    }
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"have \S+{scale}, which LlamaForCausalLM does not read"):
        load_model(str(tmp_path), device="cpu")


def test_quantised_experts_are_refused_where_the_configuration_is_silent(tmp_path: Path) -> None:
    """The files have each expert's weights, the model one parameter for all experts."""
    random_model("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for name in [one for one in weights if ".experts." in one]:
        weights |= {name: weights[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.ones(1, 1)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"have \S+weight_scale_inv, which Qwen3MoeForCausalLM does not read"):
        load_model(str(tmp_path), device="cpu")


def test_other_weights_in_the_files_are_left_out(tmp_path: Path) -> None:
    """Those of layers that predict further tokens, say."""
    random_model("llama", torch.float32).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights |= {"model.layers.2.mlp.up_proj.weight": torch.ones(1), "model.layers.0.rotary_emb.inv_freq": torch.ones(1)}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert load_model(str(tmp_path), device="cpu").spec.num_logits
