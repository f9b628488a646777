"""Launches of LoRA's two halves by block sizes and warps.

Every launch that is timed reads factors that no cache holds any more, as in a step. Kernels are compiled first, by
processes of their own at the same time; Triton keeps them on disk.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpu_bench.adapters import SCALE, choose_slots
from gpu_bench.deadline import Deadline
from gpu_bench.machine import describe, time_call
from gpu_bench.report import table, write_json
from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cuda.lora.plan import Launch, choose_launch
from loraplex_server.layers.lora import FactorTable, Segment

FILE = "launches.json"
RANK, MAX_RANK, MAX_SLOTS = 16, 256, 64
DTYPE = torch.bfloat16
# Llama-3.1-8B's: q, k and v; o; gate and up; down.
PRODUCTS: dict[str, tuple[int, tuple[int, ...]]] = {
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
}
BATCHES = ((1, "identical"), (8, "identical"), (8, "distinct"), (32, "identical"), (32, "distinct"), (64, "distinct"))
COLD_BYTES = 128 << 20  # more than a GPU's cache holds
NUM_BEST = 4


class Half(NamedTuple):
    """A launch of one half, with these block sizes."""

    name: str  # shrink or expand
    launch: Launch


@dataclass(frozen=True)
class LaunchFigure:
    """One line of the table."""

    product: str
    batch: int
    popularity: str
    half: str
    launch: dict[str, Any]
    us: float
    is_chosen: bool  # what the server takes


class Modules:
    """Merged linears of one shape with an adapter in each slot, more of them than a cache holds."""

    def __init__(self, product: str, batch: int, popularity: str, *, is_one: bool) -> None:
        self.product, self.batch, self.popularity = product, batch, popularity
        self.num_in, self.outs = PRODUCTS[product]
        self.slots = choose_slots(popularity, batch)
        num_used = len(set(self.slots))
        adapter_bytes = sum(RANK * (self.num_in + out) for out in self.outs) * DTYPE.itemsize
        num_modules = 1 if is_one else max(8, -(-COLD_BYTES // (num_used * adapter_bytes)))
        self.tables = [self._tables(max(self.slots) + 1) for _ in range(num_modules)]
        self.x = torch.randn(batch, self.num_in, device="cuda").to(DTYPE)
        self.y = torch.zeros(batch, sum(self.outs), device="cuda", dtype=DTYPE)

    def _tables(self, num_slots: int) -> list[FactorTable]:
        tables = [FactorTable(num_slots, self.num_in, out, "cuda") for out in self.outs]
        for name in ("a_ptrs", "b_ptrs", "ranks", "scales"):  # side by side, as AdapterSlots has them
            together = torch.stack([getattr(one, name) for one in tables])
            for idx, one in enumerate(tables):
                setattr(one, name, together[idx])
        for one, slot in itertools.product(tables, range(num_slots)):
            a = torch.randn(RANK, self.num_in, device="cuda").mul_(SCALE).to(DTYPE)
            b = torch.randn(one.out_features, RANK, device="cuda").mul_(SCALE).to(DTYPE)
            one.set(slot, LoraFactors(a, b, 2.0))
        return tables

    def call(self, half: Half) -> Callable[[], None]:
        """Launches the half for all modules, one after the other."""
        from loraplex_server.backends.cuda.lora import operation

        ops = operation.TritonOps(MAX_RANK, "rows")
        reserved = ops.reserve(self.batch, MAX_SLOTS, self.x.device)
        ops.refill(reserved, [Segment(row, row + 1, slot) for row, slot in enumerate(self.slots)])
        stride = operation.table_stride(self.x, self.tables[0])
        assert stride is not None
        calls = [operation.Call(self.x, one, reserved.data, MAX_RANK, True, half.launch, stride) for one in self.tables]
        inner = calls[0].inner().normal_()

        def run() -> None:
            for call in calls:
                if half.name == "shrink":
                    operation.shrink(call, inner)
                else:
                    operation.expand(call, self.y, inner)

        return run


def halves(num_in: int, num_out: int, batch: int) -> Iterator[tuple[Half, bool]]:
    """The halves to time for blocks of one row, and whether the server takes that one."""
    chosen = choose_launch(1, batch, num_in, num_out, MAX_RANK, DTYPE.itemsize, "rows")
    for block_in, warps in itertools.product((256, 512, 1024), (2, 4, 8)):
        launch = chosen._replace(block_in=block_in, num_splits=-(-num_in // block_in))
        for lanes in (1, 4):
            one = launch._replace(num_lanes=lanes, shrink_warps=warps)
            yield Half("shrink", one), one == chosen
        for block_out in (64, 128, 256):
            one = launch._replace(block_out=block_out, expand_warps=warps)
            yield Half("expand", one), one == chosen


def run(out: Path, limit_s: float, num_jobs: int) -> bool:
    """Times everything that there is time for, prints the best of each case and what is chosen, and writes all."""
    deadline = Deadline(limit_s)
    compile_all(num_jobs, deadline)
    figures: list[LaunchFigure] = []
    for product, (batch, popularity) in itertools.product(PRODUCTS, BATCHES):
        if not deadline.allows(f"{product}, batch {batch}, {popularity}", 3.0):
            continue
        modules = Modules(product, batch, popularity, is_one=False)
        with torch.inference_mode():
            for half, is_chosen in halves(modules.num_in, sum(modules.outs), batch):
                seconds = time_call(modules.call(half), modules.x.device).seconds
                us = 1e6 * seconds / len(modules.tables)
                figures.append(
                    LaunchFigure(product, batch, popularity, half.name, half.launch._asdict(), us, is_chosen)
                )
        del modules
        torch.cuda.empty_cache()
        report = {**describe("cuda"), "figures": [asdict(one) for one in figures], "left_out": deadline.left_out}
        write_json(out, FILE, report)
    print(text_of(figures))
    for what in deadline.left_out:
        print(f"left out: {what}")
    return not deadline.left_out


def compile_all(num_jobs: int, deadline: Deadline) -> None:
    """Each process compiles some of the kernels. What it did not come to is compiled when it is timed."""
    script = [sys.executable, sys.argv[0], "launches", "--compile"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [subprocess.Popen([*script, str(idx), str(num_jobs)], env=environment) for idx in range(num_jobs)]
    for job in jobs:
        try:
            job.wait(max(0.0, deadline.left_s))
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        if job.returncode:
            print(f"a process that compiles kernels ended with status {job.returncode}", file=sys.stderr)


def compile_some(idx: int, num_jobs: int) -> None:
    """Every `num_jobs`th kernel, by launching it once."""
    with torch.inference_mode():
        for product in PRODUCTS:
            modules = Modules(product, 2, "distinct", is_one=True)
            for half, _ in itertools.islice(halves(modules.num_in, sum(modules.outs), 2), idx, None, num_jobs):
                modules.call(half)()
    torch.cuda.synchronize()


def text_of(figures: Sequence[LaunchFigure]) -> str:
    """Table of the cases: the time of the launch that is chosen, and the fastest launches."""
    rows: list[tuple[object, ...]] = []
    cases = dict.fromkeys((one.product, one.batch, one.popularity, one.half) for one in figures)
    for case in cases:
        found = sorted(
            (one for one in figures if (one.product, one.batch, one.popularity, one.half) == case),
            key=lambda one: one.us,
        )
        chosen = next((one.us for one in found if one.is_chosen), None)
        best = "; ".join(f"{one.us:.2f} {_blocks(one)}" for one in found[:NUM_BEST])
        rows.append((*case, chosen, best))
    return table("Launches (us each)", ("product", "batch", "scenario", "half", "chosen", "best"), rows)


def _blocks(figure: LaunchFigure) -> str:
    one = figure.launch
    if figure.half == "shrink":
        return f"in {one['block_in']}, {one['num_lanes']} lanes, {one['shrink_warps']} warps"
    return f"in {one['block_in']}, out {one['block_out']}, {one['expand_warps']} warps"
