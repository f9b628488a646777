"""Environments that the Makefile makes, where Python is not as it should be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# An interpreter of 3.10, by what it says of itself.
OLD = """#!/bin/sh
[ "$1" != -c ] || exec python3 -c "import sys; sys.version_info = (3, 10, 2)
${2#import sys; }"
echo "$*" >> ran
"""
# Debian's without python3-venv: it leaves an environment that lacks pip.
NO_ENSUREPIP = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exec python3 "$@"
mkdir -p "$3/bin" && ln -sf /bin/false "$3/bin/python"
echo "ensurepip is not available" >&2
exit 1
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("python", "says"), [(OLD, "3.11 is needed"), (NO_ENSUREPIP, "ensurepip is not available")])
def test_a_python_that_will_not_do_says_so_each_time(python: str, says: str, tmp_path: Path) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(python)
    interpreter.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "-f", str(ROOT / "Makefile"), ".venv/.installed", f"PYTHON={interpreter}", "UV="]
    for _ in range(2):
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert made.returncode != 0
        assert says in made.stderr
    assert not (tmp_path / "ran").exists(), "the old one made an environment"
