"""Reports to a supervisor."""

from __future__ import annotations

import fcntl
import os
import sys

import pytest

from loraplex_runtime.reports import report_of, write_report


def test_a_full_pipe_loses_reports_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source, os.fdopen(writer, "w") as full:
        size = fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
        monkeypatch.setattr(sys, "stdout", full)
        write_report(event="alive")
        line = source.readline()
        assert report_of(line) == {"event": "alive"}
        os.write(writer, b"x" * size)
        write_report(event="draining")
        assert os.read(reader, 2 * size) == b"x" * size
