"""MXINT8 weights: their values, and exact products."""

from __future__ import annotations

import pytest
import torch
from support.guarded_memory import at_end
from support.lora_cases import bits
from torch import Tensor

from loraplex_server.backends.cpu.native.int8 import BLOCK, round_, to_int8
from loraplex_server.backends.cpu.native.kernels import NativeKernels

DTYPES = [torch.float32, torch.bfloat16]
INPUTS = [32, 64, 160, 608, 2080]  # the last is several slabs of a band
ROWS = [1, 7, 16, 17, 32, 33, 64, 65, 70]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Of very different sizes, as outputs and blocks of a weight are."""
    sizes = torch.randn(shape[0], 1).exp() * torch.randn(1, shape[1]).exp()
    return (torch.randn(*shape) * sizes).to(dtype)


def rounded(weight: Tensor) -> Tensor:
    copy = weight.clone()
    round_(copy)
    return copy


# --- what they stand for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("num_inputs", INPUTS)
def test_a_weight_moves_by_half_a_step_at_most(dtype: torch.dtype, num_inputs: int) -> None:
    """Of a block's largest, which may be cut to 127 steps, by a whole one."""
    weight = random(50, num_inputs, dtype=dtype)
    got = rounded(weight).double()
    assert not torch.equal(got, weight.double())
    for start in range(0, num_inputs, BLOCK):
        before, after = weight[:, start : start + BLOCK].double(), got[:, start : start + BLOCK]
        step = 2.0 ** (before.abs().amax(1, keepdim=True).log2().floor() - 6)
        assert torch.equal((after / step).round(), after / step)
        assert ((after - before).abs() <= torch.where(before.abs() > 127 * step, 1.0, 0.5) * step).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rounding_twice_is_rounding_once(dtype: torch.dtype, scale: float) -> None:
    """So that a rounded model can be saved, loaded and packed, and is still the same."""
    weight = (torch.randn(3000, 256) * scale).to(dtype)
    once = to_int8(weight)
    twice = to_int8(once.widened(dtype))
    assert torch.equal(once.values, twice.values)
    assert torch.equal(once.exponents, twice.exponents)
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


@pytest.mark.parametrize("exponent", [-100, -1, 0, 100])
def test_every_value_survives_bfloat16(exponent: int) -> None:
    values = torch.arange(-127, 128)
    weight = torch.zeros(255, 2)
    weight[:, 0] = 127 * 2.0**exponent
    weight[:, 1] = values * 2.0**exponent
    assert torch.equal(weight.bfloat16().float(), weight)
    assert torch.equal(to_int8(weight.bfloat16()).values[:, 1].long(), values)
    assert torch.equal(rounded(weight.bfloat16()).float(), weight)


def test_zeros_stay_and_what_is_next_to_nothing_becomes_zero() -> None:
    weight = torch.zeros(3, 64, dtype=torch.bfloat16)
    weight[0, 5], weight[1, 40], weight[1, 3] = -3.140625, 2.0**-100, 2.0**-115
    got = rounded(weight)
    assert got[0, 5] == -3.125  # the nearest of eight bits' steps
    assert got[1, 40] == weight[1, 40]
    assert torch.count_nonzero(got) == 2


def test_many_rows_and_views_of_other_layouts() -> None:
    weight = random(160, 5000, dtype=torch.float32).t()  # rows are taken in parts
    got = rounded(weight.contiguous())
    assert torch.equal(to_int8(weight).widened(torch.float32), got)
    base = weight.contiguous().t().contiguous()
    round_(base.t())
    assert torch.equal(base.t(), got)


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_inputs", INPUTS)
@pytest.mark.parametrize("num_outputs", [1, 33, 100, 2100])
def test_products_are_those_of_the_rounded_weight(
    kernels: NativeKernels, dtype: torch.dtype, num_inputs: int, num_outputs: int
) -> None:
    """To the bit, with any number of rows: kernels widen weights to what `rounded` is, and sum in the same order."""
    weight = random(num_outputs, num_inputs, dtype=dtype)
    plain, packed = kernels.pack([rounded(weight)]), kernels.pack([weight], int8=True)
    bias = torch.randn(num_outputs).to(dtype)
    for num_rows in ROWS:
        x = at_end(random(num_rows, num_inputs, dtype=dtype))
        want, got = kernels.linear(x, plain, bias), kernels.linear(x, packed, bias)
        assert got.isfinite().all()
        assert torch.equal(bits(got), bits(want)), num_rows


@pytest.mark.parametrize("num_inputs", [1, 7, 130])
def test_any_number_of_inputs_in_float32(kernels: NativeKernels, num_inputs: int) -> None:
    weight, x = (random(size, num_inputs, dtype=torch.float32) for size in (40, 9))
    want = kernels.linear(x, kernels.pack([rounded(weight)]), None)
    assert torch.equal(kernels.linear(x, kernels.pack([weight], int8=True), None), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_so_many_rows_that_they_go_in_parts(kernels: NativeKernels, dtype: torch.dtype) -> None:
    weight, x = random(1100, 320, dtype=dtype), random(1100, 320, dtype=dtype)
    want = kernels.linear(x, kernels.pack([rounded(weight)]), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack([weight], int8=True), None)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_weights_and_pairs(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x = random(5, 160, dtype=dtype)
    weights = [random(size, 160, dtype=dtype) for size in (64, 32, 45)]
    want = kernels.linear(x, kernels.pack([rounded(weight) for weight in weights]), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack(weights, int8=True), None)), bits(want))
    first, second = (random(40, 160, dtype=dtype) for _ in range(2))
    want = kernels.linear(x, kernels.pack_pair(rounded(first), rounded(second)), None)
    assert torch.equal(bits(kernels.linear(x, kernels.pack_pair(first, second, int8=True), None)), bits(want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_of_the_smallest_and_the_largest_blocks(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """Kernels compute with their powers of two in a way of their own."""
    exponents = torch.cat([torch.arange(-112, -90), torch.arange(90, 118)])
    weight = (torch.randn(len(exponents), 64).clamp(-0.99, 0.99) * 2.0 ** exponents[:, None].double()).to(dtype)
    for x in (torch.eye(64, dtype=dtype), torch.eye(64, dtype=dtype)[:20]):
        want = kernels.linear(x, kernels.pack([rounded(weight)]), None)
        assert want.isfinite().all()
        assert torch.equal(bits(kernels.linear(x, kernels.pack([weight], int8=True), None)), bits(want))


def test_memory_is_a_half(kernels: NativeKernels) -> None:
    weight = random(640, 1024, dtype=torch.bfloat16)
    packed = kernels.pack([weight], int8=True)
    assert packed.memory.numel() / kernels.pack([weight]).memory.numel() == pytest.approx(0.5, abs=0.02)
