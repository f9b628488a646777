"""Supervision of worker processes, with small programs in the workers' place."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_workers import until

from loraplex_contracts.errors import FailedPrecondition, UnsupportedModel
from loraplex_runtime import child_processes as children_module
from loraplex_runtime.child_processes import Children, ChildSpec

READY = """print('{"event": "progress", "text": "loading"}', flush=True)
print('{"event": "ready", "address": "127.0.0.1:7"}', flush=True)
"""
WAIT = "sys.stdin.read()\n"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "RESTART_DELAYS_S", (0.01,))


async def test_a_child_that_writes_nothing_more_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child whose lines stop is killed; one that goes on writing stays."""
    monkeypatch.setattr(children_module, "CHECK_S", 0.05)
    speaks = READY + "while True: print('{}', flush=True); time.sleep(0.01)\n"
    for program, is_silent in ((READY + WAIT, True), (speaks, False)):
        async with started(tmp_path / f"child-{is_silent}", program) as (children, _):
            (before,) = children.pids
            watching = asyncio.ensure_future(children.kill_silent())
            if is_silent:
                await until(lambda children=children, before=before: children.pids != [before])
            else:
                await asyncio.sleep(0.05 * 3 * children_module.MAX_SILENT_CHECKS)
                assert children.pids == [before]
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


async def test_a_child_that_freezes_while_it_starts_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "START_SILENT_S", 0.5)
    slow = """for _ in range(10): print('{"event": "alive"}', flush=True); time.sleep(0.1)\n"""
    async with started(tmp_path / "slow", slow + READY + WAIT):
        pass
    path = tmp_path / "frozen"
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{WAIT}")
    path.chmod(0o755)
    children = Children(ChildSpec((str(path),)), 1, lambda text: None)
    with pytest.raises(FailedPrecondition, match=r"said nothing for 0\.5 s"):
        await children.start(asyncio.Event())


@asynccontextmanager
async def started(path: Path, program: str) -> AsyncIterator[tuple[Children, list[str]]]:
    """One running child, watched."""
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{program}")
    path.chmod(0o755)
    progress: list[str] = []
    children = Children(ChildSpec((str(path),)), 1, progress.append)
    assert await children.start(asyncio.Event()) == ["127.0.0.1:7"]
    watching = asyncio.ensure_future(children.watch())
    try:
        yield children, progress
        assert not watching.done()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await children.stop(1.0)


async def kill(children: Children) -> int:
    """Ends the child as a crash does; returns the pid of the one that takes its place."""
    (before,) = children.pids
    os.kill(before, signal.SIGKILL)
    await until(lambda: children.pids != [before])
    return children.pids[0]


async def test_what_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alive = """print('{"event": "alive"}', flush=True)\n"""
    async with started(tmp_path / "worker", alive + READY + alive + WAIT) as (children, progress):
        for _ in range(2):
            pid = await kill(children)
            os.kill(pid, 0)  # it is there
        assert progress == ["loading"]
        said = [record.getMessage() for record in caplog.records]
        assert said.count("loading") == 2
        assert not [line for line in said if "alive" in line]


@pytest.mark.parametrize("noise", ["print([1, 2])", "print('x' * 300_000)", "print('no JSON')", "print('{}')"])
async def test_whatever_a_worker_prints(tmp_path: Path, noise: str) -> None:
    """A worker that prints more than a pipe holds, before it is ready and afterwards, goes on: somebody reads it."""
    program = f"{noise}\n{READY}for _ in range(3): {noise}\nprint('y' * 300_000, flush=True)\nopen('done', 'w')\n{WAIT}"
    path = tmp_path / "worker"
    program = program.replace("'done'", repr(str(tmp_path / "done")))
    async with started(path, program) as (children, _):
        await until((tmp_path / "done").exists)
        (tmp_path / "done").unlink()
        await kill(children)
        await until((tmp_path / "done").exists)


async def test_a_worker_that_cannot_be_started_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "worker"
    async with started(path, READY + WAIT) as (children, _):
        path.rename(tmp_path / "elsewhere")  # FileNotFoundError
        os.kill(children.pids[0], signal.SIGKILL)
        await until(lambda: caplog.text.count("worker 0 does not start") >= 2)
        (tmp_path / "elsewhere").rename(path)
        await until(lambda: _is_running(children.pids[0]))


