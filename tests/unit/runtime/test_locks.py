"""Locks of files between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from loraplex_contracts.errors import FailedPrecondition
from loraplex_runtime.locks import hold, try_hold

HOLDER = "import fcntl, os, sys, time; f = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.flock(f, 2); print(1, flush=True); time.sleep(float(sys.argv[2]))"  # noqa: E501


def held_for(path: Path, seconds: float) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), f"{seconds}"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_a_free_one_is_had_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    os.close(hold(tmp_path / "lock", "the folder", 5.0, said.append))
    assert said == []


def test_the_newcomer_waits_and_says_so(tmp_path: Path) -> None:
    process, said, start_s = held_for(tmp_path / "lock", 0.5), list[str](), time.monotonic()
    assert try_hold(tmp_path / "lock", "the folder") is None
    os.close(hold(tmp_path / "lock", "the folder", 10.0, said.append))
    assert time.monotonic() - start_s > 0.3
    assert said == ["waiting for up to 10 s until the process before this one leaves the folder"]
    process.wait()


def test_it_gives_up(tmp_path: Path) -> None:
    process = held_for(tmp_path / "lock", 30)
    try:
        with pytest.raises(FailedPrecondition, match="the folder is still used by another process after 0 s"):
            hold(tmp_path / "lock", "the folder", 0.0, lambda text: None)
    finally:
        process.kill()
        process.wait()
    found = try_hold(tmp_path / "lock", "the folder")
    assert found is not None, "a lock ends with its process"
    os.close(found)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="cannot be opened: No such file"):
        try_hold(tmp_path / "missing" / "lock", "the folder")
