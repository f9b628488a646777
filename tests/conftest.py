"""Fixtures and settings of all tests."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.faults import PROPERTY, Fault, table
from support.world import TinyWorld, make_world

# For engines, here and in other processes. Tiny tensors gain nothing from threads, and threads of several processes
# wait for each other: with two threads, an engine beside a busy process takes three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Before every test, since an engine that was built in one may have set more."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A random Llama and 40 adapters."""
    return make_world(tmp_path_factory.mktemp("world"), num_adapters=40)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the tables of the fault tests, of the comparisons with PEFT and of the sweep over families that ran."""
    reports = terminalreporter.getreports("")  # set-ups and tear-downs that went well
    found = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if found:
        terminalreporter.section("faults")
        terminalreporter.write_line(table((Fault(*fields), took_s) for *fields, took_s in found))
    cells = [value for report in reports for name, value in report.user_properties if name == "parity"]
    if cells:
        from support.parity import passed  # late: it imports every model's configuration

        terminalreporter.section("parity with PEFT")
        terminalreporter.write_line(passed(cells))
    swept = [value for report in reports for name, value in report.user_properties if name == "sweep"]
    if swept:
        from support import sweep

        terminalreporter.section("families")
        terminalreporter.write_line(sweep.table(swept))
