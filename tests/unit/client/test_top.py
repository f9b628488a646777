"""`loraplex top` against a scripted router."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from rich.console import Console

from loraplex import Client
from loraplex.cli.main import main
from loraplex.cli.top import screen, sparkline
from loraplex_contracts.errors import PermissionDenied, Unavailable, Unimplemented
from loraplex_proto.v1 import status_pb2

Capture = pytest.CaptureFixture[str]
MARKUP = "[bold]x[/bold]\x1b[2J<b>"


def a_status() -> status_pb2.GetStatusResponse:
    activity = status_pb2.Activity(
        window_s=60, tokens=6000, drafted_tokens=100, accepted_tokens=75, requests=9, failed_requests=1,
        time_to_first_p50_s=0.02, time_to_first_p99_s=1.5,
    )  # fmt: skip
    status = status_pb2.GetStatusResponse(
        router_id="host:1", model_id="tiny", uptime_s=100, requests_in_flight=3, total_adapters=70, activity=activity,
        tokens_by_second=[0, 4, 8],
    )  # fmt: skip
    status.workers.add(
        worker_id="10.0.0.1:5", state=status_pb2.WORKER_STATE_SERVING, running_requests=2, max_running_requests=8,
        total_kv_blocks=10, free_kv_blocks=4, adapters=5, device_adapters=2, activity=activity,
    )  # fmt: skip
    status.workers.add(worker_id="10.0.0.2:5", state=status_pb2.WORKER_STATE_UNREACHABLE, error=f"refused {MARKUP}")
    status.adapters.add(adapter_id="sql", tiers="42", work_tokens=77)
    status.adapters.add(adapter_id=MARKUP, tiers="30", waiting=True)
    status.errors.add(age_s=4, method="Generate", code="INTERNAL", reason="INTERNAL", message=f"bad {MARKUP}")
    return status


def test_a_look_has_it_all(fake: Any, capsys: Capture) -> None:
    fake.status = a_status()
    assert main(["top", fake.address, "--prefix", "s"]) == 0
    out = capsys.readouterr().out
    for said in ("tiny", "1 of 2 workers serve", "100 tokens/s", "20 ms, p99 1500 ms"):
        assert said in out
    for said in ("accepted 75 %", "3 under way", "1 of 9 failed"):
        assert said in out
    lines = out.splitlines()
    assert [line for line in lines if line.endswith(" ")] == []
    (serving,) = (line for line in lines if "10.0.0.1:5" in line)
    assert serving.split()[2:7] == ["serving", "2/8", "0", "0", "0"]
    assert "60 %" in serving
    (lost,) = (line for line in lines if "10.0.0.2:5" in line)
    assert "unreachable" in lost
    (sql,) = (line for line in lines if line.startswith("sql"))
    assert sql.split() == ["sql", "77", "D", "S"]
    assert "2 of 70 adapters" in out
    # Names and errors are text: neither the terminal's control characters nor rich's markup.
    assert out.count("[bold]x[/bold]\\x1b[2J<b>") == 3
    assert "\x1b" not in out
    (seen,) = fake.seen
    assert (seen.method, seen.request.adapter_prefix) == ("GetStatus", "s")


def test_a_long_reason_leaves_the_other_columns_whole(fake: Any) -> None:
    fake.status = a_status()
    fake.status.workers[1].error = "UNAVAILABLE: " + "connection refused " * 20
    with Client(fake.address) as client:
        shown = screen(client.status(), 40)
    console = Console(width=140, file=io.StringIO(), color_system=None)
    console.print(shown)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (lost,) = (line for line in lines if "10.0.0.2:5" in line)
    assert "unreachable" in lost
    assert "UNAVAILABLE: conn" in lost
    assert len(lost) <= 140
    assert any("PENDING" in line and "ACCEPTED" in line for line in lines)


def test_json(fake: Any, capsys: Capture) -> None:
    fake.status = a_status()
    assert main(["top", fake.address, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["workers"][1]["state"] == "unreachable"
    assert found["adapters"][0]["tiers"] == [4, 2]


def test_the_sdk_has_it(fake: Any) -> None:
    fake.status = a_status()
    with Client(fake.address) as client:
        found = client.status(max_adapters=3)
    assert found.workers[0].activity.tokens == 6000
    assert found.tokens_by_second == (0, 4, 8)
    assert fake.seen[0].request.max_adapters == 3


def test_errors_are_one_sentence(fake: Any, capsys: Capture) -> None:
    fake.error = PermissionDenied("this credential may not do that")
    assert main(["top", fake.address]) != 0
    assert capsys.readouterr().err == "error: this credential may not do that\n"
    assert main(["top", fake.address, "--interval", "nan"]) == 2


def test_one_look_is_tried_again_as_often_as_was_asked(fake: Any, capsys: Capture) -> None:
    fake.error = Unavailable("starting", retry_after_s=0.01)
    assert main(["top", fake.address, "--retries", "2"]) == 1
    assert len(fake.seen) == 3


def test_a_worker_has_none(fake: Any, capsys: Capture) -> None:
    fake.error = Unimplemented("the server does not know this method")
    assert main(["top", fake.address]) != 0
    assert f"{fake.address} has no status to show: it is a worker" in capsys.readouterr().err


def test_live_in_a_terminal_until_ctrl_c(fake: Any) -> None:
    """The screen keeps what was seen last while the router is frozen, and Ctrl-C ends it then too."""
    fake.status = a_status()
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex", "top", fake.address, "--interval", "0.2"],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "150", "LINES": "40"},
    )  # fmt: skip
    os.close(theirs)

    def read_until(said: bytes, times: int) -> bytes:
        shown, deadline = b"", time.monotonic() + 30
        while shown.count(said) < times and time.monotonic() < deadline:
            shown += os.read(ours, 1 << 16)
        assert shown.count(said) >= times
        return shown

    try:
        assert b"\x1b[2J<b>" not in read_until(b"workers serve", 3)
        fake.delay_s = 60.0
        _, _, rest = read_until(b"has not answered for 5 s", 1).partition(b"has not answered for 5 s")
        assert b"workers serve" in rest or read_until(b"workers serve", 1), "what was seen last stays"
        process.send_signal(signal.SIGINT)
        while True:  # until it has put the screen back
            try:
                if not os.read(ours, 1 << 16):
                    break
            except OSError:
                break
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.wait(10)
        os.close(ours)


@pytest.mark.parametrize(
    ("counts", "line"), [((), ""), ((0, 0), "  "), ((0, 1, 8), " ▁█"), ((3, 3), "██"), ((1, 1000), "▁█")]
)
def test_sparkline(counts: tuple[int, ...], line: str) -> None:
    assert sparkline(counts) == line
