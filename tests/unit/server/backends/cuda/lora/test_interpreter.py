"""Runs the suites over the Triton kernels, in Triton's interpreter on the CPU.

Triton chooses between compiler and interpreter when it is imported, for its own library too, and in a pytest process it
is imported early (by torch and transformers). So the choice is made for processes of their own, and the rest of the
suite keeps the compiler (see test_compile.py).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")

HERE = Path(__file__).parent
SERVER = HERE.parents[2]
SUITES = (
    SERVER / "backends/test_lora_operations.py",
    SERVER / "layers/test_lora.py",
    HERE / "kernel_grid.py",
)


@pytest.mark.timeout(400)  # a minute of work for all, on a machine that may have other work
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the suites run over the kernels directly")
def test_the_suites_over_the_kernels(step: int) -> None:
    """Every fifth test of them, or all."""
    command = [sys.executable, "-m", "pytest", *map(str, SUITES), "--confcutdir", str(SERVER), "-p", "support.sampled"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SAMPLED_STEP": str(step)}
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True, timeout=380
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    summary = run.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) >= 190 // step, summary
    assert "skipped" not in summary, summary
