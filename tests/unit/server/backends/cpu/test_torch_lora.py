"""Torch LoRA on a CPU: choice of products, variants and kept copies."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.lora_cases import Problem, random_factors, random_problem, random_segments, random_table
from torch.utils._python_dispatch import TorchDispatchMode

from loraplex_server.backends.cpu.torch_lora import Cost, CpuOps, Piece, Profile, has_fast_half, lay_out
from loraplex_server.layers.lora import FactorTable, Segment

LAYOUT = "loraplex_server.backends.cpu.torch_lora"
FREE, DEAR = Cost(0.0, 0.0, 0.0), Cost(1e9, 0.0, 0.0)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class CallCounter(TorchDispatchMode):
    """Counts the operators that reach torch's dispatcher; views too, they cost as much to call."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def count_calls(ops: CpuOps, problem: Problem) -> int:
    prepared = problem.prepared(ops)
    y = problem.y.clone()
    ops.apply(y, problem.x, problem.table, prepared)  # binds
    with CallCounter() as counter:
        ops.apply(y, problem.x, problem.table, prepared)
    return len(counter.names)


def one_row_each(num_rows: int, dtype: torch.dtype, rank: int = 8, width: int = 64) -> Problem:
    table = FactorTable(num_rows, width, width, "cpu")
    for slot in range(num_rows):
        table.set(slot, random_factors(rank, width, width, dtype, scale=2.0))
    return random_problem([Segment(i, i + 1, i) for i in range(num_rows)], table, num_rows, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("idle_rows", [False, True])
@pytest.mark.parametrize("way", ["native", "upcast", "packed", "packed upcast"])
def test_every_way_is_right(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, way: str, idle_rows: bool) -> None:
    """Results are right whatever the cost model would choose, on machines with and without fast half precision."""
    torch.manual_seed(5)
    upcast = "upcast" in way
    monkeypatch.setattr(f"{LAYOUT}.UPCAST_COST", FREE if upcast else DEAR)
    monkeypatch.setattr(f"{LAYOUT}.SMALL_COST", DEAR if upcast else FREE)
    monkeypatch.setattr(f"{LAYOUT}.ONEDNN_COST", DEAR if upcast else FREE)
    monkeypatch.setattr(f"{LAYOUT}.MASK_US", -1e6 if "packed" in way else 1e6)
    table = random_table([8, 3, None, 16, 5], 48, 40, dtype)
    segments = random_segments("uniform", 14, 5, idle_rows=idle_rows)
    segments += [Segment(14, 16, 0, 0.5), Segment(14, 16, 1, 0.5), Segment(17, 18, 3, -0.5)]
    problem = random_problem(segments, table, 20, dtype)
    problem.check(problem.run(CpuOps()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_adapter_for_all_rows_is_two_products(dtype: torch.dtype) -> None:
    table = random_table([8], 32, 32, dtype)
    problem = random_problem([Segment(i, i + 1, 0) for i in range(3)], table, 3, dtype)
    assert count_calls(CpuOps(), problem) == 2


def test_decode_with_many_adapters_is_five_calls() -> None:
    assert count_calls(CpuOps(), one_row_each(8, torch.float32)) == 5


def test_differing_weights_cost_one_call_more() -> None:
    problem = one_row_each(8, torch.float32)
    problem.segments[3] = Segment(3, 4, 3, 0.5)
    assert count_calls(CpuOps(), problem) == 6


@pytest.mark.skipif(not has_fast_half(torch.bfloat16), reason="this CPU has no fast bfloat16")
def test_half_precision_decode_with_many_adapters_is_five_calls() -> None:
    assert count_calls(CpuOps(), one_row_each(32, torch.bfloat16, rank=16, width=256)) == 5


def test_no_segment_is_no_call() -> None:
    problem = random_problem([], random_table([8], 32, 32, torch.float32), 3, torch.float32)
    assert count_calls(CpuOps(), problem) == 0


def test_an_equal_step_is_prepared_once() -> None:
    ops = CpuOps()
    problem = one_row_each(4, torch.float32)
    first = problem.prepared(ops)
    assert problem.prepared(ops) is first
    problem.segments[1] = Segment(1, 2, 1, 0.5)
    assert problem.prepared(ops) is not first
    again = problem.prepared(ops)
    problem.segments[1] = Segment(1, 2, 1)
    assert problem.prepared(ops) is first
    assert ops.prepare(problem.segments, 9, 4, torch.device("cpu")).num_rows == 9 != again.num_rows


def test_a_pack_survives_while_its_adapters_stay() -> None:
    """Other rows, the same adapters: nothing is copied again."""
    problem, ops = one_row_each(8, torch.float32), CpuOps()
    problem.run(ops)
    with CallCounter() as counter:
        problem.segments = [Segment(i, i + 1, 7 - i) for i in range(8)]
        problem.check(problem.run(ops))
    assert "aten.cat.default" not in counter.names
    with CallCounter() as counter:
        problem.segments = [Segment(i, i + 1, i % 6) for i in range(8)]
        problem.check(problem.run(ops))
    assert counter.names.count("aten.cat.default") == 2


@pytest.mark.parametrize("is_cleared", [False, True])
def test_packs_survive_a_load_into_another_slot(is_cleared: bool) -> None:
    problem, ops = one_row_each(9, torch.float32), CpuOps()
    problem.segments = [Segment(i, i + 1, i) for i in range(8)]
    calls_of_a_bound_step = count_calls(ops, problem)
    problem.table.set(8, None if is_cleared else random_factors(8, 64, 64, torch.float32))
    prepared = problem.prepared(ops)
    y = problem.y.clone()
    with CallCounter() as counter:
        ops.apply(y, problem.x, problem.table, prepared)
    assert len(counter.names) == calls_of_a_bound_step
    problem.check(y)


def test_of_several_packs_those_of_other_slots_survive_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LAYOUT}.MAX_PACKED_SEGMENTS", 4)
    problem, ops = one_row_each(8, torch.float32), CpuOps()
    with CallCounter() as counter:
        problem.check(problem.run(ops))
    assert counter.names.count("aten.cat.default") == 4
    problem.table.set(0, random_factors(8, 64, 64, torch.float32))
    with CallCounter() as counter:
        problem.check(problem.run(ops))
    assert counter.names.count("aten.cat.default") == 2


def test_clearing_a_slot_frees_its_factors() -> None:
    problem = one_row_each(8, torch.float32)
    ops = CpuOps()
    problem.run(ops)
    factors = problem.table.factors[0]
    assert factors is not None
    alive = weakref.ref(factors.a)
    problem.table.set(0, None)
    del factors
    gc.collect()
    assert alive() is None


def test_only_half_precision_can_be_fast_half() -> None:
    assert not has_fast_half(torch.float32)
    assert not has_fast_half(torch.float64)


def profile(dtype: torch.dtype, width: int, ranks: list[int], *, fast_half: bool = True) -> Profile:
    return Profile(dtype, 2 * width, width, tuple(ranks), tuple(1.0 for _ in ranks), fast_half)


def segments_of_one_row(num_rows: int) -> list[Segment]:
    return [Segment(i, i + 1, i) for i in range(num_rows)]


def first_columns(piece: Piece, ranks: list[int]) -> list[int]:
    return [sum(ranks[slot] for slot in piece.slots[:i]) for i in range(len(piece.slots))]


def test_many_small_half_precision_segments_share_one_product() -> None:
    pieces = lay_out(segments_of_one_row(32), range(32), profile(torch.bfloat16, 512, [16] * 32))
    assert len(pieces) == 1
    (piece,) = pieces
    assert piece.keep is not None
    assert piece.rows == (0, 32)
    assert piece.keep.shape == (32, 512)
    assert piece.keep.sum() == -512
    assert piece.factors is None


def test_packs_stay_small() -> None:
    pieces = lay_out(segments_of_one_row(65), range(65), profile(torch.bfloat16, 512, [16] * 65))
    assert [len(p.slots) for p in pieces if p.keep is not None] == [21, 22, 22]


def test_the_copies_of_a_module_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = profile(torch.bfloat16, 512, [16] * 64)
    one_pack = 32 * 16 * 1024 * 2  # adapters, rank, features, bytes
    for max_bytes, num_packs in ((2 * one_pack, 2), (2 * one_pack - 1, 1), (one_pack - 1, 0)):
        monkeypatch.setattr("loraplex_server.backends.cpu.torch_lora.MAX_PACKED_BYTES", max_bytes)
        pieces = lay_out(segments_of_one_row(64), range(64), shape)
        assert sum(p.keep is not None for p in pieces) == num_packs


def test_scattered_rows_of_one_adapter_share_a_product_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loraplex_server.backends.cpu.torch_lora.MAX_PACKED_BYTES", 0)
    segments = [Segment(2 * i, 2 * i + 1, 0) for i in range(8)]
    (piece,) = lay_out(segments, [0], profile(torch.bfloat16, 1024, [16]))
    assert piece.keep is not None
    assert isinstance(piece.rows, torch.Tensor)
    assert piece.rows.tolist() == list(range(0, 16, 2))


def test_large_float32_segments_stay_alone() -> None:
    pieces = lay_out(segments_of_one_row(16), range(16), profile(torch.float32, 4096, [64] * 16))
    assert all(p.keep is None and not p.upcast for p in pieces)
    assert len(pieces) == 16


def test_half_precision_is_upcast_where_starting_onednn_costs_more_and_where_it_is_missing() -> None:
    small = [Segment(0, 1, 0)]
    long = [Segment(0, 65, 0)]
    assert lay_out(small, [0], profile(torch.bfloat16, 1024, [16])) == (Piece((0, 1), (0,), 1.0, True),)
    assert lay_out(small, [0], profile(torch.bfloat16, 64, [16])) == (Piece((0, 1), (0,), 1.0, False),)
    assert lay_out(long, [0], profile(torch.bfloat16, 1024, [64])) == (Piece((0, 65), (0,), 1.0, False),)
    assert lay_out(long, [0], profile(torch.bfloat16, 1024, [64], fast_half=False)) == (
        Piece((0, 65), (0,), 1.0, True),
    )


def test_a_slot_without_factors_gets_no_product() -> None:
    pieces = lay_out([Segment(0, 3, 0), Segment(3, 4, 1)], [0, 1], profile(torch.float32, 64, [0, 8]))
    assert pieces == (Piece((3, 4), (1,), 1.0, False),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(12))
def test_every_term_exactly_once(dtype: torch.dtype, seed: int) -> None:
    chooser = random.Random(seed)
    num_rows, ranks = 40, [chooser.choice([0, 1, 2, 5]) for _ in range(6)]
    segments = [
        Segment(i, i + chooser.choice([1, 1, 2]), chooser.randrange(6), chooser.choice([1.0, 0.5]))
        for i in sorted(chooser.sample(range(num_rows - 2), 20))
    ]
    shape = profile(dtype, 64, ranks)
    wanted = torch.zeros(num_rows, 6)
    for s in segments:
        wanted[s.start : s.end, s.adapter_slot] += s.weight * (ranks[s.adapter_slot] > 0)

    found = torch.zeros(num_rows, 6)
    for piece in lay_out(segments, range(6), shape):
        rows = piece.rows if isinstance(piece.rows, torch.Tensor) else torch.arange(*piece.rows)
        if piece.keep is None:
            found[rows, piece.slots[0]] += piece.alpha
            continue
        factors = piece.factors if piece.factors is not None else piece.alpha * piece.keep.ne(0).float()
        assert torch.equal(piece.keep == -1, factors != 0)
        for slot, first in zip(piece.slots, first_columns(piece, ranks), strict=True):
            columns = factors[:, first : first + ranks[slot]]
            assert (columns == columns[:, :1]).all()
            found[rows, slot] += columns[:, 0]
        # The same terms once more, for factors that cannot be packed.
        apart = torch.zeros(num_rows, 6)
        for part in piece.apart:
            assert isinstance(part.rows, tuple)
            apart[slice(*part.rows), part.slots[0]] += part.alpha
        assert apart.sum() == sum(factors[:, column].sum() for column in first_columns(piece, ranks))
    assert torch.equal(found, wanted)
