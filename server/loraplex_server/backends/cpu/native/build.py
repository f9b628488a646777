"""Build of the native CPU kernels: one shared library out of src/.

    python -m loraplex_server.backends.cpu.native.build [--help]

src/*.cpp is compiled once for any CPU of the architecture, src/isa/*.cpp once for each instruction set. Standard
library only, because the build hook of the wheel imports this where nothing is installed. Knows no kernel, and decides
nothing at run time: the library itself picks the instruction set.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Final

from loraplex_server.backends.cpu.native.config import compiler_from_environment

HERE: Final = Path(__file__).resolve().parent
SOURCES: Final = HERE / "src"
LIBRARY: Final = HERE / "_kernels.so"

COMPILERS: Final = ("g++", "clang++")
# Products and sums may fuse (every variant has FMA), but nothing is reordered: no -ffast-math. And no -march=native,
# because a wheel runs on other machines than the one that built it.
COMMON: Final = (
    "-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-math-errno",
    "-ffp-contract=fast", "-Wall", "-Wextra",
    "-Wno-maybe-uninitialized", "-Wno-uninitialized",  # GCC 12 finds them in its own intrinsics
)  # fmt: skip
# Compiled with the flags of each instruction set to see whether the compiler knows it.
PROBE: Final = """
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_SVE)
#include <arm_sve.h>
typedef svfloat32_t Floats __attribute__((arm_sve_vector_bits(__ARM_FEATURE_SVE_BITS)));
#endif
"""
# Only our functions are visible: what libstdc++'s templates bring in is not offered to others nor replaced by theirs.
EXPORTS: Final = "{ global: lp_*; local: *; };\n"


@dataclass(frozen=True, slots=True)
class Machine:
    """One architecture: flags that each of its CPUs has, and the instruction sets, each including those before it."""

    baseline: tuple[str, ...]
    variants: Mapping[str, tuple[str, ...]]
    has_version_scripts: bool = True  # its linker takes them


_AVX2: Final = ("-mavx2", "-mfma")
_AVX512: Final = (*_AVX2, "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512BF16: Final = (*_AVX512, "-mavx512bf16")
_ARM: Final = {"neon": (), "neonbf16": ("-march=armv8.2-a+bf16",)}
# Vectors of 256 bits, as on Neoverse V1. Those of 128 (V2, N2) are as wide as NEON's and left to it.
_SVE256: Final = ("-march=armv8.2-a+sve+bf16", "-msve-vector-bits=256")
MACHINES: Final[Mapping[tuple[str, str], Machine]] = {
    ("linux", "x86_64"): Machine(
        ("-march=x86-64",),
        {
            "avx2": _AVX2,
            "avx512": _AVX512,
            "avx512bf16": _AVX512BF16,
            "amx": (*_AVX512BF16, "-mamx-tile", "-mamx-bf16"),
        },
    ),
    ("linux", "aarch64"): Machine(("-march=armv8-a",), {**_ARM, "sve256": _SVE256}),
    ("darwin", "arm64"): Machine(("-march=armv8-a",), _ARM, has_version_scripts=False),  # never run
}


class BuildError(Exception):
    """The library was not built. The message is one line; `output` is what the compiler said."""

    def __init__(self, message: str, output: str = "") -> None:
        super().__init__(message)
        self.output = output


class CannotBuild(BuildError):
    """No build is possible on this machine: no compiler, or an architecture without kernels. The code is not at
    fault."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that runs, and what it can make."""

    command: tuple[str, ...]
    version: str
    machine: Machine
    variants: tuple[str, ...]  # those of the machine before the first whose flags it does not know


@dataclass(frozen=True, slots=True)
class _Object:
    """One call of the compiler."""

    source: Path
    flags: tuple[str, ...]


def this_machine() -> Machine:
    """The machine that this is. Raises CannotBuild for an architecture that has no kernels."""
    return machine_of(f"{sys.platform}-{platform.machine()}")


def machine_of(name: str) -> Machine:
    """The machine of a platform as sysconfig names it: linux-x86_64, macosx-14.0-arm64. Raises CannotBuild for one that
    has no kernels."""
    system, _, architecture = name.partition("-")
    if system == "macosx":
        system, architecture = "darwin", architecture.rpartition("-")[2]
    if (system, architecture) not in MACHINES:
        known = ", ".join(" ".join(one) for one in MACHINES)
        raise CannotBuild(f"there are native kernels for {known} only, and this is {system} {architecture}")
    return MACHINES[system, architecture]


def find_compiler(
    wanted: Sequence[str] | None = None, machine: Machine | None = None, search: str | None = None
) -> Compiler:
    """The compiler `wanted` ($CXX by default), or the first of COMPILERS that is there. `search`: folders instead of
    $PATH's.

    Raises CannotBuild.
    """
    machine = machine or this_machine()
    command = tuple(compiler_from_environment() if wanted is None else wanted)
    candidates = [command] if command else [(name,) for name in COMPILERS]
    for candidate in candidates:
        if shutil.which(candidate[0], path=search) is None:
            continue
        found = _call([*candidate, "--version"])
        if found.returncode == 0:
            return Compiler(candidate, found.stdout.partition("\n")[0], machine, _known_variants(candidate, machine))
    if command:
        raise CannotBuild(f"the C++ compiler that CXX names does not run: {' '.join(command)}")
    raise CannotBuild(f"no C++ compiler ({' or '.join(COMPILERS)}); install one, or name it in CXX")


