"""Requests through the load balancers whose configurations come with the project."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from support.processes import Running, loraplex, together
from support.world import TinyWorld, make_world

from loraplex import Client, ConnectionLost, LoraplexError, Stream

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "docker"
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
def world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    """A model whose texts may last as long as a drain."""
    return make_world(tmp_path_factory.mktemp("world"), 3, max_context=32_768)


@pytest.fixture(scope="module")
def worker(world: TinyWorld) -> Iterator[Running]:
    with loraplex(
        *("worker", str(world.model), "--adapters", str(world.adapters)),
        *("--port", "0", "--dtype", "float64", "--stream-wait", "0"),  # each token by itself
    ) as running:
        yield running


@contextlib.contextmanager
def two_routers(worker: Running, flags: Sequence[str] = ()) -> Iterator[tuple[list[Running], list[str]]]:
    """Two in front of one worker, and their addresses for HTTP."""
    ports = [free_port(), free_port()]
    arguments = [
        ("router", "--worker", worker.address, "--port", "0", "--http-port", str(port), *flags) for port in ports
    ]
    with together(*arguments) as running:
        yield running, [f"127.0.0.1:{port}" for port in ports]


def nginx_command(tmp_path: Path, text: str) -> list[str]:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in kinds)
    text = text.replace("http {", f"http {{\naccess_log off;\n{temporary}")
    text = f"daemon off; worker_processes 4; pid {tmp_path}/nginx.pid; error_log stderr;\n" + text
    (tmp_path / "nginx.conf").write_text(text)
    return ["nginx", "-c", str(tmp_path / "nginx.conf"), "-p", str(tmp_path), "-e", "stderr"]


def haproxy_command(tmp_path: Path, text: str) -> list[str]:
    # No Docker names to look up here, and no need for the descriptors of a large machine.
    text = text.replace(" resolvers docker init-addr none", "").replace("maxconn 20000", "maxconn 200")
    (tmp_path / "haproxy.cfg").write_text(text)
    return ["haproxy", "-db", "-f", str(tmp_path / "haproxy.cfg")]


MAKE = {"nginx": nginx_command, "haproxy": haproxy_command}
CONFIGURATIONS = {"nginx": "nginx.conf", "haproxy": "haproxy.cfg"}


def documented(balancer: str) -> str:
    """The configuration for HTTP in docs/http.md."""
    page = (ROOT / "docs/http.md").read_text()
    text = page.partition(f"```{balancer}\n")[2].partition("```")[0]
    return f"events {{}}\nhttp {{\n{text}}}\n" if balancer == "nginx" else f"global\n    maxconn 200\n{text}"


@contextlib.contextmanager
def balancing(balancer: str, tmp_path: Path, text: str, addresses: Sequence[str]) -> Iterator[str]:
    """The balancer with the configuration `text`, in front of routers at `addresses` instead of those that it names.
    Yields its own address."""
    address = f"127.0.0.1:{free_port()}"
    text = re.sub(r"(bind|listen) :?\d+", rf"\1 {address}", text)
    for name, router in zip(("router-a", "router-b"), addresses, strict=True):
        text = re.sub(rf"{name}:\d+", router, text)
    process = subprocess.Popen(MAKE[balancer](tmp_path, text), stderr=subprocess.PIPE)
    try:
        wait_for_port(int(address.rpartition(":")[2]), process)
        yield address
    finally:
        process.terminate()
        process.wait(20)
        assert process.stderr is not None
        process.stderr.close()


def where_installed(name: str, *marks: pytest.MarkDecorator) -> Any:
    """Marked, so that nothing is started for a test that is skipped."""
    reason = f"{name} is not installed (Debian: apt-get install {name})"
    return pytest.param(name, marks=[pytest.mark.skipif(shutil.which(name) is None, reason=reason), *marks])


HAPROXY = where_installed("haproxy", pytest.mark.slow)
BALANCERS = pytest.mark.parametrize("balancer", [where_installed("nginx"), HAPROXY])


@BALANCERS
def test_streams_through_a_balancer(balancer: str, tmp_path: Path, worker: Running, world: TinyWorld) -> None:
    text = (DOCKER / CONFIGURATIONS[balancer]).read_text()
    with (
        two_routers(worker) as (routers, _),
        balancing(balancer, tmp_path, text, [router.address for router in routers]) as address,
        Client(routers[0].address) as direct,
        Client(address) as client,
    ):
        for adapter_id in ("", *world.names):
            expected = direct.generate("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True).text
            chunks = list(client.stream("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True))
            assert len(chunks) > 40, "tokens come as they are made, not at the end"
            assert "".join(chunk.text for chunk in chunks) == expected
        # One router dies: not a single call is lost, the first ones included that come before anybody has noticed.
        routers[1].kill()
        for _ in range(10):
            assert client.generate("hello", adapter_id=adapter_id, max_tokens=96, ignore_eos=True).text == expected


@contextlib.contextmanager
def draining(router: Running) -> Iterator[None]:
    """A drain that lasts for the context, since a stream goes on."""
    with Client(router.address) as direct:
        stream = direct.stream("hello", max_tokens=30_000, ignore_eos=True)
        next(stream)
        reading = threading.Thread(target=lambda: list(stream), daemon=True)
        reading.start()
        router.process.send_signal(signal.SIGTERM)
        yield
        assert reading.is_alive()
        assert router.process.poll() is None, router.output
        stream.close()
        reading.join(10)


def in_a_drain() -> Iterator[float]:
    """The time, until a drain's announcement (two seconds) has been over as long again."""
    end_s = time.monotonic() + 4.0
    while (now_s := time.monotonic()) < end_s:
        yield now_s
        time.sleep(0.02)


