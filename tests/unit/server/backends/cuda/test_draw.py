"""The draw's kernel compiled for real GPUs. `test_interpreter.py` compares it with the definition."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("truncates", [False, True])
def test_it_rounds_each_operation_by_itself(
    truncates: bool, arch: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loraplex_server.backends.cuda import draw
    from loraplex_server.sampling.draw import NoiseField

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, noise = draw.best_kernel, NoiseField(8, "cpu")
    constants = {
        "TRUNCATES": truncates,
        "LOW_BITS": noise.low_bits,
        "LOW_MASK": (1 << noise.low_bits) - 1,
        "HALF_CELLS": len(noise.values) // 2,
        "BLOCK": draw.BLOCK,
    }
    types = {"ids_ptr": "*i64", "keys_ptr": "*i32", "mixed_ids_ptr": "*i32", "vocab_size": "i32", "score_stride": "i32"}
    if not truncates:
        constants |= {"thresholds_ptr": None}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": draw.NUM_WARPS, "enable_fp_fusion": False}
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    assert "fma" not in ptx
    assert "div.rn.f32" in ptx
