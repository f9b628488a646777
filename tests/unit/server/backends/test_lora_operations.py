"""One suite for every implementation of segmented LoRA.

Here it runs over those that need no accelerator. The Triton kernels run in Triton's interpreter, which has to be chosen
before triton is imported: `cuda/test_interpreter.py` runs this file once more, in a process of its own. By hand:
`OMP_NUM_THREADS=1 TRITON_INTERPRET=1 pytest tests/unit/server/backends/test_lora_operations.py`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
import torch
from support.lora_cases import (
    POPULARITIES,
    RANKS,
    bits,
    pairwise,
    random_factors,
    random_problem,
    random_segments,
    random_table,
)
from support.native_kernels import isas, native_kernels, using

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.lora import NativeOps
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers.lora import Segment, SegmentedLora

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if IN_INTERPRETER else ["reference", "cpu", *(f"native {isa}" for isa in isas())]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
# The interpreter runs some hundreds of programs a second: fewer of them, and what matters of the rest is the same code.
OTHER_DTYPES = [torch.float32, torch.bfloat16, torch.float64] if IN_INTERPRETER else DTYPES
ROWS = [1, 5, 18] if IN_INTERPRETER else [1, 4, 33, 130]
NUM_SLOTS = 3 if IN_INTERPRETER else 6
IN_FEATURES, OUT_FEATURES = (144, 72) if IN_INTERPRETER else (192, 160)
CPU = torch.device("cpu")


@pytest.fixture(params=NAMES)
def ops(request: pytest.FixtureRequest) -> Iterator[SegmentedLora]:
    kind, _, isa = request.param.partition(" ")
    if kind == "triton":
        from loraplex_server.backends.cuda.lora.operation import TritonOps

        yield TritonOps()
    elif kind == "native":
        with using(isa):
            yield NativeOps(native_kernels())
    else:
        yield ReferenceOps() if kind == "reference" else CpuOps()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Seeds the random numbers: others for every test, the same for every run."""
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


@pytest.mark.parametrize(
    ("dtype", "rank", "popularity", "num_rows", "idle_rows"),
    pairwise(DTYPES, RANKS, POPULARITIES, ROWS, (False, True)),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(
    ops: SegmentedLora, dtype: torch.dtype, rank: int, popularity: str, num_rows: int, idle_rows: bool
) -> None:
    table = random_table([rank] * NUM_SLOTS, IN_FEATURES, OUT_FEATURES, dtype)
    segments = random_segments(popularity, num_rows, NUM_SLOTS, idle_rows=idle_rows)
    problem = random_problem(segments, table, num_rows, dtype)
    problem.check(problem.run(ops))


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_mixed_ranks_and_long_segments(ops: SegmentedLora, dtype: torch.dtype) -> None:
    table = random_table([64, 1, None, 13, 16, 0], 96, 72, dtype)
    segments = [Segment(0, 20, 0), Segment(20, 21, 3), Segment(21, 22, 1), Segment(22, 24, 2), Segment(25, 26, 4)]
    segments += [Segment(26, 27, 3), Segment(27, 28, 5), Segment(30, 30, 0)]
    problem = random_problem(segments, table, 32, dtype)
    problem.check(problem.run(ops))


def test_splits_of_the_input_features(ops: SegmentedLora) -> None:
    table = random_table([5, 16], 1100, 40, torch.float32)
    problem = random_problem([Segment(0, 1, 0), Segment(1, 4, 1)], table, 5, torch.float32)
    problem.check(problem.run(ops))


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_rows_outside_keep_every_bit(ops: SegmentedLora, dtype: torch.dtype) -> None:
    table = random_table([8, None, 4], 32, 24, dtype)
    segments = [Segment(1, 3, 0), Segment(4, 5, 1), Segment(6, 7, 2)]
    problem = random_problem(segments, table, 9, dtype)
    poison = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=dtype)
    for row in (0, 3, 4, 5, 7, 8):
        problem.y[row] = poison[torch.arange(24) % 4]
        problem.x[row] = float("nan")
    problem.check(problem.run(ops))


