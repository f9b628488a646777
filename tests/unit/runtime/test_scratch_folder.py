"""Folders for temporary files of child processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loraplex_contracts.errors import FailedPrecondition
from loraplex_runtime.scratch_folder import Scratch

KILLED = """
import os, signal
from loraplex_runtime.scratch_folder import Scratch
print(Scratch("scratch-").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    """Sets the lock's age to an hour: a young folder may belong to a process that has not locked it yet."""
    status = (folder / "lock").stat()
    os.utime(folder / "lock", (status.st_atime, status.st_mtime - 3600))


def test_it_is_removed_whole(temporary: Path) -> None:
    scratch = Scratch("scratch-")
    (scratch.path / "store").mkdir()
    (scratch.path / "store" / "file").write_text("x")
    scratch.remove()
    scratch.remove()
    assert list(temporary.iterdir()) == []


def test_what_killed_processes_left_goes_with_the_next_start(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    said = subprocess.run([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True).stdout
    left = Path(said.strip())
    assert left.name.startswith("scratch-")
    age(left)
    running = Scratch("scratch-")
    age(running.path)
    another = Scratch("scratch-")
    assert sorted(temporary.iterdir()) == sorted([running.path, another.path]), "not the one that is in use"
    running.remove()
    another.remove()


def test_nothing_else_is_removed(temporary: Path) -> None:
    running, killed, young = (Scratch("scratch-") for _ in range(3))
    for one in (killed, young):
        os.close(one._lock_fd)
    age(running.path)
    age(killed.path)
    (temporary / "scratch-new").mkdir()  # not locked yet
    (temporary / "other-killed").mkdir()
    (temporary / "scratch-link").symlink_to(running.path)
    (temporary / "scratch-file").write_text("no folder")
    another = Scratch("scratch-")
    assert {path.name for path in temporary.iterdir()} == {
        *(one.path.name for one in (running, young, another)),
        *("other-killed", "scratch-file", "scratch-link", "scratch-new"),
    }
    running.remove()
    another.remove()


def test_no_place_for_temporary_files(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", refuse)
    with pytest.raises(FailedPrecondition, match=r"No usable temporary directory found in \['/tmp'\].*TMPDIR"):
        Scratch("scratch-")
