"""Compilation of the LoRA kernels for real GPUs, without one.

Triton brings its own assembler, so no GPU is needed.

The interpreter runs a kernel as Python and accepts what the compiler does not; only a GPU shows that the code is right.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
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
    result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})
    assert result.asm["cubin"]
    assert result.metadata.shared <= 99 * 1024  # what the smallest of the supported GPUs gives one program
    return result


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def has_wide_loads(ptx: str) -> bool:
    """True if the kernel loads 16 bytes at a time, into registers or into shared memory."""
    return "ld.global.v4.b32" in ptx or bool(re.search(r"cp\.async\.cg\.shared\.global.* 0x10", ptx))


def constants_of(launch: Any, block_rows: int) -> dict[str, object]:
    """Constants of the launcher; each kernel takes its own."""
    return {
        "NUM_STEPS": launch.num_steps,
        "NUM_SPLITS": launch.num_splits,
        "SPLITS": triton.next_power_of_2(launch.num_splits),
        "NUM_LANES": launch.num_lanes,
        "BLOCK_ROWS": block_rows,
        "BLOCK_RANK": launch.block_rank,
        "BLOCK_IN": launch.block_in,
        "BLOCK_OUT": launch.block_out,
        "NUM_STAGES": launch.num_stages,
        "IS_ALIGNED": True,
        "UPCAST": False,
    }


def launch_options(name: str, launch: Any) -> dict[str, int]:
    """The launcher's options of a kernel: of warps, and of tiles of stages."""
    warps = launch.shrink_warps if name.startswith("shrink") else launch.expand_warps
    stages = {"shrink_tiles": launch.num_stages, "expand_tiles": 1}
    return {"num_warps": warps} | ({"num_stages": stages[name]} if name in stages else {})


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("name", ["shrink_rows", "expand_rows", "fused_rows"])
def test_kernels_for_few_rows(name: str, dtype: str, arch: int) -> None:
    from loraplex_server.backends.cuda.lora import kernels
    from loraplex_server.backends.cuda.lora.plan import ONE_ROW, choose_launch

    kernel = getattr(kernels, f"{name}_kernel")
    variant = "fused" if name == "fused_rows" else "rows"
    constants = constants_of(choose_launch(ONE_ROW, 8, 4096, 4096, 64, BYTES[dtype], variant), ONE_ROW)
    ptx = compiled(kernel, constants, dtype, arch).asm["ptx"]
    assert has_wide_loads(ptx)
    assert "mma" not in ptx
    if name != "fused_rows":
        narrow = compiled(kernel, {**constants, "IS_ALIGNED": False}, dtype, arch).asm["ptx"]
        # Of inner, which is always aligned, or of x; but of no factor.
        assert ptx.count("ld.global.v4") > narrow.count("ld.global.v4")


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize("name", ["shrink_tiles", "expand_tiles"])
def test_kernels_for_many_rows(name: str, block_rows: int, dtype: str, arch: int) -> None:
    from loraplex_server.backends.cuda.lora import kernels
    from loraplex_server.backends.cuda.lora.plan import choose_launch

    launch = choose_launch(block_rows, 8, 4096, 4096, 64, BYTES[dtype])
    kernel = getattr(kernels, f"{name}_kernel")
    ptx = compiled(kernel, constants_of(launch, block_rows), dtype, arch, **launch_options(name, launch)).asm["ptx"]
    # Half precision must reach the tensor cores; float32 must not be rounded to TF32 there.
    assert ("mma" in ptx) == (dtype != "fp32")
    assert has_wide_loads(ptx)


FEW_BYTES = 32  # put aside once by a thread, and not in every round of a loop
# Llama-3.1-8B's: q, k and v together; gate and up; o; down.
SHAPES = ((4096, 6144), (4096, 28672), (4096, 4096), (14336, 4096))


MAX_REGISTERS = 128  # of kernels that wait for memory: with more too few of their programs run at once


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("max_rank", [pytest.param(16, marks=pytest.mark.slow), 256])
def test_no_kernel_of_a_served_model_spills(max_rank: int, arch: int, tmp_path: Path) -> None:
    """Every kernel that the tables choose for a model in bfloat16, whatever the step. What does not fit the registers
    goes through memory, several times as slowly."""
    from loraplex_server.backends.cuda.lora import kernels
    from loraplex_server.backends.cuda.lora.plan import MANY_ROWS, ONE_ROW, SOME_ROWS, choose_launch

    done: set[tuple[Any, ...]] = set()
    steps = ((ONE_ROW, 8), (ONE_ROW, 64), (SOME_ROWS, 64), (MANY_ROWS, 64))
    for (num_in, num_out), (block_rows, num_blocks) in itertools.product(SHAPES, steps):
        launch = choose_launch(block_rows, num_blocks, num_in, num_out, max_rank, 2)
        assert launch.variant != "fused", "A is too large for that"
        constants = constants_of(launch, block_rows)
        for half in ("shrink", "expand"):
            name = f"{half}_{launch.variant}"
            kernel = getattr(kernels, f"{name}_kernel")
            used = (name, *((key, value) for key, value in constants.items() if key in kernel.arg_names))
            if used not in done:
                done.add(used)
                found = resources(compiled(kernel, constants, "bf16", arch, **launch_options(name, launch)), tmp_path)
                assert found["STACK"] <= FEW_BYTES, used
                assert launch.variant == "tiles" or found["REG"] <= MAX_REGISTERS, used
    assert len(done) <= 14, "each is compiled once, at a start or in the middle of serving"


def resources(result: Any, folder: Path) -> dict[str, int]:
    """A thread's registers (REG), and bytes that it keeps outside of them (STACK), as the tool that comes with Triton
    reads them."""
    import triton.backends.nvidia as backend

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(result.asm["cubin"])
    tool = Path(backend.__file__).parent / "bin/cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(re.search(rf"{name}:(\d+)", said)[1]) for name in ("REG", "STACK")}  # type: ignore[index]


@pytest.mark.parametrize(("dtype", "arch"), TARGETS)
@pytest.mark.parametrize("block_rows", [16, 64])
def test_dense_kernel(block_rows: int, dtype: str, arch: int) -> None:
    from loraplex_server.backends.cuda.lora.kernels import product_kernel
    from loraplex_server.backends.cuda.lora.plan import choose_dense_launch

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


def test_how_many_weights_there_are_compiles_nothing_anew() -> None:
    """The pointers of biases follow those of the weights."""
    from loraplex_server.backends.cuda.lora.kernels import product_kernel

    assert [one.name for one in product_kernel.params if one.do_not_specialize_on_alignment] == ["bias_ptrs"]