def test_a_column_slice_of_y(ops: SegmentedLora) -> None:
    """Fused projections hand out slices of one wide output."""
    table = random_table([8, 16], 32, 24, torch.float32)
    problem = random_problem([Segment(0, 2, 0), Segment(2, 3, 1), Segment(4, 6, 0)], table, 7, torch.float32)
    wide = torch.randn(7, 64)
    wide[:, 24:48] = problem.y
    before = wide.clone()
    ops.apply(wide[:, 24:48], problem.x, table, problem.prepared(ops))
    problem.check(wide[:, 24:48])
    assert torch.equal(bits(wide[:, :24]), bits(before[:, :24]))
    assert torch.equal(bits(wide[:, 48:]), bits(before[:, 48:]))


def test_x_with_a_row_stride(ops: SegmentedLora) -> None:
    table = random_table([8, 16], 32, 24, torch.float32)
    problem = random_problem([Segment(0, 2, 0), Segment(2, 3, 1)], table, 4, torch.float32)
    problem.x = torch.randn(4, 50)[:, 9:41]
    problem.check(problem.run(ops))


def test_weights(ops: SegmentedLora) -> None:
    table = random_table([8, 16], 32, 24, torch.float32)
    segments = [Segment(0, 2, 0, 0.25), Segment(2, 3, 0, -1.5), Segment(3, 4, 1, 0.0), Segment(4, 6, 1, 2.0)]
    problem = random_problem(segments, table, 6, torch.float32)
    problem.check(problem.run(ops))


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_overlapping_segments_add_up(ops: SegmentedLora, dtype: torch.dtype) -> None:
    table = random_table([8, 16, 3, 5], 32, 24, dtype)
    segments = [Segment(0, 6, 0, 0.7), Segment(0, 6, 1, 0.3), Segment(2, 9, 2), Segment(3, 4, 2, 0.5), Segment(8, 9, 2)]
    segments += [Segment(9, 10, 3), Segment(9, 10, 0, 0.5), Segment(10, 11, 3), Segment(10, 11, 0, 0.5)]
    problem = random_problem(segments, table, 12, dtype)
    problem.check(problem.run(ops))


def test_nothing_to_do(ops: SegmentedLora) -> None:
    table = random_table([None, 4], 32, 24, torch.float32)
    for segments in ([], [Segment(0, 3, 0)], [Segment(2, 2, 1)]):
        problem = random_problem(segments, table, 3, torch.float32)
        assert torch.equal(bits(problem.run(ops)), bits(problem.y))
    empty = random_problem([], table, 0, torch.float32)
    assert empty.run(ops).shape == (0, 24)


@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_two_runs_are_equal_bit_for_bit(ops: SegmentedLora, dtype: torch.dtype) -> None:
    table = random_table([8, 16, 3, 64], 64, 48, dtype)
    segments = [*random_segments("uniform", 12, 4, idle_rows=True), Segment(0, 12, 3, 0.5), Segment(3, 9, 1, 0.5)]
    problem = random_problem(segments, table, 12, dtype)
    first = problem.run(ops)
    table.derived = None
    assert torch.equal(bits(problem.run(ops)), bits(first))


def test_the_order_of_segments_does_not_matter_to_disjoint_rows(ops: SegmentedLora) -> None:
    table = random_table([8, 16, 3], 64, 48, torch.float32)
    problem = random_problem([Segment(i, i + 1, i % 3) for i in range(7)], table, 7, torch.float32)
    first = problem.run(ops)
    problem.segments.reverse()
    assert torch.equal(bits(problem.run(ops)), bits(first))


def test_a_row_in_a_batch_equals_the_row_alone(ops: SegmentedLora) -> None:
    dtype = torch.float32 if IN_INTERPRETER else torch.float64
    table = random_table([8, 16, 3, 64], 64, 48, dtype)
    mixed = random_problem([Segment(i, i + 1, i % 4) for i in range(9)], table, 9, dtype)
    together = mixed.run(ops)
    for row in range(9):
        alone = random_problem([Segment(0, 1, row % 4)], table, 1, dtype)
        alone.x, alone.y = mixed.x[row : row + 1], mixed.y[row : row + 1]
        rtol, atol = (1e-5, 1e-6) if IN_INTERPRETER else (1e-12, 1e-12)
        torch.testing.assert_close(alone.run(ops)[0], together[row], rtol=rtol, atol=atol)


