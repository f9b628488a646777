"""Each C++ header stands alone: it includes what it uses, for every instruction set."""

from __future__ import annotations

import platform
import subprocess

import pytest
from support.native import compiler_or_skip

from loraplex_server.backends.cpu.native.build import COMMON, SOURCES, Compiler

# Primitives of one architecture.
OF_MACHINE = {
    "isa/vector_neon.h": "aarch64",
    "isa/vector_sve256.h": "aarch64",
    "isa/vector_256.h": "x86_64",
    "isa/vector_512.h": "x86_64",
}
# Types of a length that the other instruction sets do not have.
OF_VARIANT = {"isa/vector_sve256.h": "sve256"}
HEADERS = [
    name
    for name in sorted(str(path.relative_to(SOURCES)) for path in SOURCES.rglob("*.h"))
    if OF_MACHINE.get(name, platform.machine()) == platform.machine()
]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_or_skip()


@pytest.mark.parametrize("is_last", [True, pytest.param(False, marks=pytest.mark.nightly)], ids=["last", "others"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_header_compiles_alone(compiler: Compiler, header: str, is_last: bool) -> None:
    """Each header compiles for the last variant, which has the most instruction sets, and for the others."""
    assert compiler.variants
    for name in compiler.variants[-1:] if is_last else compiler.variants[:-1]:
        if OF_VARIANT.get(header, name) != name:
            continue
        flags = (*compiler.machine.baseline, *compiler.machine.variants[name], *COMMON, f"-DLP_ISA={name}")
        command = [*compiler.command, *flags, "-fsyntax-only", "-I", str(SOURCES), "-x", "c++", "-"]
        found = subprocess.run(
            command, input=f'#include "{header}"\n', capture_output=True, text=True, check=False, timeout=100
        )
        assert found.returncode == 0, f"{name}: {found.stderr}"
