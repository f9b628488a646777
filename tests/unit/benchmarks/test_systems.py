"""Systems in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import memory
import pytest
import systems
from systems import PipedSystem

RUNNER = """
import sys
sys.path.insert(0, {folder!r})
from lines import answer, take_stdout

replies = take_stdout()
print("what libraries print")

def prepare(workload):
    if workload == "bad":
        print("no such thing", file=sys.stderr)
        raise SystemExit(3)
    return lambda: len(workload)

answer(prepare, {{"thing": "1.2"}}, replies)
"""


@pytest.fixture
def runner(tmp_path: Path) -> list[str]:
    path = tmp_path / "runner.py"
    path.write_text(RUNNER.format(folder=str(systems.HERE / "peers")))
    return [sys.executable, str(path)]


def test_a_runner_answers_line_by_line(runner: list[str]) -> None:
    system = PipedSystem("thing", runner)
    assert system.versions == {"thing": "1.2"}
    runs = [system.run(name) for name in ("abc", "abcdef")]
    assert [run.num_tokens for run in runs] == [3, 6]
    assert all(0 < run.seconds < 1 for run in runs)
    system.close()
    assert system._child.process.returncode is not None


def test_the_last_words_of_one_that_ends(runner: list[str]) -> None:
    system = PipedSystem("thing", runner)
    with pytest.raises(SystemExit, match=r"thing ended with status 3:\n(.*\n)*no such thing"):
        system.run("bad")
    system.close()


def test_one_that_cannot_begin() -> None:
    with pytest.raises(SystemExit, match="ended with status 1"):
        PipedSystem("thing", [sys.executable, "-c", "raise SystemExit(1)"])


HTTP_SERVER = """
import http.server, json

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(json.dumps({"data": [{"id": "base"}, {"id": "a0"}]}).encode())

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["stream_options"] == {"include_usage": True}
        if asked["model"] == "a1":
            self.send_error(404, "no such model")
            return
        usage = {"choices": [], "usage": {"completion_tokens": asked["max_tokens"]}}
        events = [f"data: {json.dumps(one)}\\n\\n" for one in ({"choices": [{"text": "x"}]}, usage)]
        self.answer("".join([*events, "data: [DONE]\\n\\n"]).encode())

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(content)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"HTTP on 127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
"""


def test_http_streams_are_sent_when_due_and_counted_by_usage(tmp_path: Path) -> None:
    for folder in ("adapters/a0", "adapters/a1", "workloads"):
        (tmp_path / folder).mkdir(parents=True)
    rows = [{"prompt_ids": [1, 2], "max_tokens": 2 + row, "adapter": None if row else 0} for row in range(3)]
    (tmp_path / "workloads/mixed-3.json").write_text(json.dumps(rows))
    (tmp_path / "workloads/arrivals-1.json").write_text(json.dumps([{**rows[0], "arrival_s": 0.3}]))
    (tmp_path / "workloads/refused-1.json").write_text(json.dumps([{**rows[0], "adapter": 1}]))
    child = systems.Child([sys.executable, "-c", HTTP_SERVER], "server", merged=True)
    system = systems.HttpSystem("server", child, child.hear_until(systems.HTTP_READY)[1], tmp_path)
    try:
        run = system.run("mixed-3")
        assert run.num_tokens == 2 + 3 + 4
        assert [0 < one.first_token_s < run.seconds for one in run.latencies] == [True] * 3
        late = system.run("arrivals-1")
        assert late.latencies[0].first_token_s > 0, "it was sent when it was due, 0.3 s after the start"
        assert late.seconds > 0.3
        with pytest.raises(SystemExit, match=r"server answered HTTP/1\.0 404 no such model"):
            system.run("refused-1")
    finally:
        system.close()


def test_commands(tmp_path: Path) -> None:
    python = Path("/x/python")
    command = systems.vllm_command(python, "a.so:b.so", tmp_path, lora=False)
    assert command[:3] == ["env", "LD_PRELOAD=a.so:b.so", "/x/python"]
    assert command[-1] == "--lora-off"
    for one in (command[3], systems.peft_command(python, tmp_path)[1], systems.engine_command(tmp_path)[1]):
        assert Path(one).is_file()


def test_peaks_of_a_process_and_its_children() -> None:
    pid = os.getpid()
    assert memory.processes(pid)[0] == pid
    memory.forget_peak(pid)  # of other tests
    before = memory.peak_bytes(pid)
    ballast = bytearray(64 << 20)
    ballast[:] = b"x" * len(ballast)
    assert memory.peak_bytes(pid) - before > 48 << 20
    del ballast
    memory.forget_peak(pid)
    assert memory.peak_bytes(pid) < before + (32 << 20)
