"""Fused operations: interface, and the plain form in torch.

Results, intermediate roundings included, must equal those of the model's own code, so that texts equal Transformers'.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class NormForm(NamedTuple):
    """How a family writes its RMS norm."""

    offset: float  # what is added to the weight
    narrows: bool  # the normed values are rounded to the model's dtype before they are multiplied with the weight


class FusedOps(Protocol):
    """One implementation."""

    @property
    def name(self) -> str: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        """x [..., features] over its root mean square, times weight [features] + offset, in x's dtype."""
        ...

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary embedding of halves: query, key [1, heads, num_tokens, dim] with cos, sin [1, num_tokens, dim].

        x * cos + (-second half, first half) * sin, products rounded to the dtype that all have.
        """
        ...


class ReferenceFused:
    """FusedOps in torch, on any device and in any dtype."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        wide = x.float()  # as model families do it, in any dtype
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if form.narrows:
            return normed.to(x.dtype) * (weight + form.offset)
        return (normed * (weight.float() + form.offset)).to(x.dtype)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
