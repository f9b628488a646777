"""Benchmark of goodput under overload.

`overload.py double` measures a worker whose engine computes nothing and whose steps take a fixed time; `overload.py
server HOST:PORT` one that runs. The deadline is twice what a request takes alone (the median), the capacity what a
burst without deadlines comes to, arrivals are Poisson and do not wait for answers. Prints a line of JSON for each load.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

from results import Record, add_json_option, recording
from systems import READY, Child

from loraplex import AsyncClient
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import StepPlan
from loraplex_server.config import BatchConfig, EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.engine import Engine
from loraplex_server.grpc.server import start_worker
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.text.tokenizer import TextTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.engine_fakes import INFO, FakeCache, FakeRunner, plain_speculator

VOCAB = range(3, 90)


@dataclass(frozen=True)
class BuildDouble:
    """An EngineBuilder: steps that take so long, whatever is in them."""

    step_s: float
    rows: int

    def __call__(self, config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        due_s = 0.0

        def wait(plan: StepPlan) -> None:
            nonlocal due_s
            due_s = max(due_s, time.monotonic() - self.step_s) + self.step_s
            time.sleep(max(0.0, due_s - time.monotonic()))

        scheduler = Scheduler(
            SchedulerConfig(max_running=self.rows, max_step_tokens=1024, max_context_tokens=256),
            BlockPool(16 * self.rows + 64, 16),
            FakeCache(),
            frozenset(),
        )
        return Engine(INFO, scheduler, FakeCache(), FakeRunner(wait), plain_speculator(), time.monotonic)


@dataclass
class Load:
    """Requests that were sent at one rate, and how they ended."""

    sent: int = 0
    good: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    refused_after_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Shape:
    prompt: int
    output: int


async def one(client: AsyncClient, shape: Shape, random: Random, deadline_s: float | None, load: Load) -> float:
    """Sends one request; returns what it took."""
    started_s = time.monotonic()
    ids = tuple(random.choices(VOCAB, k=shape.prompt))
    load.sent += 1
    try:
        await client.generate(token_ids=ids, max_tokens=shape.output, ignore_eos=True, timeout_s=deadline_s)
    except LoraplexError as error:
        load.ends[error.reason] += 1
        if error.reason == "OVERLOADED":
            load.refused_after_s.append(time.monotonic() - started_s)
    else:
        took_s = time.monotonic() - started_s
        is_good = deadline_s is None or took_s <= deadline_s
        load.good += is_good
        load.ends["ok" if is_good else "late"] += 1
    return time.monotonic() - started_s


async def sweep(address: str, shape: Shape, args: argparse.Namespace) -> None:
    random = Random(0)
    with recording(args.json) as record:
        await _sweep(address, shape, args, random, record)


async def _sweep(address: str, shape: Shape, args: argparse.Namespace, random: Random, record: Record) -> None:
    async with AsyncClient(address, timeout_s=600, retries=0) as client:
        alone_s = median([await one(client, shape, random, None, Load()) for _ in range(9)])
        started_s = time.monotonic()
        num_burst = 10 * args.rows
        await asyncio.gather(*(one(client, shape, random, 600.0, Load()) for _ in range(num_burst)))
        capacity = num_burst / (time.monotonic() - started_s)
        record({"alone_s": round(alone_s, 3), "capacity_per_s": round(capacity, 2)})
        for factor in args.factors:
            load, tasks = Load(), list[asyncio.Task[float]]()
            started_s = due_s = time.monotonic()
            while (due_s := due_s + random.expovariate(factor * capacity)) < started_s + args.seconds:
                await asyncio.sleep(due_s - time.monotonic())
                tasks.append(asyncio.create_task(one(client, shape, random, 2 * alone_s, load)))
            await asyncio.gather(*tasks)
            refused = sorted(load.refused_after_s)
            figures = {
                "load": factor,
                "sent": load.sent,
                "goodput_per_s": round(load.good / args.seconds, 2),
                "of_capacity": round(load.good / args.seconds / capacity, 3),
                "ends": dict(load.ends),
                "refused_after_ms_p50": round(1000 * median(refused), 1) if refused else None,
                "refused_after_ms_p99": round(1000 * refused[int(0.99 * len(refused))], 1) if refused else None,
            }
            record(figures)


async def serve_double(args: argparse.Namespace) -> None:
    config = WorkerConfig(
        EngineConfig(ModelConfig("double"), batch=BatchConfig(max_running=args.rows)), port=0, max_stream_wait_s=0.0
    )
    builder = BuildDouble(args.step_ms / 1000, args.rows)
    worker = await start_worker(config, builder=builder, tokenizer=TextTokenizer(None))
    print(f"ready on {worker.address}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends
    await worker.drain(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("double", "serve-double", "server"):
        command = commands.add_parser(name)
        if name == "server":
            command.add_argument("address")
        command.add_argument("--rows", type=int, default=16, help="--max-running of the server")
        command.add_argument("--step-ms", type=float, default=20.0)
        command.add_argument("--prompt", type=int, default=16)
        command.add_argument("--output", type=int, default=40)
        command.add_argument("--seconds", type=float, default=60.0)
        command.add_argument("--factors", type=float, nargs="+", default=[0.5, 0.8, 1.0, 1.5, 2.0, 5.0, 9.0])
        add_json_option(command)
        command.add_argument("--core", type=int, help="the client's own core; a double runs on the others")
    args = parser.parse_args()
    if args.command == "serve-double":
        asyncio.run(serve_double(args))
        return
    cores = os.sched_getaffinity(0)
    shape = Shape(args.prompt, args.output)
    child = None
    address = getattr(args, "address", "")
    if args.command == "double":
        if args.core is not None:
            os.sched_setaffinity(0, cores - {args.core})
        flags = ["--rows", str(args.rows), "--step-ms", str(args.step_ms)]
        child = Child([sys.executable, __file__, "serve-double", *flags], "the double")
        address = child.hear_until(READY)[1]
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    try:
        asyncio.run(sweep(address, shape, args))
    finally:
        if child is not None and child.process.stdin is not None:
            child.process.stdin.close()
            child.process.wait(20)


if __name__ == "__main__":
    main()
