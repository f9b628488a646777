"""LoftQ's quantization, number by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from loraplex_adapters.formats.peft_loftq import NF4, NF4_BLOCK, LoftqConfig, parse_loftq, quantized
from loraplex_adapters.weights import TargetModule
from loraplex_contracts.errors import AdapterUnsupported


def made(weight: Tensor, num_bits: int, num_iterations: int = 1, rank: int = 4) -> Tensor:
    module = TargetModule("q_proj", "linear", weight.shape[1], weight.shape[0], weights=lambda: (weight, None))
    return quantized(LoftqConfig(num_bits, num_iterations), module, rank)(None)


@pytest.mark.parametrize("shape", [(24, 16), (37, 19), (1, 5)])
def test_four_bits_are_the_nearest_of_sixteen_values(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight[0] = 0.0  # a block of zeros has no scale, where it is a whole one
    found = made(weight, 4).flatten().tolist()
    values = weight.flatten().tolist()
    for start in range(0, len(values), NF4_BLOCK):
        block = values[start : start + NF4_BLOCK]
        largest = max(map(abs, block))
        for value, got in zip(block, found[start : start + NF4_BLOCK], strict=True):
            want = min((code * largest for code in NF4), key=lambda one: abs(one - value))
            assert got == pytest.approx(want, abs=1e-6)


def test_eight_bits_have_a_scale_for_each_row() -> None:
    weight = torch.randn(9, 33, generator=torch.Generator().manual_seed(2), dtype=torch.bfloat16)
    weight[3] = 0.0
    for row, found in zip(weight.half().double(), made(weight, 8).double(), strict=True):
        step = row.abs().max() / 127
        assert ((found - row).abs() <= step * 0.5001).all()
        assert torch.allclose(found / step.clamp_min(1e-9), (found / step.clamp_min(1e-9)).round(), atol=1e-4)


def test_further_iterations_leave_less_to_the_factors() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(3))
    losses: list[float] = []
    for num_iterations in (1, 2, 5):
        left = torch.linalg.svdvals(weight - made(weight, 4, num_iterations, rank=8))[8:]
        losses.append(float(left.norm()))
    assert losses[0] > losses[1] > losses[2]


@pytest.mark.parametrize(
    "config", [{"loftq_bits": 2}, {"loftq_iter": 0}, {"loftq_iter": 99}, {"loftq_bits": True}, {"loftq_iter": "1"}]
)
def test_other_quantizations_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(AdapterUnsupported, match="loftq_config"):
        parse_loftq({"loftq_config": config})


def test_what_is_left_out_is_as_in_peft() -> None:
    from peft import LoftQConfig

    default = LoftQConfig()
    assert parse_loftq({"loftq_config": None}) == (default.loftq_bits, default.loftq_iter)
