"""Emulated instruction sets: tests of kernels that this CPU cannot run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.emulated import VARIABLE
from support.native import compiler_or_skip
from support.native_kernels import isas

from loraplex_server.backends.cpu.native.build import LIBRARY, Compiler, build

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = Path(__file__).resolve().parents[5] / "support"

pytestmark = pytest.mark.slow
# Where vectors are in software too, only attention fits into the time of the slow tests: two minutes, and others three.
MARKS = () if isas()[0] == "avx512bf16" else pytest.mark.nightly


@pytest.mark.parametrize(
    "chosen",
    [
        "(amx or avx512bf16) and test_attention",
        pytest.param("amx and not test_attention", marks=MARKS),
        pytest.param("avx512", marks=pytest.mark.nightly),
    ],
)
def test_kernels_in_software(chosen: str, tmp_path: Path) -> None:
    """The tests of this back end that are run for each instruction set, as they run where the CPU has it."""
    compiler = emulating(compiler_or_skip(), isas()[0])
    library = build(tmp_path / LIBRARY.name, compiler=compiler)
    # Adapters' own products take half of the time and go by the same kernels.
    options = ("-k", f"({chosen}) and not own_products", "-m", "not nightly", "--ignore", __file__, str(TESTS))
    command = [sys.executable, "-m", "pytest", "-p", "support.emulated", *options]
    path = os.pathsep.join(filter(None, (str(SUPPORT.parent), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, VARIABLE: str(library), "PYTHONPATH": path}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert " passed" in run.stdout


def emulating(compiler: Compiler, best: str) -> Compiler:
    """A compiler that puts software in the place of what a CPU with this instruction set lacks. Skips a CPU with AMX,
    and one of another architecture."""
    tiles = ("-include", str(SUPPORT / "emulated_tiles.h"))
    if best == "avx512bf16":
        return replace(compiler, command=(*compiler.command, *tiles))
    if best not in ("avx2", "avx512"):
        pytest.skip(f"needs x86-64 without AMX, and the best instruction set here is {best or 'none'}")
    avx2 = compiler.machine.variants["avx2"]
    flags = (*avx2, "-mf16c", "-O1", "-Wno-psabi", "-Wno-ignored-attributes")
    variants = {name: (*flags, f"-DLP_EMULATED={idx + 1}") for idx, name in enumerate(("avx512", "avx512bf16", "amx"))}
    return replace(
        compiler,
        command=(*compiler.command, "-include", str(SUPPORT / "emulated_512.h"), *tiles),
        machine=replace(compiler.machine, variants={"avx2": avx2, **variants}),
        variants=("avx2", *variants),
    )
