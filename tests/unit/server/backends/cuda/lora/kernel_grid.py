"""Pairwise grid of the LoRA kernels' variants.

Not collected by itself: `test_interpreter.py` runs it in Triton's interpreter, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/cuda/lora/kernel_grid.py`.
"""

from __future__ import annotations

import random

import pytest
import torch
from support.lora_cases import (
    POPULARITIES,
    RANKS,
    Problem,
    bits,
    pairwise,
    random_problem,
    random_segments,
    random_table,
)
from torch import Tensor

from loraplex_server.backends.cuda.lora import operation as lora
from loraplex_server.backends.cuda.lora.operation import TritonOps
from loraplex_server.backends.cuda.lora.plan import MAX_TERMS, Variant
from loraplex_server.layers.lora import FactorTable, PreparedSegments, ReplayableLora, Segment

assert lora.INTERPRETED, "without the interpreter these kernels need a GPU"

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
VARIANTS: list[Variant] = ["fused", "rows", "tiles"]
MIXED = (16, 1, None, 64, 13)  # ranks by slot
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills with NaN what the two halves hand over: nothing may be read that was not written."""
    inner = lora.Call.inner
    monkeypatch.setattr(lora.Call, "inner", lambda call: inner(call).fill_(float("nan")))


@pytest.mark.parametrize(
    ("variant", "dtype", "rank", "popularity", "num_rows", "idle_rows", "shape"),
    pairwise(
        VARIANTS,
        DTYPES,
        [*RANKS, None],
        POPULARITIES,
        [1, 3, 18, 40],
        (False, True),
        [(48, 40), (144, 136), (1100, 72)],
    ),
    ids=lambda value: "mixed" if value is None else str(value).removeprefix("torch."),
)
def test_grid(
    variant: Variant,
    dtype: torch.dtype,
    rank: int | None,
    popularity: str,
    num_rows: int,
    idle_rows: bool,
    shape: tuple[int, int],
) -> None:
    table = random_table(MIXED if rank is None else [rank] * 3, *shape, dtype)
    segments = random_segments(popularity, num_rows, len(table.factors), idle_rows=idle_rows)
    problem = random_problem(segments, table, num_rows, dtype)
    problem.x[[row for row in range(num_rows) if not problem.is_touched(row)]] = float("nan")
    problem.check(problem.run(TritonOps(variant=variant)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_mixture_is_added_in_one_go(variant: Variant) -> None:
    """Rows with one, two and three adapters, some of them absent here; rounded once, as if there were one."""
    table = random_table([16, 5, None, 40], 96, 72, torch.float16)  # bfloat16 the interpreter cuts off, not rounds
    segments = [
        Segment(0, 9, 0, 0.7),
        Segment(0, 9, 1, 0.3),
        Segment(2, 7, 3),
        Segment(4, 5, 1, 0.5),
        Segment(9, 11, 2),
    ]
    segments += [Segment(11, 12, 2, 0.5), Segment(11, 12, 3, 0.5)]
    problem = random_problem(segments, table, 13, torch.float16)
    got = problem.run(TritonOps(variant=variant))
    problem.check(got)
    # Half a unit in the last place. Tiles also round what is between the halves.
    atol = 1e-5 if variant != "tiles" else 5e-3
    torch.testing.assert_close(got.double(), problem.expected(), rtol=2**-11, atol=atol)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_infinity_meets_no_rank_that_the_adapter_has_not(variant: Variant) -> None:
    """An infinity times the zero of a masked rank would be no number."""
    table = random_table([1], 48, 40, torch.float32)
    problem = random_problem([Segment(0, 2, 0)], table, 2, torch.float32)
    problem.x[1, 7] = float("inf")
    got = problem.run(TritonOps(variant=variant))
    assert got[1].isinf().all()
    problem.check(got)


@pytest.mark.parametrize("variant", ["fused", "rows"])
def test_rows_of_a_popular_adapter_have_programs_of_their_own(variant: Variant) -> None:
    table = random_table([16, 7], 96, 72, torch.bfloat16)
    problem = random_problem([Segment(0, 34, 0), Segment(36, 37, 1)], table, 38, torch.bfloat16)
    ops = TritonOps(variant=variant)
    assert problem.prepared(ops).data.blocks[:, 1].tolist() == [1] * 35
    problem.check(problem.run(ops))


def test_long_steps_take_large_tiles() -> None:
    table = random_table([16, 70], 64, 136, torch.float32)
    problem = random_problem([Segment(3, 530, 0), Segment(530, 535, 1)], table, 540, torch.float32)
    assert problem.prepared(TritonOps()).data.block_rows == 64
    problem.check(problem.run(TritonOps()))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_in_every_batch(variant: Variant, dtype: torch.dtype) -> None:
    ops = TritonOps(variant=variant)
    table = random_table([8, 16, 3, 64], 600, 48, dtype)
    mixed = random_problem([Segment(i, i + 1, i % 4) for i in range(9)], table, 9, dtype)
    together = mixed.run(ops)
    for row in range(0, 9, 2):
        alone = Problem(table, [Segment(0, 1, row % 4)], mixed.x[row : row + 1], mixed.y[row : row + 1])
        assert torch.equal(bits(alone.run(ops)[0]), bits(together[row]))


def test_factors_that_lie_anywhere() -> None:
    """Loads are wide only where every factor of the table begins at a multiple of 16 bytes."""
    table = random_table([8, 16], 64, 40, torch.float32)
    factors = table.factors[1]
    assert factors is not None
    shifted = torch.empty(factors.a.numel() + 1)[1:].view_as(factors.a)
    shifted.copy_(factors.a)
    table.set(1, type(factors)(shifted, factors.b, factors.scale))
    problem = random_problem([Segment(0, 2, 0), Segment(2, 4, 1)], table, 5, torch.float32)
    problem.check(problem.run(TritonOps()))
    reserved = TritonOps().reserve(5, 2, CPU)
    with pytest.raises(ValueError, match="multiple of 16"):
        TritonOps().apply(problem.y, problem.x, table, reserved)


# --- reserved plans ---------------------------------------------------------------------------------------------------


def check_reserved(ops: TritonOps, problem: Problem, reserved: PreparedSegments) -> None:
    got = problem.y.clone()
    ops.apply(got, problem.x, problem.table, reserved)
    problem.check(got)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_reserved_plan_serves_every_composition(variant: Variant) -> None:
    ops = TritonOps(max_rank=64, variant=variant)
    assert isinstance(ops, ReplayableLora)
    num_rows = 10
    table = random_table(MIXED, 96, 72, torch.bfloat16)
    reserved = ops.reserve(num_rows, len(MIXED), CPU)
    address = reserved.data.words.data_ptr()
    check_reserved(ops, random_problem([], table, num_rows, torch.bfloat16), reserved)
    for popularity in (*POPULARITIES, "none", "distinct", "mixture", "identical"):
        if popularity == "mixture":
            segments = [Segment(0, 4, 0, 0.5), Segment(0, 4, 4, 0.25), Segment(2, 3, 3), Segment(6, 7, 1)]
        elif popularity == "none":
            segments = []
        else:
            segments = random_segments(popularity, num_rows, len(MIXED), idle_rows=popularity == "uniform")
        ops.refill(reserved, segments)
        check_reserved(ops, random_problem(segments, table, num_rows, torch.bfloat16), reserved)
    assert reserved.data.words.data_ptr() == address
    assert reserved.segments == ()


def test_a_reserved_plan_has_the_bits_of_a_prepared_one() -> None:
    ops = TritonOps(max_rank=64, variant="rows")
    table = random_table(MIXED, 600, 72, torch.bfloat16)
    problem = random_problem(random_segments("uniform", 7, 5, idle_rows=True), table, 7, torch.bfloat16)
    reserved = ops.reserve(7, 5, CPU)
    ops.refill(reserved, problem.segments)
    got = problem.y.clone()
    ops.apply(got, problem.x, table, reserved)
    assert torch.equal(bits(got), bits(problem.run(ops)))


def test_slots_change_under_a_reserved_plan() -> None:
    """Nothing is read from the host's lists once the launches are captured: here they are changed behind its back."""
    ops = TritonOps(max_rank=64, variant="rows")
    table, other = (random_table([16, 13, None], 64, 40, torch.float32) for _ in range(2))
    reserved = ops.reserve(6, 3, CPU)
    segments = random_segments("uniform", 6, 3, idle_rows=False)
    ops.refill(reserved, segments)
    for mine, theirs in (
        (table.a_ptrs, other.a_ptrs),
        (table.b_ptrs, other.b_ptrs),
        (table.ranks, other.ranks),
        (table.scales, other.scales),
    ):
        mine.copy_(theirs)
    problem = random_problem(segments, other, 6, torch.float32)
    got = problem.y.clone()
    ops.apply(got, problem.x, table, reserved)
    problem.check(got)


