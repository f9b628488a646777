"""Cores of this machine, and the threads that run on them by default.

The default number of threads is read from the machine: torch's own number is process-wide, and the engine lowers it
beside native kernels.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from loraplex_runtime import cgroups
from loraplex_server.backends.cpu.native.config import threads_from_environment

CPUS: Final = Path("/sys/devices/system/cpu")


def default_num_threads(num_workers: int = 1) -> int:
    """$OMP_NUM_THREADS where it is set, as torch reads it, or the number of cores, but no more than whose time the
    container may use. `num_workers`: processes that share that time."""
    return threads_from_environment() or int(min(num_cores(own_cpus()), max(1, cgroups.cpu_quota() / num_workers)))


def num_cores(cpus: set[int], root: Path = CPUS) -> int:
    """Number of cores that these logical CPUs belong to. CPUs that share a core count once: two threads on one only
    wait for each other."""
    return len({_core(cpu, root) for cpu in cpus})


def own_cores(root: Path = CPUS) -> list[frozenset[int]]:
    """The logical CPUs of each core that this process may use: one NUMA node after the other."""
    cores: dict[tuple[int, str], set[int]] = {}
    for cpu in sorted(own_cpus()):
        cores.setdefault((_node(cpu, root), _core(cpu, root)), set()).add(cpu)
    in_order = sorted(cores, key=lambda core: (core[0], min(cores[core])))
    return [frozenset(cores[core]) for core in in_order]


def own_cpus() -> set[int]:
    """The logical CPUs that this process may use."""
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return set(range(os.cpu_count() or 1))


def _core(cpu: int, root: Path) -> str:
    """The core of a logical CPU, as the list of its threads; the CPU itself where the system does not tell."""
    try:
        return (root / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _node(cpu: int, root: Path) -> int:
    """The NUMA node of a logical CPU; 0 where the system does not tell."""
    return next((int(link.name[4:]) for link in (root / f"cpu{cpu}").glob("node[0-9]*")), 0)
