"""Common suite of segmented dense products.

Like test_lora_operations.py it is run over the Triton kernel by cuda/test_interpreter.py, in a process of its own.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from support.lora_cases import TOLERANCES, WORDS
from support.native_kernels import isas, native_kernels, using
from torch import Tensor

from loraplex_server.backends.cpu.lora import NativeDense
from loraplex_server.backends.cpu.torch_lora import CpuDense
from loraplex_server.backends.reference import ReferenceDense
from loraplex_server.backends.registry import choose_backend
from loraplex_server.layers.lora import (
    DenseTable,
    DenseWeight,
    Segment,
    SegmentedDense,
)

IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
NAMES = ["triton"] if IN_INTERPRETER else ["reference", "cpu", *(f"native {isa}" for isa in isas())]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")


@pytest.fixture(params=NAMES)
def ops(request: pytest.FixtureRequest) -> Iterator[SegmentedDense]:
    kind, _, isa = request.param.partition(" ")
    if kind == "triton":
        from loraplex_server.backends.cuda.lora.operation import TritonDense

        yield TritonDense()
    elif kind == "native":
        with using(isa):
            yield NativeDense(native_kernels())
    else:
        yield ReferenceDense() if kind == "reference" else CpuDense()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


def random_weight(num_outputs: int, in_features: int, dtype: torch.dtype, *, has_bias: bool = True) -> DenseWeight:
    weight = torch.randn(num_outputs, in_features, dtype=torch.float64) / in_features**0.5
    bias = torch.randn(num_outputs, dtype=torch.float64).to(dtype) if has_bias else None
    return DenseWeight(weight.to(dtype), bias)


def random_table(sizes: Sequence[int | None], in_features: int, dtype: torch.dtype) -> DenseTable:
    """A table in which every other slot has a bias."""
    table = DenseTable(in_features)
    for slot, size in enumerate(sizes):
        weight = None if size is None else random_weight(size, in_features, dtype, has_bias=slot % 2 == 0)
        table.set(slot, weight)
    return table


def poisoned(num_rows: int, num_columns: int, dtype: torch.dtype) -> Tensor:
    """An output buffer that holds NaN, -0.0 and infinity."""
    y = torch.full((num_rows, num_columns), float("nan"), dtype=dtype)
    y[:, ::3] = -0.0
    y[:, 1::3] = float("inf")
    return y


def expected(y: Tensor, x: Tensor, table: DenseTable, segments: Sequence[Segment]) -> Tensor:
    """The expected result, in float64, row by row."""
    want = y.double().clone()
    for segment in segments:
        dense = table.weights[segment.adapter_slot]
        for row in range(segment.start, segment.end):
            if dense is not None:
                product = dense.weight.double() @ x[row].double()
                want[row, : dense.num_outputs] = product if dense.bias is None else product + dense.bias.double()
    return want


def check(ops: SegmentedDense, x: Tensor, table: DenseTable, segments: Sequence[Segment], num_columns: int) -> Tensor:
    """Checks that y is right where something was to be written, and elsewhere bit for bit what it was."""
    y = poisoned(x.shape[0], num_columns, x.dtype)
    got = y.clone()
    ops.apply(got, x, table, ops.prepare(segments, x.shape[0], len(table.weights), CPU))
    want = expected(y, x, table, segments)
    tolerance = TOLERANCES[x.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance, equal_nan=True)
    idle = torch.ones_like(y, dtype=torch.bool)
    for segment in segments:
        dense = table.weights[segment.adapter_slot]
        if dense is not None:
            idle[segment.start : segment.end, : dense.num_outputs] = False
    word = WORDS[x.dtype]
    assert torch.equal(got.view(word)[idle], y.view(word)[idle])
    return got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 5, 18] if IN_INTERPRETER else [1, 5, 40])
@pytest.mark.parametrize("in_features", [32, 200])
def test_grid(ops: SegmentedDense, dtype: torch.dtype, num_rows: int, in_features: int) -> None:
    table = random_table([72, 72, 72], in_features, dtype)
    x = torch.randn(num_rows, in_features).to(dtype)
    check(ops, x, table, [Segment(row, row + 1, random.randrange(3)) for row in range(num_rows)], 72)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_slot_has_its_own_size(ops: SegmentedDense, dtype: torch.dtype) -> None:
    """Columns behind a slot's own, rows between segments, and rows of a slot without weight keep what they had."""
    table = random_table([40, 7, None, 72, 1], 48, dtype)
    segments = [Segment(1, 4, 3), Segment(4, 5, 0), Segment(5, 7, 2), Segment(8, 30, 1), Segment(30, 31, 4)]
    segments += [Segment(31, 32, 1), Segment(32, 32, 0)]
    check(ops, torch.randn(33, 48).to(dtype), table, segments, 80)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_and_weights_of_others_do_no_harm(ops: SegmentedDense, dtype: torch.dtype) -> None:
    table = random_table([24, 24, 24], 32, dtype)
    bad = table.weights[1]
    assert bad is not None
    bad.weight[3] = float("inf")
    x = torch.randn(7, 32).to(dtype)
    x[0] = float("nan")
    x[5] = float("inf")
    segments = [Segment(0, 3, 0), Segment(3, 4, 1), Segment(4, 7, 2)]
    y = torch.empty(7, 24, dtype=dtype)
    ops.apply(y, x, table, ops.prepare(segments, 7, 3, CPU))
    want = expected(y, x, table, segments)
    assert not y[0].isfinite().any()
    assert not y[3, 3].isfinite()
    for row in (1, 2, 4, 6):
        torch.testing.assert_close(y[row].double(), want[row], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_strides(ops: SegmentedDense) -> None:
    """x and y as column slices of wider tensors; weights as views into one storage that are not aligned."""
    storage = torch.randn(3 * (24 * 32 + 24) + 5)
    table = DenseTable(32)
    for slot in range(3):
        start = 5 + slot * (24 * 32 + 24)
        weight = storage[start : start + 24 * 32].view(24, 32)
        table.set(slot, DenseWeight(weight, storage[start + 24 * 32 : start + 24 * 32 + 24]))
    x = torch.randn(6, 50)[:, 9:41]
    segments = [Segment(0, 1, 2), Segment(1, 4, 0), Segment(5, 6, 1)]
    wide = torch.randn(6, 64)
    before = wide.clone()
    ops.apply(wide[:, 20:44], x, table, ops.prepare(segments, 6, 3, CPU))
    want = expected(before[:, 20:44], x, table, segments)
    torch.testing.assert_close(wide[:, 20:44].double(), want, rtol=2e-5, atol=2e-5)
    assert torch.equal(wide[:, :20], before[:, :20])
    assert torch.equal(wide[:, 44:], before[:, 44:])


def test_one_step_serves_many_tables(ops: SegmentedDense) -> None:
    """The tables have other sizes, and one ends before the step's last slot."""
    segments = [Segment(0, 2, 0), Segment(2, 3, 3), Segment(4, 5, 1)]
    prepared = ops.prepare(segments, 6, 4, CPU)
    for sizes, in_features in (([24, 24, None, 24], 32), ([8, 40, 8, 40], 24), ([16], 32)):
        table = random_table(sizes, in_features, torch.float32)
        x = torch.randn(6, in_features)
        y = torch.zeros(6, 48)
        ops.apply(y, x, table, prepared)
        table.set(3, table.get(3))  # the oracle wants all slots
        want = expected(torch.zeros(6, 48), x, table, segments)
        torch.testing.assert_close(y.double(), want, rtol=2e-5, atol=2e-5)


def test_a_table_changes_between_steps(ops: SegmentedDense) -> None:
    table = random_table([24, 24], 32, torch.float32)
    x = torch.randn(4, 32)
    segments = [Segment(0, 1, 0), Segment(1, 4, 1)]
    check(ops, x, table, segments, 24)
    table.set(1, random_weight(9, 32, torch.float32))
    check(ops, x, table, segments, 24)
    table.set(0, None)
    check(ops, x, table, segments, 24)
    table.set(2, random_weight(24, 32, torch.float32))
    check(ops, x, table, [Segment(0, 2, 2), Segment(2, 4, 1)], 24)


def test_a_row_in_a_batch_equals_the_row_alone(ops: SegmentedDense) -> None:
    dtype = torch.float32 if IN_INTERPRETER else torch.float64
    table = random_table([24, 24, 24], 32, dtype)
    x = torch.randn(9, 32, dtype=dtype)
    together = check(ops, x, table, [Segment(3 * i, 3 * i + 3, i) for i in range(3)], 24)
    for row in range(9):
        alone = check(ops, x[row : row + 1], table, [Segment(0, 1, row // 3)], 24)
        rtol, atol = (1e-5, 1e-6) if IN_INTERPRETER else (1e-12, 1e-12)
        torch.testing.assert_close(alone[0], together[row], rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_runs_are_equal_bit_for_bit(ops: SegmentedDense, dtype: torch.dtype) -> None:
    table = random_table([24, 40, 24], 64, dtype)
    x = torch.randn(12, 64).to(dtype)
    segments = [Segment(0, 5, 1), Segment(5, 6, 0), Segment(6, 12, 2)]
    first = check(ops, x, table, segments, 40)
    assert torch.equal(check(ops, x, table, segments[::-1], 40).view(WORDS[dtype]), first.view(WORDS[dtype]))


def test_nothing_to_do(ops: SegmentedDense) -> None:
    table = random_table([None, 24], 32, torch.float32)
    for segments in ([], [Segment(0, 3, 0)], [Segment(2, 2, 1)]):
        check(ops, torch.randn(3, 32), table, segments, 24)
    check(ops, torch.randn(0, 32), table, [], 24)


@pytest.mark.parametrize(
    "segment",
    [
        Segment(-1, 0, 0),
        Segment(6, 9, 0),
        Segment(4, 3, 0),
        Segment(4, 5, 3),
        Segment(1, 3, 0),
        Segment(0, 8, 0),
        Segment(4, 5, 0, 0.5),
    ],
    ids=str,
)
def test_prepare_refuses(ops: SegmentedDense, segment: Segment) -> None:
    with pytest.raises(ValueError, match="Segment"):
        ops.prepare([Segment(0, 2, 0), segment], 8, 3, CPU)


def test_which_one_a_device_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_backend("cpu", cpu_kernels="torch").dense().name == "cpu"
    assert choose_backend("meta").dense().name == "reference"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_backend("cuda").dense().name == "reference"
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_backend("cuda:0").dense().name == "triton"
