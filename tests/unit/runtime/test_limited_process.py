"""Children that hang, die or run out of memory: their own call fails alone."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loraplex_runtime import limited_process
from loraplex_runtime.limited_process import LimitedProcess, LimitExceeded, Limits, ProcessFailed
from loraplex_server.config import bare_environment

LIMITS = Limits(memory_bytes=256 << 20, stack_bytes=1 << 20, cpu_s=5)


def answering(setup: Any) -> Callable[[Any], Any]:
    """Runs in the child: answers questions, or hangs, dies or fails when asked to."""

    def answer(question: Any) -> Any:
        match question:
            case "hang":
                time.sleep(60)
            case "begin":
                os.write(int(sys.argv[1]), b"\0\0\0\7{")  # a length, and the first byte
                time.sleep(60)
            case "memory":
                return len(bytearray(1 << 30))
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "fail":
                raise RuntimeError("of its own")
            case "limits":
                return [resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU)]
            case "secret":
                return os.environ.get("HF_TOKEN")
            case _:
                pass
        return [setup, question]

    return answer


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[LimitedProcess]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((os.environ.get("PYTHONPATH", ""), os.getcwd())))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    one = LimitedProcess(f"{__name__}:answering", {"a": 1}, LIMITS, bare_environment())
    try:
        yield one
    finally:
        one.close()


def test_bounds(process: LimitedProcess) -> None:
    assert process.pid is None
    assert process.call({"b": "\u00fc\ud800"}, 5.0) == [{"a": 1}, {"b": "\u00fc\ud800"}]
    pid = process.pid
    assert process.call("secret", 5.0) is None
    assert process.pid == pid
    calls = (("hang", 0.2, "time"), ("begin", 0.2, "time"), ("die", 5.0, "memory"), ("memory", 5.0, "memory"))
    for question, timeout_s, what in calls:
        with pytest.raises(LimitExceeded, match=what):
            process.call(question, timeout_s)
        assert process.pid is None
    assert process.call("again", 5.0) == [{"a": 1}, "again"]
    assert process.pid not in (pid, None)
    with pytest.raises(ProcessFailed, match="RuntimeError: of its own"):
        process.call("fail", 5.0)
    process.close()
    with pytest.raises(ProcessFailed, match="closed"):
        process.call("closed", 5.0)


MORE_THAN_A_PIPE_HOLDS = "x" * (1 << 20)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("question", ["short", MORE_THAN_A_PIPE_HOLDS], ids=["short", "long"])
def test_a_frozen_process_is_killed_whatever_it_is_asked(process: LimitedProcess, question: str) -> None:
    process.call("first", 5.0)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(LimitExceeded, match="time"):
        process.call(question, 0.3)
    assert process.call(question, 5.0) == [{"a": 1}, question]
    assert process.pid not in (pid, None)


@pytest.mark.timeout(60)
def test_a_process_that_reads_nothing_at_its_start_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(limited_process, "START_S", 0.3)
    process = LimitedProcess(f"{__name__}:answering", MORE_THAN_A_PIPE_HOLDS, LIMITS, bare_environment())
    with pytest.raises(ProcessFailed, match=r"not ready within 0\.3 s"):
        process.call("x", 5.0)
    assert process.pid is None


@pytest.mark.usefixtures("process")  # its PYTHONPATH
def test_limits_stay_below_those_of_a_batch_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    program.write_text(f'#!/bin/sh\nulimit -v {4 << 20}\nulimit -t 3600\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    limits = Limits(memory_bytes=1 << 40, stack_bytes=1 << 20, cpu_s=7200)
    process = LimitedProcess(f"{__name__}:answering", None, limits, bare_environment())
    try:
        assert process.call("limits", 5.0) == [4 << 30, 3600]
    finally:
        process.close()


def test_where_no_thread_can_start_no_process_is_left(process: LimitedProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Timer, "start", refuse)
        with pytest.raises(ProcessFailed, match="new thread"):
            process.call("x", 5.0)
        assert process.pid is None
    assert process.call("x", 5.0) == [{"a": 1}, "x"]
    monkeypatch.setattr(threading.Timer, "start", refuse)
    with pytest.raises(ProcessFailed, match="new thread"):
        process.call("x", 5.0)
    assert process.pid is None


def test_a_process_that_cannot_start() -> None:
    process = LimitedProcess("no_such_module:answering", None, LIMITS, bare_environment())
    with pytest.raises(ProcessFailed, match="before it was ready"):
        process.call("x", 5.0)
    assert process.pid is None


def test_a_parent_whose_folder_is_gone(
    process: LimitedProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    process.call("x", 5.0)
    assert process.pid is not None
    assert psutil.Process(process.pid).cwd() == "/"
