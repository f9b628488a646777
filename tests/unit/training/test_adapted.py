"""Adapters that a server takes, loaded by PEFT for training."""

from __future__ import annotations

import copy
import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.multimodal import language_model
from support.parity import FORMATS, INVOCATION, Names
from support.peft_files import save_initialised, save_variant
from support.zoo import random_model
from torch import Tensor
from transformers import PreTrainedModel

from loraplex_contracts.errors import AdapterUnsupported, BaseMismatch
from loraplex_training.adapted import with_adapter

IDS = torch.tensor([[5, 9, 70, 100, 8, 3, 17, 42, 33, 7]])


@cache
def base(family: str) -> PreTrainedModel:
    return random_model(family, torch.float32, changes={"vocab_size": 260})


def logits(model: Any) -> Tensor:
    activating = [INVOCATION] if model.config.get_text_config().vocab_size > max(INVOCATION) else []
    ids = torch.cat([IDS, *(torch.tensor([each]) for each in activating), IDS], dim=1)
    with torch.no_grad():
        return model.eval()(input_ids=ids, use_cache=False).logits


def loaded(model: PreTrainedModel, folder: Path) -> Tensor:
    return logits(with_adapter(copy.deepcopy(model), "the-base", folder))


def is_same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() < 1e-3 * wanted.abs().max())


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("PiSSA", "OLoRA")])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_formats(tmp_path: Path, family: str, name: str) -> None:
    """Computes what PEFT's own model computed when it was saved."""
    if family == "gpt2" and (name in ("VeRA", "LoHa", "LoKr", "OFT", "BOFT") or "all-linear" in name):
        pytest.skip("PEFT has none for Conv1D")
    saved = save_variant(base(family), FORMATS[name](Names.of(base(family))), tmp_path / "adapter")
    found = loaded(base(family), tmp_path / "adapter")
    assert is_same(found, logits(saved))
    assert not is_same(found, logits(base(family)))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"init_lora_weights": False},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "olora"},
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.0.self_attn.v_proj": 7}, "use_rslora": True},
    ],
)
def test_targets_that_there_are_no_tensors_for(tmp_path: Path, options: dict[str, Any]) -> None:
    """They have no terms: PEFT would make some."""
    model, folder = base("llama"), tmp_path / "adapter"
    config = LoraConfig(r=3, lora_alpha=4, target_modules=["q_proj", "v_proj"], layers_to_transform=[0], **options)
    if isinstance(config.init_lora_weights, str):
        save_initialised(model, config, folder)
        wanted = logits(PeftModel.from_pretrained(copy.deepcopy(model), str(folder)))
    else:
        wanted = logits(save_variant(model, config, folder))
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"layers_to_transform": None}))
    assert is_same(loaded(model, folder), wanted)


@pytest.mark.parametrize(("family", "words"), [("gemma3", "q_proj"), ("qwen2_vl", r".*language_model.*q_proj")])
def test_names_of_transformers_4(tmp_path: Path, family: str, words: str) -> None:
    model = language_model(family).float()
    targets: Any = words if "." in words else [words]
    config = LoraConfig(
        r=3, target_modules=targets, alpha_pattern={"language_model.model.layers.1.self_attn.q_proj": 3}
    )
    wanted = logits(save_variant(model, config, tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    new, old = "model.language_model.layers", "language_model.model.layers"
    assert all(new in name for name in tensors)
    save_file({name.replace(new, old): tensor for name, tensor in tensors.items()}, path)
    found = loaded(model, tmp_path)
    assert not is_same(found, wanted)  # the pattern means a module by its name in the file
    config.alpha_pattern = {}
    config.save_pretrained(str(tmp_path))
    assert is_same(loaded(model, tmp_path), logits(save_variant(model, config, tmp_path)))


def test_linears_of_single_experts(tmp_path: Path) -> None:
    model = base("mixtral")
    names, tensors = ("w1", "w3", "w2"), dict[str, Tensor]()
    torch.manual_seed(1)
    for layer in range(model.config.num_hidden_layers):
        fused: Any = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        num_experts, hidden, inner = fused.down_proj.shape
        for expert in range(num_experts):
            for name in names:
                num_inputs, num_outputs = (inner, hidden) if name == "w2" else (hidden, inner)
                key = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
                tensors[f"{key}.lora_A.weight"] = torch.randn(2, num_inputs)
                tensors[f"{key}.lora_B.weight"] = torch.randn(num_outputs, 2)
    LoraConfig(r=2, lora_alpha=3, target_modules=list(names)).save_pretrained(str(tmp_path))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    found = loaded(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = logits(PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path)))
    assert is_same(found, wanted)
    assert not is_same(found, logits(model))


def test_what_a_server_refuses(tmp_path: Path) -> None:
    get_peft_model(copy.deepcopy(base("qwen2")), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(
        str(tmp_path)
    )
    path = tmp_path / "adapter_model.safetensors"
    save_file({name.replace("layers.1", "layers.9"): one for name, one in load_file(path).items()}, path)
    with pytest.raises(BaseMismatch, match="'the-base' does not have; the adapter was made for another base model"):
        loaded(base("qwen2"), tmp_path)


def test_what_peft_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_variant(base("llama"), LoraConfig(r=2, target_modules=["q_proj"]), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"bias": "nonsense"}))
    with pytest.raises(AdapterUnsupported, match=r"a server takes .* PEFT, .* cannot load it: .*nonsense"):
        loaded(base("llama"), tmp_path)


def test_classifiers(tmp_path: Path) -> None:
    save_variant(base("llama"), LoraConfig(r=2, target_modules=["q_proj"]), tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"task_type": "SEQ_CLS"}))
    path = tmp_path / "adapter_model.safetensors"
    hidden = base("llama").config.hidden_size
    save_file(load_file(path) | {"base_model.model.score.weight": torch.ones(2, hidden)}, path)
    with pytest.raises(AdapterUnsupported, match="classifies and writes no text"):
        loaded(base("llama"), tmp_path)
