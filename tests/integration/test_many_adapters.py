"""Two hundred streams over forty adapters and eight slots per worker."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
import pytest
from support.processes import Running, loraplex, together
from support.world import TinyWorld

from loraplex import AsyncClient, Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NUM_STREAMS = 200
MAX_TOKENS = 16


@dataclass(frozen=True)
class Job:
    prompt: str
    adapter_id: str


def jobs_over(names: tuple[str, ...]) -> list[Job]:
    return [Job(f"request {i % 23} says {'x' * (i % 31)}", names[i % len(names)]) for i in range(NUM_STREAMS)]


def worker(world: TinyWorld) -> tuple[str, ...]:
    # float64: its sums do not depend on the batch, so texts are comparable token for token.
    return (
        "worker", str(world.model), "--adapters", str(world.adapters), "--port", "0", "--dtype", "float64",
        "--adapter-slots", "8", "--max-running", "32", "--kv-memory", "8MiB", "--threads", "1",
    )  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tiny_world: TinyWorld) -> Iterator[tuple[Running, list[Running]]]:
    with together(worker(tiny_world), worker(tiny_world)) as (one, two):
        with loraplex("router", "--port", "0", "--worker", one.address, "--worker", two.address) as router:
            yield router, [one, two]
        for process in (one, two):
            assert process.end() == 0, process.output
            assert "unaccounted" not in process.output


async def stream_text(client: AsyncClient, job: Job) -> str:
    stream = client.stream(job.prompt, adapter_id=job.adapter_id, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=300)
    return "".join([chunk.text async for chunk in stream])


async def all_at_once(address: str, jobs: list[Job]) -> list[str]:
    async with AsyncClient(address) as client:
        return await asyncio.gather(*(stream_text(client, job) for job in jobs))


def one_at_a_time(address: str, jobs: list[Job]) -> list[str]:
    with Client(address) as client:
        return [
            client.generate(job.prompt, adapter_id=job.adapter_id, max_tokens=MAX_TOKENS, ignore_eos=True).text
            for job in jobs
        ]


async def test_texts_equal_those_of_one_at_a_time(
    cluster: tuple[Running, list[Running]], tiny_world: TinyWorld
) -> None:
    router, workers = cluster
    jobs = jobs_over(tiny_world.names)
    together = await all_at_once(router.address, jobs)
    alone = await asyncio.to_thread(one_at_a_time, workers[0].address, jobs)
    wrong = [(job, t, a) for job, t, a in zip(jobs, together, alone, strict=True) if t != a]
    assert not wrong, (len(wrong), wrong[:3])
    assert len(set(together)) > NUM_STREAMS // 2, "adapters and prompts make different texts"
    with Client(router.address) as client:
        rows = client.adapters.list()
    for worker_address in {row.worker for row in rows}:
        on_device = [row for row in rows if row.worker == worker_address and row.state == "on_device"]
        assert len(on_device) <= 8


async def test_memory_comes_back(cluster: tuple[Running, list[Running]], tiny_world: TinyWorld) -> None:
    router, workers = cluster
    jobs = jobs_over(tiny_world.names)
    await all_at_once(router.address, jobs)
    engines = [psutil.Process(worker.engine_pid()) for worker in workers]
    before = [engine.memory_info().rss for engine in engines]
    for _ in range(2):
        await all_at_once(router.address, jobs)
    grown = [(engine.memory_info().rss - rss) / 2**20 for engine, rss in zip(engines, before, strict=True)]
    # A leaked adapter or KV block set per request would be hundreds of MiB; allocators may keep a little.
    assert max(grown) < 32, grown
    for process in workers:
        assert not re.search(r"ERROR|Traceback", process.output), process.output
