"""Systems in processes of their own."""

from __future__ import annotations

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
