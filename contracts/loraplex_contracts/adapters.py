"""Adapter identity, states and listing rows.

An *adapter id* is the name in a request; an *adapter key* identifies the content that the name is bound to. Two ids
with the same bytes share one key; an id whose files changed gets another one. Front ends and routers read these records
too, so they need no torch.
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
# Clients read a state or tier of a newer server as "unknown"; servers never send that.
AdapterState = Literal["unknown", "known", "fetching", "on_host", "on_device", "draining", "failed"]
AdapterTier = Literal["unknown", "source", "disk", "host", "device"]


@dataclass(frozen=True, slots=True, order=True)
class AdapterKey:
    """Content of an adapter: equal keys have equal weights, bit for bit."""

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


# Changed rows by adapter key, or by adapter id while it has no key. An empty tuple removes the rows.
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
