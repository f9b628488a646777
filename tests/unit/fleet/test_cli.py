"""Commands of a fleet, as far as they go without Ray."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loraplex", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("flags", [(), ("--log-format", "json")])
def test_an_error_is_one_line(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("model: m\nmodle: n\n")
    done = run("up", str(tmp_path / "cluster.yaml"), "--check", *flags)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    if flags:
        said = json.loads(line)
        assert (said["level"], said["reason"]) == ("error", "INVALID_ARGUMENT")
        line = said["message"]
    assert "modle is unknown (did you mean model?)" in line


def test_a_specification_is_printed_for_serve(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("model: m\n")
    done = run("up", str(tmp_path / "cluster.yaml"), "--serve-config")
    assert "import_path: loraplex_fleet.app:workers" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["down", "status"])
def test_an_address_that_is_none_is_refused(command: str) -> None:
    done = run(command, "--address", "foo")
    assert done.returncode == 2
    assert "--address must be auto or Ray's HOST:PORT, not 'foo'" in done.stderr
    assert "Traceback" not in done.stderr
