"""Where each factor lies in an adapter's one allocation. The same on disk, in host memory and on the device.

Modules in the order of their paths; of each, A [rank, in] then B [out, rank], row-major in the base model's dtype,
every factor at a multiple of 64 bytes. Offsets follow from the shapes, so that only shapes and scales are ever
written down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraplex_adapters.io.tensor_pieces import DTYPES
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.weights import LoraFactors

ALIGN_BYTES = 64


@dataclass(frozen=True, slots=True, order=True)
class FactorShape:
    """One module's factors, without the numbers."""

    path: str
    rank: int
    in_features: int
    out_features: int
    scale: float


@dataclass(frozen=True, slots=True)
class PlacedFactors:
    """A module's factors and their places, in bytes from the beginning."""

    shape: FactorShape
    a_offset: int
    b_offset: int


@dataclass(frozen=True, slots=True)
class LoraLayout:
    """The whole adapter."""

    dtype: str
    placed: tuple[PlacedFactors, ...]
    num_bytes: int

    @property
    def max_rank(self) -> int:
        return max((p.shape.rank for p in self.placed), default=0)

    def to_json(self) -> dict[str, Any]:
        """Canonical: part of the adapter's digest. The scale in hexadecimal, so that nothing is rounded."""
        shapes = (p.shape for p in self.placed)
        factors = [[s.path, s.rank, s.in_features, s.out_features, s.scale.hex()] for s in shapes]
        return {"dtype": self.dtype, "factors": factors}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> LoraLayout:
        """Raises ValueError on anything that `to_json` did not write."""
        if value.get("dtype") not in DTYPES or not isinstance(value.get("factors"), list):
            raise ValueError("not the layout of a LoRA")
        shapes: list[FactorShape] = []
        for entry in value["factors"]:
            path, rank, in_features, out_features, scale = entry
            sizes = (rank, in_features, out_features)
            if not isinstance(path, str) or not all(type(size) is int and size > 0 for size in sizes):
                raise ValueError("not the layout of a LoRA")
            shape = FactorShape(path, rank, in_features, out_features, float.fromhex(scale))
            if not math.isfinite(shape.scale):
                raise ValueError("not the layout of a LoRA")
            shapes.append(shape)
        return place(value["dtype"], shapes)


def place(dtype: str, shapes: Iterable[FactorShape]) -> LoraLayout:
    """Gives every factor its place."""
    itemsize = DTYPES[dtype].itemsize
    placed: list[PlacedFactors] = []
    position = 0
    for shape in sorted(shapes):
        a_offset = position
        b_offset = aligned(a_offset + shape.rank * shape.in_features * itemsize)
        position = aligned(b_offset + shape.rank * shape.out_features * itemsize)
        placed.append(PlacedFactors(shape, a_offset, b_offset))
    return LoraLayout(dtype, tuple(placed), position)


def factors_at(layout: LoraLayout, storage: Tensor) -> dict[str, LoraFactors]:
    """The factors whose bytes `storage` begins with (uint8, contiguous, aligned). Copies nothing."""
    dtype = DTYPES[layout.dtype]
    flat = storage.view(dtype)
    itemsize = dtype.itemsize
    factors: dict[str, LoraFactors] = {}
    for placed in layout.placed:
        checkpoint()
        shape = placed.shape
        rank, in_features = shape.rank, shape.in_features
        a = flat.as_strided((rank, in_features), (in_features, 1), placed.a_offset // itemsize)  # [rank, in]
        b = flat.as_strided((shape.out_features, rank), (rank, 1), placed.b_offset // itemsize)  # [out, rank]
        factors[shape.path] = LoraFactors(a, b, shape.scale)
    return factors


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
