"""Fused kernels compiled for real GPUs. `test_interpreter.py` compares them with the reference."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


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
        (triton_ops.silu_product_kernel, {"BLOCK": triton_ops.BLOCK_FEATURES}, 4),
    ):
        names = kernel.arg_names
        types = {name: f"*{dtype}" for name in names if name.endswith("_ptr")} | {"eps": "fp32"}
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
        even = {
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n.endswith(("_ptr", "_stride", "features"))
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even)
        options = {"num_warps": warps, "enable_fp_fusion": kernel is not triton_ops.rotate_kernel}
        result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        assert result.asm["cubin"]
        if kernel is not triton_ops.rotate_kernel:
            assert "ld.global.v4" in result.asm["ptx"]
        elif arch == 90:  # older ones have no product of bfloat16 alone
            # In one instruction with a sum a product is not rounded by itself.
            assert "fma" not in result.asm["ptx"]
