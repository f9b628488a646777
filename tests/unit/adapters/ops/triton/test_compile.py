"""The kernels compile to machine code for real GPUs. Triton brings its own assembler, so no GPU is needed.

The interpreter runs a kernel as Python and accepts what the compiler does not; only a GPU shows that the code is right.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has taken the compiler's place"
)

POINTERS = {
    "inner_ptr": "*fp32",
    "term_weights_ptr": "*fp32",
    "scales_ptr": "*fp32",
    "rows_ptr": "*i32",
    "blocks_ptr": "*i32",
    "term_slots_ptr": "*i32",
    "ranks_ptr": "*i32",
    "sizes_ptr": "*i32",
    "a_ptrs": "*i64",
    "b_ptrs": "*i64",
    "weight_ptrs": "*i64",
    "bias_ptrs": "*i64",
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TARGETS = [("bf16", 90), ("bf16", 80), ("fp16", 80), ("fp32", 90)]
# What the launchers are told to be a multiple of 16, as it is in models.
EVEN = ("in_features", "out_features", "x_stride", "y_stride")


def compiled(kernel: Any, constants: dict[str, object], dtype: str, arch: int, **options: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    types = {**POINTERS, "x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}
    signature = {arg: "constexpr" if arg in used else types.get(arg, "i32") for arg in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if arg in types or arg in EVEN}
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=attrs)
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert result.asm["cubin"]
    assert result.metadata.shared <= 99 * 1024  # what the smallest of the supported GPUs gives one program
    return result


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def has_wide_loads(ptx: str) -> bool:
    """16 bytes at a time, into registers or into shared memory."""
    return "ld.global.v4.b32" in ptx or bool(re.search(r"cp\.async\.cg\.shared\.global.* 0x10", ptx))


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("name", ["shrink_rows", "expand_rows", "fused_rows"])
def test_kernels_for_few_rows(name: str, dtype: str, arch: int) -> None:
    from loraplex_adapters.ops.triton import decode
    from loraplex_adapters.ops.triton.variants import FEW_ROWS, choose_launch

    variant = "fused" if name == "fused_rows" else "rows"
    launch = choose_launch(FEW_ROWS, 8, 4096, 4096, 64, BYTES[dtype], variant)
    constants: dict[str, object] = {
        "NUM_STEPS": launch.num_steps,
        "NUM_SPLITS": launch.num_splits,
        "SPLITS": launch.num_splits,
        "NUM_LANES": launch.num_lanes,
        "BLOCK_RANK": launch.block_rank,
        "BLOCK_IN": launch.block_in,
        "BLOCK_OUT": launch.block_out,
        "NUM_STAGES": launch.num_stages,
        "IS_ALIGNED": True,
        "OVERLAPS": False,
    }
    ptx = compiled(getattr(decode, f"{name}_kernel"), constants, dtype, arch).asm["ptx"]
    assert has_wide_loads(ptx)
    assert "mma" not in ptx
    if name != "fused_rows":
        narrow = compiled(getattr(decode, f"{name}_kernel"), {**constants, "IS_ALIGNED": False}, dtype, arch).asm["ptx"]
        # Of inner, which is always aligned, or of x; but of no factor.
        assert ptx.count("ld.global.v4") > narrow.count("ld.global.v4")
    if name != "fused_rows" and arch >= 90:
        kernel = getattr(decode, f"{name}_kernel")
        ptx = compiled(kernel, {**constants, "OVERLAPS": True}, dtype, arch, launch_pdl=True).asm["ptx"]
        assert ("griddepcontrol.launch_dependents" if name == "shrink_rows" else "griddepcontrol.wait") in ptx


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("name", ["shrink_tiles", "expand_tiles"])
def test_kernels_for_many_rows(name: str, block_rows: int, dtype: str, arch: int) -> None:
    from loraplex_adapters.ops.triton import prefill
    from loraplex_adapters.ops.triton.variants import choose_launch

    launch = choose_launch(block_rows, 8, 4096, 4096, 64, BYTES[dtype])
    constants: dict[str, object] = {
        "NUM_STEPS": launch.num_steps,
        "NUM_SPLITS": launch.num_splits,
        "NUM_LANES": launch.num_lanes,
        "BLOCK_ROWS": block_rows,
        "BLOCK_RANK": launch.block_rank,
        "BLOCK_IN": launch.block_in,
        "BLOCK_OUT": launch.block_out,
        "IS_ALIGNED": True,
        "UPCAST": False,
    }
    options = {"num_stages": launch.num_stages} if name == "shrink_tiles" else {"num_stages": 1}
    ptx = compiled(getattr(prefill, f"{name}_kernel"), constants, dtype, arch, **options).asm["ptx"]
    # Half precision must reach the tensor cores; float32 must not be rounded to TF32 there.
    assert ("mma" in ptx) == (dtype != "fp32")
    assert has_wide_loads(ptx)


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("block_rows", [16, 64])
def test_dense_kernel(block_rows: int, dtype: str, arch: int) -> None:
    from loraplex_adapters.ops.triton.product import product_kernel
    from loraplex_adapters.ops.triton.variants import choose_dense_launch

    launch = choose_dense_launch(block_rows, BYTES[dtype])
    constants: dict[str, object] = {
        "NUM_STEPS": 4096 // launch.block_in,
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": launch.block_out,
        "BLOCK_IN": launch.block_in,
        "IS_ALIGNED": True,
        "UPCAST": False,
    }
    ptx = compiled(product_kernel, constants, dtype, arch, num_stages=launch.num_stages).asm["ptx"]
    assert ("mma" in ptx) == (dtype != "fp32")
    assert has_wide_loads(ptx)
