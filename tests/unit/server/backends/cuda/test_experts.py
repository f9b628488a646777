"""Compilation of the experts' kernel for real GPUs, without one; `test_interpreter.py` runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has taken the compiler's place"
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EVEN = ("in_features", "out_features", "x_stride", "expert_stride", "out_stride", "in_stride")


@pytest.mark.parametrize(("dtype", "arch"), [("bf16", 90), ("fp16", 80), ("fp32", 80)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("block_rows", [16, 64])
def test_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, block_rows: int, is_transposed: bool, dtype: str, arch: int
) -> None:
    """The kernel compiles for experts of the shape of Qwen3-30B-A3B's. A stride of 1 is a constant to the compiler, as
    in a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loraplex_server.backends.cuda.experts import experts_kernel, tile_options

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel: Any = experts_kernel
    options = tile_options(2048, 128, 8, block_rows, DTYPES[dtype])
    launch = {name: options.pop(name) for name in ("num_stages", "num_warps")} | {"enable_fp_fusion": True}
    constants = {**options, ("out_stride" if is_transposed else "in_stride"): 1}
    types = {"order_ptr": "*i64", "ends_ptr": "*i64"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        for name in kernel.arg_names
    }
    attrs = {
        (idx,): [["tt.divisibility", 16]]
        for idx, name in enumerate(kernel.arg_names)
        if name not in constants and (name.endswith("_ptr") or name in EVEN)
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    found = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)
    assert found.asm["cubin"]
    # Half precision must reach the tensor cores; float32 must not be rounded to TF32 there.
    assert ("mma" in found.asm["ptx"]) == (dtype != "fp32")
    assert "cp.async" in found.asm["ptx"], "the loop over the inputs is not pipelined"
    assert found.metadata.shared <= 99 * 1024  # what the smallest of the supported GPUs gives one program
