"""Table of faults: declarations of fault tests and measured times.

A test of `tests/integration/faults` says with `@fault(...)` what happens, what clients see, within how many seconds,
and what is left. Its `stopwatch` fixture takes the time and holds the bound. pytest prints the rows at the end of a
run; `docs/operations.md` has the same table, and `tests/repo/test_faults.py` compares the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import pytest

# Name of the property in which a test's report carries its time to the process that prints the table.
PROPERTY = "fault"

_Test = TypeVar("_Test", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class Fault:
    """One row. `within_s` bounds the time from the fault to what clients see."""

    what: str
    clients_see: str
    within_s: float
    left: str = "nothing"


def fault(what: str, *, clients_see: str, within_s: float, left: str = "nothing") -> Callable[[_Test], _Test]:
    """Declares a test's row of the table."""
    return pytest.mark.fault(Fault(what, clients_see, within_s, left))


@dataclass(slots=True)
class Stopwatch:
    """Runs from the fault until clients have seen what the row says. The bound counts from `start`."""

    row: Fault
    clock: Callable[[], float] = time.monotonic
    started_s: float | None = None
    took_s: float | None = None

    def start(self) -> None:
        """The fault happens now."""
        self.started_s = self.clock()

    def stop(self) -> float:
        """Clients have seen it. Fails when that took longer than the row's bound; keeps the longest of several."""
        assert self.started_s is not None, "the fault has not happened yet"
        elapsed_s = self.clock() - self.started_s
        self.record(elapsed_s)
        return elapsed_s

    def record(self, took_s: float) -> None:
        """Takes a time that was measured elsewhere."""
        self.took_s = max(took_s, self.took_s or 0.0)
        assert took_s <= self.row.within_s, f"{self.row.what}: {took_s:.1f} s, not {self.row.within_s:g} s"


def table(rows: Iterable[tuple[Fault, float | None]]) -> str:
    """The rows with their measured times, as Markdown."""
    lines = ["| fault | what clients see | at most | measured | what is left |", "|---|---|---|---|---|"]
    for row, took_s in rows:
        measured = "" if took_s is None else f"{took_s:.1f} s"
        lines.append(f"| {row.what} | {row.clients_see} | {row.within_s:g} s | {measured} | {row.left} |")
    return "\n".join(lines)
