"""A minimal native library for tests of its build and loading."""

from __future__ import annotations

from pathlib import Path

import pytest

from loraplex_server.backends.cpu.native.build import CannotBuild, Compiler, find_compiler
from loraplex_server.backends.cpu.native.library import ABI_VERSION

VERSION = """
extern "C" __attribute__((visibility("default"))) int lp_abi_version() { return ABI; }
extern "C" __attribute__((visibility("default"))) const char* lp_source_hash() {
    static const char marked[] = "lp_source_hash=" LP_SOURCE_HASH;
    return marked + 15;
}
#define NAME(name) , #name
static const char* const names[] = {"none" LP_VARIANTS(NAME)};
constexpr int best = sizeof names / sizeof *names - 1;
extern "C" __attribute__((visibility("default"))) int lp_has_kernels() { return best > 0; }
extern "C" __attribute__((visibility("default"))) const char* lp_isa() { return names[best]; }
"""
# Says its own name, and by which flags it was compiled: what no flag can define but the compiler itself.
PROBE = """
#include "probe.h"
extern "C" __attribute__((visibility("default"))) int NAMED(lp_probe_, LP_ISA)() {
#if defined(__AMX_BF16__)
    return 4;
#elif defined(__AVX512BF16__)
    return 3;
#elif defined(__AVX512F__)
    return 2;
#elif defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}
"""
PROBE_HEADER = """
#define NAMED_(prefix, name) prefix##name
#define NAMED(prefix, name) NAMED_(prefix, name)
"""


def compiler_or_skip() -> Compiler:
    try:
        return find_compiler()
    except CannotBuild as error:
        pytest.skip(f"native kernels cannot be built here: {error}")


def write_sources(folder: Path, abi_version: int = ABI_VERSION) -> Path:
    (folder / "isa").mkdir(parents=True)
    (folder / "version.cpp").write_text(VERSION.replace("ABI", str(abi_version), 1))
    (folder / "probe.h").write_text(PROBE_HEADER)
    (folder / "isa" / "probe.cpp").write_text(PROBE)
    return folder
