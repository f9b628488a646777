"""PEFT adapters through source, checks, store and tiers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loraplex_adapters.cache.storage import Storage, check_adapter, import_adapter
from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.store import AdapterStore
from loraplex_adapters.weights import AdapterWeights, BaseTargets, TargetModule
from loraplex_contracts.errors import AdapterInvalid

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, about saving embeddings and tied weights


def llama(tied: bool = False) -> PreTrainedModel:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def gpt2() -> PreTrainedModel:
    torch.manual_seed(2)
    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=32)).double()


def targets_of(model: PreTrainedModel, dtype: str = "float64") -> BaseTargets:
    modules: dict[str, TargetModule] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            digest = weight_sha256(module.weight)
            modules[path] = TargetModule(
                path, "embedding", module.num_embeddings, module.embedding_dim, weight_sha256=digest
            )
        elif isinstance(module, nn.Linear):
            digest = weight_sha256(module.weight) if path == "lm_head" else ""
            modules[path] = TargetModule(path, "linear", module.in_features, module.out_features, weight_sha256=digest)
        elif isinstance(module, Conv1D):
            modules[path] = TargetModule(path, "linear", module.nx, module.nf, is_conv1d=True)
    head = modules["lm_head"]
    return BaseTargets(modules, "tiny", dtype, 16, head.in_features, head.out_features)


def save(model: PreTrainedModel, folder: Path, **fields: Any) -> PeftModel:
    """A PEFT adapter with random factors (PEFT's B would be zero)."""
    torch.manual_seed(3)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter, dtype=torch.float64)
    peft.save_pretrained(folder / "sql")
    return peft


def load(folder: Path, targets: BaseTargets) -> AdapterWeights:
    store = AdapterStore(folder / "store", 1 << 30)
    tiers = Storage(store, torch.device("cpu"))
    imported = import_adapter("sql", DirectorySource(folder), targets, store)
    host = tiers.stage(imported.key)
    assert host is not None
    weights = tiers.promote(host)
    assert weights.num_bytes == imported.layout.num_bytes
    assert weights.max_rank == imported.layout.max_rank
    store.close()
    return weights


