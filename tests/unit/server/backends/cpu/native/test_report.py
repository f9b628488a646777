"""Report of a CPU for `loraplex doctor`."""

from __future__ import annotations

import math

import pytest

from loraplex_server.backends.cpu.native.build import MACHINES
from loraplex_server.backends.cpu.native.library import load
from loraplex_server.backends.cpu.native.report import ABILITIES, cpu_flags, examine_cpu, unused_isa, unused_threads

AVX512 = "avx2 fma f16c avx512f avx512dq avx512bw avx512vl"


def flags(text: str) -> frozenset[str]:
    return cpu_flags(f"processor\t: 0\nflags\t\t: fpu {text}\n\nprocessor\t: 1\nflags\t\t: none\n")


def test_flags_are_those_of_the_first_cpu() -> None:
    assert flags("avx2 fma") == {"fpu", "avx2", "fma"}
    assert cpu_flags("processor\t: 0\nFeatures\t: fp asimd bf16\n") == {"fp", "asimd", "bf16"}
    assert cpu_flags("Features\t: asimd sve\n", "32\n") == {"asimd", "sve", "sve256"}
    assert cpu_flags("model name : none\n") == frozenset()


def test_abilities_are_those_of_all_variants() -> None:
    for machine in MACHINES.values():
        assert [isa for isa in ABILITIES if isa in machine.variants] == [*machine.variants][::-1]


@pytest.mark.parametrize(
    ("isa", "text", "words"),
    [
        ("amx", f"{AVX512} avx512_bf16 amx_bf16 amx_tile", ()),
        ("avx512bf16", f"{AVX512} avx512_bf16 amx_bf16 amx_tile", ("has amx", "run with avx512bf16", "make native")),
        ("avx512", AVX512, ()),
        ("avx2", AVX512, ("has avx512,", "run with avx2")),
        ("", "avx2 fma", ("has avx2", "no native kernels")),
        ("", "sse2", ()),
        ("avx2", "", ()),  # the system does not tell
        ("neonbf16", "asimd bf16", ()),
        ("neon", "asimd", ()),
        ("neon", "asimd bf16", ("has neonbf16", "run with neon")),
        ("sve256", "asimd bf16 sve svebf16 sve256", ()),
        ("neonbf16", "asimd bf16 sve svebf16 sve256", ("has sve256", "run with neonbf16")),
        ("neonbf16", "asimd bf16 sve svebf16 sve128", ()),  # no wider than NEON's vectors
    ],
)
def test_abilities_that_are_left(isa: str, text: str, words: tuple[str, ...]) -> None:
    found = unused_isa(isa, flags(text))
    assert bool(found) == bool(words)
    assert all(word in found for word in words), found


def test_threads_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert unused_threads(8, 8, math.inf) == ""
    assert "quota is 2.5 of 8 cores, so 2 threads" in unused_threads(2, 8, 2.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS sets 3 threads for 8 cores" in unused_threads(3, 8, math.inf)


def test_this_machine() -> None:
    report = examine_cpu()
    assert report.isa == load().status.isa
    assert report.num_threads >= 1
    assert 1e8 < report.read_bytes_per_s < 1e13
