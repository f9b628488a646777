"""Products with weights of few bits equal those with the rounded weights."""

from __future__ import annotations

import pytest
import torch
from support.guarded_memory import at_end
from support.lora_cases import bits
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.quantization import INT4, INT8, WeightFormat

DTYPES = [torch.float32, torch.bfloat16]
INPUTS = [32, 64, 160, 608, 2080]  # the last is several slabs of a band
ROWS = [1, 2, 3, 7, 8, 16, 17, 32, 33, 64, 65, 70]


@pytest.fixture(params=[INT8, INT4], ids=["int8", "int4"])
def form(request: pytest.FixtureRequest) -> WeightFormat:
    return request.param


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values of very different sizes, as outputs and blocks of a weight are."""
    sizes = torch.randn(shape[0], 1).exp() * torch.randn(1, shape[1]).exp()
    return (torch.randn(*shape) * sizes).to(dtype)


def rounded(weight: Tensor, form: WeightFormat) -> Tensor:
    copy = weight.clone()
    form.round_(copy)
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", INPUTS)
@pytest.mark.parametrize("num_outputs", [1, 33, 100, 2100])
def test_products_are_those_of_the_rounded_weight(
    kernels: NativeKernels, form: WeightFormat, dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    """Products are equal to the bit, with any number of rows: kernels widen weights to what `rounded` is, and sum in
    the same order."""
    weight = random(num_outputs, num_inputs, dtype=dtype)
    plain, packed = kernels.pack([rounded(weight, form)]), kernels.pack([weight], form)
    bias = torch.randn(num_outputs).to(dtype)
    for num_rows in ROWS:
        x = at_end(random(num_rows, num_inputs, dtype=dtype))
        want, got = kernels.linear(x, plain, bias), kernels.linear(x, packed, bias)
        assert got.isfinite().all()
        assert torch.equal(bits(got), bits(want)), num_rows


@pytest.mark.parametrize("num_inputs", [1, 7, 130])
def test_any_number_of_inputs_in_float32(kernels: NativeKernels, form: WeightFormat, num_inputs: int) -> None:
    weight, x = (random(size, num_inputs, dtype=torch.float32) for size in (40, 9))
    want = kernels.linear(x, kernels.pack([rounded(weight, form)]), None)
    assert torch.equal(kernels.linear(x, kernels.pack([weight], form), None), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_many_rows_that_they_go_in_parts(kernels: NativeKernels, form: WeightFormat, dtype: torch.dtype) -> None:
    weight, x = random(1100, 320, dtype=dtype), random(1100, 320, dtype=dtype)
    want = kernels.linear(x, kernels.pack([rounded(weight, form)]), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack([weight], form), None)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_weights_and_pairs(kernels: NativeKernels, form: WeightFormat, dtype: torch.dtype) -> None:
    x = random(5, 160, dtype=dtype)
    weights = [random(size, 160, dtype=dtype) for size in (64, 32, 45)]
    want = kernels.linear(x, kernels.pack([rounded(weight, form) for weight in weights]), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack(weights, form), None)), bits(want))
    first, second = (random(40, 160, dtype=dtype) for _ in range(2))
    want = kernels.linear(x, kernels.pack_pair(rounded(first, form), rounded(second, form)), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack_pair(first, second, form), None)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_the_smallest_and_the_largest_blocks(
    kernels: NativeKernels, form: WeightFormat, dtype: torch.dtype
) -> None:
    """Kernels compute with their powers of two in a way of their own."""
    least, most = (-112, 118) if form is INT8 else (-60, 16)
    exponents = torch.cat([torch.arange(least, least + 30), torch.arange(most - 30, most)])
    weight = (torch.randn(len(exponents), 64).clamp(-0.99, 0.99) * 2.0 ** exponents[:, None].double()).to(dtype)
    for x in (torch.eye(64, dtype=dtype), torch.eye(64, dtype=dtype)[:20]):
        want = kernels.linear(x, kernels.pack([rounded(weight, form)]), None)
        assert want.isfinite().all()
        assert torch.equal(bits(kernels.linear(x, kernels.pack([weight], form), None)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", [32, 70, 640])
def test_rounding_is_that_of_tensor_operations(
    kernels: NativeKernels, form: WeightFormat, dtype: torch.dtype, num_inputs: int
) -> None:
    if dtype == torch.bfloat16 and num_inputs % 32:
        pytest.skip("no kernel has a product with such a weight")
    weight = random(2000, num_inputs, dtype=dtype)
    weight[3] = 0
    weight[4:40] = (torch.randn(36, num_inputs) * 8).round() / 8  # many ties
    want, got = form.quantize(weight), kernels.quantize(weight, form)
    assert torch.equal(got.values, want.values)
    assert torch.equal(got.codes, want.codes)
    for view in (weight.clone(), weight.t().contiguous().t()):
        kernels.round_(view, form)
        assert torch.equal(bits(view), bits(rounded(weight, form)))


def test_memory_is_a_half_and_a_quarter(kernels: NativeKernels, form: WeightFormat) -> None:
    weight = random(640, 1024, dtype=torch.bfloat16)
    packed = kernels.pack([weight], form)
    assert packed.memory.numel() / kernels.pack([weight]).memory.numel() == pytest.approx(
        0.5 if form is INT8 else 0.25, abs=0.02
    )
