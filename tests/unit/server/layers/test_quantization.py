"""Values of weights in few bits, and of rounding to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loraplex_server.layers.quantization import BLOCK, INT4, INT8, WeightFormat

DTYPES = [torch.float32, torch.bfloat16]
INPUTS = [32, 64, 160, 608]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Random values of very different sizes, as outputs and blocks of a weight are."""
    sizes = torch.randn(shape[0], 1).exp() * torch.randn(1, shape[1]).exp()
    return (torch.randn(*shape) * sizes).to(dtype)


def rounded(weight: Tensor, form: WeightFormat = INT8) -> Tensor:
    copy = weight.clone()
    form.round_(copy)
    return copy


# --- what they stand for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("num_inputs", INPUTS)
def test_a_weight_moves_by_half_a_step_at_most(dtype: torch.dtype, num_inputs: int) -> None:
    """A weight moves by half a step at most; a block's largest, which may be cut to 127 steps, by a whole one."""
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
    """A rounded model can be saved, loaded and packed, and is still the same."""
    weight = (torch.randn(3000, 256) * scale).to(dtype)
    once = INT8.quantize(weight)
    twice = INT8.quantize(once.widened(dtype))
    assert torch.equal(once.values, twice.values)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(rounded(rounded(weight)), rounded(weight))


@pytest.mark.parametrize("exponent", [-100, -1, 0, 100])
def test_every_value_survives_bfloat16(exponent: int) -> None:
    values = torch.arange(-127, 128)
    weight = torch.zeros(255, 2)
    weight[:, 0] = 127 * 2.0**exponent
    weight[:, 1] = values * 2.0**exponent
    assert torch.equal(weight.bfloat16().float(), weight)
    assert torch.equal(INT8.quantize(weight.bfloat16()).values[:, 1].long(), values)
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
    assert torch.equal(INT8.quantize(weight).widened(torch.float32), got)
    base = weight.contiguous().t().contiguous()
    INT8.round_(base.t())
    assert torch.equal(base.t(), got)


# --- four bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_inputs", INPUTS)
def test_four_bits_are_the_nearest_levels(num_inputs: int) -> None:
    """Weights become the nearest levels of their block's scale. The scale makes the block's largest 31, and its
    neighbours have no less error."""
    weight = random(50, num_inputs, dtype=torch.float32).double()
    found = INT4.quantize(weight)
    levels = torch.tensor(INT4.LEVELS, dtype=torch.float64)
    scales = INT4.scales(torch.arange(256, dtype=torch.uint8)).double()

    def nearest(block: Tensor, scale: Tensor) -> Tensor:
        return levels[(block.unsqueeze(2) / scale[:, None, None] - levels).abs().argmin(2)] * scale[:, None]

    for start in range(0, num_inputs, BLOCK):
        block, codes = weight[:, start : start + BLOCK], found.codes[:, start // BLOCK].long()
        got = levels[found.values[:, start : start + BLOCK].long()] * scales[codes][:, None]
        assert torch.equal(got.abs().amax(1), 31 * scales[codes])
        error = (got - block).square().sum(1)
        assert torch.allclose(error, (nearest(block, scales[codes]) - block).square().sum(1))
        most = (block.abs().amax(1, keepdim=True) > INT4.OUTER * scales).sum(1) - 1
        assert (codes <= most).all()
        for codes_beside in (codes - 1, codes + 1):
            beside = nearest(block, scales[codes_beside])
            is_tried = (codes_beside <= most) & (codes_beside > most - INT4.NUM_TRIED)
            assert (beside.abs().amax(1) == 31 * scales[codes_beside])[is_tried].all()
            assert ((beside - block).square().sum(1) >= error * (1 - 1e-6))[is_tried].all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3])
def test_four_bits_are_rounded_once(dtype: torch.dtype, scale: float) -> None:
    weight = (torch.randn(3000, 256) * scale).to(dtype)
    weight[7:9] = 0
    once = INT4.quantize(weight)
    twice = INT4.quantize(once.widened(dtype))
    assert torch.equal(once.values, twice.values)
    assert torch.equal(once.codes, twice.codes)
    assert torch.equal(rounded(rounded(weight, INT4), INT4), rounded(weight, INT4))
    assert torch.count_nonzero(once.widened(dtype)[7:9]) == 0


def test_all_four_bit_weights_survive_bfloat16() -> None:
    weight = INT4.scales(torch.arange(256, dtype=torch.uint8))[:, None] * torch.tensor(INT4.LEVELS).float()
    assert torch.equal(weight.bfloat16().float(), weight)
    assert weight.unique().numel() > 1000


def test_how_far_normally_distributed_weights_move() -> None:
    weight = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    for form, most in ((INT8, 0.009), (INT4, 0.087)):
        assert (rounded(weight, form) - weight).norm() / weight.norm() < most
