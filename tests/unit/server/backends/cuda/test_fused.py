"""The fused kernels: against the reference in Triton's interpreter, and compiled for real GPUs.

The interpreter has to be chosen before triton is imported, so this file runs itself once more, in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from support.backends import ReferenceFused

from loraplex_server.backends.fusion import NormForm

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
in_interpreter = pytest.mark.skipif(not IN_INTERPRETER, reason="runs in a process of its own")
outside = pytest.mark.skipif(IN_INTERPRETER, reason="is what starts that process, or needs the compiler")


@outside
@pytest.mark.timeout(200)
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"\b24 passed, 5 skipped", found.stdout), found.stdout


def check(got: torch.Tensor, want: torch.Tensor, rtol: float) -> None:
    """The interpreter cuts what it makes bfloat16 off instead of rounding it; only a GPU shows those last bits."""
    is_cut = want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2 if is_cut else rtol, atol=3e-2 if is_cut else 1e-6 * rtol)


@in_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [NormForm(0.0, True), NormForm(1.0, False)], ids=str)
@pytest.mark.parametrize("shape", [(1, 5, 64), (3, 48), (1, 6, 4, 16)], ids=str)
def test_norms(shape: tuple[int, ...], form: NormForm, dtype: torch.dtype) -> None:
    from loraplex_server.backends.cuda.fused import TritonFused

    torch.manual_seed(0)
    wide = torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype)
    for x in (wide[..., : shape[-1]], wide[..., shape[-1] :].contiguous(), wide[..., ::2]):
        got = TritonFused().rms_norm(x, weight, 1e-5, form)
        want = ReferenceFused().rms_norm(x, weight, 1e-5, form)
        assert got.dtype == dtype
        check(got, want, rtol=1e-5 if dtype == torch.float32 else 2e-3)  # sums in another order


@in_interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 12])
def test_rotations_are_right_to_the_last_bit(dim: int, dtype: torch.dtype) -> None:
    """As slices of a joint product come, partial rotations included."""
    from loraplex_server.backends.cuda.fused import TritonFused

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


@outside
@pytest.mark.parametrize(("dtype", "arch"), [("bf16", 90), ("bf16", 80), ("fp16", 80), ("fp32", 90)])
def test_they_compile(dtype: str, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loraplex_server.backends.cuda import fused as triton_ops

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel, constants, warps in (
        (triton_ops.rms_norm_kernel, {"OFFSET": 0.0, "NARROWS": True, "BLOCK": 4096}, 8),
        (triton_ops.rotate_kernel, {"HALF": 64, "BLOCK": 64}, 1),
    ):
        names = kernel.arg_names
        types = {name: f"*{dtype}" for name in names if name.endswith("_ptr")} | {"eps": "fp32"}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        even = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith(("_ptr", "_stride", "features"))
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
        result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
        assert result.asm["cubin"]
        if kernel is triton_ops.rms_norm_kernel:
            assert "ld.global.v4" in result.asm["ptx"]
