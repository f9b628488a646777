"""Compilation of the attention kernels for real GPUs, without one.

Triton brings its own assembler, so no GPU is needed.

The interpreter runs a kernel as Python and accepts what the compiler does not; only a GPU shows that the code is right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.attention_cases import spec_of

from loraplex_server.layers.attention import AttentionBatch, LayerKv

triton = pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has taken the compiler's place"
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TYPES = {
    "parts_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "bias_ptr": "*fp32",
    "plan_ptr": "*i32",
    "slots_ptr": "*i32",
}
FLOATS = ("scale", "softcap")
# What launches pass with other values than multiples of 16.
RAGGED = ("count_at", "pieces_at", "tables_at", "partials_at", "slots_ptr", "window", "chunk", *FLOATS)


def compile_kernel(kernel: Any, dtype: str, arch: int, constants: dict[str, Any], **options: int) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    used = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature: dict[str, str] = {}
    for name in kernel.arg_names:
        default = f"*{dtype}" if name.endswith("_ptr") else "fp32" if name in FLOATS else "i32"
        signature[name] = "constexpr" if name in used else TYPES.get(name, default)
    # As a launch says of aligned pointers and of strides.
    aligned = {
        (idx,): [["tt.divisibility", 16]]
        for idx, name in enumerate(kernel.arg_names)
        if name not in used and name not in RAGGED
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=used, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": True, **options})


@pytest.mark.parametrize(
    ("dtype", "arch", "rows", "dim", "window", "softcap", "chunk"),
    [
        ("bf16", 90, 16, 128, None, None, None),  # decode of Llama 3
        ("bf16", 80, 32, 128, 4096, None, None),  # verification
        ("bf16", 90, 128, 128, None, None, None),  # a prompt
        ("fp16", 80, 128, 128, None, None, None),
        ("fp16", 90, 64, 256, 4096, 50.0, None),  # Gemma 2
        ("bf16", 90, 64, 80, None, None, None),  # no power of two
        ("bf16", 80, 32, 512, None, None, None),
        ("fp32", 80, 16, 128, None, None, None),
        ("fp32", 90, 32, 128, 1024, 50.0, None),
        ("bf16", 90, 64, 64, 128, None, None),  # gpt-oss, with sinks, and as if with biases
        ("bf16", 90, 16, 128, None, None, 8192),  # Llama 4
    ],
)
def test_attend_compiles(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    dtype: str,
    arch: int,
    rows: int,
    dim: int,
    window: int | None,
    softcap: float | None,
    chunk: int | None,
) -> None:
    from loraplex_server.backends.cuda.attention.paged import attend_kernel, tile_options
    from loraplex_server.backends.cuda.attention.plan import shape_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = spec_of(num_heads=32, num_kv_heads=8, k_dim=dim, v_dim=dim, window=window, softcap=softcap, chunk=chunk)
    assert rows <= shape_of(spec, DTYPES[dtype]).max_rows
    options = tile_options(spec, DTYPES[dtype], rows, has_wgmma=arch == 90)
    launch = {name: options.pop(name) for name in ("num_stages", "num_warps")}
    constants = {
        "GROUPS": spec.num_groups,
        "K_DIM": dim,
        "V_DIM": dim,
        "PAGE": 16,
        "BLOCK_ROWS": rows,
        "HAS_WINDOW": window is not None,
        "HAS_CHUNK": chunk is not None,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_SINKS": chunk is not None or window == 128,
        "HAS_BIAS": dim in (64, 80),
        "INTERPRETED": False,
        **options,
    }
    compiled = compile_kernel(attend_kernel, dtype, arch, constants, **launch)
    ptx = compiled.asm["ptx"]
    assert compiled.asm["cubin"]
    # Half precision must reach the tensor cores; float32 must not be rounded to TF32 there.
    assert ("mma" in ptx) == (dtype != "fp32")
    if launch["num_stages"] > 1:
        assert "wgmma" not in ptx, "ptxas before 13.3 miscompiles it in a pipelined loop"
        assert "cp.async" in ptx, "the loop over the keys is not pipelined"
    assert compiled.metadata.shared <= 99 * 1024  # what the smallest of the supported GPUs gives one program


@pytest.mark.parametrize(("dtype", "arch"), [("bf16", 90), ("fp16", 80), ("fp32", 80)])
@pytest.mark.parametrize("name", ["write_kernel", "combine_kernel"])
def test_the_others_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, dtype: str, arch: int) -> None:
    from loraplex_server.backends.cuda.attention import paged as triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"K_DIM": 128, "V_DIM": 128, "BLOCK_K": 128, "BLOCK_V": 128, "BLOCK_PARTS": 8}
    constants["HAS_SINKS"] = True
    assert compile_kernel(getattr(triton_kernels, name), dtype, arch, constants).asm["cubin"]


def test_where_slots_begin_compiles_nothing_anew() -> None:
    """They follow the counts of pieces, of which there are as many as sizes of blocks."""
    from loraplex_server.backends.cuda.attention.paged import write_kernel

    assert [one.name for one in write_kernel.params if one.do_not_specialize_on_alignment] == ["slots_ptr"]


def test_grids_are_no_larger_than_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program goes on to the next piece of its own, so fewer programs than pieces are enough."""
    from loraplex_server.backends.cuda.attention import paged

    grids: dict[str, tuple[int, int]] = {}

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, int]) -> Any:
            grids[self.name] = grid
            return lambda *_, **__: None

    for name in ("_attend", "_combine", "_write"):
        monkeypatch.setattr(paged, name, Kernel(name))
    spec, num_spans, length = spec_of(), 1025, 64 * 128  # each in 64 pieces
    lens, contexts = np.full(num_spans, 1), np.full(num_spans, length)
    tables = np.zeros((num_spans, length // 256), np.int64)
    batch = AttentionBatch(lens, contexts, tables, 256, torch.empty(0, dtype=torch.int64))
    attention = paged.TritonPagedAttention([spec])
    query = torch.zeros(num_spans, spec.num_heads, spec.k_dim, dtype=torch.bfloat16)
    key = torch.zeros(num_spans, spec.num_kv_heads, spec.k_dim, dtype=torch.bfloat16)
    page = torch.zeros(1, 256, spec.num_kv_heads, spec.k_dim, dtype=torch.bfloat16)
    plan = attention.plan(batch, torch.bfloat16, torch.device("cpu"))
    attention.run(query, key, key, LayerKv(page, page), spec, plan)
    assert grids["_attend"] == (spec.num_kv_heads, 65535)
