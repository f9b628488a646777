"""Reports of a server's start: for a person, for a supervisor, in the log."""

from __future__ import annotations

import io
import json
import logging
from functools import partial

import pytest
from rich.console import Console

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.cli import report as cli_report
from loraplex_server.cli.report import Report

ERROR = UnsupportedModel("the model [m] is too odd")


def say_all(report: Report) -> int:
    with report:
        report.progress("loading [m]")
        report.ready("127.0.0.1:5", "[m]", [9, 10], "127.0.0.1:8000")
        report.draining(2)
    return report.failed(ERROR)


def test_for_a_person(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert say_all(Report("worker", as_json=False)) == ERROR.exit_code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "worker: loading [m]",
        "worker ready on 127.0.0.1:5, serving [m], metrics on 9, 10, HTTP on 127.0.0.1:8000 (Ctrl-C ends it)",
        "error: the model [m] is too odd",
    ]
    # In the log, which never waits for its reader.
    assert caplog.messages == ["worker is draining: 2 requests under way (Ctrl-C again ends it at once)"]


def test_hints_come_below_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    Report("server", as_json=False).ready("127.0.0.1:5", "m", hints=["  try it: loraplex generate [x]"])
    assert capsys.readouterr().err.splitlines()[1:] == ["  try it: loraplex generate [x]"]
    Report("server", as_json=True).ready("127.0.0.1:5", "m", hints=["  try it"])
    assert "try it" not in capsys.readouterr().out


def test_counts_are_told_now_and_then_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("worker", as_json=False)
    for number in range(1, 5):
        report.progress(f"reading weights: {number} of 4 tensors")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["worker: reading weights: 1 of 4 tensors", "worker: reading weights: 4 of 4 tensors"]


def test_counts_are_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(cli_report, "_Console", partial(Console, file=screen, force_terminal=True, width=100))
    with Report("worker", as_json=False) as report:
        report.progress("loading [m]")
        report.progress("reading weights: 3 of 4 tensors")
        assert report._shown is not None
        (task,) = report._shown.tasks
        assert (task.completed, task.total) == (0.75, 1.0)
        report._shown.refresh()
        report.progress("packing")
        assert task.total is None
    assert "reading weights: 3 of 4 tensors" in screen.getvalue()
    assert "━━━" in screen.getvalue()


def test_in_the_log(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    report = Report("worker", as_json=False)
    report.use_log()
    with caplog.at_level(logging.INFO):
        say_all(report)
    assert capsys.readouterr() == ("", "")
    assert [record.levelname for record in caplog.records] == ["INFO"] * 3 + ["ERROR"]
    assert caplog.records[1].getMessage().startswith("worker ready on 127.0.0.1:5, serving [m], metrics on 9, 10")
    assert vars(caplog.records[3])["reason"] == ERROR.reason


@pytest.mark.parametrize("has_log", [False, True])
def test_for_a_supervisor(has_log: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("worker", as_json=True)
    if has_log:
        report.use_log()
    say_all(report)
    output, errors = capsys.readouterr()
    assert errors == ""
    assert [json.loads(line)["event"] for line in output.splitlines()] == ["progress", "ready", "draining", "failed"]
