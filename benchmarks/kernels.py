"""Benchmark of the native CPU products by instruction set, beside oneDNN and the floor.

    python benchmarks/kernels.py                                    # the 245M shape, all instruction sets, all rows
    python benchmarks/kernels.py --isas avx512bf16 avx2 --rows 1 8 32 --threads 1 --json products.json
    python benchmarks/kernels.py --library old/_kernels.so --isas avx512bf16       # beside another build of the library

One figure is the time of one product in microseconds. Its weights are cold: each call takes the next copy of them, and
all copies together are larger than the caches. What is compared takes turns in each repetition; a figure is the best
repetition. The floor is the weights' bytes at the bandwidth, or the multiplications at the best rate of oneDNN's
prepacked product, whichever takes longer; both are measured before each shape, and their spread is printed.

    oneDNN      torch's prepacked linear, with the best instructions of the machine
    ISA         the native product of that instruction set; of another build: ISA (old)
    ISA int8    the same with weights of few bits (--formats plain int8 int4)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from loraplex_server.backends.cpu.linear import can_pack, packed_linear
from loraplex_server.backends.cpu.native import library
from loraplex_server.backends.cpu.native.kernels import NativeKernels, PackedWeight
from loraplex_server.backends.cpu.native.library import Library, load
from loraplex_server.layers.quantization import FORMATS, WeightFormat

# (outputs, inputs) of the 245M shape: q/k/v, o, gate and up, down, output layer.
SHAPES = {"qkv": (1536, 1024), "o": (1024, 1024), "gate_up": (5632, 1024), "down": (1024, 2816), "head": (32000, 1024)}
ISAS = ("amx", "avx512bf16", "avx512", "avx2")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COLD_BYTES = 192 << 20  # all copies of a weight together
GEMM = (2048, 2048, 2048)  # rows, outputs, inputs
ROW = 1024  # numbers of a row that is read for the bandwidth
NUM_TRIES = 7  # for bandwidth and rate


@dataclass(frozen=True, slots=True)
class Floor:
    """Medians over tries, and their extremes."""

    bytes_per_s: tuple[float, float, float]  # least, median, most
    flops_per_s: tuple[float, float, float]

    def us(self, num_bytes: int, num_flops: int) -> float:
        return max(num_bytes / self.bytes_per_s[2], num_flops / self.flops_per_s[2]) * 1e6


@dataclass(frozen=True, slots=True)
class Result:
    shape: str
    num_rows: int
    floor_us: float
    times_us: dict[str, float]


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    libraries = _libraries(options.library)
    dtype = DTYPES[options.dtype]
    console, results = Console(), list[Result]()
    floors: list[Floor] = []
    table = Table(title=f"{options.dtype}, {options.threads} threads, cold weights, best of {options.repeat}, us")
    names: list[str] = []
    for shape in options.shapes:
        floors.append(measure_floor(dtype))
        for num_rows in options.rows:
            result = measure(shape, num_rows, dtype, floors[-1], libraries, options)
            results.append(result)
            if not names:
                names = list(result.times_us)
                for column in ("shape", "rows", "floor", *names):
                    table.add_column(column, justify="right")
            times = [f"{result.times_us[name]:.0f}" for name in names]
            table.add_row(shape, str(num_rows), f"{result.floor_us:.0f}", *times)
    console.print(table)
    for what, unit in (("bytes_per_s", "GB/s"), ("flops_per_s", "GFLOP/s")):
        values = [value / 1e9 for floor in floors for value in getattr(floor, what)]
        print(f"{what}: {min(values):.0f} to {max(values):.0f} {unit}, median {statistics.median(values):.0f}")
    if options.json is not None:
        rows = [{"shape": r.shape, "rows": r.num_rows, "floor_us": r.floor_us, **r.times_us} for r in results]
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 512, 2048])
    parser.add_argument(
        "--isas", nargs="+", choices=ISAS, default=list(ISAS), help="those that the machine lacks are left out"
    )
    parser.add_argument("--formats", nargs="+", choices=("plain", *FORMATS), default=["plain"])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument(
        "--library", type=Path, help="another build of the native library, which takes turns with this one"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _libraries(other: Path | None) -> dict[str, Library]:
    """By the word behind an instruction set's name."""
    own = load().library
    if own is None:
        raise SystemExit(f"no native CPU kernels here: {load().status.reason}")
    found = {"": own}
    if other is not None:
        functions = ctypes.CDLL(str(other.resolve()))
        library._declare(functions, {**library.IDENTITY, **library.KERNELS})
        found = {" (old)": Library(functions, other), "": own}
    return found


