"""Native segmented LoRA beyond the common suite."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from support.guarded_memory import at_end, at_start
from support.lora_cases import RANKS, Problem, bits, random_factors, random_problem, random_segments, random_table
from support.native_kernels import isas, native_kernels, using
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.lora import NativeOps, runs_of
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.layers.lora import FactorTable, Segment

DTYPES = [torch.float32, torch.bfloat16]
CPU = torch.device("cpu")


@pytest.fixture(params=isas(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)
    with using(request.param):
        yield request.param


@pytest.fixture
def ops(isa: str) -> NativeOps:
    return NativeOps(native_kernels())


# --- factors wherever they lie ----------------------------------------------------------------------------------------


def at_odd_address(values: Tensor) -> Tensor:
    """The values inside a larger buffer, at an address that is a multiple of the element's size and of nothing else."""
    buffer = torch.full((values.numel() + 40,), float("nan"), dtype=values.dtype)
    per_line = 64 // values.element_size()
    start = (1 - buffer.data_ptr() // values.element_size()) % per_line
    copy = buffer[start : start + values.numel()].view(values.shape)
    assert copy.data_ptr() % 64 == values.element_size()
    return copy.copy_(values)


def placed(table: FactorTable, place: dict[str, object]) -> FactorTable:
    moved = FactorTable(len(table.factors), table.in_features, table.out_features, CPU)
    for slot, factors in enumerate(table.factors):
        if factors is not None:
            moved.set(slot, LoraFactors(place["a"](factors.a), place["b"](factors.b), factors.scale))  # type: ignore[operator]
    return moved


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [at_odd_address, at_end, at_start], ids=lambda f: f.__name__)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 48), (33, 17), (7, 1), (96, 300)])
def test_factors_where_they_lie(
    ops: NativeOps, dtype: torch.dtype, place: object, in_features: int, out_features: int
) -> None:
    """Every kind of rank (pieces of 1, 8 and 16, odd ones), one row and several; x and y between walls too."""
    ranks = [*RANKS, 2, 3, 15, 17, 33, 66, 100]
    table = placed(random_table(ranks, in_features, out_features, dtype), {"a": place, "b": place})
    segments: list[Segment] = []
    for slot in range(len(ranks)):
        start = segments[-1].end if segments else 0
        segments.append(Segment(start, start + random.choice((1, 2, 5, 19)), slot))
    problem = random_problem(segments, table, segments[-1].end, dtype)
    problem.x, problem.y = at_end(problem.x), at_end(problem.y)
    y = at_end(problem.y)
    ops.apply(y, problem.x, table, problem.prepared(ops))
    problem.check(y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 5, 16, 70])
def test_what_lies_around_y_stays(ops: NativeOps, dtype: torch.dtype, rank: int) -> None:
    table = random_table([rank], 32, 21, dtype)
    problem = random_problem([Segment(1, 4, 0), Segment(5, 6, 0)], table, 7, dtype)
    wide = torch.full((7, 40), 3.0, dtype=dtype)
    wide[:, 9:30] = problem.y
    ops.apply(wide[:, 9:30], problem.x, table, problem.prepared(ops))
    problem.check(wide[:, 9:30])
    assert (wide[:, :9] == 3).all()
    assert (wide[:, 30:] == 3).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 20])
@pytest.mark.parametrize("rank", [2, 5, 16, 40])
def test_inner_products_are_not_rounded(ops: NativeOps, dtype: torch.dtype, num_rows: int, rank: int) -> None:
    """257 needs a bit more than bfloat16 has, which is seen when 256 are taken away."""
    x = torch.zeros(num_rows, 64, dtype=dtype)
    x[:, 7], x[:, 50] = 256, 1
    a, b = torch.ones(rank, 64, dtype=dtype), torch.zeros(37, rank, dtype=dtype)
    a[0, 50] = 0
    b[:, 0], b[:, rank - 1] = -1, 1
    table = FactorTable(1, 64, 37, CPU)
    table.set(0, LoraFactors(a, b, 1.0))
    y = torch.zeros(num_rows, 37, dtype=dtype)
    ops.apply(y, x, table, ops.prepare([Segment(0, num_rows, 0)], num_rows, 1, CPU))
    assert (y == 1).all()


