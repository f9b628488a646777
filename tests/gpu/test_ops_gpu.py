"""Compiled LoRA kernels on a CUDA device against float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from support.lora_cases import POPULARITIES, RANKS, TOLERANCES, bits, random_segments
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.registry import lora_operations
from loraplex_server.layers.lora import FactorTable, Segment, SegmentedLora

STATUS = next(status for status in lora_operations() if status.name == "triton")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not STATUS.usable, reason=f"the Triton kernels cannot run here: {STATUS.reason}"),
]
VARIANTS = ("fused", "rows", "tiles")
MIXED = (16, 1, None, 64, 13, 256, 8, None)  # ranks by slot
NUM_SLOTS = 12
# Of each rank another one, so that all meet: wide, odd (no wide loads of x), and with many splits.
SHAPES = ((4096, 1024), (1000, 72), (14336, 640))
CASES = [
    *(("bfloat16", rank) for rank in (*RANKS, None)),
    *((dtype, rank) for dtype in ("float16", "float32") for rank in (8, 13, 64, None)),
]


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


def make_ops(variant: str | None = None) -> SegmentedLora:
    from loraplex_server.backends.cuda.lora.operation import TritonOps

    return TritonOps(variant=variant)  # type: ignore[arg-type]


def make_factors(rank: int, in_features: int, out_features: int, dtype: torch.dtype) -> LoraFactors:
    a = torch.randn(rank, in_features, device="cuda") / in_features**0.5
    b = torch.randn(out_features, rank, device="cuda") / rank**0.5
    return LoraFactors(a.to(dtype), b.to(dtype), random.choice((0.5, 1.0, 2.0, 1.3)))


def make_table(ranks: Sequence[int | None], shape: tuple[int, int], dtype: torch.dtype) -> FactorTable:
    table = FactorTable(len(ranks), *shape, "cuda")
    for slot, rank in enumerate(ranks):
        table.set(slot, make_factors(rank, *shape, dtype) if rank is not None else None)
    return table


def make_rows(num_rows: int, table: FactorTable, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and y; adding nothing to y must not even change a sign."""
    x = torch.randn(num_rows, table.in_features, device="cuda").to(dtype)
    y = torch.randn(num_rows, table.out_features, device="cuda").to(dtype)
    y[:, ::3] = -0.0
    return x, y


