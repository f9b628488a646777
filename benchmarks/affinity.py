"""Hit rates and waits of a simulated fleet, by routing policy.

The router's own policy against round robin and the least loaded. Each worker is the real scheduler over the real
table of the adapter cache; the router is the real `Replicas` and `choose`, fed by reports as often as a real one gets
them. Steps, reads and copies take the times below. Requests come at random (Poisson) for adapters by Zipf's law, the
same ones for each policy. Printed as lines of JSON.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from results import Record, add_json_option, recording

from loraplex_adapters.cache.states import KeyState
from loraplex_contracts.request import Event, Request, Tokens
from loraplex_proto.v1 import adapter_pb2, worker_pb2
from loraplex_router.config import PolicyConfig
from loraplex_router.policy import Route, WorkerView, choose, routing_key
from loraplex_router.replicas import Flight, Replicas

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.scheduler_harness import make_request
from support.simulated_adapters import AdapterSimulation

REPORT_S: Final = 0.2
MAX_REPORTED: Final = 1024  # adapters, as workers report them
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = (8, 56)  # at least and at most; the router knows the number
# A step: its floor, a decoding row, a token of a prompt. A read of an adapter from disk, its copy to the device.
FLOOR_S, ROW_S, PROMPT_TOKEN_S = 0.010, 0.0003, 0.0001
STAGE_S, COPY_S = 0.150, 0.020

_TIERS: Final = {KeyState.ON_DEVICE: adapter_pb2.ADAPTER_TIER_DEVICE, KeyState.ON_HOST: adapter_pb2.ADAPTER_TIER_HOST}

Policy = Callable[[Route, Sequence[WorkerView]], str]


def step_s(num_rows: int, num_prompt_tokens: int) -> float:
    return FLOOR_S + ROW_S * num_rows + PROMPT_TOKEN_S * num_prompt_tokens


@dataclass
class Worker(AdapterSimulation):
    """Tells of tokens as they come, and where an adapter is."""

    worker_id: str = ""
    on_tokens: Callable[[str, int, float], None] = lambda request_id, num, now_s: None
    on_end: Callable[[str, float], None] = lambda request_id, now_s: None

    def tier(self, adapter_id: str) -> int:
        return self.tiers().get(adapter_id, 0)

    def tiers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for record in self.residency.records.values():
            tier = _TIERS.get(record.state, adapter_pb2.ADAPTER_TIER_DISK)
            for name in record.names:
                found[name.partition("/")[2]] = tier
        return found

    def report(self) -> worker_pb2.Load:
        load = self.scheduler.load()
        nearest = heapq.nlargest(MAX_REPORTED, self.tiers().items(), key=lambda item: item[1])
        return worker_pb2.Load(
            running_requests=load.num_running,
            queued_requests=load.num_queued,
            pending_tokens=load.pending_tokens,
            adapters=[worker_pb2.ResidentAdapter(adapter_id=name, tier=tier) for name, tier in nearest],
        )

    def _take(self, events: Sequence[Event]) -> None:
        super()._take(events)
        for event in events:
            if isinstance(event, Tokens):
                self.on_tokens(event.request_id, len(event.token_ids), self.now)
            elif self.fates[event.request_id].ended_s is not None:
                self.on_end(event.request_id, self.now)


@dataclass
class Sent:
    arrived_s: float
    flight: Flight
    tier: int  # of its adapter where it was sent
    first_token_s: float | None = None


@dataclass
class Fleet:
    """Workers and a router in simulated time."""

    workers: list[Worker]
    policy: Policy
    replicas: Replicas = field(init=False)
    sent: dict[str, Sent] = field(default_factory=dict[str, Sent])
    choosing_s: float = 0.0  # of this machine's time

    def __post_init__(self) -> None:
        self.replicas = Replicas([worker.worker_id for worker in self.workers])
        self._by_id = {worker.worker_id: worker for worker in self.workers}
        for worker in self.workers:
            worker.on_tokens, worker.on_end = self._tokens, self._end

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> None:
        reported_s = -math.inf
        for now_s, request in arrivals:
            self._advance(now_s)
            if now_s - reported_s >= REPORT_S:
                reported_s = now_s
                for worker in self.workers:
                    self.replicas.on_report(worker.worker_id, worker.report(), now_s)
            self._send(now_s, request)
        self._advance(arrivals[-1][0] + 60.0)

    def _advance(self, now_s: float) -> None:
        for worker in self.workers:
            while worker.now < now_s:
                if not worker.step():
                    worker.now = now_s

    def _send(self, now_s: float, request: Request) -> None:
        begin_s = time.perf_counter()
        adapter_ids = (request.adapter_id,)
        key = routing_key(adapter_ids)
        route = Route(adapter_ids, self.replicas.work_in_flight_tokens(key))
        worker_id = self.policy(route, self.replicas.views(now_s=now_s))
        self.choosing_s += time.perf_counter() - begin_s
        worker = self._by_id[worker_id]
        work_tokens = len(request.prompt_token_ids) + request.stopping.max_tokens
        flight = self.replicas.begin(worker_id, key, work_tokens, now_s)
        flight.remaining_tokens = work_tokens
        self.sent[request.request_id] = Sent(now_s, flight, worker.tier(request.adapter_id))
        worker.add(request)

    def _tokens(self, request_id: str, num_tokens: int, now_s: float) -> None:
        sent = self.sent[request_id]
        if sent.first_token_s is None:
            sent.first_token_s = now_s
            assert sent.flight.remaining_tokens is not None
            sent.flight.remaining_tokens -= PROMPT_TOKENS
        assert sent.flight.remaining_tokens is not None
        sent.flight.remaining_tokens = max(0, sent.flight.remaining_tokens - num_tokens)

    def _end(self, request_id: str, now_s: float) -> None:
        self.replicas.end(self.sent[request_id].flight)


def make_workers(num_workers: int, *, num_slots: int, num_host: int) -> list[Worker]:
    """`num_slots` adapters fit on each device, `num_host` in the memory of its host."""
    return [
        Worker(
            step_s,
            worker_id=f"w{number}",
            num_slots=num_slots,
            num_host=num_host,
            load_s=COPY_S,
            stage_s=STAGE_S,
        )
        for number in range(num_workers)
    ]


def make_policies(seed: int) -> dict[str, Policy]:
    random, turns = Random(seed), itertools.count()
    config = PolicyConfig()

    def affinity(route: Route, workers: Sequence[WorkerView]) -> str:
        choice = choose(route, workers, config, random)
        assert choice is not None
        return choice.worker_id

    return {
        "loraplex": affinity,
        "round robin": lambda _, workers: workers[next(turns) % len(workers)].worker_id,
        "least loaded": lambda _, workers: min(workers, key=lambda worker: worker.work_tokens).worker_id,
    }


def zipf_arrivals(
    num_adapters: int, rate: float, seconds: float, exponent: float, seed: int
) -> list[tuple[float, Request]]:
    """Requests with when they come, `rate` a second on average."""
    random = Random(seed)
    weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(num_adapters)))
    names = [f"a{number}" for number in range(num_adapters)]
    random.shuffle(names)  # popularity has nothing to do with names
    found: list[tuple[float, Request]] = []
    now_s = 0.0
    while (now_s := now_s + random.expovariate(rate)) < seconds:
        (name,) = random.choices(names, cum_weights=weights)
        prompt = [random.randrange(1 << 20) for _ in range(PROMPT_TOKENS)]
        request = make_request(f"r{len(found)}", prompt, max_tokens=random.randint(*OUTPUT_TOKENS), adapter_id=name)
        found.append((now_s, request))
    return found


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(fleet: Fleet, arrivals: Sequence[tuple[float, Request]], warm_s: float) -> dict[str, float]:
    """Figures of the requests that arrived after `warm_s`."""
    fleet.run(arrivals)
    counted = [sent for sent in fleet.sent.values() if sent.arrived_s >= warm_s]
    waits_ms = [1000 * (sent.first_token_s - sent.arrived_s) for sent in counted if sent.first_token_s is not None]
    by_worker = [sum(sent.flight.worker_id == worker.worker_id for sent in counted) for worker in fleet.workers]
    return {
        "requests": len(counted),
        "never began": len(counted) - len(waits_ms),
        "on device": round(sum(sent.tier == adapter_pb2.ADAPTER_TIER_DEVICE for sent in counted) / len(counted), 4),
        "in memory": round(sum(sent.tier >= adapter_pb2.ADAPTER_TIER_HOST for sent in counted) / len(counted), 4),
        "ttft p50 ms": round(quantile(waits_ms, 0.5), 1),
        "ttft p99 ms": round(quantile(waits_ms, 0.99), 1),
        "largest share": round(max(by_worker) * len(by_worker) / len(counted), 2),  # of the mean
        "us a choice": round(1e6 * fleet.choosing_s / len(fleet.sent), 1),
    }


def run(args: argparse.Namespace, record: Record) -> None:
    rate = args.rate * args.workers
    arrivals = zipf_arrivals(args.adapters, rate, args.warm + args.seconds, args.zipf, args.seed)
    for name, policy in make_policies(args.seed).items():
        if args.policy in ("", name):
            workers = make_workers(args.workers, num_slots=args.slots, num_host=args.host)
            begin_s = time.perf_counter()
            row = measure(Fleet(workers, policy), arrivals, args.warm)
            record({"policy": name, **row, "seconds": round(time.perf_counter() - begin_s, 1)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of Zipf's law")
    parser.add_argument("--slots", type=int, default=16, help="adapters on a worker's device")
    parser.add_argument("--host", type=int, default=48, help="adapters in a worker's memory")
    parser.add_argument("--rate", type=float, default=14.0, help="requests a second for each worker")
    parser.add_argument("--warm", type=float, default=60.0, help="simulated seconds that are not counted")
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated seconds that are")
    parser.add_argument("--policy", default="", help="only this one")
    parser.add_argument("--seed", type=int, default=1)
    add_json_option(parser)
    args = parser.parse_args()
    with recording(args.json) as record:
        run(args, record)


if __name__ == "__main__":
    main()
