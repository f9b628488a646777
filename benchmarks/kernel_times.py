"""Benchmark of segmented LoRA: every implementation against reference and floor.

    python benchmarks/kernel_times.py                       # the whole grid on the CPU, bfloat16
    python benchmarks/kernel_times.py --device cuda --width 4096 --json kernels.json

One figure is the time of one module in one step, in microseconds: the modules of a step follow each other, so that
factors come from memory as they do in a model. Columns:

    reference   the plain torch version
    own         the device's own version, the step prepared before (its composition has not changed)
    new step    the same, with other adapters in every step: preparing included, shared by the modules
    base        the base model's matrix product for the same rows
    floor       the factors of the step's distinct adapters, x, and y twice, at the bandwidth measured at the start
    GB/s        the same bytes by the time of `own`

On CUDA all but `new step` are replayed as CUDA graphs and timed by events on the device, so that they are without the
host's share; `new step` is with it. `--variants` times every variant of the Triton kernels instead of the chosen one.

Implementations take turns within each repetition, and the figure is the best repetition: other load on the machine
then changes all of them alike, or none. With --threads 1 it is processor time, which other load hardly changes.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.backends.registry import choose_backend
from loraplex_server.layers.lora import FactorTable, Segment, SegmentedLora

POPULARITIES = ("identical", "distinct", "uniform", "skewed")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Case:
    dtype: str
    rank: int  # 0: ranks 8, 16 and 64 mixed
    num_requests: int
    rows_per_request: int
    popularity: str


@dataclass(frozen=True)
class Result:
    case: Case
    implementation: str
    num_distinct: int
    reference_us: float
    own_us: float
    new_step_us: float
    base_us: float
    floor_us: float
    num_bytes: int

    @property
    def gb_s(self) -> float:
        return self.num_bytes / self.own_us / 1e3


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    if args.threads:
        torch.set_num_threads(args.threads)
    bandwidth = measure_bandwidth(device)
    implementations = make_implementations(device, args.variants)
    console = Console(stderr=not sys.stdout.isatty())
    results: list[Result] = []
    cases = [
        Case(dtype, rank, num_requests, rows, popularity)
        for dtype in args.dtypes
        for rank in args.ranks
        for rows in args.rows_per_request
        for num_requests in args.requests
        for popularity in (POPULARITIES if num_requests > 1 else ("distinct",))
    ]
    with console.status("measuring") as status:
        for i, case in enumerate(cases):
            status.update(f"case {i + 1} of {len(cases)}")
            results += [measure(case, name, make, device, bandwidth, args) for name, make in implementations.items()]
    machine = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "width": args.width,
        "modules": args.modules,
        "torch": str(torch.__version__),
        "implementations": ", ".join(implementations),
    }
    Console(width=140).print(as_table(results, machine))
    if args.json:
        rows = [
            {**asdict(r.case), **{k: v for k, v in asdict(r).items() if k != "case"}, "gb_s": r.gb_s} for r in results
        ]
        args.json.write_text(json.dumps({"machine": machine, "results": rows}, indent=1) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's choice")
    parser.add_argument("--width", type=int, default=1024, help="input and output features of a module")
    parser.add_argument("--modules", type=int, default=8, help="modules per step, each with factors of its own")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 16, 64, 0], help="0 mixes 8, 16 and 64")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--rows-per-request", nargs="+", type=int, default=[1, 4, 64])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--variants", action="store_true", help="every variant of the Triton kernels")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def make_implementations(device: torch.device, variants: bool) -> dict[str, Callable[[], SegmentedLora]]:
    """Makers of the operations that are measured, by name."""
    if not variants:
        return {choose_backend(device).lora().name: lambda: choose_backend(device).lora()}
    from loraplex_server.backends.cuda.lora.operation import TritonOps

    return {
        "fused": lambda: TritonOps(variant="fused"),
        "rows": lambda: TritonOps(variant="rows"),
        "tiles": lambda: TritonOps(variant="tiles"),
    }


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second: reading on a CPU, copying (read and write) on a GPU."""
    big = torch.ones(2**28 if device.type == "cuda" else 2**25, dtype=torch.float32, device=device)
    if device.type == "cuda":
        other = torch.empty_like(big)
        return 2 * big.nbytes / (best_us([lambda: other.copy_(big)], device, 20)[0] * 1e-6)
    return big.nbytes / (best_us([lambda: big.sum()], device, 20)[0] * 1e-6)


def best_us(actions: Sequence[Callable[[], object]], device: torch.device, repetitions: int) -> list[float]:
    """The best time of each, in turns."""
    best = [float("inf")] * len(actions)
    for repetition in range(repetitions + 2):
        for i, action in enumerate(actions):
            elapsed_us = time_us(action, device)
            if repetition >= 2:
                best[i] = min(best[i], elapsed_us)
    return best


