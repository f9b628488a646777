"""Faults of supervisors: their children end and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
import pytest
from support.credentials import credential, write_credentials
from support.faults import Stopwatch, fault
from support.processes import wait_until
from support.world import TinyWorld

from loraplex import AsyncClient, Unavailable
from loraplex_runtime.listener import check_free

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
TOKEN = "of-the-tests"
LONG = {"max_tokens": 450, "ignore_eos": True, "n": 8}  # seconds, even on a fast machine


@dataclass
class Started:
    """A `loraplex` command that starts others, and the folder for temporary files."""

    process: subprocess.Popen[str]
    temporary: Path
    address: str = ""
    seen: set[psutil.Process] = field(default_factory=set)

    def children(self) -> list[psutil.Process]:
        """The process's children, and theirs."""
        found = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.seen.update(found)
        return found

    def workers(self) -> list[psutil.Process]:
        return [one for one in psutil.Process(self.process.pid).children() if "worker" in one.cmdline()]

    def wait_ready(self) -> None:
        assert self.process.stderr is not None
        lines: list[str] = []
        for line in self.process.stderr:
            lines.append(line)
            if found := re.search(r"ready on ([\w.:]+:\d+)", line):
                self.address = found[1]
                return
        raise AssertionError("".join(lines))


def engine_of(worker: psutil.Process) -> psutil.Process:
    (found,) = [one for one in worker.children() if any("spawn_main" in argument for argument in one.cmdline())]
    return found


@contextmanager
def started(folder: Path, *arguments: str, unread: bool = False) -> Iterator[Started]:
    """`loraplex ARGUMENTS`. `unread`: without standard input and output, and nobody reads the errors."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    command = [sys.executable, "-m", "loraplex", *arguments]
    if unread:
        command = ["bash", "-c", 'exec "$@" <&- >&-', "bash", *command]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
    )
    assert process.stdin is not None
    assert process.stderr is not None
    running = Started(process, temporary)
    with process.stdin, process.stderr:
        try:
            yield running
        finally:
            running.children()
            process.kill()
            process.wait(20)
            for one in running.seen:  # where a test has failed
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def serve(world: TinyWorld, folder: Path) -> tuple[str, ...]:
    """Arguments of `loraplex serve` with credentials, so that router and workers share a secret."""
    folder.mkdir()
    auth_file = write_credentials(folder / "auth.json", credential(TOKEN, "tests", "*"))
    return (
        "serve", str(world.model), "--adapters", str(world.adapters), "--port", "0", "--dtype", "float64",
        "--threads", "1", "--auth-file", str(auth_file),
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """Processes of one server, their ports and temporary files: all that must be gone after its end."""

    processes: Sequence[psutil.Process]
    ports: Sequence[int]
    temporary: Path

    @classmethod
    def of(cls, running: Started) -> Family:
        processes = [psutil.Process(running.process.pid), *running.children()]
        connections = [one for process in processes for one in process.net_connections() if one.status == "LISTEN"]
        return cls(processes, [one.laddr.port for one in connections], running.temporary)

    async def end(self) -> None:
        await asyncio.to_thread(wait_until, lambda: all(map(is_gone, self.processes)), 30, "the end of all processes")

    def check_left(self) -> None:
        assert [path.name for path in self.temporary.iterdir()] == []
        for port in self.ports:
            check_free("127.0.0.1", port)


def is_gone(process: psutil.Process) -> bool:
    """Zombies are: what has lost its parent may have nobody to reap it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def servers(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    """Started together. Each test ends the one that it is named for."""
    root = tmp_path_factory.mktemp("orphans")
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(started(root / name, *serve(tiny_world, root / name), unread=True))
            for name in ("hung up", "loading", "full")
        }
        for one in running.values():
            one.wait_ready()
        for name in ("hung up", "loading"):
            stderr = running[name].process.stderr
            assert stderr is not None
            stderr.close()
        yield running


async def check_drain(running: Started, stopwatch: Stopwatch, *signals: signal.Signals) -> None:
    """A stream that runs when the signals come ends well, then the server with status 0, and nothing is left."""
    family = Family.of(running)
    async with AsyncClient(running.address, token=TOKEN) as client:
        stream = client.stream("hello", max_tokens=60, ignore_eos=True)
        await anext(stream)
        stopwatch.start()
        for number in signals:
            running.process.send_signal(number)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "length"
    assert await asyncio.to_thread(running.process.wait, 30) == 0
    await family.end()
    stopwatch.stop()
    family.check_left()


@fault(
    "`serve` loses its terminal (SIGHUP), nobody reads its output",
    clients_see="running requests end well; status 0",
    within_s=10,
)
async def test_a_terminal_that_closes_drains(servers: dict[str, Started], stopwatch: Stopwatch) -> None:
    hang_up = (signal.SIGHUP, signal.SIGHUP)  # of kernel and shell
    await check_drain(servers["hung up"], stopwatch, *hang_up)


