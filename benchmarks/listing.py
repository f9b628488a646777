"""Benchmark of listing many adapters beside a running stream.

    python benchmarks/listing.py MODEL [--adapters 50000] [--workers 0] [--seconds 5]

MODEL is a small base model, as for `loraplex worker`. Makes so many adapter folders, starts a worker over them
(`--workers 2`: a router and two workers) and one endless stream in a process of its own. Prints one JSON line per row:
how often it was asked, the median and the longest time of an answer in ms, its bytes, and the longest gap between two
messages of the stream while that went on. Runs with servers from before there were pages, without the rows about them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from results import Record, add_json_option, recording

from loraplex import Client
from loraplex_proto.v1 import adapter_pb2

HAS_PAGES = "page_size" in adapter_pb2.ListAdaptersRequest.DESCRIPTOR.fields_by_name
OPTIONS = [("grpc.max_receive_message_length", -1)]


def make_adapters(root: Path, count: int) -> None:
    """Folders with the names of an adapter's files in them; nobody loads these."""
    config = root.parent / "adapter_config.json"
    config.write_text("{}")
    for number in range(count):
        folder = root / f"adapter-{number:06}"
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("{}")


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """`loraplex ARGUMENTS…`; its address."""
    command = [sys.executable, "-m", "loraplex", *arguments, "--port", "0", "--drain", "0", "--announce", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"ready on (\S+:\d+)", line):
                yield found[1]
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def stream(address: str, gaps: Any) -> None:
    """Reads texts that go on and on; sends every gap with the time when it ended."""
    with Client(address) as client:
        while True:
            before_s = None
            for _ in client.stream("go on", max_tokens=400, ignore_eos=True):
                now_s = time.monotonic()
                if before_s is not None:
                    gaps.send((now_s, now_s - before_s))
                before_s = now_s


class Measured:
    """A server, and the stream beside which it is asked."""

    def __init__(self, address: str, gaps: Any, record: Record) -> None:
        self._record = record
        self._gaps: list[tuple[float, float]] = []
        threading.Thread(target=self._read, args=(gaps,), daemon=True).start()
        self._channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        self._list = self._channel.unary_unary("/loraplex.v1.AdapterService/ListAdapters")

    def _read(self, gaps: Any) -> None:
        """Receives gaps all the time: a child whose pipe is full would not read its stream."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._gaps.append(gaps.recv())

    async def ask(self, **fields: Any) -> tuple[bytes, float]:
        request = adapter_pb2.ListAdaptersRequest(include_unloaded=True, **fields).SerializeToString()
        started_s = time.monotonic()
        return await self._list(request), time.monotonic() - started_s

    async def row(self, what: str, body: Callable[[], Awaitable[list[tuple[bytes, float]]]]) -> None:
        started_s = time.monotonic()
        answers = await body()
        ended_s = time.monotonic()
        await asyncio.sleep(0.5)
        gaps = [gap_s for at_s, gap_s in self._gaps if at_s >= started_s and at_s - gap_s <= ended_s]
        row: dict[str, Any] = {"what": what, "seconds": round(ended_s - started_s, 2), "asked": len(answers)}
        if answers:
            row["median_ms"] = round(1000 * statistics.median(took_s for _, took_s in answers), 1)
            row["max_ms"] = round(1000 * max(took_s for _, took_s in answers), 1)
            row["bytes"] = max(len(raw) for raw, _ in answers)
        row["max_gap_ms"] = round(1000 * max(gaps, default=0.0), 1)
        self._record(row)


async def measure(address: str, gaps: Any, seconds: float, record: Record) -> None:
    server = Measured(address, gaps, record)

    async def nothing() -> list[tuple[bytes, float]]:
        await asyncio.sleep(seconds)
        return []

    async def first_pages(size: int) -> list[tuple[bytes, float]]:
        return [await server.ask(page_size=size) for _ in range(50)]

    async def walk() -> list[tuple[bytes, float]]:
        answers = [await server.ask(page_size=1000)]
        while token := adapter_pb2.ListAdaptersResponse.FromString(answers[-1][0]).next_page_token:
            answers.append(await server.ask(page_size=1000, page_token=token))
        return answers

    async def all_at_once(num_callers: int) -> list[tuple[bytes, float]]:
        return await asyncio.gather(*(server.ask() for _ in range(num_callers)))

    await all_at_once(1)  # an older server looks at its source now
    await nothing()
    await server.row("nothing", nothing)
    if HAS_PAGES:
        await server.row("first page of 100", partial(first_pages, 100))
        await server.row("first page of 1000", partial(first_pages, 1000))
        await server.row("all pages of 1000", walk)
    for num_callers in (1, 8):
        await server.row(f"all at once, {num_callers} callers", partial(all_at_once, num_callers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--adapters", type=int, default=50_000)
    parser.add_argument("--workers", type=int, default=0, help="behind a router; 0 for one worker without")
    parser.add_argument("--seconds", type=float, default=5.0)
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        record = stack.enter_context(recording(args.json))
        root = Path(folder) / "adapters"
        make_adapters(root, args.adapters)
        worker = (
            "worker",
            args.model,
            "--adapters",
            str(root),
            "--dtype",
            "float32",
            "--threads",
            "1",
            "--stream-wait",
            "0",
        )
        addresses = [stack.enter_context(server(*worker)) for _ in range(max(1, args.workers))]
        address = addresses[0]
        if args.workers:
            flags = [flag for one in addresses for flag in ("--worker", one)]
            address = stack.enter_context(server("router", *flags))
        ours, theirs = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("spawn").Process(target=stream, args=(address, theirs), daemon=True)
        child.start()
        try:
            asyncio.run(measure(address, ours, args.seconds, record))
        finally:
            child.kill()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
