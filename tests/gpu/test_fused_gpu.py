"""Fused operations on a GPU: what a model's own operations give there, roundings included."""

from __future__ import annotations

import pytest
import torch
from support.backends import ReferenceFused

from loraplex_server.backends.fusion import NormForm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_features", [128, 4096, 14336])
@pytest.mark.parametrize("form", [NormForm(0.0, True), NormForm(0.0, False), NormForm(1.0, False)], ids=str)
def test_norms(form: NormForm, num_features: int, dtype: torch.dtype) -> None:
    from loraplex_server.backends.cuda.fused import TritonFused

    torch.manual_seed(0)
    x, weight = torch.randn(1, 33, num_features, device=CUDA).to(dtype), torch.randn(num_features, device=CUDA)
    weight = weight.to(dtype)
    got = TritonFused().rms_norm(x, weight, 1e-5, form)
    want = ReferenceFused().rms_norm(x, weight, 1e-5, form)
    # Sums are taken in another order, which may tip a rounding over.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)
    assert (got == want).float().mean() > (0.99 if dtype.itemsize == 2 else 0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_rotations(num_tokens: int, dtype: torch.dtype) -> None:
    from loraplex_server.backends.cuda.fused import TritonFused

    torch.manual_seed(0)
    joint = torch.randn(1, num_tokens, (32 + 8) * 128, device=CUDA).to(dtype)
    query = joint[..., : 32 * 128].view(1, num_tokens, 32, 128).transpose(1, 2)
    key = joint[..., 32 * 128 :].view(1, num_tokens, 8, 128).transpose(1, 2)
    cos, sin = torch.randn(2, 1, num_tokens, 128, device=CUDA).to(dtype)
    for got, want in zip(
        TritonFused().rotate(query, key, cos, sin), ReferenceFused().rotate(query, key, cos, sin), strict=True
    ):
        if dtype.itemsize == 2:
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("num_features", [300, 14336])
def test_gates(num_features: int, dtype: torch.dtype) -> None:
    from loraplex_server.backends.cuda.fused import TritonFused

    torch.manual_seed(0)
    gate, up = (4 * torch.randn(1, 33, 2 * num_features, device=CUDA)).to(dtype).split(num_features, dim=-1)
    got, want = TritonFused().silu_product(gate, up), ReferenceFused().silu_product(gate, up)
    # The exponential's last bits may tip a rounding over.
    torch.testing.assert_close(got, want, rtol=2 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)
    assert (got == want).float().mean() > (0.99 if dtype.itemsize == 2 else 0.0)