def test_one_step_serves_many_modules(ops: SegmentedLora) -> None:
    """Other shapes, other ranks, a slot that one module has and the other has not."""
    segments = [Segment(0, 2, 0), Segment(2, 3, 1), Segment(3, 4, 2), Segment(5, 6, 0)]
    prepared = ops.prepare(segments, 6, 3, CPU)
    for ranks, in_features, out_features in (([8, 16, 4], 32, 24), ([8, None, 4], 32, 24), ([2, 2, 2], 24, 56)):
        table = random_table(ranks, in_features, out_features, torch.float32)
        problem = random_problem(segments, table, 6, torch.float32)
        got = problem.y.clone()
        ops.apply(got, problem.x, table, prepared)
        problem.check(got)


def test_a_table_changes_between_steps(ops: SegmentedLora) -> None:
    table = random_table([8, 4, 16], 32, 24, torch.float32)
    problem = random_problem([Segment(0, 1, 0), Segment(1, 2, 1), Segment(2, 4, 2)], table, 5, torch.float32)
    problem.check(problem.run(ops))
    table.set(1, random_factors(13, 32, 24, torch.float32, "cpu"))
    problem.check(problem.run(ops))
    table.set(0, None)
    problem.check(problem.run(ops))
    problem.segments = [Segment(0, 3, 2), Segment(3, 4, 1), Segment(4, 5, 0)]
    problem.check(problem.run(ops))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("bad", ["a", "b"])
@pytest.mark.parametrize("dtype", OTHER_DTYPES, ids=str)
def test_an_adapter_that_overflows_harms_only_its_own_rows(ops: SegmentedLora, dtype: torch.dtype, bad: str) -> None:
    table = random_table([4] * 12, 32, 24, dtype)
    factors = table.factors[5]
    assert factors is not None
    broken = torch.full_like(factors.a if bad == "a" else factors.b, float("inf"))
    table.set(5, LoraFactors(broken, factors.b, 1.0) if bad == "a" else LoraFactors(factors.a, broken, 1.0))
    problem = random_problem([Segment(i, i + 1, i) for i in range(12)], table, 12, dtype)
    got = problem.run(ops)
    assert not got[5].isfinite().any()
    problem.segments.pop(5)
    got[5] = problem.y[5]
    problem.check(got)


@pytest.mark.parametrize(
    "segment",
    [Segment(-1, 2, 0), Segment(0, 9, 0), Segment(3, 2, 0), Segment(0, 1, 3), Segment(0, 1, -1), Segment(9, 9, 0)],
    ids=str,
)
def test_prepare_refuses_what_is_outside(ops: SegmentedLora, segment: Segment) -> None:
    with pytest.raises(ValueError, match="Segment"):
        ops.prepare([Segment(0, 1, 0), segment], 8, 3, CPU)


def test_punicas_operators_are_a_special_case(ops: SegmentedLora) -> None:
    from support.punica_reference import bgmv, sgmv

    table = random_table([8, 8, 8], 32, 24, torch.float32)
    factors = [f for f in table.factors if f is not None]
    scaled = [LoraFactors(f.a, f.b, 2.0) for f in factors]
    for slot, f in enumerate(scaled):
        table.set(slot, f)
    problem = random_problem([Segment(0, 3, 2), Segment(3, 4, 0), Segment(4, 6, 1)], table, 6, torch.float32)
    got = problem.run(ops)

    segmented = problem.y.clone()
    wa, wb = [scaled[i].a[None] for i in (2, 0, 1)], [scaled[i].b.T.contiguous()[None] for i in (2, 0, 1)]
    sgmv(segmented, problem.x, wa, wb, [0, 3, 4, 6], 0, 2.0)
    torch.testing.assert_close(segmented, got, rtol=1e-5, atol=1e-5)

    batched = problem.y.clone()
    wa_all = torch.stack([f.a for f in scaled])[:, None]
    wb_all = torch.stack([f.b for f in scaled])[:, None]
    bgmv(batched, problem.x, wa_all, wb_all, torch.tensor([2, 2, 2, 0, 1, 1]), 0, 2.0)
    torch.testing.assert_close(batched, got, rtol=1e-5, atol=1e-5)
