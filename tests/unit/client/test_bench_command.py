"""`loraplex bench` itself."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loraplex.cli.main import main
from loraplex_contracts import errors
from loraplex_proto.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateStreamResponse, Usage

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def answers(fake: Any) -> None:
    last = GenerateStreamResponse(
        text_delta="b", token_ids=[2], finish_reason=FINISH_REASON_LENGTH, usage=Usage(completion_tokens=2)
    )
    fake.chunks = [GenerateStreamResponse(text_delta="a", token_ids=[1]), last]


def test_json(fake: Any, make_adapter: Callable[..., Any], capsys: Capture) -> None:
    fake.adapters = [make_adapter("a"), make_adapter("b")]
    argv = ["bench", fake.address, "--rate", "inf", "--num-requests", "6", "--popularity", "distinct", "--json"]
    assert main([*argv, "--prompt-tokens", "3-4", "--output-tokens", "9", "--speculation", "off"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["scheduled"], document["completed"], document["output_tokens"]) == (6, 6, 12)
    assert document["ttft_s"]["count"] == 6
    assert document["ttft_s"]["p50"] <= document["ttft_s"]["p99"] <= document["total_s"]["max"]
    assert document["load"]["popularity"] == "distinct"
    assert not document["interrupted"]
    sent = [seen.request for seen in fake.seen if seen.method == "GenerateStream"]
    assert sorted(request.adapter_id for request in sent) == ["a", "a", "a", "b", "b", "b"]
    assert {len(request.token_ids.ids) for request in sent} <= {3, 4}
    assert all(request.stopping.ignore_eos and request.speculation.off for request in sent)


def test_in_words(fake: Any, capsys: Capture) -> None:
    assert main(["bench", fake.address, "--rate", "100", "--cv", "0", "--duration", "0.055"]) == 0
    rows = dict(line.split("\t", 1) for line in capsys.readouterr().out.splitlines())
    assert rows["requests"] == "5 of 5 completed"
    assert rows["first token"].split("\t")[0] == "5"
    assert rows["throughput"].endswith("requests/s")


def test_prompts_from_a_file(fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("one\n\ntwo\n")
    argv = ["bench", fake.address, "--rate", "inf", "--num-requests", "20", "--prompts", str(path), "--stop-at-eos"]
    assert main([*argv, "-a", "sql"]) == 0
    sent = [seen.request for seen in fake.seen if seen.method == "GenerateStream"]
    assert {request.text for request in sent} == {"one", "two"}
    assert {request.adapter_id for request in sent} == {"sql"}
    assert not any(request.stopping.ignore_eos for request in sent)


def test_failures_are_listed_with_their_codes(fake: Any, capsys: Capture) -> None:
    fake.chunks, fake.stream_error = [], errors.AdapterNotFound("there is no adapter 'sqll'")
    argv = ["bench", fake.address, "--rate", "inf", "--num-requests", "2", "--base"]
    assert main(argv) == 1, "nothing was completed"
    out = capsys.readouterr().out
    assert "NOT_FOUND ADAPTER_NOT_FOUND\t2 times: there is no adapter 'sqll'" in out
    assert "requests\t0 of 2 completed, 2 failed" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rate", "0"], "--rate must be a number above 0"),
        (["--rate", "nan"], "--rate must be a number above 0"),
        (["--duration", "inf"], "--duration must be a finite number above 0"),
        (["--cv", "nan"], "--cv must be a finite number from 0 on"),
        (["--num-adapters", "0"], "--num-adapters must be at least 1"),
        (["--timeout", "-1"], "--timeout must be 0"),
        (["--rate", "inf"], "--num-requests is needed"),
        (["--popularity", "even"], "--popularity takes identical"),
        (["--output-tokens", "0"], "--output-tokens takes a number"),
        (["--prompts", "no/such/file"], "cannot read no/such/file"),
        (["--base", "-a", "x"], "leave out --adapter"),
        (["--speculation", "fast"], "`speculation` takes off"),
        (["--adapters-prefix", "zz"], "no adapter that begins with 'zz'"),
        (["--rate", "0.001", "--cv", "0", "--duration", "1"], "no request arrives"),
    ],
)
def test_loads_that_there_are_not(
    fake: Any, make_adapter: Callable[..., Any], capsys: Capture, argv: list[str], says: str
) -> None:
    fake.adapters = [make_adapter()]
    assert main(["bench", fake.address, *argv]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert not [seen for seen in fake.seen if seen.method == "GenerateStream"]


def test_no_server(capsys: Capture) -> None:
    assert main(["bench", "127.0.0.1:1"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_ctrl_c_prints_what_was_measured_so_far(fake: Any) -> None:
    argv = ["bench", fake.address, "--rate", "20", "--cv", "0", "--duration", "600", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "loraplex", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    while sum(seen.method == "GenerateStream" for seen in fake.seen) < 5:
        assert process.poll() is None
        fake.arrived.wait(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"Traceback" not in err
    document = json.loads(out)
    assert document["interrupted"]
    assert document["scheduled"] == 12_000 - 1
    assert 4 <= document["completed"] <= 100
    assert document["ttft_s"]["count"] == document["completed"]
