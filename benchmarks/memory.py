"""Benchmark of a thousand adapters: memory, and throughput beside all resident.

    python benchmarks/memory.py [--adapters 1000] [--rank 4] [--device-memory 64MiB] [--host-memory 256MiB]

Makes a small base model and the adapters, and prints lines of JSON:

    memory      peak RSS of a worker with the adapters and those budgets, that has served each of them and then a load
                of zipf(1) popularity, minus that of a worker without adapters after as many requests for the base.
                Peaks are of its processes together, once since they began and once since they were ready (loading the
                model has a peak of its own, which could hide what comes later).
    throughput  zipf(1) popularity, closed by `--in-flight`: output tokens per second with the budgets against a worker
                in which all adapters are resident; both take turns, ratio of medians with the spread over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import statistics
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from inprocess import worker_flags
from inputs import SHAPES, make_adapters, make_model, make_tokenizer
from results import add_json_option, recording
from systems import Server
from workloads import adapter_names

from loraplex import AsyncClient
from loraplex.bench import LoadSpec, Selection, Session, parse_lengths, parse_popularity
from loraplex_runtime.flags import parse_bytes

MIB = 1 << 20
ALLOWED_BEYOND_BUDGETS = 100 * MIB
THROUGHPUT_TO_REACH = 0.8
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB", re.MULTILINE)


class Load:
    """Requests to the servers; each call has a seed of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._lengths = parse_lengths(args.prompt, field="--prompt"), parse_lengths(args.output, field="--output")
        self._in_flight: int = args.in_flight

    def drive(self, address: str, num_requests: int, names: Sequence[str], popularity: str, seed: int) -> float:
        """Output tokens per second. Without names the base model is asked."""
        prompt, output = self._lengths
        spec = LoadSpec(
            math.inf,
            num_requests=num_requests,
            max_in_flight=self._in_flight,
            popularity=parse_popularity(popularity),
            prompt_tokens=prompt,
            output_tokens=output,
            seed=seed,
        )
        selection = Selection(tuple(names), base_only=not names)
        session = Session(spec, selection, {"ignore_eos": True})
        asyncio.run(_run(session, address))
        summary = session.recording.summary()
        if summary.errors:
            raise SystemExit(f"{summary.failed} requests failed: {summary.errors[0].example}")
        return summary.output_tokens_per_s


async def _run(session: Session, address: str) -> None:
    async with AsyncClient(address, timeout_s=600, retries=0) as client:
        await session.run(client)


# --- memory -----------------------------------------------------------------------------------------------------------


def processes(pid: int) -> list[int]:
    """The process and what it started, at any depth."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += processes(int(child))
    return found


def peak_bytes(pid: int) -> int:
    """Sum of the peaks of RSS of the process and its children."""
    statuses = [Path(f"/proc/{one}/status").read_text() for one in processes(pid)]
    return sum(int(found[1]) << 10 for status in statuses if (found := _PEAK.search(status)))


def forget_peak(pid: int) -> None:
    """Resets the peak memory of a server's processes; they count anew from here."""
    for one in processes(pid):
        Path(f"/proc/{one}/clear_refs").write_text("5")


class Peaks:
    """Peak memory of one server, in bytes: since it began, and since it was ready."""

    def __init__(self, server: Server) -> None:
        self._pid = server.pid
        self._at_start = peak_bytes(server.pid)
        forget_peak(server.pid)

    def read(self) -> tuple[int, int]:
        """The peaks (since the start, while serving)."""
        serving = peak_bytes(self._pid)
        return max(self._at_start, serving), serving


def measure_memory(args: argparse.Namespace, inputs: Path, load: Load) -> dict[str, object]:
    names = adapter_names(inputs)
    num_requests = args.adapters + args.requests
    with server(args, inputs, adapters=False) as bare:
        peaks = Peaks(bare)
        load.drive(bare.address, num_requests, (), "identical", seed=0)
        without = peaks.read()
    with server(args, inputs, *budget_flags(args)) as full:
        peaks = Peaks(full)
        load.drive(full.address, args.adapters, names, "distinct", seed=0)
        load.drive(full.address, args.requests, names, "zipf:1", seed=1)
        with_adapters = peaks.read()
    differences = [ours - theirs for ours, theirs in zip(with_adapters, without, strict=True)]
    allowed = parse_bytes(args.device_memory) + parse_bytes(args.host_memory) + ALLOWED_BEYOND_BUDGETS
    return {
        "what": "memory",
        "adapters": args.adapters,
        "adapter_mib": round(adapter_bytes(inputs) / MIB, 2),
        "device_memory": args.device_memory,
        "host_memory": args.host_memory,
        "peak_mib": {"since_start": _mib(with_adapters[0]), "serving": _mib(with_adapters[1])},
        "peak_without_adapters_mib": {"since_start": _mib(without[0]), "serving": _mib(without[1])},
        "difference_mib": _mib(max(differences)),
        "allowed_mib": _mib(allowed),
        "reached": max(differences) <= allowed,
    }


