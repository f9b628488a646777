"""An adapter's one allocation: the LoRA's factors, then the Medusa heads. The same on disk, host and device.

The layout of a LoRA alone is written down as it always was, so stores from before there were heads stay readable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from loraplex_adapters.layout.lora import LoraLayout, factors_at
from loraplex_adapters.layout.medusa import HeadsLayout, HeadsShape, heads_at, place_heads
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import AdapterKey, AdapterKind


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """`lora` is without factors where there are only heads."""

    lora: LoraLayout
    heads: HeadsLayout | None = None

    @property
    def dtype(self) -> str:
        return self.lora.dtype

    @property
    def num_bytes(self) -> int:
        return self.lora.num_bytes if self.heads is None else self.heads.end

    @property
    def max_rank(self) -> int:
        return self.lora.max_rank

    @property
    def num_heads(self) -> int:
        return 0 if self.heads is None else self.heads.shape.num_heads

    @property
    def kind(self) -> AdapterKind:
        if self.heads is None:
            return "lora"
        return "combined" if self.lora.placed else "medusa"

    def to_json(self) -> dict[str, Any]:
        """Canonical: part of the adapter's digest."""
        lora = self.lora.to_json()
        return lora if self.heads is None else lora | {"medusa": self.heads.shape.to_json()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> AdapterLayout:
        """Raises ValueError on anything that `to_json` did not write."""
        lora = LoraLayout.from_json(value)
        medusa = value.get("medusa")
        if medusa is None:
            return AdapterLayout(lora)
        if not isinstance(medusa, dict):
            raise ValueError("not the layout of Medusa heads")
        return adapter_layout(lora, HeadsShape.from_json(medusa))


def adapter_layout(lora: LoraLayout, heads: HeadsShape | None) -> AdapterLayout:
    """Puts the heads behind the factors."""
    return AdapterLayout(lora, None if heads is None else place_heads(lora.dtype, heads, lora.num_bytes))


def weights_at(key: AdapterKey, layout: AdapterLayout, storage: Tensor) -> AdapterWeights:
    """The adapter whose bytes are in `storage` (uint8 [num_bytes], contiguous, aligned). Copies nothing."""
    assert storage.numel() == layout.num_bytes, "an adapter's storage is exactly as large as its layout"
    factors = factors_at(layout.lora, storage)
    heads = () if layout.heads is None else heads_at(layout.heads, storage)
    return AdapterWeights(key, storage, factors, heads)
