"""Where the heads lie in an adapter's one allocation: behind its LoRA, if it has one.

The same tensor of all heads is one region, so that a set of heads is also one stacked matrix: for each layer the
weights [num_heads, hidden, hidden] and the biases [num_heads, hidden], then the token ids [num_rows] (int64), then the
projections [num_projections, num_rows, hidden]. Regions begin at multiples of 64 bytes. All but the token ids are in
the base model's dtype. Offsets follow from the shape, so that only the shape is ever written down.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loraplex_adapters.io.tensor_pieces import DTYPES
from loraplex_adapters.layout.lora import aligned
from loraplex_adapters.weights import MedusaHead, ResBlock

TOKEN_ID_BYTES = 8
MAX_DIM = 1 << 32


@dataclass(frozen=True, slots=True)
class HeadsShape:
    """A set of heads, without the numbers. All heads of a set have the same parts."""

    num_heads: int
    num_layers: int  # residual blocks of each head
    hidden_size: int
    has_bias: bool = False
    num_projections: int = 0  # 0: the base model's own head; 1: one for all; or one for each
    num_rows: int = 0  # of a projection
    has_token_ids: bool = False  # the rows are some of the vocabulary

    def to_json(self) -> dict[str, Any]:
        """Canonical: part of the adapter's digest."""
        return {
            "heads": self.num_heads,
            "layers": self.num_layers,
            "hidden": self.hidden_size,
            "bias": self.has_bias,
            "projections": self.num_projections,
            "rows": self.num_rows,
            "token_ids": self.has_token_ids,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> HeadsShape:
        """Raises ValueError on anything that `to_json` did not write."""
        numbers = [value.get(name) for name in ("heads", "layers", "hidden", "projections", "rows")]
        flags = [value.get(name) for name in ("bias", "token_ids")]
        if not all(type(n) is int and 0 <= n < MAX_DIM for n in numbers) or not all(type(f) is bool for f in flags):
            raise ValueError("not the layout of Medusa heads")
        num_heads, num_layers, hidden_size, num_projections, num_rows = (int(n or 0) for n in numbers)
        shape = HeadsShape(
            num_heads, num_layers, hidden_size, bool(flags[0]), num_projections, num_rows, bool(flags[1])
        )
        is_whole = num_heads > 0 and hidden_size > 0 and num_projections in (0, 1, num_heads)
        if not is_whole or (num_rows > 0) is not (num_projections > 0) or (shape.has_token_ids and num_rows == 0):
            raise ValueError("not the layout of Medusa heads")
        return shape


@dataclass(frozen=True, slots=True)
class HeadsLayout:
    """Offsets in bytes from the beginning of the allocation."""

    shape: HeadsShape
    dtype: str
    start: int
    weights: tuple[int, ...]  # by layer
    biases: tuple[int, ...]  # by layer; empty without biases
    token_ids: int
    projections: int
    end: int


def place_heads(dtype: str, shape: HeadsShape, start: int) -> HeadsLayout:
    """Gives every region its place, from `start` (a multiple of 64) on."""
    itemsize = DTYPES[dtype].itemsize
    weights: list[int] = []
    biases: list[int] = []
    position = start
    for _ in range(shape.num_layers):
        weights.append(position)
        position = aligned(position + shape.num_heads * shape.hidden_size**2 * itemsize)
        if shape.has_bias:
            biases.append(position)
            position = aligned(position + shape.num_heads * shape.hidden_size * itemsize)
    token_ids = position
    if shape.has_token_ids:
        position = aligned(position + shape.num_rows * TOKEN_ID_BYTES)
    projections = position
    end = aligned(position + shape.num_projections * shape.num_rows * shape.hidden_size * itemsize)
    return HeadsLayout(shape, dtype, start, tuple(weights), tuple(biases), token_ids, projections, end)


def heads_at(layout: HeadsLayout, storage: Tensor) -> tuple[MedusaHead, ...]:
    """The heads whose bytes are in `storage` (uint8, contiguous, aligned). Copies nothing. Heads that share a
    projection have the same tensor."""
    shape, dtype = layout.shape, DTYPES[layout.dtype]
    flat = storage.view(dtype)
    hidden = shape.hidden_size
    token_ids: Tensor | None = None
    if shape.has_token_ids:
        num_bytes = shape.num_rows * TOKEN_ID_BYTES
        token_ids = storage[layout.token_ids : layout.token_ids + num_bytes].view(torch.int64)  # [num_rows]

    def stack(offset: int, *sizes: int) -> Tensor:
        count = torch.Size(sizes).numel()
        begin = offset // dtype.itemsize
        return flat[begin : begin + count].view(sizes)

    weights = [stack(offset, shape.num_heads, hidden, hidden) for offset in layout.weights]
    biases = [stack(offset, shape.num_heads, hidden) for offset in layout.biases]
    projections = stack(layout.projections, shape.num_projections, shape.num_rows, hidden)
    heads: list[MedusaHead] = []
    for head in range(shape.num_heads):
        blocks = tuple(
            ResBlock(weight[head], biases[layer][head] if biases else None) for layer, weight in enumerate(weights)
        )
        own = min(head, shape.num_projections - 1)
        heads.append(MedusaHead(blocks, projections[own] if own >= 0 else None, token_ids))
    return tuple(heads)