def test_what_does_not_fit_leaves_the_plan_as_it_was() -> None:
    ops = TritonOps(max_rank=16, variant="rows")
    table = random_table([16] * 6, 32, 24, torch.float32)
    problem = random_problem([Segment(0, 2, 1), Segment(2, 3, 5)], table, 4, torch.float32)
    reserved = ops.reserve(4, 6, CPU)
    ops.refill(reserved, problem.segments)
    for wrong in (
        [Segment(0, 4, slot) for slot in range(MAX_TERMS + 1)],
        [Segment(0, 5, 0)],
        [Segment(0, 1, 6)],
    ):
        with pytest.raises(ValueError):
            ops.refill(reserved, wrong)
        check_reserved(ops, problem, reserved)
    table.set(0, random_table([17], 32, 24, torch.float32).factors[0])
    with pytest.raises(ValueError, match="rank 17"):
        ops.apply(problem.y, problem.x, table, reserved)


# --- siblings ---------------------------------------------------------------------------------------------------------


def neighbours(
    ranks: list[list[int | None]], in_features: int, outs: list[int], dtype: torch.dtype
) -> list[FactorTable]:
    """Tables whose device parts are rows of one tensor, as AdapterSlots lays them out."""
    tables = [random_table(r, in_features, out, dtype) for r, out in zip(ranks, outs, strict=True)]
    for name in ("a_ptrs", "b_ptrs", "ranks", "scales"):
        together: Tensor = torch.stack([getattr(table, name) for table in tables])
        for i, table in enumerate(tables):
            setattr(table, name, together[i])
    return tables


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("outs", [[136, 40, 24], [40, 136]], ids=str)
@pytest.mark.parametrize("is_reserved", [False, True])
def test_siblings(variant: Variant, outs: list[int], is_reserved: bool) -> None:
    """One launch (or two) adds what three modules would: q, k and v, of which an adapter may leave some alone."""
    ops = TritonOps(max_rank=20, variant=variant)
    ranks: list[list[int | None]] = [[16, None, 5], [16, 20, None], [None, 20, 3]]
    tables = neighbours(ranks[: len(outs)], 96, outs, torch.float32)
    segments = [*random_segments("uniform", 9, 3, idle_rows=True), Segment(9, 10, 0, 0.5), Segment(9, 10, 2, 0.5)]
    problems = [random_problem(segments, table, 11, torch.float32) for table in tables]
    prepared = ops.reserve(11, 3, CPU) if is_reserved else ops.prepare(segments, 11, 3, CPU)
    if is_reserved:
        ops.refill(prepared, segments)
    y = torch.cat([problem.y for problem in problems], dim=1)
    ops.apply_merged(y, problems[0].x, tables, prepared)
    for problem, got in zip(problems, y.split(outs, dim=1), strict=True):
        problem.x = problems[0].x
        problem.check(got)


def test_siblings_that_lie_apart() -> None:
    tables = [random_table([8, 4], 48, out, torch.float32) for out in (24, 40)]
    problems = [random_problem([Segment(0, 2, 0), Segment(2, 3, 1)], table, 4, torch.float32) for table in tables]
    y = torch.cat([problem.y for problem in problems], dim=1)
    ops = TritonOps()
    ops.apply_merged(y, problems[0].x, tables, problems[0].prepared(ops))
    for problem, got in zip(problems, y.split([24, 40], dim=1), strict=True):
        problem.x = problems[0].x
        problem.check(got)
