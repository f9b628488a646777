"""Runs the suites over the Triton kernels, in Triton's interpreter on the CPU.

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

HERE = Path(__file__).parent
SERVER = HERE.parents[1]
SUITES = (
    SERVER / "backends/test_lora_operations.py",
    SERVER / "backends/test_dense_operations.py",
    HERE / "lora/kernel_grid.py",
    SERVER / "layers/test_attention.py",
    HERE / "fused_kernels.py",
    HERE / "expert_kernels.py",
    HERE / "draw_kernels.py",
)


@pytest.mark.timeout(400)  # two minutes of work for all, on a machine that may have other work
@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_every_suite_over_the_kernels(step: int) -> None:
    """Every tenth test of the suites passes over the kernels, or every test."""
    num_passed = passed_over_the_kernels(*SUITES, step=step)
    assert num_passed >= 259 // step


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replays_over_the_kernels() -> None:
    assert passed_over_the_kernels(HERE / "replayed_kernels.py", step=1) == 2


def passed_over_the_kernels(*suites: Path, step: int) -> int:
    """Tests that passed; none may fail or be skipped."""
    command = [sys.executable, "-m", "pytest", *map(str, suites), "--confcutdir", str(SERVER), "-p", "support.sampled"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "SAMPLED_STEP": str(step)}
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider"], env=environment, capture_output=True, text=True, timeout=380
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    summary = run.stdout.splitlines()[-1]
    passed = re.search(r"(\d+) passed", summary)
    assert passed, summary
    assert "skipped" not in summary, summary
    return int(passed[1])
