"""The table of faults in docs/operations.md and the tests behind it say the same."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from support.faults import Fault, table

ROOT = Path(__file__).parents[2]
HEADING = "## Faults\n"


def declared() -> Iterator[Fault]:
    """The rows of the tests, in the order of files and functions."""
    for path in sorted((ROOT / "tests/integration/faults").glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"faults_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where dataclasses look for it
        spec.loader.exec_module(module)
        for value in vars(module).values():
            marks = getattr(value, "pytestmark", []) if callable(value) else []
            yield from (mark.args[0] for mark in marks if mark.name == "fault")


def without_times(markdown: str) -> list[str]:
    """The table's rows, each without the column of measured times."""
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    return [re.sub(r"\| [\d.]* ?s? ?\| ([^|]*) \|$", r"| \1 |", row) for row in rows]


def test_the_documented_table_is_that_of_the_tests() -> None:
    section = (ROOT / "docs/operations.md").read_text().partition(HEADING)[2].partition("\n## ")[0]
    documented = without_times(section)[1:]
    expected = without_times(table((row, None) for row in declared()))[1:]
    assert sorted(documented) == sorted(expected)
    assert expected, "there are fault tests"


def test_every_fault_test_declares_its_row() -> None:
    for path in (ROOT / "tests/integration/faults").glob("test_*.py"):
        text = path.read_text()
        assert len(re.findall(r"^@fault\(", text, re.M)) == len(re.findall(r"^(?:async )?def test_", text, re.M)), path
