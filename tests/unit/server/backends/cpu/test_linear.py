"""Packed linears equal plain ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from support.backends import PatchedBackend
from support.driver import Job, make_rig
from support.lora_cases import bits
from support.native_kernels import isas, native_kernels, using
from support.native_models import native_model
from support.zoo import random_model
from torch import nn

from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cpu.decoder import StackLinear, StackPair
from loraplex_server.backends.cpu.linear import (
    NativeLinear,
    PackedLinear,
    can_pack,
    native_linears,
    packed_linear,
)
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AbsorbedLinear, AdaptedHead, AdaptedLinear, PlainLinear
from loraplex_server.model.loader import adopt_model


@pytest.fixture(params=isas())
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    with using(request.param):
        yield native_kernels()


@pytest.mark.parametrize("shape", [(1, 64), (5, 64), (1, 7, 64), (2, 3, 64), (0, 64), (1, 0, 64)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_product_is_the_plain_one(
    kernels: NativeKernels, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(80, 64).to(dtype), torch.randn(shape).to(dtype)
    bias = torch.randn(80).to(dtype) if has_bias else None
    linear = native_linears(kernels)(weight, bias)
    assert isinstance(linear, NativeLinear)
    assert linear.is_copy
    out = linear(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)
    out.add_(1)  # the caller may write to it
    x.zero_()


def test_the_weight_is_a_copy_and_the_bias_may_be_a_view(kernels: NativeKernels) -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(64, 48).t(), torch.randn(96)[::2], torch.randn(3, 64)
    linear = NativeLinear(kernels, weight, bias)
    want = x @ weight.t() + bias
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)
    weight.zero_()
    torch.testing.assert_close(linear(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 4, dtype=torch.float64),
        torch.zeros(4, 4, dtype=torch.float16),
        torch.zeros(4, 33, dtype=torch.bfloat16),
    ],
    ids=lambda w: str(w.dtype),
)
def test_what_the_kernels_do_not_know_is_made_otherwise(kernels: NativeKernels, weight: torch.Tensor) -> None:
    assert isinstance(native_linears(kernels, PlainLinear)(weight, None), PlainLinear)


def test_absorbed_linears_are_computed_by_nobody(kernels: NativeKernels) -> None:
    first, second = torch.randn(8, 64), torch.randn(8, 64)
    absorbed, own = (
        AdaptedLinear(nn.Parameter(weight, False), None, StepContext(), make_base=native_linears(kernels)).base
        for weight in (first.to("meta"), second)
    )
    assert isinstance(absorbed, AbsorbedLinear)
    assert isinstance(own, NativeLinear)
    with pytest.raises(AssertionError, match="stack"):
        absorbed(torch.zeros(1, 64))


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_no_weight_is_kept_twice(kernels: NativeKernels, family: str) -> None:
    """Weights are kept once, where a model's layers became a stack and where they did not."""
    loaded = adopt_model(native_model(family, torch.bfloat16), backend=CpuBackend(kernels))
    linears = [module for module in loaded.targets.values() if isinstance(module, AdaptedLinear)]
    assert len(linears) == 2 * 7 + 1
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert [type(module) for module in kept] == [AdaptedHead]
    for module in linears:
        is_absorbed = loaded.decoder is not None and not isinstance(module, AdaptedHead)
        assert isinstance(module.base, StackLinear | StackPair if is_absorbed else NativeLinear)


def test_a_model_of_which_no_weight_packs_is_right(kernels: NativeKernels) -> None:
    """48 features are no multiple of 32, in bfloat16."""
    model = native_model("llama", torch.bfloat16, hidden_size=48)
    loaded = adopt_model(copy.deepcopy(model), backend=CpuBackend(kernels))
    packed = [m for m in loaded.model.modules() if isinstance(m, AdaptedLinear) and isinstance(m.base, NativeLinear)]
    assert loaded.decoder is None
    assert {module.in_features for module in packed} == {96, 128}  # down and o
    rig = make_rig(loaded, ops=NativeOps(kernels))
    job = Job([3, 4, 5, 6], 4)
    rig.run([job])
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([[*job.prompt, *job.tokens]]), use_cache=False).logits[0, 3:-1]
    torch.testing.assert_close(rig.logits(job), want, rtol=0, atol=0.05 * float(want.abs().max()))


def test_tied_weights_stay_tied(kernels: NativeKernels) -> None:
    model = native_model("qwen2")
    assert model.config.tie_word_embeddings
    embedding = model.get_parameter("model.embed_tokens.weight")
    loaded = adopt_model(model, backend=CpuBackend(kernels))
    head = loaded.model.get_output_embeddings()
    assert isinstance(head, AdaptedHead)
    assert head.weight is embedding
    x = torch.randn(3, 128)
    assert torch.equal(bits(head.base(x)), bits(NativeLinear(kernels, embedding, None)(x)))


def test_this_torch_still_has_the_operators() -> None:
    """The operators are private to torch. When they go, serving on a CPU goes on, slower: see to it then."""
    assert can_pack(torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (1, 7, 48), (2, 3, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_prepacked_product_is_the_plain_one(
    shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if not can_pack(torch.zeros(4, 4, dtype=dtype)):
        pytest.skip(f"this CPU multiplies {dtype} through another type")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype) if has_bias else None
    x = torch.randn(shape, generator=generator).to(dtype)
    packed = packed_linear(weight, bias)
    assert isinstance(packed, PackedLinear)
    out = packed(x)
    assert out.shape == (*shape[:-1], 80)
    torch.testing.assert_close(out, PlainLinear(weight, bias)(x), rtol=tolerance, atol=tolerance)


def test_a_transposed_weight_can_be_packed() -> None:
    """The transposed weight of a Conv1D can be packed."""
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)).t()
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(packed_linear(weight, None)(x), x @ weight.t(), rtol=1e-5, atol=1e-5)


def test_what_cannot_be_packed_stays_plain() -> None:
    assert isinstance(packed_linear(torch.zeros(4, 4, dtype=torch.float64), None), PlainLinear)


def test_packed_weights_are_not_kept_twice() -> None:
    loaded = adopt_model(random_model("llama", torch.float32), backend=PatchedBackend(make_linear=packed_linear))
    linears = [module for module in loaded.model.modules() if isinstance(module, AdaptedLinear)]
    kept = [module for module in linears if module.weight.device.type != "meta"]
    assert kept == [loaded.model.get_output_embeddings()]
    assert all(module.weight.shape == (module.out_features, module.in_features) for module in linears)