# --- measuring --------------------------------------------------------------------------------------------------------


def measure_floor(dtype: torch.dtype) -> Floor:
    matrix, vector = torch.ones(COLD_BYTES // 4 // ROW, ROW), torch.ones(ROW)
    num_rows, num_outputs, num_inputs = GEMM
    x = torch.randn(num_rows, num_inputs).to(dtype)
    linear = packed_linear(torch.randn(num_outputs, num_inputs).to(dtype), None)
    with torch.inference_mode():
        reads = [
            matrix.nbytes / min(_time_s(lambda: matrix @ vector), _time_s(lambda: matrix.sum()))
            for _ in range(NUM_TRIES)
        ]
        rates = [2 * math.prod(GEMM) / _time_s(lambda: linear(x)) for _ in range(NUM_TRIES)]
    return Floor(*((min(values), statistics.median(values), max(values)) for values in (reads, rates)))


def measure(
    shape: str,
    num_rows: int,
    dtype: torch.dtype,
    floor: Floor,
    libraries: dict[str, Library],
    options: argparse.Namespace,
) -> Result:
    num_outputs, num_inputs = SHAPES[shape]
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    x = torch.randn(num_rows, num_inputs).to(dtype)
    num_copies = max(2, COLD_BYTES // weight.nbytes)
    calls: dict[str, Callable[[int], object]] = {}
    if can_pack(weight):
        linears = [packed_linear(weight, None) for _ in range(num_copies)]
        calls["oneDNN"] = lambda copy: linears[copy](x)
    copies = dict.fromkeys(calls, num_copies)
    for word, own in libraries.items():
        kernels = NativeKernels(own, options.threads)
        for name in options.formats:
            packed = _cold_copies(kernels, weight, FORMATS.get(name))
            for isa in options.isas:
                if own.functions.lp_use_isa(isa.encode()) == 0 and own.functions.lp_has_kernels():
                    column = isa + word + ("" if name == "plain" else f" {name}")
                    calls[column], copies[column] = _native(own, isa, kernels, x, packed), len(packed)
    best = dict.fromkeys(calls, math.inf)
    with torch.inference_mode():
        for _ in range(options.repeat):
            for name, call in calls.items():
                call(0)  # its instructions, and the threads awake
                best[name] = min(best[name], *(_mean_s(call, part) for part in _parts(copies[name])))
    return Result(
        shape, num_rows, floor.us(weight.nbytes, 2 * num_rows * weight.numel()), {n: s * 1e6 for n, s in best.items()}
    )


def _cold_copies(kernels: NativeKernels, weight: Tensor, form: WeightFormat | None) -> list[PackedWeight]:
    packed = [kernels.pack([weight], form)]
    while sum(one.memory.nbytes for one in packed) < COLD_BYTES or len(packed) < 2:
        packed.append(kernels._allocate(*weight.shape, weight.dtype, form))
        packed[-1].memory.copy_(packed[0].memory)
    return packed


def _native(own: Library, isa: str, kernels: NativeKernels, x: Tensor, packed: list) -> Callable[[int], object]:
    def call(copy: int) -> object:
        own.functions.lp_use_isa(isa.encode())
        return kernels.linear(x, packed[copy], None)

    return call


def _mean_s(call: Callable[[int], object], copies: range) -> float:
    start = time.perf_counter()
    for copy in copies:
        call(copy)
    return (time.perf_counter() - start) / len(copies)


def _parts(num_copies: int) -> list[range]:
    """Of the copies, in order: large enough to time, small enough that other load spares some."""
    size = max(1, num_copies // 4)
    return [range(start, min(start + size, num_copies)) for start in range(0, num_copies, size)]


def _time_s(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
