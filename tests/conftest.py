"""Fixtures and settings of all tests."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.faults import PROPERTY, Fault, table
from support.world import TinyWorld, make_world


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and threads of several test processes wait for each other.

    Before every test, since an engine built in one sets what serving wants.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A random Llama and 40 adapters."""
    return make_world(tmp_path_factory.mktemp("world"), num_adapters=40)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the table of the fault tests that ran."""
    reports = terminalreporter.getreports("")  # set-ups and tear-downs that went well
    found = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if found:
        terminalreporter.section("faults")
        terminalreporter.write_line(table((Fault(*fields), took_s) for *fields, took_s in found))
