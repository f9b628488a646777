"""Commands `serve` and `worker`: metrics, a worker that dies, shutdown."""

from __future__ import annotations

import asyncio
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import psutil
import pytest
import torch
from support.processes import Running, loraplex, wait_until
from support.world import TinyWorld

from loraplex import AsyncClient, Client, ContextLengthExceeded, LoraplexError, MessageTooLarge

pytestmark = pytest.mark.timeout(240)
LONG = {"max_tokens": 450, "ignore_eos": True, "n": 8}  # seconds, even on a fast machine


def arguments(command: str, world: TinyWorld) -> tuple[str, ...]:
    return (
        command, str(world.model), "--adapters", str(world.adapters), "--port", "0", "--dtype", "float64",
        "--threads", "1", "--metrics-port", "0",
    )  # fmt: skip


@pytest.fixture(scope="module")
def both(tiny_world: TinyWorld) -> Iterator[dict[str, Running]]:
    """A server with two workers, and a worker by itself, started together."""
    with ExitStack() as stack:
        commands = {"serve": (*arguments("serve", tiny_world), "--workers", "2", "--max-message", "16MiB")}
        commands["worker"] = arguments("worker", tiny_world)
        running = {
            name: stack.enter_context(loraplex(*command, wait_ready=False)) for name, command in commands.items()
        }
        for one in running.values():
            wait_until(lambda one=one: one.address or one.process.poll() is not None, 150, "ready")
            assert one.address, one.output
        yield running


def metrics_ports(running: Running) -> list[int]:
    found = re.search(r"metrics on ([\d, ]+\d)", running.output)
    assert found, running.output
    return [int(port) for port in found[1].split(", ")]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return answer.read().decode()


def workers_of(serve: Running) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process(serve.process.pid).children():
        with suppress(psutil.NoSuchProcess):  # one may end meanwhile
            if child.status() != "zombie" and "worker" in child.cmdline():
                found.append(child)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="workers have GPUs of their own then")
def test_each_worker_has_its_share_of_the_cores(both: dict[str, Running]) -> None:
    cores = psutil.Process().cpu_affinity()
    shares = [worker.cpu_affinity() for worker in workers_of(both["serve"])]
    engines = [worker.children()[0].cpu_affinity() for worker in workers_of(both["serve"])]
    assert engines == shares
    assert sorted(cpu for share in shares for cpu in share) == cores or len(cores) < 2


def test_metrics_of_every_process(both: dict[str, Running], tiny_world: TinyWorld) -> None:
    name = tiny_world.names[0]
    for running in both.values():
        with Client(running.address) as client:
            client.generate("hello", adapter_id=name, max_tokens=4, ignore_eos=True)
    (alone,) = metrics_ports(both["worker"])
    router, *workers = metrics_ports(both["serve"])
    assert len(workers) == 2
    assert 'loraplex:router_requests_total{code="OK",method="Generate"} 1.0' in scrape(router)
    texts = [scrape(alone), *(text for text in map(scrape, workers) if f'adapter="{name}"' in text)]
    assert len(texts) == 2, "one of the two workers has the adapter"
    for text in texts:
        for line in (
            'loraplex:requests_total{code="OK",method="Generate"} 1.0',
            f'loraplex:adapter_resident{{adapter="{name}",pinned="false",tier="device"}} 1.0',
            "loraplex:num_requests_running 0.0",
            "loraplex:adapter_load_seconds_count 1.0",
        ):
            assert line + "\n" in text, line


def test_router_and_workers_take_messages_of_the_size_that_is_given(both: dict[str, Running]) -> None:
    text = "x" * (5 << 20)
    with Client(both["serve"].address) as client, pytest.raises(ContextLengthExceeded):
        client.generate(text, max_tokens=1)
    with Client(both["worker"].address) as client, pytest.raises(MessageTooLarge, match="takes 4194304"):
        client.generate(text, max_tokens=1)


async def test_a_worker_that_dies_is_started_again(both: dict[str, Running], tiny_world: TinyWorld) -> None:
    serve = both["serve"]
    victim, other = workers_of(serve)
    async with AsyncClient(serve.address) as client:
        expected = (await client.generate("hello", adapter_id=tiny_world.names[1], max_tokens=8)).text
        victim.kill()
        for _ in range(3):  # the other one serves meanwhile
            assert (await client.generate("hello", adapter_id=tiny_world.names[1], max_tokens=8)).text == expected
        await asyncio.to_thread(wait_until, lambda: len(workers_of(serve)) == 2, 60, "a new worker")
        (new,) = [worker for worker in workers_of(serve) if worker.pid not in (victim.pid, other.pid)]
        # It comes back where it was, and the router finds it there: it can serve by itself.
        await asyncio.to_thread(wait_until, lambda: _num_up(serve) == 2, 90, "the router sees both")
        other.kill()
        await asyncio.to_thread(wait_until, lambda: _num_up(serve) == 1, 30, "the router sees one")
        assert (await client.generate("hello", adapter_id=tiny_world.names[1], max_tokens=8)).text == expected
        assert new.is_running()


def _num_up(serve: Running) -> int:
    text = scrape(metrics_ports(serve)[0])
    return len(re.findall(r"loraplex:router_worker_up\S* 1\.0", text))


async def test_ctrl_c_drains_and_leaves_nothing(both: dict[str, Running]) -> None:
    serve = both["serve"]
    family = psutil.Process(serve.process.pid).children(recursive=True)
    async with AsyncClient(serve.address) as client:
        stream = client.stream("hello", max_tokens=60, ignore_eos=True)
        await anext(stream)
        serve.process.send_signal(signal.SIGINT)
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].finish_reason == "length"
    assert await asyncio.to_thread(serve.process.wait, 60) == 0
    assert "server is draining: 1 request under way (Ctrl-C again ends it at once)" in serve.output
    assert "Traceback" not in serve.output
    await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert [one for one in family if one.is_running()] == []


async def test_a_second_ctrl_c_does_not_wait(both: dict[str, Running]) -> None:
    worker = both["worker"]
    async with AsyncClient(worker.address) as client:
        stream = client.stream("hello", **LONG)  # type: ignore[arg-type]
        await anext(stream)
        worker.process.send_signal(signal.SIGINT)
        await asyncio.to_thread(wait_until, lambda: "is draining" in worker.output)
        assert await anext(stream), "what runs goes on"
        start = time.monotonic()
        worker.process.send_signal(signal.SIGINT)
        with pytest.raises(LoraplexError):
            async for _ in stream:
                pass
    assert await asyncio.to_thread(worker.process.wait, 20) == 0
    assert time.monotonic() - start < 15, "not the 30 seconds of --drain"
    assert "Traceback" not in worker.output