# --- bits -------------------------------------------------------------------------------------------------------------


def alone(ops: NativeOps, problem: Problem, row: int) -> Tensor:
    """The row's result when it is the only one."""
    uses = [Segment(0, 1, s.adapter_slot, s.weight) for s in problem.segments if s.start <= row < s.end]
    single = Problem(problem.table, uses, problem.x[row : row + 1], problem.y[row : row + 1])
    return single.run(ops)[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("popularity", ["identical", "distinct", "skewed"])
@pytest.mark.parametrize(
    ("ranks", "num_outputs"), [([8, 13, 64, 1, 100, 256], 333), ([16, 8, 32, 24, 72, 6], 320)], ids=["odd", "even"]
)
def test_a_row_has_the_same_bits_in_any_batch(
    isa: str, dtype: torch.dtype, num_threads: int, popularity: str, ranks: list[int], num_outputs: int
) -> None:
    table = random_table(ranks, 608, num_outputs, dtype)
    segments = random_segments(popularity, 37, 6, idle_rows=True)
    problem = random_problem([*segments, Segment(3, 30, 2, 0.5), Segment(30, 36, 1, 0.25)], table, 37, dtype)
    together = problem.run(NativeOps(native_kernels(num_threads)))
    problem.check(together)
    single = NativeOps(native_kernels(1))
    for row in range(37):
        assert torch.equal(bits(alone(single, problem, row)), bits(together[row])), row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bad_row_stays_alone(ops: NativeOps, dtype: torch.dtype) -> None:
    table = random_table([8, 13], 64, 48, dtype)
    problem = random_problem([Segment(0, 9, 0), Segment(9, 20, 1), Segment(4, 12, 1, 0.5)], table, 20, dtype)
    good = problem.run(ops)
    for row, bad in ((2, float("nan")), (11, float("inf")), (17, float("-inf"))):
        problem.x[row, 3] = bad
    got = problem.run(ops)
    for row in range(20):
        if row in (2, 11, 17):
            assert not got[row].isfinite().any()
        else:
            assert torch.equal(bits(got[row]), bits(good[row]))


# --- steps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ranks_come_and_go_between_steps(ops: NativeOps, dtype: torch.dtype) -> None:
    """The same segments step after step, which are prepared once, while their slots change under them."""
    table = random_table([4, None, 2], 32, 24, dtype)
    segments = [Segment(0, 3, 0), Segment(3, 5, 1), Segment(4, 8, 2, 0.5), Segment(40, 60, 1)]
    for step in range(12):
        problem = random_problem(segments, table, 60, dtype)
        problem.check(problem.run(ops))
        rank = random.choice((None, 1, 7, 32, 256))
        table.set(step % 3, None if rank is None else random_factors(rank, 32, 24, dtype))


def test_scratch_grows_with_rows_ranks_and_mixtures(ops: NativeOps) -> None:
    for num_rows, rank, num_uses in ((1, 1, 1), (90, 1, 1), (3, 256, 1), (90, 256, 3), (1, 8, 3), (300, 64, 2)):
        table = random_table([rank] * num_uses, 32, 24, torch.float32)
        segments = [Segment(0, num_rows, slot, 0.3) for slot in range(num_uses)]
        problem = random_problem(segments, table, num_rows, torch.float32)
        problem.check(problem.run(ops))


def test_the_same_segments_over_fewer_slots_are_checked_again(ops: NativeOps) -> None:
    segments = [Segment(0, 1, 5)]
    ops.prepare(segments, 2, 6, CPU)
    with pytest.raises(ValueError, match="Segment"):
        ops.prepare(segments, 2, 5, CPU)


def test_other_dtypes_go_to_torch(ops: NativeOps) -> None:
    for dtype in (torch.float16, torch.float64):
        table = random_table([8, 3], 32, 24, dtype)
        problem = random_problem([Segment(0, 2, 0), Segment(3, 4, 1)], table, 5, dtype)
        assert torch.equal(bits(problem.run(ops)), bits(problem.run(CpuOps())))


# --- runs -------------------------------------------------------------------------------------------------------------


def listed(segments: list[Segment]) -> list[tuple[int, int, list[tuple[int, float]]]]:
    runs = runs_of(segments)
    starts, ends, firsts, slots, weights = (array.tolist() for array in runs.arrays)
    assert runs.struct.num_runs == len(starts)
    assert runs.max_uses == max((b - a for a, b in pairwise(firsts)), default=0)
    return [
        (start, end, list(zip(slots[first:last], weights[first:last], strict=True)))
        for start, end, (first, last) in zip(starts, ends, pairwise(firsts), strict=True)
    ]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 16, 17])
