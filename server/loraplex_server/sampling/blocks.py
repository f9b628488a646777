"""Maxima of short runs of a row ("blocks"), and what they make cheap: where a row's largest values are.

On a CPU the maximum of a block costs a third of a maximum with its index, and a hundredth of a sort; everything that
follows looks only into the few blocks that matter. Pure functions; knows nothing of what the values mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
# Below this, looking at everything is as cheap.
_MIN_VOCAB = 8 * BLOCK


def block_max(values: Tensor, size: int = BLOCK) -> Tensor:
    """`[num_rows, ceil(num_values / size)]`. A block with a NaN gives NaN."""
    num_values = values.shape[1]
    num_whole = num_values // size * size
    whole = values[:, :num_whole].unflatten(1, (-1, size)).amax(-1)
    if num_whole == num_values:
        return whole
    return torch.cat((whole, values[:, num_whole:].amax(-1, keepdim=True)), dim=1)


def block_ids(blocks: Tensor, num_values: int, size: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Indices of the values in the given blocks `[n, m]` and which of them exist: `[n, m * size]` both."""
    ids = (blocks.unsqueeze(-1) * size + torch.arange(size, device=blocks.device)).flatten(1)
    return ids.clamp(max=num_values - 1), ids < num_values


def row_argmax(values: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row and its index, the lowest one on ties. A row with a NaN gives NaN."""
    num_values = values.shape[1]
    if values.device.type != "cpu" or num_values < _MIN_VOCAB:
        best = values.max(dim=-1)
        return best.values, best.indices
    # bfloat16 has no fast path for short runs.
    size = BLOCK if values.dtype in (torch.float32, torch.float64) else 4 * BLOCK
    maxima, blocks = block_max(values, size).max(dim=-1)  # the first block of several
    ids, _ = block_ids(blocks.unsqueeze(1), num_values, size)
    offsets = values.gather(1, ids).argmax(dim=-1)  # the first of several
    return maxima, ids.gather(1, offsets.unsqueeze(1)).squeeze(1)
