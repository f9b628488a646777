"""The dense kernel: the suite of dense products in Triton's interpreter, and that it compiles for real GPUs.

Why in a process of its own: see test_interpreter.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on already")

SUITE = Path(__file__).parents[1] / "test_dense.py"
POINTERS = {"rows_ptr": "*i32", "blocks_ptr": "*i32", "sizes_ptr": "*i32", "weight_ptrs": "*i64", "bias_ptrs": "*i64"}


@pytest.mark.timeout(400)  # some seconds of work, on a machine that may have other work
def test_the_suite_over_the_kernel() -> None:
    command = [sys.executable, "-m", "pytest", str(SUITE), "--confcutdir", str(SUITE.parent), "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    summary = run.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) >= 40, summary
    assert "skipped" not in summary, summary


@pytest.mark.parametrize(
    ("dtype", "block_rows", "arch"), [("bf16", 16, 90), ("bf16", 64, 80), ("fp16", 64, 90), ("fp32", 16, 80)]
)
def test_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, block_rows: int, arch: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from loraplex_adapters.ops.triton import dense
    from loraplex_adapters.ops.triton.product import product_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        "NUM_STEPS": 8,
        "BLOCK_ROWS": block_rows,
        "BLOCK_OUT": dense.BLOCK_OUT,
        "BLOCK_IN": dense.BLOCK_IN,
        "UPCAST": False,
    }
    types = {**POINTERS, "x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}"}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in product_kernel.arg_names}
    source = ASTSource(fn=product_kernel, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32))
    assert compiled.asm["cubin"]
    assert ("mma" in compiled.asm["ptx"]) == (dtype != "fp32")
    assert compiled.metadata.shared <= 99 * 1024
