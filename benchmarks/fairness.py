"""Benchmark of waits for cold adapters beside a hot one.

A worker with the real front end, scheduler and adapter cache, and an engine that computes nothing: its steps take a
fixed time. Requests for one hot adapter come at a multiple of the capacity, others for each of many cold ones in turns;
arrivals are Poisson and do not wait for answers. `--tenants` gives the cold ones a tenant of their own, and the flood
another adapter for each request. Prints a line of JSON for each load, with times to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from results import add_json_option, recording

from loraplex import AsyncClient
from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.errors import LoraplexError
from loraplex_runtime.auth import token_digest
from loraplex_server.config import BatchConfig, EngineConfig, ModelConfig, WorkerConfig
from loraplex_server.engine.engine import Engine
from loraplex_server.engine.process import EngineBuilder
from loraplex_server.grpc.server import start_worker
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.text.tokenizer import TextTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.adapter_files import Slots, base_targets, write_adapter
from support.engine_fakes import INFO, FakeRunner, plain_speculator

PROMPT, OUTPUT = 16, 40


@dataclass
class Side:
    """Requests of one kind, and what became of them."""

    first_tokens_s: list[float] = field(default_factory=list[float])
    ends: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        waits = sorted(self.first_tokens_s)
        places = {"p50": len(waits) // 2, "p95": int(0.95 * len(waits)), "max": len(waits) - 1}
        first = {name: round(waits[place], 2) for name, place in places.items()} if waits else {}
        return {"ends": dict(self.ends), "first_token_s": first}


def double(root: Path, rows: int, slots: int, step_s: float) -> EngineBuilder:
    """An engine with steps of a fixed time, and a cache of `slots` device slots over the adapters in `root`."""

    def build(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
        cache = AdapterManager(
            AdapterCacheConfig(1 << 24, 1 << 24, slots, 1 << 28),
            DirectorySource(root),
            base_targets(),
            "cpu",
            Slots().install,
            notify,
        )
        limits = SchedulerConfig(max_running=rows, max_step_tokens=1024, max_context_tokens=256)
        scheduler = Scheduler(limits, BlockPool(16 * rows + 64, 16), cache, frozenset())
        return Engine(
            INFO, scheduler, cache, FakeRunner(lambda plan: time.sleep(step_s)), plain_speculator(), time.monotonic
        )

    return build


async def one(client: AsyncClient, adapter_id: str, random: Random, side: Side) -> None:
    started_s = time.monotonic()
    ids = tuple(random.choices(range(3, 90), k=PROMPT))
    try:
        stream = client.stream(token_ids=ids, adapter_id=adapter_id, max_tokens=OUTPUT, ignore_eos=True)
        is_first = True
        async for _ in stream:
            if is_first:
                side.first_tokens_s.append(time.monotonic() - started_s)
            is_first = False
    except LoraplexError as error:
        side.ends[error.reason] += 1
    else:
        side.ends["ok"] += 1


async def send(
    client: AsyncClient, rate: float, seconds: float, adapters: Sequence[str], seed: int, side: Side
) -> None:
    random, tasks = Random(seed), list[asyncio.Task[None]]()
    started_s = due_s = time.monotonic()
    while rate and (due_s := due_s + random.expovariate(rate)) < started_s + seconds:
        await asyncio.sleep(due_s - time.monotonic())
        adapter_id = adapters[len(tasks) % len(adapters)]
        tasks.append(asyncio.create_task(one(client, adapter_id, random, side)))
    await asyncio.gather(*tasks)


async def run(args: argparse.Namespace, root: Path) -> None:
    flood = [f"m{number}" for number in range(500)] if args.tenants else ["hot"]
    cold = [f"cold{number}" for number in range(args.cold)]
    for seed, name in enumerate((*flood, *cold)):
        write_adapter(root / name, rank=2, seed=seed)
    auth_file = root / "auth.json"
    rows = ", ".join(
        f'{{"sha256": "{token_digest(name)}", "tenant": "{name}", "adapters": ["*"]}}' for name in ("flood", "cold")
    )
    auth_file.write_text(f'{{"credentials": [{rows}]}}')
    batch = BatchConfig(max_running=args.rows)
    config = WorkerConfig(
        EngineConfig(ModelConfig("double"), batch=batch), port=0, auth_file=auth_file if args.tenants else None
    )
    builder = double(root, args.rows, args.slots, args.step_ms / 1000)
    worker = await start_worker(config, inline=True, builder=builder, tokenizer=TextTokenizer(None))
    capacity = args.rows / (OUTPUT * args.step_ms / 1000)
    tokens = ("flood", "cold") if args.tenants else (None, None)
    clients = [
        AsyncClient(worker.address, timeout_s=600, retries=0, **({"token": one} if one else {})) for one in tokens
    ]
    try:
        with recording(args.json) as record:
            for factor in args.factors:
                sides = Side(), Side()
                await asyncio.gather(
                    send(clients[0], factor * capacity, args.seconds, flood, 0, sides[0]),
                    send(clients[1], args.cold_rate, args.seconds, cold, 1, sides[1]),
                )
                record({"load": factor, "flood": sides[0].figures(), "cold": sides[1].figures()})
    finally:
        for client in clients:
            await client.close()
        await worker.drain(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tenants", action="store_true", help="two tenants; the flood has 500 adapters")
    parser.add_argument("--cold", type=int, default=20, help="cold adapters")
    parser.add_argument("--cold-rate", type=float, default=2.0, help="requests per second for all of them")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.0, 0.5, 1.0, 3.0], help="of the capacity")
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(args, Path(folder)))


if __name__ == "__main__":
    main()
