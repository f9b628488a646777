"""Cost of the HTTP port over the gRPC relay of the same router.

A scripted worker sends paced streams of one token each `--pace-ms`. Printed as lines of JSON: the router's CPU time per
streamed chunk and the time to the first token beside those streams, HTTP and gRPC in turns; the memory of idle streams;
and the rate of streams beside one whose client has stopped reading. With `--core` the router has a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio
import psutil
from results import Record, add_json_option, recording
from systems import HTTP_READY, READY, Child

from loraplex_proto.v1 import inference_pb2, inference_pb2_grpc

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.fake_workers import FakeWorker

ENDLESS = 1_000_000
WARM_UP_S = 1.0

# A client's stream: counts its chunks into the list until it is cancelled.
Read = Callable[[list[int], int], Awaitable[None]]


def paced_worker(pace_s: float, *, in_step: bool = False) -> FakeWorker:
    """A worker whose streams have `max_tokens` tokens, one each `pace_s`; with a seed of 1 nothing behind the first
    one. With `in_step` all streams get theirs at the same moments, as from an engine's steps."""

    async def paced(request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[bytes]:
        num_tokens = request.stopping.max_tokens
        due_s = time.monotonic()
        if in_step:
            due_s -= due_s % pace_s
        for index in range(num_tokens):
            chunk = inference_pb2.GenerateStreamResponse(text_delta="token ", token_ids=[index % 256])
            if index == num_tokens - 1:
                chunk.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            yield chunk.SerializeToString()
            if chunk.finish_reason:
                return
            if index == 0 and request.sampling.seed == 1:
                await asyncio.Event().wait()
            due_s += pace_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    worker = FakeWorker("paced")
    worker.info["max_context_tokens"] = 2 * ENDLESS
    worker.stream = paced
    return worker


async def serve_worker(pace_s: float) -> None:
    worker = await paced_worker(pace_s).start()
    print(f"ready on {worker.address}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop()


class Clients:
    """Streams over gRPC and over HTTP to one router."""

    def __init__(self, grpc_address: str, http_address: str) -> None:
        self._channel = grpc.aio.insecure_channel(grpc_address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._host, _, port = http_address.rpartition(":")
        self._port = int(port)
        self._kept: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def close(self) -> None:
        await self._channel.close()
        if self._kept is not None:
            self._kept[1].close()

    async def read_grpc(self, counts: list[int], index: int, num_tokens: int = ENDLESS) -> None:
        stopping = inference_pb2.Stopping(max_tokens=num_tokens)
        call = self._stub.GenerateStream(inference_pb2.GenerateRequest(text="hello", stopping=stopping))
        async for _ in call:
            counts[index] += 1

    async def read_http(self, counts: list[int], index: int, num_tokens: int = ENDLESS) -> None:
        reader, writer = await self.open_http(num_tokens)
        try:
            status = await reader.readline()
            if b" 200 " not in status:
                raise RuntimeError(f"the router answers {status!r}")
            while data := await reader.read(1 << 16):
                counts[index] += data.count(b"data: {")
                if b"data: [DONE]" in data:
                    break
        finally:
            writer.close()

    async def open_http(
        self, num_tokens: int = ENDLESS, seed: int = 0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        self._ask(writer, num_tokens, seed)
        return reader, writer

    def _ask(self, writer: asyncio.StreamWriter, num_tokens: int, seed: int) -> None:
        body = json.dumps({"prompt": "hello", "max_tokens": num_tokens, "stream": True, "seed": seed})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())

    async def first_token_grpc_s(self) -> float:
        start_s = time.perf_counter()
        stopping = inference_pb2.Stopping(max_tokens=1)
        call = self._stub.GenerateStream(inference_pb2.GenerateRequest(text="hello", stopping=stopping))
        took_s = 0.0
        async for _ in call:
            took_s = took_s or time.perf_counter() - start_s
        return took_s

    async def first_token_http_s(self) -> float:
        """Seconds to a first token, over one connection, as clients keep theirs and gRPC its channel."""
        if self._kept is None:
            self._kept = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._kept
        start_s = time.perf_counter()
        self._ask(writer, 1, 0)
        await reader.readuntil(b"data: {")
        took_s = time.perf_counter() - start_s
        await reader.readuntil(b"\r\n0\r\n\r\n")
        return took_s


@asynccontextmanager
async def streams(read: Read, num: int, pace_s: float) -> AsyncIterator[list[int]]:
    """`num` streams that do not keep step; their counts of chunks."""
    counts = [0] * num
    tasks: list[asyncio.Future[None]] = []
    for index in range(num):
        tasks.append(asyncio.ensure_future(read(counts, index)))
        await asyncio.sleep(pace_s / num)
    try:
        await asyncio.sleep(WARM_UP_S)
        yield counts
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def chunk_cost_us(read: Read, router: psutil.Process, args: argparse.Namespace) -> float:
    """CPU time of the router for one chunk."""
    async with streams(read, args.streams, args.pace_ms / 1000) as counts:
        before, num_before = cpu_s(router), sum(counts)
        await asyncio.sleep(args.seconds)
        return 1e6 * (cpu_s(router) - before) / max(1, sum(counts) - num_before)


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def first_tokens_ms(clients: Clients, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Times of requests of one token, over gRPC and HTTP in turns, beside paced streams over gRPC."""
    found: tuple[list[float], list[float]] = ([], [])
    async with streams(clients.read_grpc, args.streams, args.pace_ms / 1000):
        for _ in range(args.requests):
            found[0].append(1000 * await clients.first_token_grpc_s())
            found[1].append(1000 * await clients.first_token_http_s())
    return found


async def idle_memory_bytes(clients: Clients, router: psutil.Process, num: int) -> int:
    """Memory of the router that `num` streams hold while they wait for their second token."""
    before = router.memory_info().rss
    connections = [await clients.open_http(seed=1) for _ in range(num)]
    for reader, _ in connections:
        await reader.readuntil(b"data: {")
    held = router.memory_info().rss - before
    for _, writer in connections:
        writer.close()
    return held


async def rates_beside_a_stopped_reader(clients: Clients, args: argparse.Namespace) -> tuple[float, float]:
    """Chunks per second of each stream, alone and beside a client that reads nothing of its own."""
    rates: list[float] = []
    async with streams(clients.read_http, args.streams, args.pace_ms / 1000) as counts:
        for is_stopped in (False, True):
            writer = (await clients.open_http())[1] if is_stopped else None
            if writer is not None:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
            before = sum(counts)
            await asyncio.sleep(args.seconds)
            rates.append((sum(counts) - before) / args.seconds / args.streams)
            if writer is not None:
                writer.close()
    return rates[0], rates[1]


async def measure(clients: Clients, router: psutil.Process, args: argparse.Namespace, record: Record) -> None:
    costs: dict[str, list[float]] = {"grpc": [], "http": []}
    for _ in range(args.rounds):
        costs["grpc"].append(await chunk_cost_us(clients.read_grpc, router, args))
        costs["http"].append(await chunk_cost_us(clients.read_http, router, args))
    for name, values in costs.items():
        record(
            {"case": f"cpu per chunk, {name}", "us": round(median(values), 1), "all": [round(one) for one in values]}
        )
    added = [http - relay for http, relay in zip(costs["http"], costs["grpc"], strict=True)]
    record({"case": "cpu per chunk, added by http", "us": round(median(added), 1)})
    relay_ms, http_ms = await first_tokens_ms(clients, args)
    record(
        {
            "case": "time to first token",
            "grpc_ms": round(median(relay_ms), 2),
            "http_ms": round(median(http_ms), 2),
            "added_ms": round(median(http - relay for http, relay in zip(http_ms, relay_ms, strict=True)), 2),
        }
    )
    alone, beside = await rates_beside_a_stopped_reader(clients, args)
    record({"case": "chunks/s beside a stopped reader", "alone": round(alone, 2), "beside": round(beside, 2)})
    held = await idle_memory_bytes(clients, router, args.idle)
    record({"case": f"memory of {args.idle} idle streams", "mb": round(held / 1e6, 1)})


async def run(args: argparse.Namespace) -> None:
    worker = Child([sys.executable, __file__, "--serve-worker", "--pace-ms", str(args.pace_ms)], "the worker")
    router: Child | None = None
    try:
        address = worker.hear_until(READY)[1]
        command = [sys.executable, "-m", "loraplex", "router", "--worker", address, "--port", "0"]
        command += ["--http-port", "0", "--max-in-flight", str(args.idle + 100)]
        if args.core is not None:
            command = ["taskset", "-c", str(args.core), *command]
        router = Child(command, "the router", merged=True)
        http_ready = router.hear_until(HTTP_READY)  # in one line with the address for gRPC
        ready = READY.search(http_ready.string)
        assert ready is not None
        if args.core is not None:
            os.sched_setaffinity(0, os.sched_getaffinity(0) - {args.core})
        clients = Clients(ready[1], http_ready[1])
        with recording(args.json) as record:
            await measure(clients, psutil.Process(router.process.pid), args, record)
        await clients.close()
    finally:
        for child in (router, worker):
            if child is not None:
                child.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pace-ms", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--core", type=int, help="the router's own core")
    parser.add_argument("--serve-worker", action="store_true", help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    asyncio.run(serve_worker(args.pace_ms / 1000) if args.serve_worker else run(args))


if __name__ == "__main__":
    main()
