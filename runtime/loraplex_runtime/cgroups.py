"""Control groups: a container's limits of memory and CPU time."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

ROOT: Final = Path("/sys/fs/cgroup")
OWN_GROUPS: Final = Path("/proc/self/cgroup")


def free_bytes(root: Path = ROOT, own: Path = OWN_GROUPS) -> int | None:
    """Memory left under the tightest limit of the process's groups; None without a limit."""
    found = [left for folder in _folders("memory", root, own) if (left := _left_bytes(folder)) is not None]
    return min(found, default=None)


def cpu_quota(root: Path = ROOT, own: Path = OWN_GROUPS) -> float:
    """CPUs whose time the process's groups may use at once, by the tightest limit; infinite without one.

    Threads beyond it are stopped for the rest of each period, and those that wait for them with them.
    """
    return min((_quota(folder) for folder in _folders("cpu", root, own)), default=math.inf)


def _folders(controller: str, root: Path, own: Path) -> list[Path]:
    """The process's own groups and those around them: a limit counts for all groups inside."""
    folders = [root, root / controller]  # in a container the path may be the host's; the mounted root is ours then
    for line in read(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):  # v2 names no controller
            # v1 mounts controllers that go together under all their names, with a link for each.
            folder = root / controller if controllers else root
            for part in Path(path).parts[1:]:
                folder = folder / part
                folders.append(folder)
    return folders


def _left_bytes(folder: Path) -> int | None:
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, used = read(folder / limit_name).strip(), read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            stat = dict(line.split(maxsplit=1) for line in read(folder / "memory.stat").splitlines())
            # The page cache counts as used but makes room where it is needed, except for what is mapped: a CPU reads
            # weights from there.
            cached = int(stat.get(f"{prefix}inactive_file", 0)) + int(stat.get(f"{prefix}active_file", 0))
            mapped = int(stat.get("file_mapped", 0)) + int(stat.get("total_mapped_file", 0))
            return max(0, int(limit) - int(used) + max(0, cached - mapped))
    return None


def _quota(folder: Path) -> float:
    words = read(folder / "cpu.max").split() or [
        read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    quota, period = words if len(words) == 2 else ("", "")
    # "max" in v2 and -1 in v1 are no limit.
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else math.inf


def read(path: Path) -> str:
    """The file's text; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
