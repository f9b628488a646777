"""Kernel launches on a reserved plan, for CUDA graphs.

Launches are recorded instead of run, so that this needs neither a GPU nor the interpreter.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support.lora_cases import POPULARITIES, random_segments, random_table

pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")

from loraplex_server.backends.cuda.lora import operation as lora
from loraplex_server.backends.cuda.lora.operation import TritonOps
from loraplex_server.layers.lora import Segment

CPU = torch.device("cpu")
KERNELS = ("_shrink_rows", "_expand_rows", "_fused_rows", "_shrink_tiles", "_expand_tiles")


class Recorder:
    """Stands in for a kernel: `kernel[grid](*args, **constants)`."""

    def __init__(self, name: str, launches: list[Any]) -> None:
        self.name = name
        self.launches = launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: object, **constants: object) -> None:
            # What is between the halves has its address from the graph's own pool of memory.
            seen = [a if not isinstance(a, torch.Tensor) else self._identity(a) for a in args]
            self.launches.append((self.name, grid, seen, constants))

        return launch

    def _identity(self, tensor: torch.Tensor) -> object:
        is_inner = tensor.dim() == 4
        return (None if is_inner else tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    for name in KERNELS:
        monkeypatch.setattr(lora, name, Recorder(name, found))
    return found


@pytest.mark.parametrize(("num_rows", "width", "max_rank"), [(1, 64, 16), (8, 4096, 256), (40, 64, 64), (320, 256, 64)])
def test_replays_launch_what_was_captured(launches: list[Any], num_rows: int, width: int, max_rank: int) -> None:
    random.seed(num_rows)
    ops = TritonOps(max_rank=max_rank)
    table = random_table([None] * 6, width, width, torch.bfloat16)
    x, y = torch.zeros(2, num_rows, width, dtype=torch.bfloat16)
    reserved = ops.reserve(num_rows, 6, CPU)
    ops.apply(y, x, table, reserved)
    captured = launches.copy()
    assert captured, "a step without adapters is captured as well"
    for popularity in POPULARITIES:
        table.set(random.randrange(6), random_table([random.randint(1, 16)], width, width, torch.bfloat16).factors[0])
        ops.refill(reserved, random_segments(popularity, num_rows, 6, idle_rows=popularity == "uniform"))
        launches.clear()
        ops.apply(y, x, table, reserved)
        assert launches == captured


def test_eager_steps_launch_nothing_for_nobody(launches: list[Any]) -> None:
    table = random_table([8, None], 64, 64, torch.float32)
    x, y = torch.zeros(2, 4, 64)
    ops = TritonOps()
    ops.apply(y, x, table, ops.prepare([Segment(0, 4, 1)], 4, 2, CPU))
    ops.apply(y, x, table, ops.prepare([], 4, 2, CPU))
    assert not launches
    ops.apply(y, x, table, ops.prepare([Segment(0, 4, 0)], 4, 2, CPU))
    assert launches


def test_siblings_take_as_many_launches_as_one_module(launches: list[Any]) -> None:
    tables = [random_table([16, None], 4096, out, torch.bfloat16) for out in (4096, 1024, 1024)]
    for name in ("a_ptrs", "b_ptrs", "ranks", "scales"):
        together = torch.stack([getattr(table, name) for table in tables])
        for i, table in enumerate(tables):
            setattr(table, name, together[i])
    x, y = torch.zeros(4, 4096, dtype=torch.bfloat16), torch.zeros(4, 6144, dtype=torch.bfloat16)
    ops = TritonOps()
    ops.apply_merged(y, x, tables, ops.prepare([Segment(0, 1, 0), Segment(1, 2, 1)], 4, 2, CPU))
    assert [(name, grid[1]) for name, grid, _, _ in launches] == [("_shrink_rows", 8), ("_expand_rows", 32 + 8 + 8)]
    launches.clear()
    ops.apply_merged(y, x, tables[::-1], ops.prepare([Segment(0, 1, 0)], 4, 2, CPU))
    assert len(launches) == 6
