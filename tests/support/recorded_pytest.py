"""One file run under pytest, with every test's outcome."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MARKERS = ("gpu", "slow", "network")


class Recorder:
    """A plugin."""

    def __init__(self, choose: Callable[[list[Any]], list[Any]], write: Callable[[dict[str, Any]], None]) -> None:
        self._choose = choose
        self._write = write
        self._told: set[str] = set()

    def pytest_configure(self, config: pytest.Config) -> None:
        for marker in MARKERS:
            config.addinivalue_line("markers", marker)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = self._choose(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._write({"collected": [item.name for item in session.items]})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Records the phase that decides a test: the first that does not pass, else the call."""
        name = report.nodeid.rpartition("::")[2]
        if name in self._told or (report.passed and report.when != "call"):
            return
        self._told.add(name)
        text = (
            report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else report.longreprtext
        )
        self._write({"name": name, "outcome": report.outcome, "text": text})


def run_file(path: Path, choose: Callable[[list[Any]], list[Any]], write: Callable[[dict[str, Any]], None]) -> int:
    """Runs those tests of a file that `choose` leaves. Returns pytest's exit status; that there were none is none."""
    # No configuration file and no conftest.py: they are made for a machine where all that tests need is installed.
    options = ["-c", os.devnull, "--rootdir", str(path.parent), "--confcutdir", str(path.parent), "-q"]
    options += ["--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    status = pytest.main([*options, str(path.resolve())], plugins=[Recorder(choose, write)])
    return 0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else int(status)
