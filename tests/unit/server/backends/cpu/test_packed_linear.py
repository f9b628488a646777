"""Packed base weights give the plain product."""

from __future__ import annotations

import pytest
import torch
from support.backends import PatchedBackend
from support.zoo import random_model

from loraplex_server.backends.cpu.linear import PackedLinear, can_pack, packed_linear
from loraplex_server.layers.linear import AdaptedLinear, PlainLinear
from loraplex_server.model.loader import adopt_model


def test_this_torch_still_has_the_operators() -> None:
    """They are private. When they go, serving on a CPU goes on, slower: see to it then."""
    assert can_pack(torch.zeros(4, 4))


@pytest.mark.parametrize("shape", [(1, 48), (5, 48), (1, 7, 48), (2, 3, 48), (0, 48)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_the_product_is_the_plain_one(
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
    """Of a Conv1D."""
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
