"""Cores of a machine and the default number of threads."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from loraplex_runtime import cgroups
from loraplex_server.backends.cpu import cores
from loraplex_server.backends.cpu.cores import default_num_threads, num_cores, own_cores


@pytest.fixture
def cpus(tmp_path: Path) -> Path:
    """Two cores of two threads each, and a CPU of which nothing is known."""
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("own", "expected"), [({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 1}, 2), ({3}, 1), ({0, 4}, 2), ({4, 5}, 2)]
)
def test_cores_count_once(cpus: Path, own: set[int], expected: int) -> None:
    assert num_cores(own, cpus) == expected


@pytest.mark.parametrize(("given", "expected"), [("3", 3), (" 5,2", 5), ("0", 7), ("", 7), ("many", 7), ("-2", 7)])
def test_the_environment_comes_first(given: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "num_cores", lambda cpus: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_num_threads() == expected


@pytest.mark.parametrize(
    ("quota", "num_workers", "expected"),
    [(math.inf, 4, 7), (2.5, 1, 2), (0.5, 1, 1), (6.0, 2, 3), (2.0, 4, 1), (9.0, 1, 7)],
)
def test_threads_follow_the_quota(
    quota: float, num_workers: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "num_cores", lambda cpus: 7)
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert default_num_threads(num_workers) == expected


def test_no_more_than_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert default_num_threads() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= default_num_threads() <= len(before)


def test_cores_go_by_numa_node(cpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "own_cpus", lambda: {0, 1, 2, 3})
    assert own_cores(cpus) == [{0, 2}, {1, 3}]
    for cpu in range(4):
        (cpus / f"cpu{cpu}" / f"node{1 - cpu % 2}").mkdir()
    assert own_cores(cpus) == [{1, 3}, {0, 2}]
