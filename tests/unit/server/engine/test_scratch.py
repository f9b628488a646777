"""The folder for an engine's temporary files goes with whoever is left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from loraplex_adapters.store import LOCK_NAME
from loraplex_server.engine.scratch import PREFIX, Scratch

KILLED = """
import os, signal
from loraplex_server.engine.scratch import Scratch
print(Scratch().path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    """As if it had been made an hour ago: young ones may belong to somebody who has not locked them yet."""
    status = (folder / LOCK_NAME).stat()
    os.utime(folder / LOCK_NAME, (status.st_atime, status.st_mtime - 3600))


def test_it_is_removed_whole(temporary: Path) -> None:
    scratch = Scratch()
    (scratch.path / "store").mkdir()
    (scratch.path / "store" / "file").write_text("x")
    scratch.remove()
    scratch.remove()
    assert list(temporary.iterdir()) == []


def test_what_killed_processes_left_goes_with_the_next_start(temporary: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    said = subprocess.run([sys.executable, "-c", KILLED], env=environment, stdout=subprocess.PIPE, text=True).stdout
    left = Path(said.strip())
    assert left.name.startswith(PREFIX)
    age(left)
    running = Scratch()
    age(running.path)
    another = Scratch()
    assert sorted(temporary.iterdir()) == sorted([running.path, another.path]), "not the one that is in use"
    running.remove()
    another.remove()
