"""The kernels compile to machine code for real GPUs. Triton brings its own assembler, so no GPU is needed.

The interpreter runs a kernel as Python and accepts what the compiler does not; only a GPU shows that the code is right.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")

TYPES = {
    "x_ptr": "*{t}",
    "y_ptr": "*{t}",
    "inner_ptr": "*fp32",
    "weights_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "rows_ptr": "*i32",
    "blocks_ptr": "*i32",
    "ranks_ptr": "*i32",
    "a_ptrs": "*i64",
    "b_ptrs": "*i64",
}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has taken the compiler's place")
@pytest.mark.parametrize(
    ("dtype", "block_rows", "arch"), [("bf16", 16, 90), ("bf16", 64, 80), ("fp16", 64, 90), ("fp32", 16, 80)]
)
@pytest.mark.parametrize("name", ["shrink", "expand"])
def test_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, dtype: str, block_rows: int, arch: int
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loraplex_adapters.ops.triton import lora
    from loraplex_adapters.ops.triton.expand import expand_kernel
    from loraplex_adapters.ops.triton.shrink import shrink_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = shrink_kernel if name == "shrink" else expand_kernel
    constants = {
        "NUM_STEPS": 8,
        "NUM_SPLITS": 4,
        "BLOCK_ROWS": block_rows,
        "BLOCK_RANK": lora.BLOCK_RANK,
        "BLOCK_IN": lora.BLOCK_IN,
        "BLOCK_OUT": lora.BLOCK_OUT,
        "UPCAST": False,
    }
    used = {c: value for c, value in constants.items() if c in kernel.arg_names}
    signature = {arg: "constexpr" if arg in used else TYPES.get(arg, "i32").format(t=dtype) for arg in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_stages": 1})
    assert compiled.asm["cubin"]
    # Half precision must reach the tensor cores; float32 must not be rounded to TF32 there.
    assert ("mma" in compiled.asm["ptx"]) == (dtype != "fp32")
    assert compiled.metadata.shared <= 99 * 1024  # what the smallest of the supported GPUs gives one program
