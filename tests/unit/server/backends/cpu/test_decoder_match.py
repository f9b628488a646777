"""Models that get the native decoder, and models that do not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.driver import Job, make_rig
from support.native_kernels import library_or_skip, native_kernels
from support.native_models import NOT_STACKED, STACKED, native_model, native_rig
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.decoder import NativeNorm, NativeStack
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.loader import adopt_model

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def built(caplog: pytest.LogCaptureFixture) -> None:
    library_or_skip()
    caplog.set_level(logging.INFO, "loraplex_server.backends.cpu.decoder")


def adopted(model: PreTrainedModel, *, verify: bool = True) -> LoadedModel:
    return adopt_model(model, backend=CpuBackend(native_kernels()), verify=verify)


def said(caplog: pytest.LogCaptureFixture) -> str:
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", STACKED)
def test_layers_of_the_common_kind(family: str, dtype: torch.dtype) -> None:
    model = native_model(family, dtype)
    layers, norm = model.model.layers, model.model.norm
    loaded = adopted(model)
    assert list(loaded.model.model.layers) == [loaded.decoder]
    assert isinstance(loaded.model.model.norm, NativeNorm)
    assert loaded.model.model.norm.weight is norm.weight
    assert isinstance(loaded.decoder, NativeStack)
    assert loaded.decoder.shape.num_heads == 4
    assert len(layers) == len(loaded.attention) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_change_far_out(caplog: pytest.LogCaptureFixture, dtype: torch.dtype) -> None:
    """Up to some position their parts and what they compute are those of a layer of the common kind."""
    model = native_model("ministral3", dtype)
    rope = model.config.rope_parameters
    rope["original_max_position_embeddings"] = 40  # behind the tokens that a proof of the first ones sees
    assert adopted(model).decoder is None
    assert "layer 0 computes something else" in said(caplog)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", NOT_STACKED)
def test_layers_of_other_kinds(caplog: pytest.LogCaptureFixture, family: str, dtype: torch.dtype) -> None:
    assert adopted(native_model(family, dtype)).decoder is None
    assert "layers are run one operation at a time" in said(caplog)


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({"head_dim": 16}, torch.float32, "heads of 16 and 16"),
        ({}, torch.float64, "not in float64"),
        ({}, torch.float16, "not in float16"),
        ({"intermediate_size": 80}, torch.bfloat16, "a number of features"),
        ({"mlp_bias": True}, torch.float32, "biases in the feed-forward part"),
        ({"hidden_act": "relu"}, torch.float32, "the activation ReLU"),
        ({"hidden_act": "gelu"}, torch.float32, "the activation GELU"),
    ],
    ids=lambda value: str(value),
)
def test_what_the_kernels_do_not_know(
    caplog: pytest.LogCaptureFixture, changes: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    assert adopted(native_model("llama", dtype, **changes)).decoder is None
    assert reason in said(caplog)


@pytest.mark.parametrize(
    "changes", [{"attention_bias": True}, {"hidden_act": "gelu_pytorch_tanh"}, {"rms_norm_eps": 0.1}]
)
def test_what_they_do_know(changes: dict[str, Any]) -> None:
    model = native_model("llama", **changes)
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    check_logits(model, rig)


def check_logits(model: PreTrainedModel, rig: Any) -> None:
    jobs = [Job([3, 4, 5, 6], 6), Job([9] * 20, 6)]
    rig.run(jobs)
    for job in jobs:
        with torch.inference_mode():
            ids = torch.tensor([[*job.prompt, *job.tokens]])
            want = model(input_ids=ids, use_cache=False).logits[0, len(job.prompt) - 1 : -1]
        torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=1e-4 * float(want.abs().max()))


def test_layers_may_differ_in_their_numbers() -> None:
    """Epsilons and windows are each layer's own."""
    model = native_model("qwen2-window")
    for norm in (model.model.layers[1].input_layernorm, model.model.layers[1].post_attention_layernorm):
        norm.variance_epsilon = 0.3
    rig = native_rig(model, native_kernels())
    assert rig.loaded.decoder is not None
    assert [layer.spec.window for layer in rig.loaded.attention] == [None, 6]
    check_logits(model, rig)


