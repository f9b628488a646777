"""Torch LoRA on a CPU, beyond the common suite."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.lora_cases import random_factors, random_problem, random_segments, random_table

from loraplex_server.backends.cpu import torch_lora
from loraplex_server.backends.cpu.torch_lora import FEW_ROWS, CpuOps, has_fast_half
from loraplex_server.layers.lora import Segment


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_fast", [False, True])
def test_every_way_is_right(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_fast: bool) -> None:
    """Results are right whatever the machine is thought to be fast at, and for few rows as for many."""
    torch.manual_seed(5)
    monkeypatch.setattr(torch_lora, "has_fast_half", lambda dtype: is_fast)
    table = random_table([8, 3, None, 16, 5], 48, 40, dtype)
    segments = random_segments("uniform", 14, 5, idle_rows=True)
    segments += [Segment(14, 16, 0, 0.5), Segment(14, 16, 1, 0.5), Segment(17, 18, 3, -0.5)]
    segments += [Segment(18, 18 + FEW_ROWS, 0), Segment(22, 23 + FEW_ROWS, 1)]
    problem = random_problem(segments, table, 30, dtype)
    problem.check(problem.run(CpuOps()))


def test_a_row_of_half_precision_is_rounded_once() -> None:
    """Few rows are computed in float32: no sum is rounded on the way to y."""
    torch.manual_seed(5)
    problem = random_problem([Segment(0, 1, 0)], random_table([8], 48, 40, torch.bfloat16), 1, torch.bfloat16)
    factors = problem.table.factors[0]
    assert factors is not None
    term = problem.x.float() @ factors.a.float().T @ factors.b.float().T
    assert torch.equal(problem.run(CpuOps()), (problem.y.float() + factors.scale * term).bfloat16())


def test_a_clear_slot_frees_its_factors() -> None:
    table, ops = random_table([8, 8], 32, 32, torch.float32), CpuOps()
    random_problem([Segment(0, 1, 0), Segment(1, 2, 1)], table, 2, torch.float32).run(ops)
    factors = random_factors(8, 32, 32, torch.float32)
    alive = weakref.ref(factors.a)
    table.set(0, factors)
    random_problem([Segment(0, 1, 0), Segment(1, 2, 1)], table, 2, torch.float32).run(ops)
    table.set(0, None)
    del factors
    gc.collect()
    assert alive() is None


def test_only_half_precision_can_be_fast_half() -> None:
    assert not has_fast_half(torch.float32)
    assert not has_fast_half(torch.float64)
