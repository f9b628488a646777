"""Equivalence checks of fast implementations against the model's own code.

Every check at load time runs both on the same few values and compares them here. What differs is not used, or, where
nothing else could be used, the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

Kind = Literal[
    "operation", "gate", "product", "decoder", "model", "merged model", "adapted model", "token", "served logits"
]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest relative error that is rounding alone."""

    wide: float  # float32 and float64
    narrow: float  # bfloat16 and float16

    def of(self, dtype: torch.dtype) -> float:
        return self.wide if dtype.itemsize >= 4 else self.narrow


TOLERANCES: Final[Mapping[Kind, Tolerance]] = {
    # One norm or rotation: the order in which float32 is added up; in narrow dtypes a last bit too.
    "operation": Tolerance(1e-5, 1e-2),
    # A gated MLP with small linears. A last bit may tip; a product that is rounded once less is 2e-3 off in bfloat16,
    # and in float16 3e-4, which is not told apart.
    "gate": Tolerance(1e-5, 1e-3),
    # A linear beside the same product by itself: another order of sums, parts of which a GPU adds up as bfloat16.
    "product": Tolerance(1e-4, 1e-2),
    # A decoder layer, relative to what it adds to its input: other orders of sums, roundings between operations. What
    # narrow rounding may hide (a layer that attends to all alike and does not turn its queries) shows in float32.
    "decoder": Tolerance(1e-4, 3e-2),
    # States and logits of a whole model of which parts were replaced: the same through all layers.
    "model": Tolerance(1e-4, 3e-2),
    # The same, where each linear or operation that was replaced is compared by itself. In bfloat16 another order of
    # sums alone makes 2.7 % to 3.4 % in 32 random layers of 2,048, and more in wider and deeper ones. So this shows
    # what is connected wrongly.
    "merged model": Tolerance(1e-4, 0.2),
    # Logits with an adapter, here and in PEFT.
    "adapted model": Tolerance(1e-4, 0.1),
    # States and logits of one token in two runs, by the largest value: products that are blocked in another way.
    "token": Tolerance(1e-4, 3e-2),
    # Logits over paged attention and under Transformers' own. In narrow dtypes two right results may differ by a
    # router's decision; a wrong scale or mask differs by far more.
    "served logits": Tolerance(1e-2, 0.5),
}
DOUBTFUL: Final = 0.1  # served logits in narrow dtypes that differ by more are logged


@dataclass(frozen=True, slots=True)
class Comparison:
    """The distance of two results, relative to the expected one, and its bound."""

    error: float
    limit: float

    @property
    def is_equal(self) -> bool:
        return self.error <= self.limit  # NaN is not


def compare(kind: Kind, expected: Tensor, got: Tensor, base: Tensor | None = None) -> Comparison:
    """Norm of the difference relative to that of `expected`, or of what `expected` adds to `base`."""
    limit = TOLERANCES[kind].of(expected.dtype)
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return Comparison(math.inf, limit)
    wanted = expected.double()
    scale = (wanted if base is None else wanted - base.double()).norm().clamp_min(1e-30)
    error = float((got.double() - wanted).norm() / scale)
    return Comparison(error if math.isfinite(error) else math.inf, limit)


def compare_all(kind: Kind, expected: Sequence[Tensor], got: Sequence[Tensor]) -> Comparison:
    """Compares pairs of results. Returns the first pair that differs, or else the last one."""
    found = Comparison(0.0, 0.0)
    for wanted, own in zip(expected, got, strict=True):
        found = compare(kind, wanted, own)
        if not found.is_equal:
            break
    return found


def compare_peaks(kind: Kind, expected: Tensor, got: Tensor) -> Comparison:
    """Largest difference relative to the largest value: one wrong entry of many shows."""
    largest = max(float(expected.abs().max()), 1e-6)
    return Comparison(float((expected - got).abs().max()) / largest, TOLERANCES[kind].of(expected.dtype))
