"""Adapter identity, states and listing rows, free of torch.

Free of torch, because front ends and routers read them too.

An *adapter id* is the name that a request gives; an *adapter key* is the content that it is bound to. Two ids with the
same bytes share one key; an id whose files changed gets another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from loraplex_contracts.ids import MAX_ADAPTER_ID_CHARS, AdapterId, check_adapter_id

__all__ = [
    "MAX_ADAPTER_ID_CHARS",
    "AdapterId",
    "AdapterInfo",
    "AdapterKey",
    "AdapterKind",
    "AdapterState",
    "AdapterTier",
    "CacheUsage",
    "ListingChanges",
    "check_adapter_id",
]

AdapterKind = Literal["lora", "medusa", "combined"]
# "unknown" is what a client reads where a newer server says something else; a server never says it.
AdapterState = Literal["unknown", "known", "fetching", "on_host", "on_device", "draining", "failed"]
AdapterTier = Literal["unknown", "source", "disk", "host", "device"]


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Identity by content: equal keys have equal weights, bit for bit."""

    kind: AdapterKind
    digest: str  # 64 hexadecimal digits (SHA-256)

    def __str__(self) -> str:
        return f"{self.kind}:{self.digest}"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One row of a listing."""

    adapter_id: str
    kind: str  # an AdapterKind; empty before the first fetch has ended
    digest: str
    state: AdapterState
    tier: AdapterTier
    num_bytes: int
    rank: int
    num_running: int
    pinned: bool
    error: str = ""
    error_reason: str = ""
    num_heads: int = 0  # Medusa heads


# Rows that have changed, by what they are about: a content, or an adapter id without one yet. No rows: it is gone.
ListingChanges = dict[AdapterKey | str, tuple[AdapterInfo, ...]]


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """Bytes in use and allowed, by tier, and counters since the start."""

    device_bytes: int
    device_budget_bytes: int
    host_bytes: int
    host_budget_bytes: int
    num_device_slots: int
    num_device_slots_used: int
    hits: int = 0
    misses: int = 0
    device_evictions: int = 0
    host_evictions: int = 0
    load_seconds_total: float = 0.0
    loads_total: int = 0
