"""Supervision of a child of twenty lines."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from loraplex_contracts.errors import Cancelled, FailedPrecondition, UnsupportedModel
from loraplex_fleet import supervisor
from loraplex_fleet.supervisor import Child, end_text, is_chatter
from loraplex_runtime.logs import JsonFormatter, PlainFormatter

CHILD = """\
import json, signal, sys, time
def say(**fields): print(json.dumps(fields), flush=True)
how = sys.argv[1]
if how == "crash": sys.exit("no such device")
if how == "refuse": say(event="failed", reason="UNSUPPORTED_MODEL", message="it is too odd"); sys.exit(1)
say(event="progress", text="loading")
if how == "slow": time.sleep(60)
def drain(*_):
    say(event="draining"); time.sleep(0.2 if how == "drains" else 60); sys.exit(0)
signal.signal(signal.SIGTERM, drain)
print("chatter", flush=True)
sys.stderr.write("a line of the log\\n"); sys.stderr.flush()
say(event="ready", address="127.0.0.1:5", metrics_ports=[])
sys.stdin.read()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "child.py").write_text(CHILD)
    return tmp_path / "child.py"


def child(script: Path, how: str, said: list[str] | None = None) -> Child:
    return Child([sys.executable, str(script), how], ([] if said is None else said).append)


def test_it_is_ready_and_drains(script: Path) -> None:
    said: list[str] = []
    one = child(script, "drains", said)
    assert one.start()["address"] == "127.0.0.1:5"
    assert said == ["loading"]
    assert one.status is None
    assert psutil.pid_exists(one.pid)
    assert one.stop(drain_s=5.0) == 0
    assert one.status == 0
    assert one.last_words == "a line of the log"
    assert one.end == "the process ended with status 0: a line of the log"


def test_what_it_reports_is_raised(script: Path) -> None:
    with pytest.raises(UnsupportedModel, match="it is too odd"):
        child(script, "refuse").start()


def test_its_last_words_are_told(script: Path) -> None:
    one = child(script, "crash")
    with pytest.raises(FailedPrecondition, match="ended with status 1 before it was ready: no such device"):
        one.start()
    assert one.status == 1


@pytest.mark.parametrize(
    ("status", "words", "text"),
    [
        (1, "no such device", "ended with status 1: no such device"),
        (1, "", "ended with status 1"),
        (-9, "", "was killed by signal 9 (perhaps out of memory)"),
        (137, "low memory", "was killed by signal 9 (perhaps out of memory); its last words: low memory"),
        (-11, "", "was killed by signal 11"),
        (255, "odd", "ended with status 255: odd"),
    ],
)
def test_an_end_in_words(status: int, words: str, text: str) -> None:
    assert end_text(status, words) == text


@pytest.mark.parametrize("formatter", [PlainFormatter(), JsonFormatter()])
def test_last_words_are_warnings_and_errors(formatter: logging.Formatter) -> None:
    levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
    records = [logging.LogRecord("loraplex.start", one, "", 0, "so it is", None, None) for one in levels]
    assert [is_chatter(formatter.format(one)) for one in records] == [True, True, False, False]
    assert not is_chatter("{ no JSON")
    assert not is_chatter("Segmentation fault")


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(FailedPrecondition, match="cannot be started"):
        Child(["/nowhere/loraplex"]).start()


def test_an_end_while_it_starts(script: Path) -> None:
    one, raised = child(script, "slow"), list[BaseException]()

    def start() -> None:
        with pytest.raises(Cancelled) as found:
            one.start()
        raised.append(found.value)

    thread = threading.Thread(target=start)
    thread.start()
    while not one.pid:
        time.sleep(0.01)
    assert one.stop(drain_s=5.0) == -signal.SIGTERM
    thread.join(5)
    assert raised


def test_one_that_does_not_end_is_killed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "GRACE_S", 0.1)
    one = child(script, "hangs")
    one.start()
    assert one.stop(drain_s=0.1) == -signal.SIGKILL


def test_nothing_runs_yet(script: Path) -> None:
    one = child(script, "drains")
    assert (one.pid, one.status, one.stop(1.0), one.kill()) == (0, None, 0, 0)
