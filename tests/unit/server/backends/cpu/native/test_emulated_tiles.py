"""Kernels for AMX on a CPU without it: their tests with tiles in software."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.emulated_tiles import VARIABLE
from support.native import compiler_or_skip
from support.native_kernels import isas

from loraplex_server.backends.cpu.native.build import LIBRARY, build

TESTS = Path(__file__).resolve().parents[1]
TILES = Path(__file__).resolve().parents[5] / "support" / "emulated_tiles.h"

pytestmark = pytest.mark.slow


def test_kernels_with_tiles_in_software(tmp_path: Path) -> None:
    """The tests of this back end that are run for each instruction set, as they run where there is AMX."""
    compiler = compiler_or_skip()
    if (best := isas()[0]) != "avx512bf16":
        pytest.skip(f"needs AVX512-bf16 without AMX, and the best instruction set here is {best or 'none'}")
    including = replace(compiler, command=(*compiler.command, "-include", str(TILES)))
    library = build(tmp_path / LIBRARY.name, compiler=including)
    # Adapters' own products take half of the time and go by the same kernels.
    chosen = ("-k", "amx and not own_products", "-m", "not nightly", str(TESTS))
    command = [sys.executable, "-m", "pytest", "-p", "support.emulated_tiles", *chosen]
    path = os.pathsep.join(filter(None, (str(TILES.parents[1]), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, VARIABLE: str(library), "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