def assert_equals_peft(weights: AdapterWeights, peft: PeftModel) -> None:
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in peft.named_modules()
        if isinstance(module, LoraLayer)
    }
    assert set(weights.factors) == set(layers)
    for path, layer in layers.items():
        ours = weights.factors[path]
        if "default" in layer.lora_embedding_A:
            a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
        else:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        assert torch.equal(ours.a, a.double()), path
        assert torch.equal(ours.b, b.double()), path
        assert ours.scale == layer.scaling["default"], path
        assert ours.rank == layer.r["default"], path
        for factor in (ours.a, ours.b):
            assert factor.is_contiguous()
            assert factor.data_ptr() % 64 == 0
            assert factor.untyped_storage().data_ptr() == weights.storage.untyped_storage().data_ptr()


ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LLAMA_CASES: dict[str, dict[str, Any]] = {
    "every linear": {"r": 8, "lora_alpha": 16, "target_modules": ALL_LINEAR},
    "shorthand": {"r": 4, "lora_alpha": 3, "target_modules": "all-linear"},
    "a pattern of targets": {"r": 4, "lora_alpha": 3, "target_modules": r".*\.layers\.1\..*_proj"},
    "some layers": {"r": 4, "lora_alpha": 3, "target_modules": ["q_proj"], "layers_to_transform": [1]},
    "rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "ranks by module": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {"q_proj": 2, r".*\.layers\.1\.mlp\..*": 3, "^model.layers.0.self_attn.k_proj": 5},
    },
    "alphas by module": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ALL_LINEAR,
        "alpha_pattern": {"v_proj": 1, "layers.0.mlp.up_proj": 7},
        "rank_pattern": {"v_proj": 3},
    },
    "rslora, ranks and alphas": {
        "r": 8,
        "lora_alpha": 16,
        "use_rslora": True,
        "target_modules": ["q_proj", "v_proj"],
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {r"layers\.[01]\.self_attn\.v_proj": 5},
    },
    "embedding and head": {"r": 4, "lora_alpha": 8, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "rank one": {"r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]},
    "dropout": {"r": 4, "lora_alpha": 8, "lora_dropout": 0.3, "target_modules": ["q_proj"]},
    "bias of nothing": {"r": 4, "lora_alpha": 8, "bias": "lora_only", "target_modules": ["q_proj"]},
}


@pytest.mark.parametrize("fields", LLAMA_CASES.values(), ids=LLAMA_CASES)
def test_llama(fields: dict[str, Any], tmp_path: Path) -> None:
    model = llama()
    targets = targets_of(model)
    peft = save(model, tmp_path, **fields)
    assert_equals_peft(load(tmp_path, targets), peft)


def test_gpt2_conv1d(tmp_path: Path) -> None:
    model = gpt2()
    targets = targets_of(model)
    fields = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_fc", "c_proj"], "fan_in_fan_out": True}
    peft = save(model, tmp_path, **fields)
    weights = load(tmp_path, targets)
    assert_equals_peft(weights, peft)
    assert weights.factors["transformer.h.0.attn.c_attn"].b.shape == (96, 4)


def test_tied_embedding_and_head(tmp_path: Path) -> None:
    model = llama(tied=True)
    targets = replace(targets_of(model), embedding="model.embed_tokens", tied_head="lm_head")
    names = ["embed_tokens", "lm_head", "q_proj", "o_proj"]
    peft = save(model, tmp_path, r=4, lora_alpha=8, target_modules=names, ensure_weight_tying=True)
    weights = load(tmp_path, targets)
    assert_equals_peft(weights, peft)
    # PEFT leaves out other modules that are not on the list, and the head where the embedding is not.
    file = tmp_path / "sql" / "adapter_config.json"
    fields = json.loads(file.read_text())
    for name in ("q_proj", "embed_tokens"):
        left = [one for one in fields["target_modules"] if not one.endswith(name)]
        file.write_text(json.dumps(fields | {"target_modules": left}))
        with pytest.raises(AdapterInvalid, match="does not name its module"):
            check_adapter("sql", DirectorySource(tmp_path), targets)


@pytest.mark.parametrize("names", [["lm_head", "q_proj"], ["lm_head"], r".*(lm_head|q_proj)"])
def test_tied_embedding_that_the_base_has_elsewhere(names: list[str] | str, tmp_path: Path) -> None:
    """The configuration names the embedding by its path in the model that PEFT trained."""
    model = llama(tied=True)
    own = targets_of(model).modules.values()
    modules = [replace(one, path=one.path.replace("model.", "model.language_model.", 1)) for one in own]
    targets = replace(
        targets_of(model),
        modules={one.path: one for one in modules},
        embedding="model.language_model.embed_tokens",
        tied_head="lm_head",
    )
    save(model, tmp_path, r=4, lora_alpha=8, target_modules=names, ensure_weight_tying=True)
    check_adapter("sql", DirectorySource(tmp_path), targets)


def test_saved_without_copies_of_the_embeddings(tmp_path: Path) -> None:
    model = llama()
    targets = targets_of(model)
    peft = save(model, tmp_path, r=4, lora_alpha=8, target_modules=["embed_tokens", "lm_head"])
    peft.save_pretrained(tmp_path / "sql", save_embedding_layers=False)
    assert_equals_peft(load(tmp_path, targets), peft)


def test_a_copy_that_is_not_the_bases_is_the_adapters_own(tmp_path: Path) -> None:
    model = llama()
    targets = targets_of(model)
    model.lm_head.weight.data[0, 0] += 1e-12
    save(model, tmp_path, r=4, lora_alpha=8, target_modules=["lm_head"])
    weights = load(tmp_path, targets)
    assert weights.saved.keys() == {"lm_head"}
    assert torch.equal(weights.saved["lm_head"]["weight"].values, model.lm_head.weight.data)


def test_a_saved_head_that_is_written_three_times(tmp_path: Path) -> None:
    """PEFT with `save_embedding_layers` writes the weight that it computes with twice, and the original."""
    model = llama()
    targets = targets_of(model)
    peft = save(model, tmp_path, r=4, lora_alpha=8, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft.save_pretrained(tmp_path / "sql", save_embedding_layers=True)
    file = tmp_path / "sql" / "adapter_model.safetensors"
    tensors = load_file(file)
    names = [f"base_model.model.lm_head.{name}weight" for name in ("", "modules_to_save.", "original_module.")]
    assert tensors.keys() >= set(names)
    assert_equals_peft(load(tmp_path, targets), peft)
    save_file(tensors | {names[1]: tensors[names[0]] + 1}, file)
    with pytest.raises(AdapterInvalid, match="a second weight for the same module, with other values"):
        load(tmp_path, targets)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_dtypes_are_rounded_as_torch_does(dtype: str, tmp_path: Path) -> None:
    model = llama()
    targets = targets_of(model, dtype)
    peft = save(model, tmp_path, r=8, lora_alpha=8, target_modules=["down_proj"])
    weights = load(tmp_path, targets)
    path = "model.layers.1.mlp.down_proj"
    theirs = peft.get_submodule("base_model.model." + path)
    assert torch.equal(weights.factors[path].a, theirs.lora_A["default"].weight.to(getattr(torch, dtype)))
    assert torch.equal(weights.factors[path].b, theirs.lora_B["default"].weight.to(getattr(torch, dtype)))
