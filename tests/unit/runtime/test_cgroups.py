"""Control groups: limits of memory and CPU time."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from loraplex_runtime.cgroups import cpu_quota, free_bytes

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_the_page_cache_of_weights_that_were_read_is_free(tmp_path: Path) -> None:
    stat = f"anon {10 * MIB}\nfile {70 * MIB}\ninactive_file {50 * MIB}\nactive_file {20 * MIB}\nfile_mapped 0\n"
    group(tmp_path, str(100 * MIB), 80 * MIB, stat)
    assert free_bytes(tmp_path, tmp_path / "none") == 90 * MIB


def test_weights_that_are_mapped_are_in_use(tmp_path: Path) -> None:
    stat = f"inactive_file {50 * MIB}\nactive_file {20 * MIB}\nfile_mapped {30 * MIB}\n"
    group(tmp_path, str(100 * MIB), 80 * MIB, stat)
    assert free_bytes(tmp_path, tmp_path / "none") == 60 * MIB


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    group(tmp_path / "outer", str(100 * MIB), 70 * MIB, "")
    group(tmp_path / "outer" / "inner", "max", 60 * MIB, "")
    assert free_bytes(tmp_path, own) == 30 * MIB
    group(tmp_path / "outer" / "inner", str(64 * MIB), 60 * MIB, "")
    assert free_bytes(tmp_path, own) == 4 * MIB
    own.write_text("0::/of/the/host\n")
    assert free_bytes(tmp_path, own) is None


def test_version_one(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(100 * MIB))
    (folder / "memory.usage_in_bytes").write_text(str(80 * MIB))
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {50 * MIB}\ntotal_mapped_file {MIB}\n")
    assert free_bytes(tmp_path, own) == 69 * MIB


# --- CPU time ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", math.inf), ("250000 100000", 2.5), ("50000 100000", 0.5), ("", math.inf), ("x y", math.inf)],
)
def test_quotas_of_version_two(text: str, expected: float, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert cpu_quota(tmp_path, tmp_path / "none") == expected


def test_the_tightest_quota_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "cpu.max").write_text("300000 100000\n")
    assert cpu_quota(tmp_path, own) == 3.0
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("400000 100000\n")
    assert cpu_quota(tmp_path, own) == 3.0
    (tmp_path / "outer" / "inner" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, own) == 1.5


@pytest.mark.parametrize(("quota", "expected"), [("400000", 4.0), ("-1", math.inf)])
def test_quotas_of_version_one(quota: str, expected: float, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:cpu,cpuacct:/job\n0::/\n")
    folder = tmp_path / "cpu" / "job"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path, own) == expected
