"""Each C++ header stands alone: it includes what it uses, for every instruction set."""

from __future__ import annotations

import subprocess

import pytest
from support.native import compiler_or_skip

from loraplex_server.backends.cpu.native.build import COMMON, SOURCES

HEADERS = sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.h"))


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(header: str) -> None:
    compiler = compiler_or_skip()
    assert compiler.variants
    for name in compiler.variants:
        flags = (*compiler.machine.baseline, *compiler.machine.variants[name], *COMMON, f"-DLP_ISA={name}")
        command = [*compiler.command, *flags, "-fsyntax-only", "-I", str(SOURCES), "-x", "c++", "-"]
        found = subprocess.run(
            command, input=f'#include "{header}"\n', capture_output=True, text=True, check=False, timeout=100
        )
        assert found.returncode == 0, f"{name}: {found.stderr}"
