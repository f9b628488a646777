"""Fused kernels against the reference.

Not collected by itself: `test_interpreter.py` runs it in Triton's interpreter, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/cuda/fused_kernels.py`.
"""

from __future__ import annotations

import pytest
import torch
from support.backends import ReferenceFused

from loraplex_server.backends.cuda.fused import TritonFused
from loraplex_server.backends.fusion import NormForm

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def check(got: torch.Tensor, want: torch.Tensor, rtol: float) -> None:
    """Compares values. The interpreter cuts what it makes bfloat16 off instead of rounding it; only a GPU shows those
    last bits."""
    is_cut = want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2 if is_cut else rtol, atol=3e-2 if is_cut else 1e-6 * rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [NormForm(0.0, True), NormForm(1.0, False)], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 48), (1, 6, 4, 16)], ids=str)
def test_norms(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for x in (wide[..., : shape[-1]], wide[..., shape[-1] :].contiguous(), wide[..., ::2]):
        got = TritonFused().rms_norm(x, weight, 1e-5, form)
        want = ReferenceFused().rms_norm(x, weight, 1e-5, form)
        assert got.dtype == dtype
        check(got, want, rtol=1e-5 if dtype == torch.float32 else 2e-3)  # sums in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 12])
def test_rotations_are_right_to_the_last_bit(dim: int, dtype: torch.dtype) -> None:
    """Query and key are slices of a joint product, partial rotations included."""
    torch.manual_seed(0)
    joint = torch.randn(1, 5, (4 + 2) * 20).to(dtype)
    query = joint[..., :80].view(1, 5, 4, 20).transpose(1, 2)[..., :dim]
    key = joint[..., 80:].view(1, 5, 2, 20).transpose(1, 2)[..., 20 - dim :]
    cos, sin = torch.randn(2, 1, 5, dim).to(dtype)
    for got, want in zip(
        TritonFused().rotate(query, key, cos, sin), ReferenceFused().rotate(query, key, cos, sin), strict=True
    ):
        assert got.shape == want.shape
        check(got, want, rtol=0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_features", [40, 1500])
def test_gates(num_features: int, dtype: torch.dtype) -> None:
    """Gate and up are halves of a joint product, or apart."""
    torch.manual_seed(0)
    joint = (4 * torch.randn(1, 5, 2 * num_features)).to(dtype)
    gate, up = joint.split(num_features, dim=-1)
    for halves in ((gate, up), (gate.contiguous(), up.contiguous()), (gate, up.transpose(1, 2).contiguous().mT)):
        got = TritonFused().silu_product(*halves)
        assert got.shape == gate.shape
        check(got, ReferenceFused().silu_product(gate, up), rtol=1e-5 if dtype == torch.float32 else 2e-3)
