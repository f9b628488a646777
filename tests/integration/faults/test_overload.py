"""Faults of load: more requests, or longer ones, than a worker can take."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from support.faults import Stopwatch, fault
from support.processes import Running, loraplex, together
from support.world import TinyWorld

from loraplex import AsyncClient, DeadlineExceeded, LoraplexError, ResourceExhausted

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
NUM_LONG, LONG_TOKENS = 200, 2000  # seconds each on any machine: the engine gives turns of half a second


@pytest.fixture(scope="module")
def model(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with room for long texts."""
    copy = shutil.copytree(tiny_world.model, tmp_path_factory.mktemp("overload") / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2 * LONG_TOKENS}))
    return copy


@pytest.fixture(scope="module")
def router(model: Path, tiny_world: TinyWorld) -> Iterator[Running]:
    """A router in front of one worker with few rows."""
    worker = (
        "worker", str(model), "--adapters", str(tiny_world.adapters), "--port", "0", "--dtype", "float64",
        "--threads", "1", "--drain", "0", "--max-running", "4", "--max-queue-wait", "3600",
    )  # fmt: skip
    with together(worker) as (running,), loraplex("router", "--port", "0", "--worker", running.address) as router:
        yield router


async def timed(client: AsyncClient, number: int, timeout_s: float) -> tuple[float, LoraplexError | None]:
    started_s, error = time.monotonic(), None
    try:
        await client.generate(f"{number}", max_tokens=100, ignore_eos=True, timeout_s=timeout_s)
    except LoraplexError as caught:
        error = caught
    return time.monotonic() - started_s, error


@fault(
    "flood of requests at several times the capacity",
    clients_see="RESOURCE_EXHAUSTED with a retry hint at once; the others end in time",
    within_s=1,
)
async def test_a_flood_is_refused_at_once(router: Running, stopwatch: Stopwatch) -> None:
    async with AsyncClient(router.address) as client:
        alone_s = median([(await timed(client, number, 60))[0] for number in range(5)])
        deadline_s = max(1.0, 5 * alone_s)
        # Four rows, and all that goes with a request costs time as well.
        per_s = 5 * 4 / alone_s
        tasks: list[asyncio.Task[tuple[float, LoraplexError | None]]] = []
        for number in range(int(4 * deadline_s * per_s)):
            tasks.append(asyncio.create_task(timed(client, number, deadline_s)))
            await asyncio.sleep(1 / per_s)
        ended = await asyncio.gather(*tasks)
    refused = [(took_s, error) for took_s, error in ended if isinstance(error, ResourceExhausted)]
    assert all(error is None or isinstance(error, ResourceExhausted | DeadlineExceeded) for _, error in ended), ended
    assert all(error.retry_after_s for _, error in refused)
    assert len(refused) > 0.2 * len(ended), "many are more than it can do"
    assert sum(error is None for _, error in ended) >= 4 * 2, "and what it can do it does"
    stopwatch.start()
    stopwatch.started_s = time.monotonic() - median(took_s for took_s, _ in refused)
    stopwatch.stop()


@fault(
    f"{NUM_LONG} long streams take every row",
    clients_see="a new short request begins; the long ones go on in turns",
    within_s=3,
)
async def test_a_short_request_behind_long_streams(router: Running, stopwatch: Stopwatch) -> None:
    async with AsyncClient(router.address) as client:
        expected = (await client.generate("hello", max_tokens=4)).text
        long = [
            asyncio.create_task(client.generate(f"{number}", max_tokens=LONG_TOKENS, ignore_eos=True, timeout_s=None))
            for number in range(NUM_LONG)
        ]
        await asyncio.sleep(2)
        assert not all(task.done() for task in long)
        stopwatch.start()
        assert (await client.generate("hello", max_tokens=4)).text == expected
        stopwatch.stop()
        assert sum(task.done() for task in long) < NUM_LONG - 4, "rows were taken all the while"
        for task in long:
            task.cancel()
        ends = await asyncio.gather(*long, return_exceptions=True)
        assert all(not isinstance(end, LoraplexError) for end in ends), ends
