"""Working directories of children whose parent's is of no use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loraplex_runtime.child_folder import ROOT, child_folder, in_child_folder

# Starts a child of multiprocessing once its working directory is gone.
PARENT = """
import multiprocessing, os
from loraplex_runtime.shutdown import start_shielded
if __name__ == "__main__":
    os.rmdir(os.getcwd())
    child = multiprocessing.get_context("spawn").Process(target=os.getcwd)
    start_shielded(child)
    child.join()
    print(child.exitcode)
    try:
        print(os.getcwd())
    except FileNotFoundError:
        print("none")
"""


def test_where_it_is_of_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert child_folder() is None
    with in_child_folder():
        assert os.getcwd() == str(tmp_path)


def test_one_that_is_deleted(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    gone = tmp_path / "gone"
    gone.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, script], cwd=gone, env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["0", "none"], ran.stderr


def test_one_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *_: object) -> None:
        raise PermissionError(path)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(tmp_path))
    monkeypatch.setattr(os, "open", refuse)
    assert child_folder() == ROOT
    with in_child_folder():
        assert os.getcwd() == ROOT
    assert os.getcwd() == ROOT, "there is no way back"