def check(got: Tensor, x: Tensor, y: Tensor, table: FactorTable, segments: Sequence[Segment]) -> None:
    """Right in float64, and bit for bit y where no adapter is."""
    want = y.double()
    is_idle = torch.ones(len(y), dtype=torch.bool)
    rows_of: dict[tuple[int, float], list[int]] = {}
    for s in segments:
        rows_of.setdefault((s.adapter_slot, s.weight), []).extend(range(s.start, s.end))
    for (slot, weight), rows in rows_of.items():
        factors = table.factors[slot]
        if factors is not None and rows:
            at = torch.tensor(rows, device="cuda")
            want[at] += weight * factors.scale * (x[at].double() @ factors.a.double().T) @ factors.b.double().T
            is_idle[rows] = False
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert torch.equal(bits(got.cpu()[is_idle]), bits(y.cpu()[is_idle]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dtype_name", "rank"), CASES)
def test_grid(variant: str, dtype_name: str, rank: int | None) -> None:
    dtype = getattr(torch, dtype_name)
    shape = SHAPES[(0 if rank is None else RANKS.index(rank)) % len(SHAPES)]
    table = make_table(MIXED if rank is None else [rank] * NUM_SLOTS, shape, dtype)
    ops = make_ops(variant)
    for popularity, num_rows, idle_rows in itertools.product(
        POPULARITIES, (1, 7, 64, 300, 1100, 4096) if variant == "tiles" else (1, 7, 64, 200), (False, True)
    ):
        segments = random_segments(popularity, num_rows, len(table.factors), idle_rows=idle_rows)
        x, y = make_rows(num_rows, table, dtype)
        poisoned = sorted(set(range(num_rows)).difference(s.start for s in segments))[:4]
        x[poisoned] = float("nan")
        y[poisoned, :2] = float("inf")
        got, again = y.clone(), y.clone()
        prepared = ops.prepare(segments, num_rows, len(table.factors), x.device)
        ops.apply(got, x, table, prepared)
        check(got, x, y, table, segments)
        ops.apply(again, x, table, prepared)
        assert torch.equal(bits(again), bits(got)), "not the same bits twice"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_prefill_and_decode_with_mixed_ranks_and_a_mixture(dtype: torch.dtype) -> None:
    table = make_table([64, 1, None, 13, 16, 256], (2048, 2048), dtype)
    segments = [Segment(0, 500, 0), Segment(500, 501, 3), Segment(501, 502, 1), Segment(502, 520, 2)]
    segments += [Segment(600, 700, 4, 0.5), Segment(600, 700, 5, 0.5), Segment(700, 4000, 5)]
    x, y = make_rows(4096, table, dtype)
    y[:, :4] = float("nan")
    got = y.clone()
    ops = make_ops()
    ops.apply(got, x, table, ops.prepare(segments, 4096, 6, x.device))
    check(got, x, y, table, segments)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_column_slice_of_y_and_factors_that_are_not_aligned(variant: str) -> None:
    table = make_table([8, 16], (256, 128), torch.bfloat16)
    factors = table.factors[1]
    assert factors is not None
    shifted = torch.empty(factors.a.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(factors.a)
    table.set(1, LoraFactors(shifted.copy_(factors.a), factors.b, factors.scale))
    segments = [Segment(0, 2, 0), Segment(2, 3, 1), Segment(4, 6, 0)]
    x, y = make_rows(7, table, torch.bfloat16)
    wide = torch.randn(7, 515, device="cuda").to(torch.bfloat16)
    wide[:, 129:257] = y
    before = wide.clone()
    ops = make_ops(variant)
    ops.apply(wide[:, 129:257], x, table, ops.prepare(segments, 7, 2, x.device))
    check(wide[:, 129:257].contiguous(), x, y, table, segments)
    for columns in (slice(0, 129), slice(257, None)):
        assert torch.equal(bits(wide[:, columns]), bits(before[:, columns]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_graph_is_replayed_with_other_adapters(variant: str) -> None:
    """Captured without any adapter; afterwards segments and slots change, the graph does not."""
    from loraplex_server.backends.cuda.lora.operation import TritonOps

    num_rows, num_slots, dtype = 40, 6, torch.bfloat16
    ops = TritonOps(max_rank=64, variant=variant)  # type: ignore[arg-type]
    table = make_table([None] * num_slots, (2048, 1536), dtype)
    x, y = make_rows(num_rows, table, dtype)
    got = y.clone()
    reserved = ops.reserve(num_rows, num_slots, x.device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        ops.apply(got, x, table, reserved)  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.apply(got, x, table, reserved)
    for popularity in (*POPULARITIES, "none", "mixture"):
        for slot in random.sample(range(num_slots), 3):
            rank = random.choice([None, 1, 8, 13, 16, 64])
            table.set(slot, make_factors(rank, 2048, 1536, dtype) if rank else None)
        if popularity == "mixture":
            segments = [Segment(0, 20, 0, 0.5), Segment(0, 20, 1, 0.25), Segment(5, 9, 2), Segment(30, 31, 3)]
        elif popularity == "none":
            segments = []
        else:
            segments = random_segments(popularity, num_rows, num_slots, idle_rows=popularity == "uniform")
        got.copy_(y)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            ops.refill(reserved, segments)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        check(got, x, y, table, segments)
        eager = y.clone()
        ops.apply(eager, x, table, reserved)
        assert torch.equal(bits(eager), bits(got))


def test_a_branch_of_a_graph_adds_what_is_added_behind_the_base() -> None:
    """Modules in a chain, as in a model: memory that one has left is another's."""
    num_rows, num_slots, dtype = 24, 6, torch.bfloat16
    ops = make_ops("rows")
    shapes = [(2048, 1536), (1536, 2048), (2048, 4096), (4096, 2048)] * 3
    weights = [(torch.randn(out, num_in, device="cuda") / num_in**0.5).to(dtype) for num_in, out in shapes]
    tables = [make_table([16] * num_slots, shape, dtype) for shape in shapes]
    first = torch.randn(num_rows, 2048, device="cuda").to(dtype)
    reserved = ops.reserve(num_rows, num_slots, first.device)  # type: ignore[attr-defined]

    def chain() -> Tensor:
        x = first
        for weight, table in zip(weights, tables, strict=True):
            x = torch.nn.functional.layer_norm(
                ops.apply_over(lambda w=weight, x=x: x @ w.T, x, [table], reserved), (len(weight),)
            )
        return x

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain()  # compiles
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    assert ops._branch is not None  # type: ignore[attr-defined]
    for popularity, idle_rows in itertools.product(POPULARITIES * 3, (False, True)):
        segments = random_segments(popularity, num_rows, num_slots, idle_rows=idle_rows)
        ops.refill(reserved, segments)  # type: ignore[attr-defined]
        got.fill_(float("nan"))
        graph.replay()
        found = got.clone()
        assert torch.equal(bits(found), bits(chain()))


def test_steps_that_follow_each_other_at_once() -> None:
    """The host fills in the next step while the device is busy: no step may see its successor's segments."""
    ops = make_ops()
    table = make_table([16] * 4, (1024, 1024), torch.bfloat16)
    x, y = make_rows(8, table, torch.bfloat16)
    reserved = ops.reserve(8, 4, x.device)  # type: ignore[attr-defined]
    busy = torch.randn(8192, 8192, device="cuda")
    steps = [[Segment(i, i + 1, (i * step) % 4) for i in range(8)] for step in range(30)]
    results: list[Tensor] = []
    for segments in steps:
        torch.mm(busy, busy)
        got = y.clone()
        ops.refill(reserved, segments)  # type: ignore[attr-defined]
        ops.apply(got, x, table, reserved)
        results.append(got)
    for segments, got in zip(steps, results, strict=True):
        check(got, x, y, table, segments)


def test_siblings() -> None:
    from loraplex_server.backends.cuda.lora.operation import TritonOps

    outs = [4096, 1024, 1000]
    tables = [make_table([16, None, 5, 40], (4096, out), torch.bfloat16) for out in outs]
    for name in ("a_ptrs", "b_ptrs", "ranks", "scales"):
        together = torch.stack([getattr(table, name) for table in tables])
        for i, table in enumerate(tables):
            setattr(table, name, together[i])
    segments = random_segments("uniform", 12, 4, idle_rows=True)
    rows = [make_rows(12, table, torch.bfloat16) for table in tables]
    x = rows[0][0]
    y = torch.cat([mine for _, mine in rows], dim=1)
    for variant in VARIANTS:
        ops = TritonOps(variant=variant)  # type: ignore[arg-type]
        got = y.clone()
        ops.apply_merged(got, x, tables, ops.prepare(segments, 12, 4, x.device))
        for table, mine, (_, before) in zip(tables, got.split(outs, dim=1), rows, strict=True):
            check(mine.contiguous(), x, before, table, segments)
