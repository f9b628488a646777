"""Free memory: control groups and page cache."""

from __future__ import annotations

from pathlib import Path

import torch

from loraplex_server.model.memory import cgroup_free_bytes, free_memory_bytes

MIB = 1 << 20


def group(folder: Path, limit: str, used: int, stat: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(stat)


def test_something_is_free_here() -> None:
    assert free_memory_bytes(torch.device("cpu")) > MIB


def test_the_page_cache_of_weights_that_were_read_is_free(tmp_path: Path) -> None:
    stat = f"anon {10 * MIB}\nfile {70 * MIB}\ninactive_file {50 * MIB}\nactive_file {20 * MIB}\nfile_mapped 0\n"
    group(tmp_path, str(100 * MIB), 80 * MIB, stat)
    assert cgroup_free_bytes(tmp_path, tmp_path / "none") == 90 * MIB


def test_weights_that_are_mapped_are_in_use(tmp_path: Path) -> None:
    stat = f"inactive_file {50 * MIB}\nactive_file {20 * MIB}\nfile_mapped {30 * MIB}\n"
    group(tmp_path, str(100 * MIB), 80 * MIB, stat)
    assert cgroup_free_bytes(tmp_path, tmp_path / "none") == 60 * MIB


def test_the_tightest_group_around_the_process_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    group(tmp_path / "outer", str(100 * MIB), 70 * MIB, "")
    group(tmp_path / "outer" / "inner", "max", 60 * MIB, "")
    assert cgroup_free_bytes(tmp_path, own) == 30 * MIB
    group(tmp_path / "outer" / "inner", str(64 * MIB), 60 * MIB, "")
    assert cgroup_free_bytes(tmp_path, own) == 4 * MIB
    own.write_text("0::/of/the/host\n")
    assert cgroup_free_bytes(tmp_path, own) is None


def test_version_one(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/\n4:memory:/job\n0::/\n")
    folder = tmp_path / "memory" / "job"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(str(100 * MIB))
    (folder / "memory.usage_in_bytes").write_text(str(80 * MIB))
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {50 * MIB}\ntotal_mapped_file {MIB}\n")
    assert cgroup_free_bytes(tmp_path, own) == 69 * MIB