async def test_each_of_several_workers_is_told_its_place(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    says = 'print(\'{"event": "progress", "text": "\' + \' \'.join(sys.argv[1:]) + \'"}\', flush=True)\n'
    path.write_text(f"#!{sys.executable}\nimport sys\n{says}{READY}{WAIT}")
    path.chmod(0o755)
    for num_workers in (1, 2):
        progress: list[str] = []
        children = Children(ChildSpec((str(path),)), num_workers, progress.append)
        await children.start(asyncio.Event())
        await children.stop(1.0)
        told = [words for text in progress if "--port" in text for words in text.split() if "/" in words]
        assert told == ([] if num_workers == 1 else ["0/2", "1/2"])


async def test_workers_that_ignore_the_end_are_killed_at_one_deadline(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    ignore = "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    path.write_text(f"#!{sys.executable}\n{ignore}{READY}import time\ntime.sleep(60)")
    path.chmod(0o755)
    children = Children(ChildSpec((str(path),)), 3, lambda text: None)
    await children.start(asyncio.Event())
    pids = children.pids
    begin_s = time.monotonic()
    await children.stop(0.0, grace_s=2.0)
    assert 2.0 <= time.monotonic() - begin_s < 4.0, "one grace time, not one for each"
    assert not any(map(_is_running, pids))


async def test_a_second_stop_hurries(tmp_path: Path) -> None:
    """The first one drains, whatever else signals the children: systemd sends SIGTERM to all processes of a unit."""
    path = tmp_path / "worker"
    says = f"signal.signal(signal.SIGHUP, lambda *_: open({str(tmp_path / 'drains')!r}, 'w'))\n"
    hurries = "signal.signal(signal.SIGINT, lambda *_: os._exit(5))\n"
    path.write_text(f"#!{sys.executable}\nimport os, signal, time\n{says}{hurries}{READY}while True: time.sleep(60)")
    path.chmod(0o755)
    children = Children(ChildSpec((str(path),)), 1, lambda text: None)
    await children.start(asyncio.Event())
    (child,) = children._children
    stopping = asyncio.ensure_future(children.stop(60.0))
    await until((tmp_path / "drains").exists)
    assert child.process.returncode is None
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)
    await children.stop(0.0, grace_s=5.0)
    assert child.process.returncode == 5


def _is_running(pid: int) -> bool:
    """Neither reaped nor a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_a_start_that_fails_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "worker"
    pid_file = tmp_path / "pid"
    note = f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))\n"
    failed = '{"event": "failed", "reason": "UNSUPPORTED_MODEL", "message": "no such thing"}'
    path.write_text(f"#!{sys.executable}\nimport os, sys, time\n{note}print({failed!r}, flush=True)\ntime.sleep(60)")
    path.chmod(0o755)
    with pytest.raises(UnsupportedModel, match="no such thing"):
        await Children(ChildSpec((str(path),)), 1, lambda text: None).start(asyncio.Event())
    assert not _is_running(int(pid_file.read_text()))
    path.write_text(f"#!{sys.executable}\nraise SystemExit(3)")
    with pytest.raises(FailedPrecondition, match="status 3"):
        await Children(ChildSpec((str(path),)), 1, lambda text: None).start(asyncio.Event())


@pytest.mark.parametrize("way", ["stop", "cancel"])
async def test_a_start_that_is_given_up_leaves_nothing_behind(tmp_path: Path, way: str) -> None:
    unheard: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unheard.append(context))
    path = tmp_path / "worker"
    path.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)")
    path.chmod(0o755)
    others = asyncio.all_tasks()
    children = Children(ChildSpec((str(path),)), 2, lambda text: None)
    stop = asyncio.Event()
    starting = asyncio.ensure_future(children.start(stop))
    await until(lambda: len(children._starting) == 1)
    (process,) = children._starting
    if way == "stop":
        stop.set()
        assert await starting is None
    else:
        starting.cancel()
        assert isinstance((await asyncio.gather(starting, return_exceptions=True))[0], asyncio.CancelledError)
    await children.stop(1.0)
    assert process.returncode == -signal.SIGTERM
    assert asyncio.all_tasks() == others
    assert unheard == []


async def test_a_silent_worker_is_replaced_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "CHECK_S", 0.02)
    async with started(tmp_path / "worker", READY + WAIT) as (children, _):
        heard_s = 1.0
        watching = asyncio.ensure_future(children.kill_silent(lambda address: heard_s))
        (before,) = children.pids
        for number in range(20):
            heard_s = float(number)
            await asyncio.sleep(0.02)
        assert children.pids == [before]
        await until(lambda: children.pids != [before])  # now it says nothing any more
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
