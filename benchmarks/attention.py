"""Benchmark of paged attention on a CPU: native kernels beside torch.

    python benchmarks/attention.py                                  # heads of the 245M shape, bfloat16
    python benchmarks/attention.py --isa avx512bf16 --heads 32 8 128

One figure is the time of one layer in one step, in milliseconds, with its keys and values written to their pages.
Back ends take turns of some calls each, and the figure is the median of the calls. `--others` names other builds of the
library, to compare versions of the kernels.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from loraplex_server.backends.cpu.attention import NativePagedAttention
from loraplex_server.backends.cpu.cores import default_num_threads
from loraplex_server.backends.cpu.native import library as native
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import IDENTITY, KERNELS
from loraplex_server.backends.reference import TorchPagedAttention
from loraplex_server.layers.attention import AttentionBatch, AttentionSpec, LayerKv, PagedAttention

CPU = torch.device("cpu")
BLOCK_SIZE = 16
NUM_CALLS = 8  # of a turn, behind one that is not measured
PAUSE_S = 0.05  # before a turn: threads of the back end before it look for work for a while, on the same cores
# (past tokens, queries) of each span
CASES: dict[str, Sequence[tuple[int, int]]] = {
    "prompt of 512": [(0, 512)],
    "prompt of 2048": [(0, 2048)],
    "256 after 6000": [(6000, 256)],
    "256 after 32000": [(32000, 256)],
    "decode, 1 at 100": [(99, 1)],
    "decode, 32 at 100": [(99, 1)] * 32,
    "decode, 32 at 1000": [(999, 1)] * 32,
    "drafts of 4, 8 at 500": [(500, 5)] * 8,
}


def main() -> None:
    args = parse_args()
    num_threads = args.threads or default_num_threads()
    torch.set_num_threads(num_threads)
    num_heads, num_kv_heads, dim = args.heads
    spec = AttentionSpec(num_heads, num_kv_heads, dim, dim, dim**-0.5)
    backends: dict[str, PagedAttention] = {"torch": TorchPagedAttention()}
    for path in (native.LIBRARY, *args.others):
        library = load(path)
        if args.isa and library.functions.lp_use_isa(args.isa.encode()) != 0:
            raise SystemExit(f"{path} has no kernels for {args.isa} here")
        name = f"native, {library.isa}" if path == native.LIBRARY else path.name
        backends[name] = NativePagedAttention(NativeKernels(library, num_threads))
    print(f"{num_heads} heads of {dim}, {num_kv_heads} of keys and values; bfloat16, {num_threads} threads; ms")
    for case, spans in CASES.items():
        times = measure(spans, spec, backends, args.repeat)
        base = times["torch"]
        print(f"{case:24}", "   ".join(f"{name} {ms:.3f} ({base / ms:.2f}x)" for name, ms in times.items()), flush=True)


def load(path: Path) -> native.Library:
    """Any build of this version of the interface, of whatever sources."""
    functions = ctypes.CDLL(str(path))
    for name, prototype in {**IDENTITY, **KERNELS}.items():
        if hasattr(functions, name):
            function = getattr(functions, name)
            function.restype, function.argtypes = prototype.returns, prototype.arguments
    return native.Library(functions, path)


def num_blocks(spans: Sequence[tuple[int, int]]) -> int:
    return sum(-(-(past + new) // BLOCK_SIZE) for past, new in spans)


def batch_of(spans: Sequence[tuple[int, int]], order: np.ndarray) -> AttentionBatch:
    """`order`: the blocks of the spans' contexts, one span after the other."""
    query_lens = np.array([new for _, new in spans], dtype=np.int64)
    context_lens = np.array([past + new for past, new in spans], dtype=np.int64)
    needed = -(-context_lens // BLOCK_SIZE)
    tables = np.zeros((len(spans), int(needed.max())), dtype=np.int64)
    for row, (end, count) in enumerate(zip(needed.cumsum(), needed, strict=True)):
        tables[row] = order[end - count]
        tables[row, :count] = order[end - count : end]
    own = [(tables[row], np.arange(past, past + new)) for row, (past, new) in enumerate(spans)]
    slots = np.concatenate([blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for blocks, at in own])
    return AttentionBatch(query_lens, context_lens, tables, BLOCK_SIZE, torch.from_numpy(slots))


def measure(
    spans: Sequence[tuple[int, int]], spec: AttentionSpec, backends: dict[str, PagedAttention], repeat: int
) -> dict[str, float]:
    """Milliseconds by back end."""
    rng = torch.Generator().manual_seed(1)
    order = torch.randperm(num_blocks(spans), generator=rng).numpy()
    batch = batch_of(spans, order)
    num_tokens = len(batch.slots)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng).bfloat16()

    kv = LayerKv(*(random(len(order), BLOCK_SIZE, spec.num_kv_heads, spec.k_dim) for _ in range(2)))
    query = random(num_tokens, spec.num_heads, spec.k_dim)
    key, value = (random(num_tokens, spec.num_kv_heads, spec.k_dim) for _ in range(2))
    plans = {name: backend.plan(batch, torch.bfloat16, CPU) for name, backend in backends.items()}
    times: dict[str, list[float]] = {name: [] for name in backends}
    for _ in range(repeat):
        for name, backend in backends.items():
            time.sleep(PAUSE_S)
            for call in range(NUM_CALLS + 1):
                start = time.perf_counter()
                backend.run(query, key, value, kv, spec, plans[name])
                if call > 0:
                    times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=(16, 4, 64), metavar=("HEADS", "KV_HEADS", "DIM"))
    parser.add_argument("--isa", help="a lesser instruction set than the best")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="other builds of the library")
    return parser.parse_args()


if __name__ == "__main__":
    main()
