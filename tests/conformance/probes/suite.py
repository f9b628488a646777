"""Another project's pytest files as calls of a probe."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from calls import SKIPPED

THIRD_PARTY = Path(__file__).resolve().parents[1] / "third_party"


def run(folder: str, *plugins: object) -> int:
    """Runs the files of third_party/`folder` with the fixtures of `plugins`, and none of this repository's."""
    tests = str(THIRD_PARTY / folder)
    only_theirs = ["-c", os.devnull, "--rootdir", tests, "--confcutdir", tests, "-p", "no:cacheprovider"]
    status = pytest.main([tests, *only_theirs, "-p", "no:terminal", "-s"], plugins=[_Results(), *plugins])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


class _Results:
    """A line of JSON for each test. One that skips itself has a fault, so that it needs a row in differences.toml."""

    def __init__(self) -> None:
        self._faults: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if _name(item) not in SKIPPED]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            print(json.dumps({"call": report.nodeid, "fault": str(report.longrepr)}), flush=True)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.excinfo is not None:
            self._faults.append(call.excinfo.exconly())
        if call.when == "teardown":
            print("\n" + json.dumps({"call": _name(item), "fault": "; ".join(self._faults)}), flush=True)
            self._faults = []


def _name(item: Any) -> str:
    """File, test and parameters: brackets would be patterns in differences.toml."""
    return f"{item.path.stem}, {item.name}".replace("[", " (").replace("]", ")")