def adapter_bytes(inputs: Path) -> int:
    return (inputs / "adapters" / adapter_names(inputs)[0] / "adapter_model.safetensors").stat().st_size


def _mib(num_bytes: int) -> int:
    return round(num_bytes / MIB)


# --- throughput -------------------------------------------------------------------------------------------------------


def measure_throughput(args: argparse.Namespace, inputs: Path, load: Load) -> dict[str, object]:
    names = adapter_names(inputs)
    all_of_them = ["--adapter-slots", str(args.adapters), "--adapter-device-memory", "16GiB"]
    all_of_them += ["--adapter-host-memory", "16GiB"]
    figures: tuple[list[float], list[float]] = ([], [])
    with server(args, inputs, *budget_flags(args)) as tight, server(args, inputs, *all_of_them) as resident:
        both = (tight, resident)
        for one in both:  # everything is loaded once: files read, checked and stored
            load.drive(one.address, args.adapters, names, "distinct", seed=0)
        for number in range(args.rounds + 1):  # the first is not counted
            turn = 1 if number % 2 else -1
            for one, found in list(zip(both, figures, strict=True))[::turn]:
                found.append(load.drive(one.address, args.requests, names, "zipf:1", seed=number + 1))
    ours, theirs = (found[1:] for found in figures)
    by_round = [a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {
        "what": "throughput",
        "popularity": "zipf:1",
        "adapters": args.adapters,
        "tokens_per_s": round(statistics.median(ours), 1),
        "all_resident_tokens_per_s": round(statistics.median(theirs), 1),
        "ratio": round(ratio, 3),
        "spread": [round(min(by_round), 3), round(max(by_round), 3)],
        "to_reach": THROUGHPUT_TO_REACH,
        "reached": ratio >= THROUGHPUT_TO_REACH,
    }


def budget_flags(args: argparse.Namespace) -> list[str]:
    flags = ["--adapter-device-memory", args.device_memory, "--adapter-host-memory", args.host_memory]
    return [*flags, "--adapter-slots", str(args.slots)]


@contextmanager
def server(args: argparse.Namespace, inputs: Path, *flags: str, adapters: bool = True) -> Generator[Server]:
    with tempfile.TemporaryDirectory(dir=inputs) as store:
        told = [*worker_flags(inputs, Path(store), lora=adapters), "--kv-memory", args.kv_memory]
        running = Server("worker", *told, *flags)
        try:
            yield running
        finally:
            running.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--device-memory", default="64MiB")
    parser.add_argument("--host-memory", default="256MiB")
    parser.add_argument("--slots", type=int, default=128, help="more than fit, so that the bytes decide")
    parser.add_argument("--kv-memory", default="64MiB")
    parser.add_argument("--requests", type=int, default=1000, help="of a zipf load")
    parser.add_argument("--in-flight", type=int, default=32)
    # With one length, requests that wait for no adapter would begin and end together, with all prompts in one step.
    parser.add_argument("--prompt", default="16-48", help="tokens: 32, or 16-48")
    parser.add_argument("--output", default="16-48", help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("memory", "throughput"))
    parser.add_argument("--work", type=Path, help="where to make files; default: a temporary directory")
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as directory, recording(args.json) as record:
        inputs = Path(directory)
        make_model(inputs / "model", SHAPES[args.shape])
        make_tokenizer(inputs / "model", SHAPES[args.shape])
        make_adapters(inputs / "adapters", SHAPES[args.shape], args.adapters, [args.rank], torch.bfloat16)
        load = Load(args)
        if args.only != "throughput":
            record(measure_memory(args, inputs, load))
        if args.only != "memory":
            record(measure_throughput(args, inputs, load))


if __name__ == "__main__":
    main()
