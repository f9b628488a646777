"""Report of this CPU: instruction set, threads, bandwidth, and what stays unused."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from loraplex_runtime import cgroups
from loraplex_server.backends.cpu.cores import default_num_threads, num_cores, own_cpus
from loraplex_server.backends.cpu.native.config import threads_from_environment
from loraplex_server.backends.cpu.native.library import load

CPU_INFO: Final = Path("/proc/cpuinfo")
SVE_LENGTH: Final = Path("/proc/sys/abi/sve_default_vector_length")  # of Arm's vectors, in bytes
# Instruction sets of the kernels, the best first, with what the CPU must have for them.
ABILITIES: Final = {
    "amx": ("amx_bf16", "amx_tile"),
    "avx512bf16": ("avx512_bf16",),
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "f16c"),
    "avx2": ("avx2", "fma"),
    "sve256": ("asimd", "bf16", "svebf16", "sve256"),
    "neonbf16": ("asimd", "bf16"),
    "neon": ("asimd",),
}
READ_BYTES: Final = 128 << 20  # more than most caches hold
NUM_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class CpuReport:
    """Instruction set, threads and bandwidth of an engine with the defaults."""

    isa: str  # of the native kernels; empty without any
    num_threads: int
    read_bytes_per_s: float  # the best of a few tries, with these threads
    unused: tuple[str, ...]  # sentences


def examine_cpu() -> CpuReport:
    """The report of this CPU. Measures for about a second."""
    isa, num_threads = load().status.isa, default_num_threads()
    flags = cpu_flags(cgroups.read(CPU_INFO), cgroups.read(SVE_LENGTH))
    unused = [unused_isa(isa, flags), unused_threads(num_threads, num_cores(own_cpus()), cgroups.cpu_quota())]
    return CpuReport(isa, num_threads, _read_bytes_per_s(num_threads), tuple(one for one in unused if one))


def cpu_flags(info: str, sve_length: str = "") -> frozenset[str]:
    """Features of the first CPU in /proc/cpuinfo: the line `flags` on x86-64, `Features` on Arm.

    `sve256` is one of them where SVE's vectors have as many bits."""
    own = (line.partition(":")[2] for line in info.splitlines() if line.startswith(("flags", "Features")))
    length = sve_length.strip()
    return frozenset([*next(own, "").split(), *([f"sve{8 * int(length)}"] if length.isdigit() else [])])


def unused_isa(isa: str, flags: frozenset[str]) -> str:
    """Instruction sets of the CPU beyond the kernels'; empty for none."""
    best = next((name for name, needed in ABILITIES.items() if flags.issuperset(needed)), "")
    names = (*ABILITIES, "")
    if names.index(best) >= names.index(isa if isa in ABILITIES else ""):
        return ""
    if not isa:
        return f"this CPU has {best}, and there are no native kernels: see `cpu kernels`"
    return (
        f"this CPU has {best}, and the kernels run with {isa}: the system does not allow {best} to processes, or the "
        "compiler that built the kernels did not know it (`make native`)"
    )


def unused_threads(num_threads: int, num_own_cores: int, quota: float) -> str:
    """The reason for fewer threads than cores; empty where there are as many."""
    if num_threads >= num_own_cores:
        return ""
    if threads_from_environment() is not None:
        return f"OMP_NUM_THREADS sets {num_threads} threads for {num_own_cores} cores"
    return f"the container's CPU quota is {quota:g} of {num_own_cores} cores, so {num_threads} threads"


def _read_bytes_per_s(num_threads: int) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        numbers, best_s = torch.ones(READ_BYTES // 4), math.inf
        for _ in range(NUM_TRIES):
            start = time.perf_counter()
            numbers.sum()
            best_s = min(best_s, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return READ_BYTES / best_s
