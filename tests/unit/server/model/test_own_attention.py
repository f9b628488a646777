"""Attention modules in code of their own, and the biases that they are given."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.zoo import MAX_LEN, random_model
from transformers import T5Config, T5ForConditionalGeneration

from loraplex_contracts.errors import InvalidArgument, UnsupportedModel
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.quantization import INT8
from loraplex_server.model.loader import adopt_model
from loraplex_server.model.own_attention import form_of, has_known_form, install_attention, use_attention
from loraplex_server.model.refusals import refuse_class, refuse_config

CONTEXTS = {"bloom": MAX_LEN, "mpt": MAX_LEN, "falcon-alibi": 512}


@pytest.mark.parametrize("family", [*CONTEXTS, "falcon"])
def test_configurations_are_not_refused(family: str) -> None:
    config = random_model(family).config
    refuse_config(config, family)
    refuse_class(config, family)


@pytest.mark.parametrize("family", CONTEXTS)
def test_every_layer_has_a_bias_for_each_position(family: str) -> None:
    model = random_model(family, torch.float32)
    loaded = adopt_model(copy.deepcopy(model))
    assert loaded.spec.max_context_tokens == CONTEXTS[family]
    biases = [layer.key_bias for layer in loaded.spec.layers]
    first = biases[0]
    assert first is not None
    assert all(one is first for one in biases)  # one table in memory
    assert first.shape == (loaded.spec.layers[0].num_heads, CONTEXTS[family])
    assert first.dtype == torch.float32
    assert (first.diff(dim=1)[:, :120] > 0).all()


def test_falcon_without_alibi_has_no_biases() -> None:
    loaded = adopt_model(random_model("falcon"))
    assert [layer.key_bias for layer in loaded.spec.layers] == [None, None]
    assert [(layer.num_heads, layer.num_kv_heads) for layer in loaded.spec.layers] == [(4, 2)] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_biases_are_rounded_as_the_family_rounds_them(dtype: torch.dtype) -> None:
    for family in ("bloom", "falcon-alibi"):
        bias = adopt_model(random_model(family, dtype)).spec.layers[0].key_bias
        assert bias is not None
        narrow = dtype if family == "bloom" else torch.bfloat16
        # Falcon's slopes are powers of 4 here, and its scaling of 8 ** -0.5 no power of two.
        own = bias[:, :512] * (1.0 if family == "bloom" else 8**0.5)
        torch.testing.assert_close(own.to(narrow).float(), own, rtol=0 if family == "bloom" else 1e-2, atol=0)


def test_without_a_handle_the_own_code_runs() -> None:
    model = random_model("mpt")
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.inference_mode():
        want = model(input_ids=ids).logits
        install_attention(model, 64)
        assert torch.equal(model(input_ids=ids).logits, want)
        assert use_attention(model, "eager")
        assert torch.equal(model(input_ids=ids).logits, want)


def test_linears_of_a_class_of_their_own_are_rounded_too() -> None:
    model = random_model("falcon", torch.float32)
    own = {path: parameter.clone() for path, parameter in model.named_parameters()}
    loaded = adopt_model(model, form=INT8)
    targets = [path for path in loaded.targets if path.endswith(("query_key_value", "dense", "dense_4h_to_h"))]
    assert len(targets) == 6
    for path in targets:
        linear = loaded.targets[path]
        assert isinstance(linear, AdaptedLinear)
        assert not torch.equal(linear.base.matrix(), own[f"{path}.weight"])


def test_a_longer_context_than_the_biases_reach_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="--max-context must be 2 to 128"):
        adopt_model(random_model("mpt"), max_context_tokens=MAX_LEN + 1)


def test_slices_of_the_output_weight_are_refused() -> None:
    model = random_model("bloom", changes={"pretraining_tp": 2, "slow_but_exact": True})
    with pytest.raises(UnsupportedModel, match="does not use Transformers' attention interface"):
        adopt_model(model)


def test_other_attention_has_no_known_form() -> None:
    encoder: Any = T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, num_layers=1, num_heads=2))
    assert all(form_of(type(module)) is None for module in encoder.modules())
    assert not has_known_form(type(random_model("gpt2")))