def test_own_weights_of_full_rank(ops: NativeOps, dtype: torch.dtype, num_rows: int) -> None:
    """A full-rank product goes into some columns of some rows; a row has the same bits in any batch of few."""
    weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((70, 48), (70,)))
    x, wide = torch.randn(num_rows, 48, dtype=dtype), torch.zeros(num_rows, 100, dtype=dtype)
    for given in (None, bias):
        ops.dense(wide[:, 10:80], x, weight, given)
        want = x.double() @ weight.double().T + (0 if given is None else given.double())
        close = {"rtol": 1e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(wide[:, 10:80].double(), want, **close)
        assert not wide[:, :10].any()
        assert not wide[:, 80:].any()
    if num_rows <= 16 and dtype in DTYPES:
        first = x.new_empty(1, 70)
        ops.dense(first, x[:1], weight, bias)
        assert torch.equal(bits(first), bits(wide[:1, 10:80]))


def test_runs_are_rows_with_the_same_adapters() -> None:
    assert listed([]) == []
    assert listed([Segment(3, 3, 0)]) == []
    assert listed([Segment(4, 6, 1), Segment(0, 2, 3, 0.5)]) == [(0, 2, [(3, 0.5)]), (4, 6, [(1, 1.0)])]
    overlapping = [Segment(0, 6, 0, 0.5), Segment(2, 9, 1), Segment(2, 3, 0, 0.25)]
    assert listed(overlapping) == [
        (0, 2, [(0, 0.5)]),
        (2, 3, [(0, 0.5), (1, 1.0), (0, 0.25)]),
        (3, 6, [(0, 0.5), (1, 1.0)]),
        (6, 9, [(1, 1.0)]),
    ]


def test_runs_are_in_order_and_apart(isa: str) -> None:
    for _ in range(50):
        segments = [
            Segment(start := random.randrange(40), start + random.randrange(9), random.randrange(5))
            for _ in range(random.randrange(12))
        ]
        found = listed(segments)
        assert all(a[1] <= b[0] for a, b in pairwise(found))
        by_row = {row: [slot for slot, _ in uses] for start, end, uses in found for row in range(start, end)}
        for row in range(50):
            assert by_row.get(row, []) == [s.adapter_slot for s in segments if s.start <= row < s.end]


def test_an_equal_step_is_prepared_once(ops: NativeOps) -> None:
    first = ops.prepare([Segment(0, 1, 0), Segment(1, 2, 1)], 2, 4, CPU)
    other = ops.prepare([Segment(0, 1, 0), Segment(1, 2, 1, 0.5)], 2, 4, CPU)
    assert ops.prepare([Segment(0, 1, 0), Segment(1, 2, 1)], 2, 4, CPU) is first is not other
    assert ops.prepare([Segment(0, 1, 0), Segment(1, 2, 1)], 9, 4, CPU).num_rows == 9
