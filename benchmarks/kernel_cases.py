"""Cases of the native CPU kernels' benchmark: products, LoRA updates, attention, cold memory.

Each case knows the bytes that it must read and the multiplications that it must do, which is its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from attention import BLOCK_SIZE, batch_of, num_blocks
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.attention import Plan, plan_spans
from loraplex_server.backends.cpu.linear import can_pack, packed_linear
from loraplex_server.backends.cpu.lora import runs_of, table_of
from loraplex_server.backends.cpu.native.kernels import NativeKernels, PackedWeight, RunsOfRows
from loraplex_server.layers.lora import FactorTable, Segment
from loraplex_server.layers.quantization import FORMATS, WeightFormat

COLD_BYTES = 192 << 20  # all copies of what a case reads together
MAX_COPIES = 512

# (outputs, inputs) of the 245M shape: q/k/v, o, gate and up, down, output layer.
SHAPES = {"qkv": (1536, 1024), "o": (1024, 1024), "gate_up": (5632, 1024), "down": (1024, 2816), "head": (32000, 1024)}
# (adapters, rows of each): a decode step, a prompt, a batch of prompts.
UPDATES = ((1, 1), (8, 1), (32, 1), (1, 32), (1, 64), (32, 64))
RANK, WIDTH = 16, 1024
HEADS, KV_HEADS, DIM = 16, 4, 64
# (past tokens, queries) of each span
ATTENTION: dict[str, Sequence[tuple[int, int]]] = {
    "1 at 100": [(99, 1)],
    "32 at 100": [(99, 1)] * 32,
    "32 at 1000": [(999, 1)] * 32,
    "drafts of 4, 8 at 500": [(500, 5)] * 8,
    "prompt of 64, 32": [(0, 64)] * 32,
    "prompt of 2048": [(0, 2048)],
}

Call = Callable[[int], object]  # of one of the copies


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    size: str
    num_bytes: int
    num_flops: int
    # Calls by these kernels, and how many copies there are, by the suffix of their columns.
    native: dict[str, Callable[[NativeKernels], tuple[Call, int]]]
    others: dict[str, tuple[Call, int]] = field(default_factory=dict[str, tuple[Call, int]])


def products(shape: str, num_rows: int, dtype: torch.dtype, formats: Sequence[str]) -> Case:
    weight = torch.randn(*SHAPES[shape]).to(dtype)
    x = torch.randn(num_rows, weight.shape[1]).to(dtype)

    def native(form: WeightFormat | None) -> Callable[[NativeKernels], tuple[Call, int]]:
        def make(kernels: NativeKernels) -> tuple[Call, int]:
            packed = _cold_copies(kernels, weight, form)
            return lambda copy: kernels.linear(x, packed[copy], None), len(packed)

        return make

    others: dict[str, tuple[Call, int]] = {}
    if can_pack(weight):
        linears = [packed_linear(weight, None) for _ in range(max(2, COLD_BYTES // weight.nbytes))]
        others["oneDNN"] = (lambda copy: linears[copy](x)), len(linears)
    by_word = {"" if name == "plain" else f" {name}": native(FORMATS.get(name)) for name in formats}
    return Case(shape, str(num_rows), weight.nbytes, 2 * num_rows * weight.numel(), by_word, others)


def _cold_copies(kernels: NativeKernels, weight: Tensor, form: WeightFormat | None) -> list[PackedWeight]:
    packed = [kernels.pack([weight], form)]
    while sum(one.memory.nbytes for one in packed) < COLD_BYTES or len(packed) < 2:
        packed.append(kernels._allocate(*weight.shape, weight.dtype, form))
        packed[-1].memory.copy_(packed[0].memory)
    return packed


def updates(dtype: torch.dtype) -> Iterator[Case]:
    """Cases of LoRA updates: one module of 1024 inputs and outputs, adapters of rank 16."""
    num_slots = max(num for num, _ in UPDATES)
    adapter_bytes = 2 * RANK * WIDTH * dtype.itemsize
    tables = [_table(num_slots, dtype) for _ in range(COLD_BYTES // (num_slots * adapter_bytes))]
    for num_adapters, rows in UPDATES:
        num_rows = num_adapters * rows
        x, y = (torch.randn(num_rows, WIDTH).to(dtype) for _ in range(2))
        groups = [
            runs_of([Segment(i * rows, (i + 1) * rows, first + i) for i in range(num_adapters)])
            for first in range(0, num_slots, num_adapters)
        ]

        def make(
            kernels: NativeKernels, x: Tensor = x, y: Tensor = y, groups: Sequence[RunsOfRows] = groups
        ) -> tuple[Call, int]:
            native = [table_of(table) for table in tables]

            def call(copy: int) -> None:
                kernels.add_lora(y, x, native[copy % len(native)], groups[copy // len(native)], RANK)

            return call, min(MAX_COPIES, len(native) * len(groups))

        num_bytes = num_adapters * adapter_bytes + x.nbytes + 2 * y.nbytes
        yield Case("lora", f"{num_adapters} x {rows}", num_bytes, 4 * num_rows * RANK * WIDTH, {"": make})


def _table(num_slots: int, dtype: torch.dtype) -> FactorTable:
    table = FactorTable(num_slots, WIDTH, WIDTH, "cpu")
    for slot in range(num_slots):
        a, b = torch.randn(RANK, WIDTH) / WIDTH**0.5, torch.randn(WIDTH, RANK) / RANK**0.5
        table.set(slot, LoraFactors(a.to(dtype), b.to(dtype), 2.0))
    return table


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Cases of attention in one layer with the heads of the 245M shape; its keys and values are in their pages."""
    row_bytes = KV_HEADS * DIM * dtype.itemsize
    num_in_all = COLD_BYTES // (2 * BLOCK_SIZE * row_bytes)
    k, v = (torch.randn(num_in_all, BLOCK_SIZE, KV_HEADS, DIM).to(dtype) for _ in range(2))
    order = np.random.default_rng(1).permutation(num_in_all)
    for name, spans in ATTENTION.items():
        size = num_blocks(spans)
        num_copies = min(MAX_COPIES, num_in_all // size)
        plans = [plan_spans(batch_of(spans, order[copy * size : (copy + 1) * size])) for copy in range(num_copies)]
        query = torch.randn(sum(new for _, new in spans), HEADS, DIM).to(dtype)

        def make(kernels: NativeKernels, query: Tensor = query, plans: Sequence[Plan] = plans) -> tuple[Call, int]:
            attend = partial(kernels.attend, query, k, v, scaling=DIM**-0.5, softcap=None, window=None)
            return (lambda number: attend(plans[number].spans)), len(plans)

        num_keys = sum(past + new for past, new in spans)
        num_pairs = sum(new * past + new * (new + 1) // 2 for past, new in spans)  # that may see each other
        yield Case(
            "attention", name, 2 * num_keys * row_bytes + 2 * query.nbytes, 4 * num_pairs * HEADS * DIM, {"": make}
        )
