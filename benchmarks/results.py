"""Benchmark results as JSON: rows, with machine, command, date and commit."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = Callable[[Mapping[str, Any]], None]
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")  # of /proc/cpuinfo


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """`--json FILE` of a benchmark; give its value to `recording`."""
    parser.add_argument("--json", type=Path, help="also write the rows to this file, with machine, command and commit")


@contextmanager
def recording(path: Path | None) -> Generator[Record]:
    """Yields a function that prints a row as one JSON line; at the end all rows are written to `path`, if given."""
    rows: list[Mapping[str, Any]] = []

    def record(row: Mapping[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        rows.append(row)

    try:
        yield record
    finally:
        if path is not None and rows:
            path.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


def provenance() -> dict[str, Any]:
    """Date, commit, command, machine, instruction sets and versions of this run."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": _commit(),
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{os.cpu_count()} x {_cpu_field('model name') or platform.machine()}",
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in _cpu_field("flags").split()],
        "versions": {name: found for name in ("torch", "transformers", "peft") if (found := _version(name))},
    }


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(": ")[2] for line in lines if line.startswith(name)), "")


def _commit() -> str:
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