@pytest.mark.parametrize("balancer", [HAPROXY])
@pytest.mark.parametrize("freezes", [True, False])
def test_only_streams_of_a_frozen_router_are_cut_off(
    balancer: str, freezes: bool, tmp_path: Path, worker: Running
) -> None:
    """Those of one that drains go on, though it gets no new calls."""
    text = (DOCKER / CONFIGURATIONS[balancer]).read_text()
    with (
        two_routers(worker) as (routers, _),
        balancing(balancer, tmp_path, text, [router.address for router in routers]) as address,
        Client(address, retries=0) as client,
    ):
        streams = [client.stream("hello", max_tokens=30_000, ignore_eos=True, timeout_s=60) for _ in range(2)]
        for stream in streams:  # one at each router
            next(stream)
        lost: list[LoraplexError] = []

        def read(stream: Stream) -> None:
            end_s = time.monotonic() + 15
            try:
                while time.monotonic() < end_s:
                    next(stream)
            except LoraplexError as error:
                lost.append(error)

        readers = [threading.Thread(target=read, args=(stream,)) for stream in streams]
        for reader in readers:
            reader.start()
        routers[0].process.send_signal(signal.SIGSTOP if freezes else signal.SIGTERM)
        for reader in readers:
            reader.join(30)
        if freezes:
            routers[0].process.send_signal(signal.SIGCONT)
        assert [type(error) for error in lost] == [ConnectionLost] * freezes
        for stream in streams:
            stream.close()


def flags_of_compose() -> list[str]:
    """Flags of routers in docker/compose.yaml that are not addresses."""
    command = yaml.safe_load((DOCKER / "compose.yaml").read_text())["x-router"]["command"]
    return [flag for flag in command[1:] if "=" not in flag]


@BALANCERS
def test_a_router_that_drains_costs_no_call(balancer: str, tmp_path: Path, worker: Running) -> None:
    """nginx needs compose's flags; HAProxy asks for health."""
    text = (DOCKER / CONFIGURATIONS[balancer]).read_text()
    failed: list[LoraplexError] = []
    with (
        two_routers(worker, flags_of_compose() if balancer == "nginx" else ()) as (routers, _),
        balancing(balancer, tmp_path, text, [router.address for router in routers]) as address,
        Client(address, retries=0) as client,
        draining(routers[0]),
    ):
        for _ in in_a_drain():
            try:
                client.generate("hello", max_tokens=2)
            except LoraplexError as error:
                failed.append(error)
    assert len(failed) <= 1, failed  # at the very moment when the port closes one may be refused


@BALANCERS
def test_a_router_that_drains_costs_no_http_request(balancer: str, tmp_path: Path, worker: Running) -> None:
    """By the configurations of docs/http.md."""
    with (
        two_routers(worker) as (routers, addresses),
        balancing(balancer, tmp_path, documented(balancer), addresses) as address,
        httpx2.Client(base_url=f"http://{address}", timeout=20, trust_env=False) as http,
    ):
        body = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            assert len(list(answer.iter_raw())) > 20, "tokens come as they are made, not at the end"
        with draining(routers[0]):
            body = {"prompt": "hello", "max_tokens": 2}
            statuses = Counter(http.post("/v1/completions", json=body).status_code for _ in in_a_drain())
    assert set(statuses) == {200}, statuses


@BALANCERS
async def test_a_frozen_router_gets_few_http_requests(balancer: str, tmp_path: Path, worker: Running) -> None:
    """HAProxy's checks notice it; with nginx those that wait there keep others from it."""
    with (
        two_routers(worker) as (routers, addresses),
        balancing(balancer, tmp_path, documented(balancer), addresses) as address,
    ):
        async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60, trust_env=False) as http:
            body = {"prompt": "hello", "max_tokens": 2}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            routers[0].process.send_signal(signal.SIGSTOP)
            try:
                sent: list[asyncio.Task[httpx2.Response]] = []
                for _ in range(40):
                    sent.append(asyncio.ensure_future(http.post("/v1/completions", json=body)))
                    await asyncio.sleep(0.15)
                answered, waiting = await asyncio.wait(sent, timeout=2)
            finally:
                routers[0].process.send_signal(signal.SIGCONT)
            assert {one.result().status_code for one in answered} == {200}
            assert len(waiting) <= 10, f"{len(waiting)} of 40 are at the router that is frozen"
            assert {one.result().status_code for one in (await asyncio.wait(sent))[0]} == {200}
