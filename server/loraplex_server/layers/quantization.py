"""Formats of weights in few bits: MXINT8, and INT4 with 16 levels.

A weight is a small whole number times a scale that 32 inputs of an output share. bfloat16 holds each such product
exactly. So the served model is the same model with rounded weights, and rounding those again changes none.

INT8 is MXINT8 of the Open Compute Project's microscaling formats (Rouhani et al., arXiv 2310.10537). INT4 has 16 whole
numbers of five bits with a sign, denser around zero as weights are, and scales of three significant bits, of which each
block takes the one that leaves the least squared error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK: Final = 32  # lp::kBlock
ROWS: Final = 4096  # that are in float32 at once


class WeightFormat(ABC):
    """Rounds weights to what its bits hold."""

    name: ClassVar[str]  # in --quantize
    words: ClassVar[str]
    code: ClassVar[int]  # lp::Format
    too_large: ClassVar[float]  # weights are smaller than that

    def quantize(self, weight: Tensor) -> QuantizedWeight:
        """The levels nearest to finite weights [out, in] smaller than `too_large`."""
        parts = [self._quantize(rows) for rows in weight.detach().split(ROWS)]
        return QuantizedWeight(self, torch.cat([values for values, _ in parts]), torch.cat([own for _, own in parts]))

    def round_(self, weight: Tensor) -> None:
        """Replaces weights [out, in] by those that their quantized ones stand for, in place."""
        for rows in weight.split(ROWS):
            rows.copy_(QuantizedWeight(self, *self._quantize(rows)).widened(weight.dtype))

    def _quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        num_outputs, num_inputs = weight.shape
        blocks = F.pad(weight.float(), (0, -num_inputs % BLOCK)).reshape(num_outputs, -1, BLOCK).contiguous()
        values, codes = self._quantize_blocks(blocks)
        return values.reshape(num_outputs, -1)[:, :num_inputs].contiguous(), codes

    @abstractmethod
    def _quantize_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Values of blocks [out, blocks, BLOCK] in float32, and their scales [out, blocks] as bytes."""

    @abstractmethod
    def whole_numbers(self, values: Tensor) -> Tensor:
        """The whole numbers of these values, in float32."""

    @abstractmethod
    def scales(self, codes: Tensor) -> Tensor:
        """The scales of these bytes, in float32."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [out, in] in few bits."""

    format: WeightFormat
    values: Tensor  # int8 [out, in]: whole numbers, or numbers of levels
    codes: Tensor  # uint8 [out, blocks], of scales

    def widened(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] that it stands for."""
        scales = self.format.scales(self.codes).repeat_interleave(BLOCK, dim=1)[:, : self.values.shape[1]]
        return (self.format.whole_numbers(self.values) * scales).to(dtype)


class Int8(WeightFormat):
    """MXINT8: whole numbers of -127 to 127. Scales are exponents with a bias of 127, as in float32; 0 of a block of
    zeros."""

    name = "int8"
    words = "eight bits"
    code = 1
    too_large = 2.0**118  # for kernels: what they take off the product would be infinite
    LARGEST: ClassVar = 127
    SMALLEST: ClassVar = 2.0**-110  # blocks of less are zero: products with them would be no normal numbers

    def _quantize_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Int8 values of blocks, scaled by the least power of two with which the largest value of a block fits."""
        largest = blocks.abs().amax(dim=2)
        exponents = torch.frexp(largest).exponent - 7 + 127  # the largest becomes 64 to 127
        exponents = torch.where(largest >= self.SMALLEST, exponents, torch.zeros_like(exponents)).to(torch.uint8)
        scales = self.scales(exponents).unsqueeze(2)
        values = torch.where(scales > 0, blocks / scales, torch.zeros_like(blocks))
        return values.round_().clamp_(-self.LARGEST, self.LARGEST).to(torch.int8), exponents

    def whole_numbers(self, values: Tensor) -> Tensor:
        return values.float()

    def scales(self, codes: Tensor) -> Tensor:
        return (codes.to(torch.int32) << 23).view(torch.float32)


class Int4(WeightFormat):
    """INT4: numbers of levels. Scales are (4 + code % 4) / 4 times 2 ** (code // 4 - 48)."""

    name = "int4"
    words = "four bits"
    code = 2
    too_large = 2.0**16  # for scales
    # LP_INT4_LEVELS: those that leave the least squared error of normally distributed weights, with 0.
    LEVELS: ClassVar = (-31, -24, -18, -14, -10, -6, -3, 0, 3, 5, 8, 11, 15, 19, 24, 31)
    OUTER: ClassVar = 27.51  # a little more than the middle of the last two levels: what is larger becomes the last
    # Scales that are tried, from the largest with which a block's largest becomes 31 down: more found nothing better.
    NUM_TRIED: ClassVar = 3

    def _quantize_blocks(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """The levels and scales of the least squared error. The largest of a block becomes 31 or -31 with every scale
        that is tried. So the first one that is tried of a rounded block is its own."""
        levels = torch.tensor(self.LEVELS, dtype=torch.float32)
        middles = (levels[1:] + levels[:-1]) / 2
        most = _code_of(blocks.abs().amax(dim=2) / self.OUTER)
        best = torch.zeros_like(most)
        best_error = torch.full_like(most, torch.inf, dtype=torch.float32)
        best_values = torch.zeros_like(blocks, dtype=torch.int8)
        for step in range(self.NUM_TRIED):
            codes = (most - step).clamp_(0, 255)
            scales = self.scales(codes).unsqueeze(2)
            values = torch.bucketize(blocks / scales, middles)
            error = (levels[values] * scales - blocks).square_()
            for half in (16, 8, 4, 2, 1):  # in an order that kernels can keep
                error = error[..., :half] + error[..., half:]
            error = error.squeeze(2)
            is_better = error < best_error
            best, best_error = torch.where(is_better, codes, best), torch.where(is_better, error, best_error)
            best_values = torch.where(is_better.unsqueeze(2), values.to(torch.int8), best_values)
            if not best_error.any():  # rounded before
                break
        return best_values, best.to(torch.uint8)

    def whole_numbers(self, values: Tensor) -> Tensor:
        return torch.tensor(self.LEVELS, dtype=torch.float32)[values.to(torch.int32)]

    def scales(self, codes: Tensor) -> Tensor:
        return ((codes.to(torch.int32) << 21) + _SMALLEST_SCALE).view(torch.float32)


_SMALLEST_SCALE: Final = (127 - 48) << 23  # of Int4, as bits


def _code_of(scale: Tensor) -> Tensor:
    """The code (int32) of the largest scale of Int4 that is not larger."""
    return ((scale.view(torch.int32) - _SMALLEST_SCALE) >> 21).clamp_(0, 255)


INT8: Final = Int8()
INT4: Final = Int4()
FORMATS: Final[Mapping[str, WeightFormat]] = {one.name: one for one in (INT8, INT4)}
