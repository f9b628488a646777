"""The paged KV cache: memory for the keys and values of all layers.

Owns the tensors. The scheduler decides which sequence has which block; block tables say which block holds a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_server.layers.spec import ModelSpec, kv_block_bytes
from loraplex_server.layers.transfer import upload


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's pages: views into the cache."""

    k: Tensor  # [num_blocks, block_size, kv_heads, k_dim]
    v: Tensor  # [num_blocks, block_size, kv_heads, v_dim]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Stores key, value [num_tokens, kv_heads, dim] at slots [num_tokens] (block * block_size + offset)."""
        self.k.flatten(0, 1).index_copy_(0, slots, key.to(self.k.dtype))
        self.v.flatten(0, 1).index_copy_(0, slots, value.to(self.v.dtype))


class KvCache:
    """Pages of all layers, in the model's dtype.

    Layers of one shape share an allocation, so that copying or clearing a block is a few operations, not a few per
    layer. Memory is taken from the system as blocks are first used. A block is cleared when a sequence takes it:
    attention may multiply a masked position by zero, and what was left there need not be finite.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        shapes = [(layer.num_kv_heads, layer.k_dim, layer.v_dim) for layer in spec.layers]
        self._pages: list[Tensor] = []  # [layers of that shape, num_blocks, block_size, kv_heads, dim]
        layers: dict[int, LayerKv] = {}
        for shape in dict.fromkeys(shapes):
            members = [idx for idx, other in enumerate(shapes) if other == shape]
            heads, k_dim, v_dim = shape
            k = torch.empty(len(members), num_blocks, block_size, heads, k_dim, dtype=dtype, device=device)
            v = torch.empty(len(members), num_blocks, block_size, heads, v_dim, dtype=dtype, device=device)
            self._pages += [k, v]
            for place, layer_idx in enumerate(members):
                layers[layer_idx] = LayerKv(k[place], v[place])
        self.layers = tuple(layers[idx] for idx in range(len(shapes)))

    @property
    def num_bytes(self) -> int:
        return sum(pages.numel() * pages.element_size() for pages in self._pages)

    def clear_blocks(self, block_ids: Sequence[int]) -> None:
        """Sets blocks to zero in all layers."""
        if not block_ids:
            return
        idx = upload(torch.tensor(block_ids, dtype=torch.int64), self.device)
        for pages in self._pages:
            pages.index_fill_(1, idx, 0)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies blocks in all layers; all sources are read before a target is written."""
        if not sources:
            return
        source, target = upload(torch.tensor([sources, targets], dtype=torch.int64), self.device)
        for pages in self._pages:
            pages.index_copy_(1, target, pages.index_select(1, source))


def num_blocks_for(spec: ModelSpec, block_size: int, dtype: torch.dtype, budget_bytes: int) -> int:
    """How many blocks fit into a byte budget; 0 when not even one does."""
    return budget_bytes // kv_block_bytes(spec, block_size, dtype.itemsize)
