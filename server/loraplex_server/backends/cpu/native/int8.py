"""Weights in eight bits (MXINT8).

Weights are whole numbers of -127 to 127 times a power of two that 32 inputs of an output share.

MXINT8 of the Open Compute Project's microscaling formats (Rouhani et al., arXiv 2310.10537). bfloat16 holds every such
weight exactly. So the served model is the same model with rounded weights, and rounding those again changes none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK: Final = 32  # lp::kBlock
LARGEST: Final = 127
BIAS: Final = 127  # of exponents, as in float32
SMALLEST: Final = 2.0**-110  # blocks of less are zero: products with them would be no normal numbers
TOO_LARGE: Final = 2.0**118  # for kernels: what they take off the product would be infinite
ROWS: Final = 4096  # that are in float32 at once


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out, in]."""

    values: Tensor  # int8 [out, in]
    exponents: Tensor  # uint8 [out, blocks], with BIAS; 0 of a block of zeros

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that it stands for."""
        scales = _scales(self.exponents).repeat_interleave(BLOCK, dim=1)[:, : self.values.shape[1]]
        return (self.values.float() * scales).to(dtype)


def to_int8(weight: Tensor) -> Int8Weight:
    """Of weights [out, in] smaller than TOO_LARGE those that are nearest, with the least power of two that the largest
    of a block leaves."""
    parts = [_to_int8(rows) for rows in weight.detach().split(ROWS)]
    return Int8Weight(torch.cat([part.values for part in parts]), torch.cat([part.exponents for part in parts]))


def _to_int8(weight: Tensor) -> Int8Weight:
    num_outputs, num_inputs = weight.shape
    blocks = F.pad(weight.float(), (0, -num_inputs % BLOCK)).reshape(num_outputs, -1, BLOCK)
    largest = blocks.abs().amax(dim=2)
    exponents = torch.frexp(largest).exponent - 7 + BIAS  # the largest becomes 64 to 127
    exponents = torch.where(largest >= SMALLEST, exponents, torch.zeros_like(exponents)).to(torch.uint8)
    scales = _scales(exponents).unsqueeze(2)
    values = torch.where(scales > 0, blocks / scales, torch.zeros_like(blocks))
    values = values.round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return Int8Weight(values.view(num_outputs, -1)[:, :num_inputs].contiguous(), exponents)


def _scales(exponents: Tensor) -> Tensor:
    return (exponents.to(torch.int32) << 23).view(torch.float32)


def round_(weight: Tensor) -> None:
    """Replaces weights [out, in] smaller than TOO_LARGE by those that eight bits stand for, in place."""
    for rows in weight.split(ROWS):
        rows.copy_(_to_int8(rows).widened(weight.dtype))
