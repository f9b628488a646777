"""Replaced modules: which may carry an adapter, and whose weights they share."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.multimodal import language_model
from support.zoo import VOCAB_SIZE, ZOO, random_model
from torch import Tensor, nn

from loraplex_server.layers.experts import AdaptedRouter, ExpertLinear
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedHead, AdaptedLinear
from loraplex_server.model.loader import adopt_model


@pytest.mark.parametrize("family", ZOO)
def test_every_linear_is_replaced_and_shares_its_weight(family: str) -> None:
    model = random_model(family, torch.float32)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters(remove_duplicate=False)}
    loaded = adopt_model(model)
    assert not [path for path, module in model.named_modules() if type(module) is nn.Linear]
    for path, module in loaded.targets.items():
        if isinstance(module, ExpertLinear):  # a parameter of a module that stays
            assert model.get_parameter(path.replace(".experts.", ".experts.base.")).data_ptr() == before[path]
            continue
        assert module.weight.data_ptr() == before[f"{path}.weight"]
        assert model.get_submodule(path) is module
    kinds = {type(module) for module in loaded.targets.values()} - {AdaptedRouter, ExpertLinear}
    assert kinds == {AdaptedLinear, AdaptedHead, AdaptedEmbedding}


def test_targets_as_plain_data() -> None:
    loaded = adopt_model(random_model("gpt2", torch.float32), model_id="tiny")
    targets = loaded.base_targets(max_rank=16)
    fused = targets.modules["transformer.h.0.attn.c_attn"]
    assert (fused.kind, fused.in_features, fused.out_features, fused.is_conv1d) == ("linear", 32, 96, True)
    words = targets.modules["transformer.wte"]
    assert (words.kind, words.in_features, words.out_features) == ("embedding", VOCAB_SIZE, 32)
    assert targets.modules["lm_head"].weight_sha256 == words.weight_sha256 != ""  # tied
    assert (targets.model_id, targets.dtype, targets.max_rank) == ("tiny", "float32", 16)
    assert (targets.hidden_size, targets.vocab_size) == (32, VOCAB_SIZE)


@pytest.mark.parametrize("family", ["llama", "mistral3", "internvl", "qwen3_vl_moe"])
def test_a_tied_head_is_one_that_has_the_embeddings_weight(family: str) -> None:
    """Whatever the configuration of a model's text says of itself."""
    model = random_model(family) if family in ZOO else language_model(family)
    is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    targets = adopt_model(model).base_targets(max_rank=16)
    assert targets.tied_head == (targets.head if is_tied else "")


def test_weights_that_layers_share_are_told() -> None:
    modules = adopt_model(random_model("zamba")).base_targets(max_rank=16).modules
    shared = {path for path, module in modules.items() if module.is_shared}
    assert shared
    assert all(".shared_transf." in path for path in shared)


def test_experts_and_routers_are_targets() -> None:
    targets = adopt_model(random_model("deepseek_v3")).base_targets(max_rank=16)
    assert targets.experts == {"model.layers.1.mlp.experts": ("gate_up_proj", "down_proj")}
    fused, router = (targets.modules[f"model.layers.1.mlp.{name}"] for name in ("experts.gate_up_proj", "gate"))
    assert (fused.kind, fused.in_features, fused.out_features, fused.num_experts) == ("experts", 32, 32, 4)
    assert (router.kind, router.in_features, router.out_features, router.num_experts) == ("router", 32, 4, 0)
    assert targets.modules["model.layers.1.mlp.shared_experts.up_proj"].kind == "linear"  # sees every token


def test_experts_that_are_given_all_rows_are_targets() -> None:
    """Llama 4's, whose weights PEFT takes for those of the other layout."""
    targets = adopt_model(random_model("llama4-experts")).base_targets(max_rank=16)
    assert targets.experts == {
        f"model.layers.{layer}.feed_forward.experts": ("gate_up_proj", "down_proj") for layer in range(2)
    }
    fused = targets.modules["model.layers.1.feed_forward.experts.gate_up_proj"]
    assert (fused.in_features, fused.out_features, fused.num_experts, fused.swaps_features) == (32, 96, 4, True)
    assert targets.modules["model.layers.1.feed_forward.router"].kind == "router"


def test_experts_of_another_form_are_no_targets() -> None:
    """Rows of other experts that are no zeros behind them."""
    model = random_model("llama4-experts")
    for layer in model.model.layers:
        layer.feed_forward.experts.forward = partial(_shifted, layer.feed_forward.experts)
    targets = adopt_model(model).base_targets(max_rank=16)
    assert not targets.experts
    assert not [path for path in targets.modules if ".experts." in path]


def _shifted(experts: Any, hidden_states: Tensor) -> Tensor:
    return type(experts).forward(experts, hidden_states) + 0.5
