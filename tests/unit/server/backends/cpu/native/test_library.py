"""Libraries that are loaded or refused, and prototypes against the sources."""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path

import pytest
from support.native import compiler_or_skip, write_sources

from loraplex_server.backends.cpu.native import build
from loraplex_server.backends.cpu.native.build import SOURCES, Compiler, Machine, find_compiler
from loraplex_server.backends.cpu.native.library import (
    ABI_VERSION,
    IDENTITY,
    KERNELS,
    Loaded,
    NativeStatus,
    Prototype,
    load,
)

PROBES = {"lp_probe_avx512": Prototype(ctypes.c_int)}
AGAIN = "python -m loraplex_server.backends.cpu.native.build"


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_or_skip()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "src")


def refused(loaded: Loaded) -> str:
    assert loaded.library is None
    assert not loaded.status.usable
    assert loaded.status.isa == ""
    assert "\n" not in loaded.status.reason
    return loaded.status.reason


def test_a_library_that_fits(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    library, status = load(out, sources, PROBES)
    assert status == NativeStatus(True, "", compiler.variants[-1])
    assert library is not None
    assert library.isa == compiler.variants[-1]
    assert library.functions.lp_probe_avx512() == 2
    with pytest.raises(ctypes.ArgumentError):
        library.functions.lp_probe_avx512("not", object())


def test_not_built(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    assert refused(load(tmp_path / "out.so", sources)) == f"not built; with a C++ compiler, {AGAIN} builds it"


def test_stale(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    (sources / "isa" / "probe.cpp").write_text("// the code has moved on\n")
    why = refused(load(out, sources, PROBES))
    assert why == f"built from other sources than those that are there; {AGAIN} builds it again"
    build.build(out, sources=sources, compiler=compiler)
    assert load(out, sources, {}).status.usable


def test_nothing_of_a_stale_library_runs(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    (sources / "early.cpp").write_text(
        "#include <cstdlib>\n__attribute__((constructor)) static void early() { std::_Exit(9); }\n"
    )
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    (sources / "early.cpp").write_text("// better not\n")
    assert "other sources" in refused(load(out, sources, PROBES))


def test_another_abi(compiler: Compiler, tmp_path: Path) -> None:
    sources = write_sources(tmp_path / "src", abi_version=ABI_VERSION + 1)
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    why = refused(load(out, sources, PROBES))
    assert why == f"of version {ABI_VERSION + 1}, and this package is made for {ABI_VERSION}; {AGAIN} builds it again"


def test_a_function_that_is_not_there(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    why = refused(load(out, sources, {"lp_no_such_kernel": Prototype(None)}))
    assert why.startswith("does not load: ")
    assert "lp_no_such_kernel" in why


def test_a_file_that_is_no_library(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    out = tmp_path / "out.so"
    out.write_bytes(b"half a download lp_source_hash=" + build.source_hash(sources).encode() + b"\0")
    assert refused(load(out, sources, PROBES)).startswith("does not load: ")


def test_a_cpu_for_which_nothing_was_built(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    plain = find_compiler(compiler.command, Machine(compiler.machine.baseline, {}))
    out = build.build(tmp_path / "out.so", sources=sources, compiler=plain)
    assert refused(load(out, sources, {})) == "this CPU has none of the instruction sets that it was built for"


def test_another_architecture(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert "this is linux riscv64" in refused(load(tmp_path / "out.so", sources))


def declared() -> dict[str, list[str]]:
    text = "\n".join(path.read_text() for path in SOURCES.glob("*.cpp"))
    found = re.findall(r"(?m)^[^/\n]*\b(lp_[a-z_0-9]+)\(([^)]*)\)\s*\{", text)
    return {name: re.findall(r"(\w+)\s*(?:,|$)", arguments) for name, arguments in found}


@pytest.mark.parametrize("name", KERNELS)
def test_arguments_have_the_names_of_the_sources(name: str) -> None:
    assert declared()[name] == list(KERNELS[name].names)


def test_every_function_is_declared() -> None:
    assert declared().keys() == {*KERNELS, *IDENTITY}