def fill(pipe: IO[str]) -> None:
    """Writes into the pipe, by its end that is read, until nothing more goes in."""
    writer = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.close(writer)


@fault(
    "reader of the output of `serve` frozen: its pipe is full; SIGTERM",
    clients_see="running requests end well; status 0",
    within_s=20,
)
async def test_a_full_pipe_holds_no_drain_up(servers: dict[str, Started], stopwatch: Stopwatch) -> None:
    running = servers["full"]
    assert running.process.stderr is not None
    fill(running.process.stderr)
    await check_drain(running, stopwatch, signal.SIGTERM)


@fault(
    "worker killed (its front end), its engine frozen (SIGSTOP)",
    clients_see="as without the SIGSTOP",
    within_s=10,
)
async def test_a_frozen_engine_goes_with_its_front_end(servers: dict[str, Started], stopwatch: Stopwatch) -> None:
    running = servers["loading"]
    (worker,) = running.workers()
    left = Family([worker, *worker.children()], [], running.temporary)
    engine_of(worker).suspend()
    stopwatch.start()
    worker.kill()
    await left.end()
    stopwatch.stop()
    left.check_left()
    assert running.process.poll() is None


@fault("`serve` killed while its workers load, nobody reads its output", clients_see="UNAVAILABLE", within_s=10)
async def test_workers_that_load_go_with_their_server(servers: dict[str, Started], stopwatch: Stopwatch) -> None:
    """The worker is a new one, in the place of that which the test before has killed."""
    running = servers["loading"]

    def is_loading() -> bool:
        return any(len(worker.children()) == 2 for worker in running.workers())

    await asyncio.to_thread(wait_until, is_loading, 60, "a worker loads")
    family = Family.of(running)
    stopwatch.start()
    running.process.kill()
    await family.end()
    stopwatch.stop()
    family.check_left()


@fault("`serve` killed in mid-stream", clients_see="UNAVAILABLE", within_s=10)
async def test_a_killed_server_leaves_nothing(tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch) -> None:
    with started(tmp_path / "it", *serve(tiny_world, tmp_path / "it")) as running:
        running.wait_ready()
        family = Family.of(running)
        assert len(family.ports) == 2
        async with AsyncClient(running.address, token=TOKEN) as client:
            stream = client.stream("hello", **LONG)  # type: ignore[arg-type]
            await anext(stream)
            stopwatch.start()
            running.process.kill()
            with pytest.raises(Unavailable):
                async for _ in stream:
                    pass
        await family.end()
        stopwatch.stop()
        family.check_left()


@fault("`serve` killed, its worker frozen (SIGSTOP)", clients_see="UNAVAILABLE", within_s=10)
async def test_a_frozen_worker_goes_with_its_server(
    tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch
) -> None:
    with started(tmp_path / "it", *serve(tiny_world, tmp_path / "it")) as running:
        running.wait_ready()
        family = Family.of(running)
        (worker,) = running.workers()
        worker.suspend()
        engine_of(worker).suspend()
        stopwatch.start()
        running.process.kill()
        await family.end()
        stopwatch.stop()
        family.check_left()


@fault(
    "supervisor of a worker gone, --on-orphan drain=60",
    clients_see="running requests end well",
    within_s=60,
)
async def test_an_orphan_drains_where_it_was_told_to(
    tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch
) -> None:
    command = ("worker", str(tiny_world.model), "--port", "0", "--threads", "1", "--announce", "0", "--supervised")
    with started(tmp_path, *command, "--on-orphan", "drain=60") as running:
        running.wait_ready()
        family = Family.of(running)
        assert running.process.stdin is not None
        async with AsyncClient(running.address) as client:
            stream = client.stream("hello", max_tokens=200, ignore_eos=True)
            await anext(stream)
            stopwatch.start()
            running.process.stdin.close()
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].finish_reason == "length"
        assert await asyncio.to_thread(running.process.wait, 60) == 0
        await family.end()
        stopwatch.stop()
        family.check_left()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@fault(
    "signal while a worker loads", clients_see="refused connections; status 128 and the signal's number", within_s=10
)
async def test_signals_while_loading(
    tiny_world: TinyWorld, tmp_path: Path, stopwatch: Stopwatch, number: signal.Signals, status: int
) -> None:
    with started(tmp_path, "worker", str(tiny_world.model), "--port", "0") as running:
        await asyncio.to_thread(wait_until, lambda: len(running.children()) == 2, 60, "the engine is started")
        family = Family.of(running)
        stopwatch.start()
        running.process.send_signal(number)
        assert await asyncio.to_thread(running.process.wait, 30) == status
        await family.end()
        stopwatch.stop()
        family.check_left()
