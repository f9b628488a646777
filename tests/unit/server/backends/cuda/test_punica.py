"""Punica's operators over a torch stand-in for the package.

The real one: tests/gpu/test_punica_gpu.py.
"""

from __future__ import annotations

import ctypes
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.lora_cases import (
    POPULARITIES,
    bits,
    pairwise,
    random_factors,
    random_problem,
    random_segments,
    random_table,
)
from support.punica_reference import bgmv, sgmv
from torch import Tensor

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.backends import registry
from loraplex_server.backends.backend import Implementation
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.backends.cuda.punica import BGMV_RANKS, DTYPES, SGMV_RANKS, PunicaOps
from loraplex_server.backends.reference import ReferenceOps
from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment

IN, OUT = 96, 64


def at(pointer: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor that a kernel finds behind a pointer."""
    num_bytes = dtype.itemsize * torch.Size(shape).numel()
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(pointer), dtype=dtype).view(shape)


class FakePunica:
    """punica.ops in torch: documented shapes, checked as its binding checks them. `layers` is 1."""

    def __init__(self, uncompiled: tuple[int, ...] = ()) -> None:
        self.uncompiled = uncompiled  # ranks that it was built without
        self.calls: list[tuple[str, int, int]] = []  # function, rank, rows

    def add_lora_sgmv_custom_cutlass(
        self, y: Tensor, x: Tensor, wa_ptr: Tensor, wb_ptr: Tensor, s: Tensor, layer_idx: int, lora_rank: int
    ) -> None:
        self._check(y, x, lora_rank, SGMV_RANKS)
        assert wa_ptr.dtype == wb_ptr.dtype == torch.int64
        assert s.dtype == torch.int32
        assert wa_ptr.shape == wb_ptr.shape == (len(s) - 1,)
        starts = s.tolist()
        assert starts[0] == 0
        assert starts[-1] == x.shape[0]
        assert starts == sorted(starts)
        wa = [at(pointer, (1, lora_rank, x.shape[1]), x.dtype) for pointer in wa_ptr.tolist()]
        wb = [at(pointer, (1, lora_rank, y.shape[1]), x.dtype) for pointer in wb_ptr.tolist()]
        sgmv(y, x, wa, wb, starts, layer_idx)
        self.calls.append(("sgmv", lora_rank, x.shape[0]))

    def add_lora_bgmv(
        self, y: Tensor, x: Tensor, wa_T_all: Tensor, wb_T_all: Tensor, indicies: Tensor, layer_idx: int, scale: float
    ) -> None:
        rank = wb_T_all.shape[-1]
        self._check(y, x, rank, BGMV_RANKS)
        assert wa_T_all.is_contiguous()
        assert wb_T_all.is_contiguous()
        assert wa_T_all.shape[1:] == (1, rank, x.shape[1])
        assert wb_T_all.shape[1:] == (1, y.shape[1], rank)
        assert indicies.dtype == torch.int64
        assert indicies.shape == (x.shape[0],)
        bgmv(y, x, wa_T_all, wb_T_all, indicies, layer_idx, scale)
        self.calls.append(("bgmv", rank, x.shape[0]))

    def _check(self, y: Tensor, x: Tensor, rank: int, ranks: tuple[int, ...]) -> None:
        assert y.dim() == x.dim() == 2
        assert y.shape[0] == x.shape[0] > 0
        assert y.is_contiguous(), "y must be contiguous"
        assert x.is_contiguous(), "x must be contiguous"
        assert x.shape[1] % 8 == y.shape[1] % 8 == 0, "misaligned"
        if x.dtype not in DTYPES or rank not in ranks or rank in self.uncompiled:
            raise RuntimeError(f"No suitable kernel. dtype={x.dtype} d_out={rank}")


class CountingOps(ReferenceOps):
    """Records the slots that Punica leaves to others."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def apply(self, y: Tensor, x: Tensor, table: FactorTable, prepared: PreparedSegments) -> None:
        self.slots += [segment.adapter_slot for segment in prepared.segments]
        super().apply(y, x, table, prepared)


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(sum(map(ord, request.node.name)))
    random.seed(request.node.name)


@pytest.fixture
def fake() -> FakePunica:
    return FakePunica()


@pytest.fixture
def other() -> CountingOps:
    return CountingOps()


@pytest.mark.parametrize(
    ("dtype", "rank", "popularity", "num_rows", "idle_rows"),
    pairwise(
        [torch.float16, torch.bfloat16, torch.float32],
        [1, 8, 13, 16, 64, 96, 256],
        POPULARITIES,
        [1, 33],
        (False, True),
    ),
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_grid(fake: FakePunica, dtype: torch.dtype, rank: int, popularity: str, num_rows: int, idle_rows: bool) -> None:
    table = random_table([rank] * 5, IN, OUT, dtype)
    segments = random_segments(popularity, num_rows, 5, idle_rows=idle_rows)
    problem = random_problem(segments, table, num_rows, dtype)
    problem.check(problem.run(PunicaOps(fake, ReferenceOps())))
    has_kernel = dtype in DTYPES and rank in (8, 16, 64, 96)
    assert bool(fake.calls) == (has_kernel and bool(segments))


def test_one_call_per_rank_and_the_rest_row_by_row(fake: FakePunica, other: CountingOps) -> None:
    table = random_table([16, 64, 16, 13, 8, None, 256], IN, OUT, torch.bfloat16)
    segments = [Segment(0, 3, 0), Segment(3, 4, 1), Segment(5, 6, 2), Segment(6, 9, 3), Segment(9, 11, 4)]
    segments += [Segment(11, 12, 5), Segment(12, 13, 6), Segment(14, 15, 0)]
    problem = random_problem(segments, table, 16, torch.bfloat16)
    problem.check(problem.run(PunicaOps(fake, other)))
    assert sorted(fake.calls) == [("bgmv", 8, 2), ("sgmv", 16, 5), ("sgmv", 64, 1)]
    assert sorted(other.slots) == [3, 5, 6]


def test_mixtures_and_rows_of_several_adapters(fake: FakePunica, other: CountingOps) -> None:
    """A weight is only known to bgmv, and no call may have a row twice."""
    table = random_table([16, 32, 96, 16], IN, OUT, torch.float16)
    segments = [Segment(0, 6, 0, 0.7), Segment(0, 6, 1, 0.3), Segment(6, 8, 2, 0.5), Segment(8, 9, 0), Segment(8, 9, 3)]
    problem = random_problem(segments, table, 10, torch.float16)
    problem.check(problem.run(PunicaOps(fake, other)))
    assert sorted(fake.calls) == [("bgmv", 16, 6), ("bgmv", 32, 6), ("sgmv", 16, 1)]
    assert sorted(other.slots) == [2, 3]


@pytest.mark.parametrize(("in_features", "out_features"), [(100, 64), (96, 60)])
def test_widths_that_do_not_fit_its_loads(fake: FakePunica, in_features: int, out_features: int) -> None:
    table = random_table([16], in_features, out_features, torch.bfloat16)
    problem = random_problem([Segment(0, 4, 0)], table, 5, torch.bfloat16)
    problem.check(problem.run(PunicaOps(fake, ReferenceOps())))
    assert fake.calls == []


def test_column_slices_and_row_strides(fake: FakePunica) -> None:
    table = random_table([16, 8], IN, OUT, torch.bfloat16)
    problem = random_problem([Segment(0, 2, 0), Segment(3, 5, 1)], table, 6, torch.bfloat16)
    problem.x = torch.randn(6, 2 * IN).bfloat16()[:, IN:]
    wide = torch.randn(6, 3 * OUT).bfloat16()
    wide[:, OUT : 2 * OUT] = problem.y
    before = wide.clone()
    ops = PunicaOps(fake, ReferenceOps())
    ops.apply(wide[:, OUT : 2 * OUT], problem.x, table, problem.prepared(ops))
    problem.check(wide[:, OUT : 2 * OUT])
    for part in (slice(0, OUT), slice(2 * OUT, None)):
        assert torch.equal(bits(wide[:, part]), bits(before[:, part]))


def test_a_shape_that_it_was_built_without_is_left_to_others_from_then_on(other: CountingOps) -> None:
    fake = FakePunica(uncompiled=(96,))
    ops = PunicaOps(fake, other)
    table = random_table([96, 16], IN, OUT, torch.bfloat16)
    problem = random_problem([Segment(0, 2, 0), Segment(2, 3, 1)], table, 4, torch.bfloat16)
    prepared = problem.prepared(ops)
    for _ in range(3):
        got = problem.y.clone()
        ops.apply(got, problem.x, table, prepared)
        problem.check(got)
    assert other.slots == [0, 0, 0]
    assert fake.calls == [("sgmv", 16, 1)] * 3


def test_other_errors_are_not_swallowed(fake: FakePunica, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(fake, "add_lora_sgmv_custom_cutlass", lost)
    problem = random_problem([Segment(0, 1, 0)], random_table([16], IN, OUT, torch.bfloat16), 1, torch.bfloat16)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        problem.run(PunicaOps(fake, ReferenceOps()))


def test_a_table_changes_between_steps(fake: FakePunica) -> None:
    """Folded copies of a slot go with it; so do those that the other implementation keeps."""
    ops = PunicaOps(fake, CpuOps())
    table = random_table([16, 16, 13], IN, OUT, torch.bfloat16)
    problem = random_problem([Segment(0, 1, 0), Segment(1, 2, 1), Segment(2, 4, 2)], table, 5, torch.bfloat16)
    problem.check(problem.run(ops))
    for slot, rank in ((1, 16), (0, 64), (2, 16), (1, 13)):
        table.set(slot, random_factors(rank, IN, OUT, torch.bfloat16))
        problem.check(problem.run(ops))
        problem.check(problem.run(ops))
    table.set(0, None)
    problem.check(problem.run(ops))


def test_two_runs_are_equal_bit_for_bit(fake: FakePunica) -> None:
    table = random_table([8, 16, 64], IN, OUT, torch.bfloat16)
    problem = random_problem(random_segments("uniform", 12, 3, idle_rows=True), table, 12, torch.bfloat16)
    first = problem.run(PunicaOps(fake, ReferenceOps()))
    assert torch.equal(bits(problem.run(PunicaOps(FakePunica(), ReferenceOps()))), bits(first))


def test_segments_outside_are_refused(fake: FakePunica) -> None:
    with pytest.raises(ValueError, match="Segment"):
        PunicaOps(fake, ReferenceOps()).prepare([Segment(0, 9, 0)], 8, 3, torch.device("cpu"))


# --- which package it is ----------------------------------------------------------------------------------------------

REAL = """
def add_lora_sgmv_custom_cutlass(y, x, wa_ptr, wb_ptr, s, layer_idx, lora_rank): ...
def add_lora_bgmv(y, x, wa_T_all, wb_T_all, indicies, layer_idx, scale): ...
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for packages that nobody else sees."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "punica"]:
        del sys.modules[name]


def install(site: Path, init: str, ops: str | None) -> None:
    (site / "punica").mkdir()
    (site / "punica/__init__.py").write_text(init)
    if ops is not None:
        (site / "punica/ops").mkdir()
        (site / "punica/ops/__init__.py").write_text(ops)
    importlib.invalidate_caches()


def status() -> Implementation:
    return next(found for found in registry.lora_operations() if found.name == "punica")


@pytest.mark.parametrize("ops", [None, "", "def add_lora_bgmv(): ..."])
def test_a_stranger_of_that_name_is_not_even_imported(site: Path, ops: str | None) -> None:
    install(site, "raise SystemExit('a stranger runs')", ops)
    assert status()[:3] == (
        "punica",
        False,
        "the package punica that is installed is another one, without LoRA operators",
    )
    with pytest.raises(InvalidArgument, match="another one"):
        CudaBackend().lora(name="punica")


def test_a_module_instead_of_a_package(site: Path) -> None:
    (site / "punica.py").write_text("raise SystemExit('a stranger runs')")
    importlib.invalidate_caches()
    assert not status().usable


def test_the_real_one_is_bound_but_never_chosen_by_itself(site: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed (it is for Linux)")
    install(site, "", REAL)
    assert status().usable
    assert CudaBackend().lora(name="punica").name == "punica"
    assert registry.choose_backend("cuda").lora().name == "triton"


def test_it_needs_a_gpu(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "", REAL)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "compute capability" in status().reason
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert status().reason == "no CUDA device"


def test_where_there_is_none() -> None:
    assert status().reason in ("the package punica is not installed", "no CUDA device")
