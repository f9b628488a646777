"""Products and adapters' terms of experts by the native kernels."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from support.native_kernels import best_first, native_kernels, using
from support.native_models import native_rig
from support.zoo import random_model
from torch import Tensor, nn

from loraplex_adapters.weights import LoraFactors
from loraplex_server.backends.cpu.experts import NativeExperts, NativeTerms, native_experts, native_fused_experts
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.experts import (
    DOWN,
    UP,
    AdaptedExperts,
    AddTerms,
    ExpertLinear,
    FusedExperts,
    Uses,
    add_terms,
    sorted_pairs,
    uses_of_rows,
)
from loraplex_server.layers.lora import FactorTable, Segment
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat

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


# --- all in one call --------------------------------------------------------------------------------------------------


def fused(
    kernels: NativeKernels, dtype: torch.dtype, form: WeightFormat | None = None
) -> tuple[FusedExperts, list[ExpertLinear], list[Tensor]]:
    """Experts of 64 features and 48 inner ones, their linears with adapters in slots 0 and 2, and their weights."""
    torch.manual_seed(2)
    linears = [adapted(64, 192, dtype), adapted(96, 64, dtype)]
    weights = [(torch.randn(NUM_EXPERTS, *sizes) / 8).to(dtype) for sizes in ((192, 64), (64, 96))]
    if form is not None:
        for weight in weights:
            form.round_(weight.view(-1, weight.shape[2]))
    made = native_fused_experts(kernels, form)(linears, weights, nn.SiLU())
    assert made is not None
    return made, linears, weights


def one_by_one(
    linears: list[ExpertLinear], weights: list[Tensor], x: Tensor, chosen: Tensor, shares: Tensor, slots: list[int]
) -> Tensor:
    """Output of experts, pair by pair in float64."""
    y = torch.zeros(x.shape, dtype=torch.float64)
    for row, slot in enumerate(slots):
        for expert, share in zip(chosen[row].tolist(), shares[row].double(), strict=True):

            def product(value: Tensor, which: int, expert: int = expert, slot: int = slot) -> Tensor:
                found = weights[which][expert].double() @ value
                terms = linears[which].terms(slot) if slot >= 0 else None
                if terms is None:
                    return found
                update = terms.b[expert].double() @ (terms.a[expert].double() @ value)
                return found + terms.factors.scale * update

            gate, up = product(x[row].double(), 0).chunk(2)
            y[row] += share * product(nn.functional.silu(gate) * up, 1)
    return y


def uses_of(slots: list[int]) -> Uses:
    return uses_of_rows([Segment(row, row + 1, slot) for row, slot in enumerate(slots) if slot >= 0], len(slots), CPU)


@pytest.mark.parametrize("form", [None, INT8, INT4], ids=["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 9, 150])
def test_fused_experts_equal_those_one_by_one(
    kernels: NativeKernels, dtype: torch.dtype, num_rows: int, form: WeightFormat | None
) -> None:
    made, linears, weights = fused(kernels, dtype, form)
    x, chosen = routed(num_rows, 64, dtype)
    shares = torch.rand(num_rows, TOP_K)
    slots = [(0, 2, -1, 1)[row * 7 % 4] for row in range(num_rows)]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-6  # of the largest value: sums near zero have terms as large
    for adapters in (slots, [-1] * num_rows):
        uses = uses_of(adapters) if max(adapters) >= 0 else None
        got = made(x, chosen, shares, uses)
        want = one_by_one(linears, weights, x, chosen, shares, adapters)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * float(want.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_fused_experts_has_the_same_bits_in_any_batch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    made, _, _ = fused(kernels, dtype)
    x, chosen = routed(150, 64, dtype)
    shares, slots = torch.rand(150, TOP_K), [(0, 2, -1)[row % 3] for row in range(150)]
    together = made(x, chosen, shares, uses_of(slots))
    for part in (slice(0, 1), slice(2, 3), slice(31, 32), slice(0, 9), slice(40, 120)):
        apart = made(x[part], chosen[part], shares[part], uses_of(slots[part]))
        assert torch.equal(apart, together[part])
    assert torch.equal(made(x, chosen, shares, None)[2::3], together[2::3])


@pytest.mark.parametrize("expert", [-1, NUM_EXPERTS])
def test_fused_experts_refuse_an_expert_that_is_not_there(expert: int) -> None:
    made, _, _ = fused(native_kernels(), torch.float32)
    with pytest.raises(IndexError, match="none of 7"):
        made(torch.randn(2, 64), torch.tensor([[0, 1], [2, expert]]), torch.rand(2, 2), None)


def test_unknown_activations_and_sizes_are_not_fused() -> None:
    make = native_fused_experts(native_kernels())
    linears = [adapted(64, 192, torch.float32), adapted(96, 64, torch.float32)]
    weights = [torch.randn(2, 192, 64), torch.randn(2, 64, 96)]
    assert make(linears, weights, nn.SiLU()) is not None
    assert make(linears, weights, nn.ReLU()) is None
    assert make(linears, [torch.randn(2, 40, 64), torch.randn(2, 64, 20)], nn.SiLU()) is None


def test_a_loaded_model_keeps_one_copy_of_fused_experts() -> None:
    """Those of a family with biases and a gate of its own are computed by their products."""
    for family, is_fused in (("qwen3_moe", True), ("gpt_oss", False)):
        loaded = native_rig(random_model(family, torch.float32), native_kernels()).loaded
        found = [module for _, module in loaded.named_modules() if isinstance(module, AdaptedExperts)]
        assert len(found) == 2
        for experts in found:
            assert (experts.fused is not None) is is_fused
            assert set(experts.products) == (set() if is_fused else {UP, DOWN})
            assert experts.base.get_parameter(UP).is_meta
