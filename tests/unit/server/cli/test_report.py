"""Reports of a server's start: for a person, for a supervisor, in the log."""

from __future__ import annotations

import json
import logging

import pytest

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.cli.report import Report

ERROR = UnsupportedModel("the model [m] is too odd")


def say_all(report: Report) -> int:
    with report:
        report.progress("loading [m]")
        report.ready("127.0.0.1:5", "[m]", [9, 10], "127.0.0.1:8000")
        report.draining(2)
    return report.failed(ERROR)


def test_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert say_all(Report("worker", as_json=False)) == ERROR.exit_code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        "worker: loading [m]",
        "worker ready on 127.0.0.1:5, serving [m], metrics on 9, 10, HTTP on 127.0.0.1:8000 (Ctrl-C ends it)",
        "worker is draining: 2 requests under way (Ctrl-C again ends it at once)",
        "error: the model [m] is too odd",
    ]


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