# --- layers that look like it -----------------------------------------------------------------------------------------


def scaled(module: nn.Module, factor: float) -> None:
    """As a patch of a model does it: on the instance."""
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * factor

    module.forward = forward  # type: ignore[method-assign]


PATCHES: dict[str, Callable[[PreTrainedModel], None]] = {
    "a layer": lambda model: scaled(model.model.layers[1], 1.1),
    "a feed-forward part": lambda model: scaled(model.model.layers[0].mlp, 0.9),
    "a norm": lambda model: scaled(model.model.layers[1].input_layernorm, 0.5),
    "an activation": lambda model: scaled(model.model.layers[1].mlp.act_fn, 0.5),
    "a linear": lambda model: scaled(model.model.layers[0].self_attn.k_proj, -1.0),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_forward_is_noticed(caplog: pytest.LogCaptureFixture, patch: str, dtype: torch.dtype) -> None:
    model = native_model("llama", dtype)
    PATCHES[patch](model)
    # A patched linear is replaced with its patch by every server's modules: that one is for the last check to refuse.
    loaded = adopted(model, verify=patch != "a linear")
    assert loaded.decoder is None
    assert "computes something else" in said(caplog) or "called in another way" in said(caplog)
    assert not any(isinstance(module, NativeStack | NativeNorm) for module in loaded.model.modules())


@pytest.mark.parametrize("patch", ["a layer", "a feed-forward part", "a norm"])
def test_a_patched_model_is_served_as_it_is(patch: str) -> None:
    model = native_model("llama")
    PATCHES[patch](model)
    patched = copy.deepcopy(native_model("llama"))
    PATCHES[patch](patched)
    kernels = native_kernels()
    rig = make_rig(adopt_model(patched, backend=CpuBackend(kernels)), ops=NativeOps(kernels))
    assert rig.loaded.decoder is None
    check_logits(model, rig)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_without_positions_are_noticed_where_attention_hardly_matters(dtype: torch.dtype) -> None:
    """Small random weights attend to everything alike: what is missing there is less than bfloat16 rounds away."""
    assert adopted(native_model("smollm3", dtype, initializer_range=0.02)).decoder is None


def turn_some(monkeypatch: pytest.MonkeyPatch, num_features: int) -> None:
    """Llama, of whose heads positions turn the first features only."""
    apply = modeling_llama.apply_rotary_pos_emb
    forward = modeling_llama.LlamaRotaryEmbedding.forward

    def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        n = cos.shape[-1]
        turned = apply(q[..., :n], k[..., :n], cos, sin, **options)
        return torch.cat([turned[0], q[..., n:]], -1), torch.cat([turned[1], k[..., n:]], -1)

    def fewer(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = forward(self, x, position_ids)
        half = num_features // 2
        return torch.cat([cos[..., :half]] * 2, -1), torch.cat([sin[..., :half]] * 2, -1)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", partial)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", fewer)


@pytest.mark.parametrize(("head_dim", "num_features", "is_stack"), [(64, 32, True), (96, 64, True), (64, 16, False)])
def test_positions_that_turn_a_part_of_each_head(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, num_features: int, is_stack: bool
) -> None:
    turn_some(monkeypatch, num_features)
    model = native_model("llama", head_dim=head_dim)
    rig = native_rig(model, native_kernels())
    assert (rig.loaded.decoder is not None) == is_stack
    check_logits(model, rig)


def test_the_comparison_leaves_nothing_behind() -> None:
    model = native_model("granite")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = adopted(model)
    assert loaded.decoder is None
    assert loaded.context.attention is None
    kept = {name: value for name, value in loaded.model.state_dict().items() if value.device.type != "meta"}
    assert kept
    for name, value in kept.items():
        assert torch.equal(value, before[name.replace(".base.", ".")]), name
