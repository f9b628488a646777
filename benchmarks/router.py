"""Cost of a router: CPU time by message, time added to the first token.

Scripted workers in one process send paced streams of one token each `--pace-ms`; routers are processes of their own,
started as an operator starts them. `--routers` has several share a port, `--members` gives them so many workers in a
file that they follow. Printed as lines of JSON. With `--core` the routers have a core of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import grpc.aio
import psutil
from http_cost import ENDLESS, WARM_UP_S, Read, cpu_s, paced_worker, streams
from results import Record, add_json_option, recording
from systems import READY, Child

from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc

ADAPTERS = [f"adapter-{number}" for number in range(200)]


async def serve_workers(num_workers: int, pace_s: float, in_step: bool) -> None:
    workers = [paced_worker(pace_s, in_step=in_step) for _ in range(num_workers)]
    for worker in workers:
        await worker.start()
    print(json.dumps([worker.address for worker in workers]), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for worker in workers:
        await worker.stop()


class Client:
    """One connection."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def close(self) -> None:
        await self._channel.close()

    async def read(self, counts: list[int], index: int) -> None:
        """A stream that is read until it is cancelled."""
        async for _ in self._stub.GenerateStream(_request(ENDLESS)):
            counts[index] += 1

    async def first_token_s(self, adapter_id: str = "") -> float:
        start_s = time.perf_counter()
        took_s = 0.0
        async for _ in self._stub.GenerateStream(_request(1, adapter_id)):
            took_s = took_s or time.perf_counter() - start_s
        return took_s


def _request(num_tokens: int, adapter_id: str = "") -> inference_pb2.GenerateRequest:
    stopping = inference_pb2.Stopping(max_tokens=num_tokens)
    return inference_pb2.GenerateRequest(text="hello", stopping=stopping, adapter_id=adapter_id)


class Routers:
    """Router processes on one port."""

    def __init__(self, processes: list[psutil.Process], address: str) -> None:
        self.processes = processes
        self.address = address

    def cpu_s(self) -> list[float]:
        return [cpu_s(process) for process in self.processes]


def start_routers(stack: ExitStack, workers: list[str], args: argparse.Namespace) -> Routers:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    members = folder / "members"
    members.write_text("".join(f"w{number}={address}\n" for number, address in enumerate(workers)))
    command = [sys.executable, "-m", "loraplex", "router", "--workers-from", f"file:{members}"]
    if args.core is not None:
        command = ["taskset", "-c", str(args.core), *command]
    if args.routers > 1:
        command += ["--reuse-port"]
    port, processes, address = "0", [], ""
    for _ in range(args.routers):
        child = Child([*command, "--port", port], "a router", merged=True)
        stack.callback(child.close)
        address = child.hear_until(READY)[1]
        port = address.rpartition(":")[2]
        processes.append(psutil.Process(child.process.pid))
    return Routers(processes, address)


def read_by(clients: list[Client]) -> Read:
    """Reads streams over these connections in turns."""
    return lambda counts, index: clients[index % len(clients)].read(counts, index)


async def cpu_by_message(routers: Routers, clients: list[Client], args: argparse.Namespace, record: Record) -> None:
    """CPU time of all routers for one message, and which share of it each router had."""
    costs: list[float] = []
    shares: list[list[float]] = []
    rates: list[float] = []
    async with streams(read_by(clients), args.streams, args.pace_ms / 1000) as counts:
        for _ in range(args.rounds):
            before, num_before, start_s = routers.cpu_s(), sum(counts), time.perf_counter()
            await asyncio.sleep(args.seconds)
            used = [after - one for after, one in zip(routers.cpu_s(), before, strict=True)]
            num_messages = max(1, sum(counts) - num_before)
            costs.append(1e6 * sum(used) / num_messages)
            rates.append(num_messages / (time.perf_counter() - start_s))
            shares.append([round(one / sum(used), 2) for one in used])
    row = {"case": "cpu by message", "us": round(median(costs), 1), "all": [round(one) for one in costs]}
    record({**row, "messages/s": round(median(rates)), "shares": shares[-1]})


async def idle_cpu(routers: Routers, args: argparse.Namespace, record: Record) -> None:
    before = sum(routers.cpu_s())
    await asyncio.sleep(args.seconds)
    used = sum(routers.cpu_s()) - before
    record({"case": "cpu of idle routers", "ms/s": round(1000 * used / args.seconds, 1)})


async def added_to_first_token(
    routers: Routers, worker: str, clients: list[Client], args: argparse.Namespace, record: Record
) -> None:
    """Requests of one token, straight to the worker and through a router in turns, beside the streams."""
    straight, through = Client(worker), Client(routers.address)
    direct_ms: list[float] = []
    routed_ms: list[float] = []
    async with streams(read_by(clients), args.streams, args.pace_ms / 1000):
        for number in range(args.requests):
            adapter_id = ADAPTERS[number % len(ADAPTERS)] if args.adapters else ""
            direct_ms.append(1000 * await straight.first_token_s(adapter_id))
            routed_ms.append(1000 * await through.first_token_s(adapter_id))
    added = [routed - direct for routed, direct in zip(routed_ms, direct_ms, strict=True)]
    row = {
        "case": "time to first token",
        "direct_ms": round(median(direct_ms), 2),
        "routed_ms": round(median(routed_ms), 2),
    }
    record({**row, "added_ms": round(median(added), 2), "added_p90_ms": round(sorted(added)[9 * len(added) // 10], 2)})
    await straight.close()
    await through.close()


async def run(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        command = [sys.executable, __file__, "--serve-workers", str(args.members), "--pace-ms", str(args.pace_ms)]
        if args.in_step:
            command.append("--in-step")
        worker = Child(command, "the workers")
        stack.callback(worker.close)
        addresses: list[str] = json.loads(worker.hear())
        routers = start_routers(stack, addresses, args)
        if args.core is not None:
            os.sched_setaffinity(0, os.sched_getaffinity(0) - {args.core})
        clients = [Client(routers.address) for _ in range(args.connections)]
        await asyncio.sleep(WARM_UP_S)
        with recording(args.json) as record:
            await idle_cpu(routers, args, record)
            await cpu_by_message(routers, clients, args, record)
            await added_to_first_token(routers, addresses[0], clients, args, record)
        for client in clients:
            await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pace-ms", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--connections", type=int, default=4, help="over which the streams are spread")
    parser.add_argument("--routers", type=int, default=1, help="processes on one port")
    parser.add_argument("--members", type=int, default=1, help="workers that the routers follow")
    parser.add_argument("--adapters", action="store_true", help="requests for 200 adapters in turns")
    parser.add_argument(
        "--in-step", action="store_true", help="tokens of all streams at the same moments, as of an engine"
    )
    parser.add_argument("--core", type=int, help="the routers' own core")
    parser.add_argument("--serve-workers", type=int, default=0, help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    if args.serve_workers:
        asyncio.run(serve_workers(args.serve_workers, args.pace_ms / 1000, args.in_step))
    else:
        asyncio.run(run(args))


if __name__ == "__main__":
    main()
