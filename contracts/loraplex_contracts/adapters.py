"""Who an adapter is. Torch-free, because the router reads it too.

A *name* (adapter id) is what a request says; a *key* is what it means: the kind and the digest of the content. Two
names with the same bytes share one key; a name whose files changed gets another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex_contracts.ids import MAX_ADAPTER_ID_CHARS, check_adapter_id

__all__ = ["MAX_ADAPTER_ID_CHARS", "AdapterKey", "AdapterKind", "check_adapter_id"]

AdapterKind = Literal["lora", "medusa", "combined"]


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Identity by content: equal keys have equal weights, bit for bit."""

    kind: AdapterKind
    digest: str  # 64 hexadecimal digits (SHA-256)

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}"
