"""What the engine and the scheduler see of the adapter cache.

Everything here is called from the engine's thread and never blocks: loads run in the background, and `poll` takes in
what they finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import AdapterKey

AdapterStateName = Literal["known", "fetching", "on_host", "on_device", "draining", "failed"]
TierName = Literal["source", "disk", "host", "device"]

# Puts weights into a device slot of every module (None: clears it). Called between steps only.
InstallFn = Callable[[int, AdapterWeights | None], None]


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """One row of a listing. Plain data; crosses processes."""

    adapter_id: str
    kind: str
    digest: str
    state: AdapterStateName
    tier: TierName
    num_bytes: int
    rank: int
    num_running: int
    pinned: bool
    error: str = ""
    error_reason: str = ""
    num_heads: int = 0  # Medusa heads


# Rows that have changed, by what they are about: a content, or a name without one yet. No rows: it is gone.
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


class Residency(Protocol):
    """What the scheduler needs, and all that it may touch."""

    def acquire(self, key: AdapterKey) -> int | None:
        """Takes a reference for one running sequence and returns the device slot.

        None when the weights are not on the device now: no reference is taken, and a load is wanted from here on.
        """
        ...

    def release(self, key: AdapterKey) -> None:
        """Gives one reference back."""
        ...

    def failure(self, key: AdapterKey) -> Exception | None:
        """Why this key cannot come to the device at all (source gone, does not fit), or None."""
        ...


class AdapterCache(Residency, Protocol):
    """The whole life cycle. Owned by the engine."""

    def resolve(self, adapter_id: str, tenant: str, now: float) -> AdapterKey | None:
        """The key that the name is bound to, pinned once for the caller (`unpin` gives it back).

        None while it is being fetched: ask again after `poll` has returned True. A name is bound on first use and bound
        anew only by `load`. Raises the typed error (AdapterNotFound, AdapterInvalid, ...) when it cannot be had.
        """
        ...

    def unpin(self, key: AdapterKey) -> None:
        """The request that resolved it has ended."""
        ...

    def load(self, adapter_id: str, pin: bool, now: float) -> AdapterInfo | None:
        """Reads the source anew, binds the name to what it finds and brings it up to the device where there is room.
        None while under way; call again after `poll`. Raises as `resolve`."""
        ...

    def unload(self, adapter_id: str) -> AdapterInfo:
        """Forgets the name; weights go when the last request has ended. Raises AdapterNotFound."""
        ...

    def get(self, adapter_id: str) -> AdapterInfo:
        """Raises AdapterNotFound, also for what is in the source and nobody has asked for yet."""
        ...

    def take_changes(self) -> ListingChanges:
        """What a listing (cache/listing.py) shows differently since the last call; at the first one, all it shows: what
        is bound, fetched or remembered as failed, and what drains."""
        ...

    def usage(self) -> CacheUsage: ...

    def poll(self, now: float) -> bool:
        """Takes in finished loads, installs them in slots, starts what is wanted next. True when anything changed."""
        ...

    def borrow(self, key: AdapterKey) -> int | None:
        """The device slot, for this turn only: valid until the next `poll`, no reference is taken.

        None when the weights are not on the device now. They are wanted then, until the next `poll` and by a request
        that has the key pinned only: behind whatever `acquire` wants, and pushing out nothing that was used lately.
        Who borrows must be able to do without.
        """
        ...

    def check_integrity(self) -> None:
        """Raises AssertionError when idle and a reference, pin or byte is unaccounted for."""
        ...

    def close(self) -> None: ...