def time_us(action: Callable[[], object], device: torch.device) -> float:
    """Microseconds that the action takes; on CUDA by the device's own clock."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        action()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    since = clock()
    action()
    return (clock() - since) * 1e6


def without_host(action: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The action; on CUDA as a graph, so that its launches are not measured."""
    if device.type != "cuda":
        return action
    action()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph.replay


def make_segments(case: Case, shift: int) -> list[Segment]:
    """Each request draws its adapter; `shift` moves every draw to another adapter."""
    chooser = random.Random(0)
    num_slots = case.num_requests
    segments: list[Segment] = []
    for i in range(case.num_requests):
        slot = {
            "identical": 0,
            "distinct": i,
            "uniform": chooser.randrange(num_slots),
            "skewed": min(int(chooser.expovariate(0.6)), num_slots - 1),
        }[case.popularity]
        start = i * case.rows_per_request
        segments.append(Segment(start, start + case.rows_per_request, (slot + shift) % (num_slots + 1)))
    return segments


def make_table(case: Case, width: int, device: torch.device) -> FactorTable:
    table = FactorTable(case.num_requests + 1, width, width, device)
    for slot in range(case.num_requests + 1):
        rank = case.rank or (8, 16, 64)[slot % 3]
        a = torch.randn(rank, width, device=device) / width**0.5
        b = torch.randn(width, rank, device=device) / rank**0.5
        table.set(slot, LoraFactors(a.to(DTYPES[case.dtype]), b.to(DTYPES[case.dtype]), 2.0))
    return table


def measure(
    case: Case,
    name: str,
    make_ops: Callable[[], SegmentedLora],
    device: torch.device,
    bandwidth: float,
    args: argparse.Namespace,
) -> Result:
    own, fresh = make_ops(), make_ops()
    dtype, width = DTYPES[case.dtype], args.width
    num_rows, num_slots = case.num_requests * case.rows_per_request, case.num_requests + 1
    # Tables of its own for each, or the second would find in the caches what the first has read.
    tables = [[make_table(case, width, device) for _ in range(args.modules)] for _ in range(3)]
    weights = [torch.randn(width, width, device=device).to(dtype) / width**0.5 for _ in range(args.modules)]
    x = torch.randn(num_rows, width, device=device).to(dtype)
    y = torch.zeros(num_rows, width, device=device, dtype=dtype)
    steps = [make_segments(case, shift) for shift in (0, 1)]
    reference = ReferenceOps()
    prepared_reference = reference.prepare(steps[0], num_rows, num_slots, device)
    prepared_own = own.prepare(steps[0], num_rows, num_slots, device)
    num_steps = 0

    def run(ops: SegmentedLora, prepared: object, modules: list[FactorTable], into: Tensor) -> None:
        for table in modules:
            ops.apply(into, x, table, prepared)  # type: ignore[arg-type]

    def new_step() -> None:
        nonlocal num_steps
        num_steps += 1
        prepared = fresh.prepare(steps[num_steps % 2], num_rows, num_slots, device)
        run(fresh, prepared, tables[2], y)

    def base() -> None:
        for weight in weights:
            F.linear(x, weight)

    with torch.inference_mode():
        times = best_us(
            [
                without_host(lambda: run(reference, prepared_reference, tables[0], y), device),
                without_host(lambda: run(own, prepared_own, tables[1], y), device),
                new_step,
                without_host(base, device),
            ],
            device,
            args.repetitions,
        )
    reference_us, own_us, new_step_us, base_us = (t / args.modules for t in times)
    used = {s.adapter_slot for s in steps[0]}
    factors = [f for slot in used if (f := tables[0][0].factors[slot]) is not None]
    num_bytes = sum(f.a.nbytes + f.b.nbytes for f in factors) + x.nbytes + 2 * y.nbytes
    floor_us = num_bytes / bandwidth * 1e6
    return Result(case, name, len(used), reference_us, own_us, new_step_us, base_us, floor_us, num_bytes)


def as_table(results: Sequence[Result], machine: Mapping[str, object]) -> Table:
    title = ", ".join(f"{name} {value}" for name, value in machine.items())
    table = Table(title=title)
    for column in ("dtype", "rank", "requests", "rows each", "popularity", "distinct", "kernels"):
        table.add_column(column)
    for column in ("reference", "own", "new step", "base", "floor", "GB/s", "reference is"):
        table.add_column(column, justify="right")
    for r in results:
        slower = min(r.reference_us / r.own_us, r.reference_us / r.new_step_us)
        table.add_row(
            r.case.dtype,
            str(r.case.rank or "mixed"),
            str(r.case.num_requests),
            str(r.case.rows_per_request),
            r.case.popularity,
            str(r.num_distinct),
            r.implementation,
            *(f"{t:.0f}" for t in (r.reference_us, r.own_us, r.new_step_us, r.base_us)),
            f"{r.floor_us:.1f}",
            f"{r.gb_s:.0f}",
            f"{r.reference_us / r.own_us:.1f}x" + (" !" if slower < 1 else ""),
        )
    return table


if __name__ == "__main__":
    main()
