"""`loraplex demo` as a newcomer runs it, on the world that comes along."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest
from support.processes import loraplex, wait_until

from loraplex import Client
from loraplex_demo.world import committed_world

pytestmark = pytest.mark.timeout(240)


def demo(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "loraplex", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def test_every_answer_is_right() -> None:
    with demo("--json", "--records", "2") as process:
        out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    printed = json.loads(out)
    rows: list[dict[str, Any]] = printed["answers"]
    names = ["", *(adapter.name for adapter in committed_world().adapters)]
    alone = {row["adapter"]: row for row in printed["one_at_a_time"]}
    assert sorted(alone) == sorted(names)
    assert all(row["tokens_per_step"] > 2 for row in alone.values() if row["drafted_by"].startswith("Medusa"))
    assert sorted(row["adapter"] for row in rows) == sorted(names * 2)
    assert all(row["is_right"] and row["text"] == row["expected"] for row in rows)
    assert len({row["text"] for row in rows}) == len(rows), "nobody answers for another"


def test_ctrl_c_while_it_starts() -> None:
    with demo() as process:
        wait_until(lambda: len(psutil.Process(process.pid).children()) == 1, 60, "the worker is started")
        (worker,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert out == ""
    for word in ("Traceback", "never retrieved", "error"):
        assert word not in err
    assert not worker.is_running()


@pytest.mark.slow
def test_serve_until_ctrl_c() -> None:
    with loraplex("demo", "--serve", "--port", "0") as server, Client(server.address) as client:
        rows = client.adapters.list(include_unloaded=True)
        assert {adapter.name for adapter in committed_world().adapters} <= {row.adapter_id for row in rows}
        assert server.end(signal.SIGINT, timeout_s=60) == 0
        assert "Traceback" not in server.output


@pytest.mark.slow
def test_what_http_says_to_try() -> None:
    with loraplex("demo", "--http", "--port", "0", "--http-port", "0") as server:
        wait_until(lambda: "loraplex generate" in server.output, what="the commands are printed")
        commands = re.findall(r"^  (curl (?:.*\\\n)?.*)$", server.output, re.MULTILINE)
        assert len(commands) == 3
        answers = [subprocess.run(["bash", "-c", one + " -sS"], capture_output=True, text=True) for one in commands]
        assert server.end(signal.SIGINT, timeout_s=60) == 0
    models, completion, chat = (answer.stdout for answer in answers)
    world = committed_world()
    (case,) = world.showcase(1)
    assert json.loads(models)["data"][0]["id"] == "demo"
    assert json.loads(completion)["choices"][0]["text"] == case.expected(world.adapters[0].format)
    assert chat.endswith("data: [DONE]\n\n")
