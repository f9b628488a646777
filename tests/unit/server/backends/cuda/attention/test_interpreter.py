"""Runs the attention suite over the Triton kernels, in Triton's interpreter on the CPU.

Triton chooses between compiler and interpreter when it is imported, for its own library too, and in a pytest process it
is imported early (by torch and transformers). So the choice is made for a process of its own, and the rest of the
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

SUITE = Path(__file__).parents[3] / "layers/test_attention.py"


@pytest.mark.timeout(400)  # some forty seconds of work for all, on a machine that may have other work
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the suite runs over the kernels directly")
def test_the_attention_suite_over_the_kernels(step: int) -> None:
    """Every fifth test of it, or all."""
    command = [sys.executable, "-m", "pytest", str(SUITE), "--confcutdir", str(SUITE.parent), "-p", "no:cacheprovider"]
    command += ["-p", "support.sampled"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SAMPLED_STEP": str(step)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    summary = run.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert int(passed[1]) >= 45 // step, summary
    assert "skipped" not in summary, summary
