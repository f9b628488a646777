"""Fleets on Ray for tests: nodes on addresses of loopback, and the commands."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

HEAD, SECOND = "127.0.0.2", "127.0.0.3"
# Ray gives up nodes without their head after this; a minute otherwise.
ENVIRONMENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "12",
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "OMP_NUM_THREADS": "1",
}


def ray_is_missing() -> str:
    """Why tests with Ray are skipped; empty where they run."""
    if not Path(sys.executable).with_name("ray").exists():
        return "Ray is not installed; pip install 'loraplex[ray]'"
    return "" if sys.platform == "linux" else "the tests' nodes are addresses of loopback, which only Linux has"


@dataclass
class Node:
    """`ray start` as a child of the tests."""

    process: subprocess.Popen[bytes]
    address: str

    def processes(self, name: str = "") -> list[psutil.Process]:
        """All that it started, with `name` in the command line."""
        found: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if name in " ".join(one.cmdline()):
                        found.append(one)
        return found


@dataclass
class Fleet:
    """Owns nodes and the file."""

    folder: Path
    spec: dict[str, Any]
    nodes: list[Node] = field(default_factory=list[Node])
    seen: dict[int, psutil.Process] = field(default_factory=dict[int, psutil.Process])
    outlived: list[str] = field(default_factory=list[str])  # command lines of what was left after `stop`
    _ray_folder: Path | None = None

    def start_node(self, num_cpus: int) -> Node:
        """The first one is the head."""
        ray = str(Path(sys.executable).with_name("ray"))
        common = ["--block", "--disable-usage-stats", "--num-cpus", f"{num_cpus}", "--object-store-memory", "80000000"]
        if not self.nodes:
            address, port = HEAD, free_port()
            self.spec["address"] = f"{HEAD}:{port}"
            where = ["--head", "--port", f"{port}", "--include-dashboard", "false", "--resources", '{"front": 1}']
            self._ray_folder = Path(tempfile.mkdtemp(prefix="lr", dir="/tmp"))  # sockets have short paths
            where += ["--temp-dir", str(self._ray_folder)]
        else:
            address = f"127.0.0.{2 + len(self.nodes)}"
            where = ["--address", self.spec["address"], "--dashboard-agent-listen-port", f"{free_port()}"]
        log = (self.folder / f"node-{len(self.nodes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [ray, "start", *where, "--node-ip-address", address, *common],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT},
            )  # fmt: skip
        node = Node(process, address)
        self.nodes.append(node)
        wait_for(lambda: b"block forever" in Path(log.name).read_bytes() or process.poll() is not None, 60, "a node")
        assert process.poll() is None, Path(log.name).read_text()
        return node

    def command(self, *arguments: str, timeout_s: float = 150) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "loraplex", *arguments],
            check=False, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    def up(
        self, *flags: str, succeeds: bool = True, timeout_s: float = 150, **worker: Any
    ) -> subprocess.CompletedProcess[str]:
        """`worker`: keys of the section in the place of those before."""
        self.spec["worker"] |= worker
        path = self.folder / "cluster.yaml"
        path.write_text(yaml.safe_dump(self.spec))
        done = self.command("up", str(path), *flags, timeout_s=timeout_s)
        assert (done.returncode == 0) == succeeds, done.stdout + done.stderr
        self.remember()
        return done

    def status(self) -> dict[str, Any]:
        done = self.command("status", "--json", "--address", self.spec["address"])
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def part(self, kind: str) -> dict[str, Any]:
        (part,) = [one for one in self.status()["parts"] if one["kind"] == kind]
        return part

    def serving(self, kind: str = "worker") -> list[dict[str, Any]]:
        return [one for one in self.part(kind)["replicas"] if one["state"] == "ready"]

    def is_whole(self) -> bool:
        return all(part["running"] == part["wanted"] and part["state"] == "RUNNING" for part in self.status()["parts"])

    def wait_whole(self, timeout_s: float = 90) -> None:
        wait_for(self.is_whole, timeout_s, "all of the fleet", look_s=0.3)
        self.remember()

    @property
    def router(self) -> str:
        return self.serving("router")[0]["address"]

    def remember(self) -> None:
        """All processes but Ray's own, so that `left` finds those that outlive their parents."""
        for node in self.nodes:
            for one in node.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if one.pid not in self.seen and not _is_of_ray(one.cmdline()):
                        self.seen[one.pid] = one

    def left(self, timeout_s: float = 30) -> list[psutil.Process]:
        """Processes that still run, after a while."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout_s)
        return [one for one in alive if one.is_running() and runs(one.pid)]

    def stop(self) -> None:
        """Ends Ray as an operator does. Its own processes take half a minute for that, whatever runs, and are killed
        once those that it started for us have ended."""
        self.remember()
        own = [one for node in self.nodes for one in node.processes()]
        for node in reversed(self.nodes):
            node.process.terminate()
            node.process.send_signal(signal.SIGCONT)
        for one in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.outlived.append(" ".join(one.cmdline()))
        for one in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        for node in self.nodes:
            node.process.kill()
            node.process.wait()
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)

    def logs(self, kind: str) -> str:
        """Ray's logs of the replicas of a kind."""
        assert self._ray_folder is not None
        found = self._ray_folder.glob(f"session_*/logs/serve/replica_*-{kind}s_*.log")
        return "".join(path.read_text() for path in found)


def _is_of_ray(command: list[str]) -> bool:
    return any(part.startswith(("ray::", "ray.")) or "site-packages/ray/" in part for part in command)


@contextlib.contextmanager
def ray_nodes(folder: Path, spec: dict[str, Any], num_cpus: tuple[int, ...]) -> Generator[Fleet]:
    fleet = Fleet(folder, spec)
    try:
        for number in num_cpus:
            fleet.start_node(number)
        yield fleet
    finally:
        fleet.stop()


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(condition: Callable[[], object], timeout_s: float, what: str, look_s: float = 0.05) -> float:
    """Seconds until `condition()` was true."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > timeout_s:
            raise AssertionError(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(look_s)
    return time.monotonic() - start_s
