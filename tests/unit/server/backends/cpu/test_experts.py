"""Products and adapters' terms of experts by the native kernels."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from support.native_kernels import best_first, native_kernels, using
from support.native_models import native_rig
from support.zoo import random_model
from torch import Tensor

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.experts import NativeExperts, NativeTerms, native_experts
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.experts import (
    DOWN,
    UP,
    AdaptedExperts,
    AddTerms,
    ExpertLinear,
    add_terms,
    sorted_pairs,
    uses_of_rows,
)
from loraplex_server.layers.lora import FactorTable, Segment

NUM_EXPERTS, TOP_K = 7, 3
CPU = torch.device("cpu")


@pytest.fixture(params=best_first())
def kernels(request: pytest.FixtureRequest) -> Generator[NativeKernels]:
    with using(request.param):
        yield native_kernels()


def routed(num_rows: int, num_inputs: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    return x, torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(TOP_K).indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 32, 16), (40, 96, 200), (300, 64, 130)])
def test_equals_products_one_by_one(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    """Outputs that fill no band, more rows than a product takes at once, and experts without a row."""
    x, chosen = routed(num_rows, num_inputs, dtype)
    chosen[chosen == 2] = 4
    weight = torch.randn(NUM_EXPERTS, num_outputs, num_inputs).to(dtype)
    got = NativeExperts(kernels, weight)(x, chosen)
    want = torch.einsum("rk,rtok->rto", x.double(), weight.double()[chosen]).flatten(0, 1)
    torch.testing.assert_close(got.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_batch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, chosen = routed(75, 64, dtype)
    products = NativeExperts(kernels, torch.randn(NUM_EXPERTS, 96, 64).to(dtype))
    together = products(x, chosen).view(75, TOP_K, -1)
    for row in (0, 31, 32, 74):
        assert torch.equal(products(x[row : row + 1], chosen[row : row + 1]), together[row])
    flat = products(x.repeat_interleave(TOP_K, dim=0), chosen.reshape(-1, 1))
    assert torch.equal(flat, together.flatten(0, 1))


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
def test_an_expert_that_is_not_there_is_refused(expert: int) -> None:
    products = NativeExperts(native_kernels(), torch.randn(NUM_EXPERTS, 8, 16))
    with pytest.raises(IndexError, match="none of 7"):
        products(torch.randn(2, 16), torch.tensor([[0, 1], [2, expert]]))


def test_weights_of_odd_sizes_are_not_taken() -> None:
    make = native_experts(native_kernels())
    assert make(torch.randn(2, 8, 24, dtype=torch.bfloat16)) is None
    assert make(torch.randn(2, 8, 24, dtype=torch.float64)) is None
    assert make(torch.randn(2, 8, 24)) is not None


# --- adapters' terms --------------------------------------------------------------------------------------------------


def adapted(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> ExpertLinear:
    """Experts with adapters of two ranks in slots 0 and 2, and none in slot 1."""
    linear = ExpertLinear(torch.empty(NUM_EXPERTS, num_outputs, num_inputs, dtype=dtype))
    linear.table, linear.num_installed = FactorTable(3, num_inputs, num_outputs, "cpu"), 2
    for slot, rank in ((0, 4), (2, 9)):
        a, b = torch.randn(NUM_EXPERTS, rank, num_inputs), torch.randn(NUM_EXPERTS, num_outputs, rank)
        linear.table.set(slot, LoraFactors(a.to(dtype) / num_inputs**0.5, b.to(dtype), 0.7))
    return linear


def with_terms(
    terms: AddTerms, linear: ExpertLinear, x: Tensor, chosen: Tensor, slots: list[int], weight: float = 1.0
) -> Tensor:
    """y [rows, TOP_K, out], ones before the terms. `slots`: of each row, -1 for none."""
    segments = [Segment(row, row + 1, slot, weight) for row, slot in enumerate(slots) if slot >= 0]
    uses = uses_of_rows(segments, len(slots), CPU)
    keys, order, groups = sorted_pairs(chosen, uses)
    y = torch.ones(len(keys), linear.out_features, dtype=x.dtype)
    terms(y, x.index_select(0, order // TOP_K), linear, groups, uses)
    return torch.empty_like(y).index_copy_(0, order, y).view(len(slots), TOP_K, -1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), [(1, 32, 16), (40, 96, 200), (300, 64, 130)])
def test_terms_equal_those_of_torch(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    torch.manual_seed(num_rows)
    linear, (x, chosen) = adapted(num_inputs, num_outputs, dtype), routed(num_rows, num_inputs, dtype)
    slots = [(0, 2, -1, 1)[row * 7 % 4] for row in range(num_rows)]
    got = with_terms(NativeTerms(kernels), linear, x, chosen, slots, 0.5)
    want = with_terms(add_terms, linear, x, chosen, slots, 0.5)
    tolerance = 3e-2 if dtype == torch.bfloat16 else 1e-5  # a sum near zero of terms that are rounded
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert not torch.equal(got, torch.ones_like(got))
    assert torch.equal(got[[slot in (-1, 1) for slot in slots]], torch.ones_like(got[[s in (-1, 1) for s in slots]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_terms_has_the_same_bits_in_any_batch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    linear, (x, chosen) = adapted(64, 96, dtype), routed(150, 64, dtype)
    slots = [(0, 2, -1)[row % 3] for row in range(150)]
    together = with_terms(NativeTerms(kernels), linear, x, chosen, slots)
    for part in (slice(0, 1), slice(31, 32), slice(0, 9), slice(40, 120)):
        apart = with_terms(NativeTerms(kernels), linear, x[part], chosen[part], slots[part])
        assert torch.equal(apart, together[part])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_loaded_model_keeps_one_copy_of_its_experts(family: str) -> None:
    """Experts may have weights that lie the other way round, biases and a gate of the family's own."""
    model = native_rig(random_model(family, torch.float32), native_kernels()).loaded.model
    found = [module for module in model.modules() if isinstance(module, AdaptedExperts)]
    assert len(found) == 2
    for experts in found:
        assert set(experts.products) == {UP, DOWN}
        assert experts.base.get_parameter(UP).is_meta
