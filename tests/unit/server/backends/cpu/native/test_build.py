"""The build of the native library, on sources of its own."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support.native import compiler_or_skip, write_sources

from loraplex_server.backends.cpu.native import build
from loraplex_server.backends.cpu.native.build import BuildError, CannotBuild, Compiler, Machine, find_compiler

ARM_COMPILER = "aarch64-linux-gnu-g++"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return compiler_or_skip()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "src")


def test_each_instruction_set_is_compiled_with_its_flags(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    library = ctypes.CDLL(str(build.build(tmp_path / "out.so", sources=sources, compiler=compiler)))
    assert compiler.variants, "this compiler knows none of the flags"
    levels = {"avx2": 1, "avx512": 2, "avx512bf16": 3, "amx": 4}
    found = {name: library[f"lp_probe_{name}"]() for name in compiler.variants}
    assert found == {name: levels[name] for name in compiler.variants}


def test_only_what_is_ours_can_be_seen(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    loud = 'extern "C" __attribute__((visibility("default"))) int clash() { return 1; }\n'
    (sources / "loud.cpp").write_text(loud)
    library = ctypes.CDLL(str(build.build(tmp_path / "out.so", sources=sources, compiler=compiler)))
    assert library.lp_abi_version() > 0
    with pytest.raises(AttributeError):
        _ = library.clash


def test_flags_that_the_compiler_does_not_know_leave_a_variant_and_those_after_it_out(
    compiler: Compiler, sources: Path, tmp_path: Path
) -> None:
    known = compiler.machine.variants["avx512"]
    variants = {"avx512": known, "future": ("-mno-such-instructions",), "beyond": known}
    older = find_compiler(compiler.command, Machine(compiler.machine.baseline, variants))
    assert older.variants == ("avx512",)
    library = ctypes.CDLL(str(build.build(tmp_path / "out.so", sources=sources, compiler=older)))
    library.lp_isa.restype = ctypes.c_char_p
    assert library.lp_isa() == b"avx512"
    with pytest.raises(AttributeError):
        _ = library.lp_probe_future


def test_types_that_the_compiler_does_not_know_leave_a_variant_out(tmp_path: Path) -> None:
    if shutil.which(ARM_COMPILER) is None:
        pytest.skip(f"{ARM_COMPILER} is not there: apt install g++-aarch64-linux-gnu")
    machine = build.MACHINES["linux", "aarch64"]
    assert find_compiler([ARM_COMPILER], machine).variants == ("neon", "neonbf16", "sve256")
    (tmp_path / "arm_sve.h").write_text("#error an older compiler\n")
    older = find_compiler([ARM_COMPILER, "-isystem", str(tmp_path)], machine)
    assert older.variants == ("neon", "neonbf16")


def test_a_variant_that_no_cpu_is_asked_for_does_not_compile(compiler: Compiler, tmp_path: Path) -> None:
    machine = replace(compiler.machine, variants={**compiler.machine.variants, "future": ()})
    (tmp_path / "version.cpp").write_bytes((build.SOURCES / "version.cpp").read_bytes())
    with pytest.raises(BuildError, match="has_future"):
        build.build(tmp_path / "out.so", sources=tmp_path, compiler=find_compiler(compiler.command, machine))


def test_the_library_names_its_sources(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    library = ctypes.CDLL(str(out))
    library.lp_source_hash.restype = ctypes.c_char_p
    assert library.lp_source_hash().decode() == build.built_from(out) == build.source_hash(sources)


def test_the_hash_follows_names_and_contents(sources: Path) -> None:
    seen = {build.source_hash(sources)}
    (sources / "probe.h").write_text((sources / "probe.h").read_text() + "\n")
    seen.add(build.source_hash(sources))
    (sources / "probe.h").rename(sources / "other.h")
    seen.add(build.source_hash(sources))
    (sources / "isa" / "more.cpp").touch()
    seen.add(build.source_hash(sources))
    assert len(seen) == 4
    (sources / "probe.cpp~").write_text("of an editor")
    assert build.source_hash(sources) in seen


def test_what_has_no_hash(tmp_path: Path) -> None:
    assert build.built_from(tmp_path / "nothing.so") is None
    (tmp_path / "other.so").write_bytes(b"\x7fELF something else")
    assert build.built_from(tmp_path / "other.so") is None


def test_only_what_changed_is_compiled_again(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out, objects = tmp_path / "out.so", tmp_path / "objects"

    def compiled() -> set[str]:
        before = set(objects.glob("*"))
        build.build(out, sources=sources, compiler=compiler, objects=objects)
        return {path.name.rpartition("-")[0] for path in set(objects.glob("*")) - before}

    assert compiled() == {"version", "probe"}
    assert compiled() == set()
    (sources / "plain.cpp").write_text("// nothing\n")
    assert compiled() == {"plain", "version"}, "version.cpp has the hash of all sources"
    (sources / "probe.h").write_text((sources / "probe.h").read_text() + "\n")
    assert compiled() == {"plain", "version", "probe"}, "everybody may include a header"
    assert build.built_from(out) == build.source_hash(sources)


def test_code_that_does_not_compile_leaves_the_library_alone(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.so"
    out.write_bytes(b"the old one")
    (sources / "wrong.cpp").write_text("int wrong( {\n")
    with pytest.raises(BuildError, match=r"compiling wrong\.cpp failed: .*wrong\.cpp:1.*error") as raised:
        build.build(out, sources=sources, compiler=compiler)
    assert not isinstance(raised.value, CannotBuild)
    assert "\n" not in str(raised.value)
    assert "wrong.cpp:1" in raised.value.output
    assert out.read_bytes() == b"the old one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.so", "src"]


def test_a_library_in_use_is_replaced_not_written_over(compiler: Compiler, sources: Path, tmp_path: Path) -> None:
    out = build.build(tmp_path / "out.so", sources=sources, compiler=compiler)
    with out.open("rb") as opened:
        before = opened.read()
        (sources / "plain.cpp").write_text("// changed\n")
        build.build(out, sources=sources, compiler=compiler)
        opened.seek(0)
        assert opened.read() == before
    assert out.read_bytes() != before


# --- machines that cannot ---------------------------------------------------------------------------------------------


def test_machines_by_their_platforms() -> None:
    """Platforms have the names that sysconfig gives them; those say for what a wheel is built."""
    assert set(build.machine_of("linux-x86_64").variants) == {"avx2", "avx512", "avx512bf16", "amx"}
    assert set(build.machine_of("linux-aarch64").variants) == {"neon", "neonbf16", "sve256"}
    assert set(build.machine_of("macosx-14.0-arm64").variants) == {"neon", "neonbf16"}
    for name in ("linux-riscv64", "macosx-11.0-x86_64", "win32"):
        with pytest.raises(
            CannotBuild, match="there are native kernels for linux x86_64, linux aarch64, darwin arm64 only"
        ):
            build.machine_of(name)


def test_no_compiler(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match=r"no C\+\+ compiler \(g\+\+ or clang\+\+\)"):
        find_compiler((), search=str(tmp_path))


def test_the_compiler_of_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    with pytest.raises(CannotBuild, match=r"CXX names does not run: /nowhere/g\+\+ -m64"):
        find_compiler()
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo stand-in 1.2 || exit 1\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    found = find_compiler()
    assert (found.command, found.version, found.variants) == ((str(script),), "stand-in 1.2", ())


def test_a_compiler_that_only_fails(tmp_path: Path, sources: Path) -> None:
    script = tmp_path / "g++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo stand-in 1.2 || { echo licence expired >&2; exit 1; }\n')
    script.chmod(0o755)
    found = find_compiler((), search=str(tmp_path))
    with pytest.raises(BuildError, match=r"compiling version\.cpp failed: licence expired"):
        build.build(tmp_path / "out.so", sources=sources, compiler=replace(found, command=(str(script),)))


def test_an_architecture_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(CannotBuild, match="linux x86_64, linux aarch64, darwin arm64 only, and this is linux riscv64"):
        build.this_machine()


def test_the_build_needs_the_standard_library_alone() -> None:
    """The build runs where a wheel is made, before anything is installed."""
    server = Path(build.__file__).parents[4]
    code = f"import sys; sys.path.insert(0, {str(server)!r}); from loraplex_server.backends.cpu.native import build"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(CannotBuild, match="no sources"):
        build.source_hash(tmp_path)


# --- the command ------------------------------------------------------------------------------------------------------


def test_without_a_compiler_the_command_fails_unless_told_that_it_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    out = ["--out", str(tmp_path / "out.so")]
    assert build.main(out) == 1
    assert build.main([*out, "--optional"]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["native CPU kernels not built: the C++ compiler that CXX names does not run: /nowhere/g++"] * 2
    assert not (tmp_path / "out.so").exists()


def test_a_failure_to_compile_is_never_optional(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    script = tmp_path / "c++"
    script.write_text('#!/bin/sh\n[ "$1" = --version ] || { echo a.cpp:1: error: no >&2; exit 1; }\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    assert build.main(["--out", str(tmp_path / "out.so"), "--optional"]) == 1
    assert "a.cpp:1: error: no" in capsys.readouterr().err


def test_a_library_of_the_present_sources_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    out = tmp_path / "out.so"
    out.write_bytes(b"... lp_source_hash=" + build.source_hash().encode() + b"\0 ...")
    assert build.main(["--out", str(out), "--if-stale"]) == 0
    assert build.main(["--out", str(out)]) == 1, "asked to build, it builds"
    out.write_bytes(b"... lp_source_hash=" + b"0" * 32 + b"\0 ...")
    assert build.main(["--out", str(out), "--if-stale"]) == 1


def test_a_foreign_process_can_run_it() -> None:
    """The Makefile and CONTRIBUTING.md run the build so: it imports nothing beyond the standard library."""
    code = (
        "import runpy, sys\n"
        "sys.modules.update(dict.fromkeys(('torch', 'numpy', 'google', 'grpc')))\n"
        "sys.argv = ['build', '--help']\n"
        "runpy.run_module('loraplex_server.backends.cpu.native.build', run_name='__main__')\n"
    )
    root = str(build.HERE.parents[3])
    command = ["python3", "-S", "-c", f"import sys; sys.path.insert(0, {root!r})\n{code}"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "--if-stale" in run.stdout