def _known_variants(command: tuple[str, ...], machine: Machine) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder) / "probe.cpp"
        probe.write_text(PROBE)

        def is_known(name: str) -> bool:
            flags = (*machine.baseline, *machine.variants[name])
            return _call([*command, *flags, "-c", str(probe), "-o", str(probe.with_suffix(".o"))]).returncode == 0

        return tuple(takewhile(is_known, machine.variants))


def source_hash(sources: Path = SOURCES) -> str:
    """Hash of everything that decides what the library is, except the compiler. The library carries it."""
    digest = hashlib.sha256(repr((COMMON, EXPORTS, sorted(MACHINES.items()))).encode())
    for path in _files(sources):
        digest.update(f"{path.relative_to(sources).as_posix()}\n{path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def built_from(library: Path) -> str | None:
    """The hash of the sources that a library was made of, read without loading it; None where there is none to read."""
    try:
        found = re.search(rb"lp_source_hash=([0-9a-f]{32})\0", library.read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def _files(sources: Path) -> list[Path]:
    """Sources and headers; files that an editor leaves beside them are left out."""
    found = sorted(path for path in sources.rglob("*") if path.suffix in {".cpp", ".h"} and path.is_file())
    if not found:
        raise CannotBuild(f"there are no sources of the native kernels in {sources}")
    return found


def build(
    target: Path = LIBRARY, *, sources: Path = SOURCES, compiler: Compiler | None = None, objects: Path | None = None
) -> Path:
    """Compiles and links `target`, which is replaced at once when all went well and else stays as it is.

    `objects` is a folder that keeps object files between builds: what has not changed is not compiled again.
    Raises CannotBuild without a compiler, BuildError when it fails.
    """
    compiler = compiler or find_compiler()
    files = _files(sources)
    headers = b"".join(path.read_bytes() for path in files if path.suffix == ".h")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        folder = objects or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        # map keeps the order, and the order matters: of an inline function or template that several objects hold the
        # linker takes the first, which must be that of the oldest instruction set.
        made = list(pool.map(lambda one: _compile(one, compiler, headers, folder), _objects(files, sources, compiler)))
        link = [*compiler.command, "-shared", "-pthread"]
        if compiler.machine.has_version_scripts:
            exports = Path(scratch) / "exports.map"
            exports.write_text(EXPORTS)
            link.append(f"-Wl,--version-script={exports}")
        _make([*link, *map(str, made), "-o"], target, "linking")
    return target


def _objects(files: Sequence[Path], sources: Path, compiler: Compiler) -> list[_Object]:
    """Calls of the compiler: for any CPU first, then for one instruction set after the other."""
    baseline = (*COMMON, *compiler.machine.baseline, f"-I{sources}")
    variants = f"-DLP_VARIANTS(X)={''.join(f'X({name})' for name in compiler.variants)}"
    identity = (f'-DLP_SOURCE_HASH="{source_hash(sources)}"',)
    plain = [path for path in files if path.suffix == ".cpp" and path.parent == sources]
    per_isa = [path for path in files if path.suffix == ".cpp" and path.parent == sources / "isa"]
    # Only one file gets the hash, or every edit would compile all of them.
    found = [_Object(path, (*baseline, variants, *(identity if path.name == "version.cpp" else ()))) for path in plain]
    for name in compiler.variants:
        flags = (*baseline, *compiler.machine.variants[name], f"-DLP_ISA={name}")
        found += [_Object(path, flags) for path in per_isa]
    return found


def _compile(one: _Object, compiler: Compiler, headers: bytes, folder: Path) -> Path:
    """The object file, named for everything that it is made of."""
    key = hashlib.sha256(repr((compiler.command, compiler.version, one)).encode() + headers + one.source.read_bytes())
    target = folder / f"{one.source.stem}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        _make([*compiler.command, *one.flags, "-c", str(one.source), "-o"], target, f"compiling {one.source.name}")
    return target


def _make(command: Sequence[str], target: Path, doing: str) -> None:
    """Runs `command TARGET`. The target appears whole or not at all; a process that has the old one open keeps it."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        done = _call([*command, str(part)])
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise BuildError(f"{doing} failed: {lines[0].strip()}", done.stderr)
        sys.stderr.write(done.stderr)  # warnings
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _call(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the native CPU kernels where Python finds them.")
    parser.add_argument("--out", type=Path, default=LIBRARY, help="the library to write")
    parser.add_argument("--objects", type=Path, help="folder that keeps object files, so that the next build is short")
    parser.add_argument("--if-stale", action="store_true", help="do nothing while the library is that of the sources")
    parser.add_argument("--optional", action="store_true", help="exit with 0 on a machine that cannot build it")
    given = parser.parse_args(arguments)
    if given.if_stale and built_from(given.out) == source_hash():
        return 0
    try:
        compiler = find_compiler()
        build(given.out, compiler=compiler, objects=given.objects)
    except BuildError as error:
        sys.stderr.write(error.output)
        sys.stderr.write(f"native CPU kernels not built: {error}\n")
        return 0 if given.optional and isinstance(error, CannotBuild) else 1
    print(f"{given.out}: {', '.join(compiler.variants) or 'no variant'}; {compiler.version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
