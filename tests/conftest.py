"""Fixtures and settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.faults import PROPERTY, Fault, table
from support.world import TinyWorld, make_world

# For engines, here and in other processes. Tiny tensors gain nothing from threads, and threads of several processes
# wait for each other: with two threads, an engine beside a busy process takes three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A refusal is what most tests of servers are about: clients hand it on at once, here and in other processes.
os.environ.setdefault("LORAPLEX_RETRIES", "0")
# PEFT fills in a template that it compiles each time, which takes as long as all else of a tiny adapter.
PeftModel.create_or_update_model_card = lambda self, output_dir: (Path(output_dir) / "README.md").touch()
# `nohup` and some shells start processes that ignore these, and the servers of tests would inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
COMPILERS = {name: os.environ.get(name) for name in ("CC", "CXX")}


def pytest_collection_finish() -> None:
    """Takes what was imported and collected out of later garbage collections, which would go through it each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Sets one thread before every test, since an engine that was built in one may have set more."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_compilers() -> Iterator[None]:
    """Restores the compilers' variables after every test, since PEFT's BOFT layers leave CXX=gcc behind where their
    CUDA extension does not compile (0.21), and gcc links no library of C++."""
    yield
    for name, value in COMPILERS.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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
