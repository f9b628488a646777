"""Streams through the load balancers whose configurations come with the project."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import Running, loraplex, together
from support.world import TinyWorld

from loraplex import Client

DOCKER = Path(__file__).resolve().parents[2] / "docker"
pytestmark = pytest.mark.timeout(180)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(200):
        assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError("the balancer does not listen")


@pytest.fixture(scope="module")
def worker(tiny_world: TinyWorld) -> Iterator[Running]:
    with loraplex(
        *("worker", str(tiny_world.model), "--adapters", str(tiny_world.adapters)),
        *("--port", "0", "--dtype", "float64", "--stream-wait", "0"),  # each token by itself
    ) as running:
        yield running


@pytest.fixture
def routers(worker: Running) -> Iterator[list[Running]]:
    """Two in front of one worker."""
    arguments = ("router", "--worker", worker.address, "--port", "0")
    with together(arguments, arguments) as running:
        yield running


def nginx_command(tmp_path: Path, routers: list[Running], port: int) -> list[str]:
    text = (DOCKER / "nginx.conf").read_text()
    text = text.replace("listen 50051", f"listen 127.0.0.1:{port}")
    for name, router in zip(("router-a", "router-b"), routers, strict=True):
        text = text.replace(f"{name}:50051", router.address)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    text = text.replace("http {", f"http {{\naccess_log off;\n{temporary}")
    text = f"daemon off; pid {tmp_path}/nginx.pid; error_log stderr;\n" + text
    (tmp_path / "nginx.conf").write_text(text)
    return ["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path), "-e", "stderr"]


def haproxy_command(tmp_path: Path, routers: list[Running], port: int) -> list[str]:
    text = (DOCKER / "haproxy.cfg").read_text()
    text = text.replace("bind :50051", f"bind 127.0.0.1:{port}")
    for name, router in zip(("router-a", "router-b"), routers, strict=True):
        text = text.replace(f"{name}:50051", router.address)
    # No Docker names to look up here, and no need for the descriptors of a large machine.
    text = text.replace(" resolvers docker init-addr none", "").replace("maxconn 20000", "maxconn 200")
    (tmp_path / "haproxy.cfg").write_text(text)
    return ["haproxy", "-db", "-f", str(tmp_path / "haproxy.cfg")]


def where_installed(name: str) -> Any:
    """A mark, so that nothing is started for a test that is skipped."""
    reason = f"{name} is not installed (Debian: apt-get install {name})"
    return pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=reason))


@pytest.mark.parametrize("balancer", [where_installed("nginx"), where_installed("haproxy")])
def test_streams_through_a_balancer(
    balancer: str, tmp_path: Path, routers: list[Running], tiny_world: TinyWorld
) -> None:
    port = free_port()
    make = {"nginx": nginx_command, "haproxy": haproxy_command}[balancer]
    process = subprocess.Popen(make(tmp_path, routers, port), stderr=subprocess.PIPE)
    try:
        wait_for_port(port, process)
        with Client(routers[0].address) as direct, Client(f"127.0.0.1:{port}") as client:
            for adapter_id in ("", *tiny_world.names[:3]):
                expected = direct.generate("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True).text
                chunks = list(client.stream("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True))
                assert len(chunks) > 40, "tokens come as they are made, not at the end"
                assert "".join(chunk.text for chunk in chunks) == expected
            # One router dies: not a single call is lost, the first ones included that come before anybody has noticed.
            routers[1].kill()
            for _ in range(10):
                assert client.generate("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True).text == expected
    finally:
        process.terminate()
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()
