"""Benchmark of the native CPU kernels by instruction set, beside oneDNN and the floor.

    python benchmarks/kernels.py                                    # the 245M shape, everything
    python benchmarks/kernels.py --isas avx512bf16 avx2 --rows 1 8 32 --threads 1 --json kernels.json
    python benchmarks/kernels.py --kinds lora attention --library old/_kernels.so       # beside another build

One figure is the time of one product, one module's LoRA update or one layer's attention, in microseconds. What it reads
is cold: each call takes the next copy, and all copies together are larger than the caches (but where the floor says
that a case has too few bytes for it). What is compared takes turns in each repetition; a figure is the best repetition.
The floor is the bytes at the bandwidth, or the multiplications at the best rate of oneDNN's prepacked product,
whichever takes longer; both are measured with the best instructions of the machine, and their spread is printed. For
lesser ones `--limit` bounds oneDNN, and with it the floor.

    oneDNN      torch's prepacked linear, with the best instructions of the machine, or those of --limit
    ISA         the native kernel of that instruction set; of another build: ISA (old)
    ISA int8    the same with weights of few bits (--formats plain int8 int4)
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from isa import ISAS, limit_environment
from kernel_cases import COLD_BYTES, SHAPES, Call, Case, attention, products, updates
from rich.console import Console
from rich.table import Table

from loraplex_server.backends.cpu.linear import packed_linear
from loraplex_server.backends.cpu.native import library
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import Library, load
from loraplex_server.layers.quantization import FORMATS

KINDS = ("products", "lora", "attention")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
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


def main() -> None:
    options = _options()
    limit_environment(options.limit)
    torch.set_num_threads(options.threads)
    libraries = _libraries(options.library)
    dtype = DTYPES[options.dtype]
    floors: list[Floor] = []
    rows: list[dict[str, object]] = []
    for case in _cases(options, dtype):
        floors.append(measure_floor(dtype))
        times = {name: round(us, 1) for name, us in measure(case, libraries, options).items()}
        floor_us = round(floors[-1].us(case.num_bytes, case.num_flops), 1)
        rows.append({"case": case.what, "size": case.size, "floor_us": floor_us, **times})
    table = Table(title=f"{options.dtype}, {options.threads} threads, cold memory, best of {options.repeat}, us")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        table.add_column(column.removesuffix("_us"), justify="right")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    Console(width=140).print(table)
    for what, unit in (("bytes_per_s", "GB/s"), ("flops_per_s", "GFLOP/s")):
        values = [value / 1e9 for floor in floors for value in getattr(floor, what)]
        print(f"{what}: {min(values):.0f} to {max(values):.0f} {unit}, median {statistics.median(values):.0f}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


def _cases(options: argparse.Namespace, dtype: torch.dtype) -> Iterator[Case]:
    if "products" in options.kinds:
        for shape in options.shapes:
            for num_rows in options.rows:
                yield products(shape, num_rows, dtype, options.formats)
    if "lora" in options.kinds:
        yield from updates(dtype)
    if "attention" in options.kinds:
        yield from attention(dtype)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64, 512, 2048])
    parser.add_argument(
        "--isas", nargs="+", choices=ISAS, default=list(ISAS), help="those that the machine lacks are left out"
    )
    parser.add_argument("--limit", choices=ISAS, help="of oneDNN and the floor; default: the machine's best")
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
    """Libraries by the suffix of their columns: "" is this build, " (old)" the other one."""
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


def measure(case: Case, libraries: dict[str, Library], options: argparse.Namespace) -> dict[str, float]:
    """Microseconds by column."""
    calls = dict(case.others)
    for word, own in libraries.items():
        kernels = NativeKernels(own, options.threads)
        for behind, make in case.native.items():
            call, num_copies = make(kernels)
            for isa in options.isas:
                if own.functions.lp_use_isa(isa.encode()) == 0 and own.functions.lp_has_kernels():
                    calls[isa + word + behind] = _limited(own, isa, call), num_copies
    best = dict.fromkeys(calls, math.inf)
    with torch.inference_mode():
        for _ in range(options.repeat):
            for name, (call, num_copies) in calls.items():
                call(0)  # its instructions, and the threads awake
                best[name] = min(best[name], *(_mean_s(call, part) for part in _parts(num_copies)))
    return {name: seconds * 1e6 for name, seconds in best.items()}


def _limited(own: Library, isa: str, call: Call) -> Call:
    def limited(copy: int) -> object:
        own.functions.lp_use_isa(isa.encode())
        return call(copy)

    return limited


def _mean_s(call: Call, copies: range) -> float:
    start = time.perf_counter()
    for copy in copies:
        call(copy)
    return (time.perf_counter() - start) / len(copies)


def _parts(num_copies: int) -> list[range]:
    """Ranges of the copies, in order: large enough to time, small enough that other load spares some."""
    size = max(1, num_copies // 4)
    return [range(start, min(start + size, num_copies)) for start in range(0, num_copies, size)]


def _time_s(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
