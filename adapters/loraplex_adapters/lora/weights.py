"""One LoRA adapter's weights on one device: a single flat allocation and views into it.

A single allocation makes a move between tiers one copy, and its size the number that budgets count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from loraplex_adapters.key import AdapterKey
from loraplex_adapters.ops.base import LoraFactors


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Factors by module path (see targets.TargetModule.path); all of them are views into `storage`."""

    key: AdapterKey
    storage: Tensor  # uint8 [num_bytes]
    factors: Mapping[str, LoraFactors]

    @property
    def num_bytes(self) -> int:
        return self.storage.numel()

    @property
    def max_rank(self) -> int:
        return max((f.rank for f in self.factors.values()), default=0)
