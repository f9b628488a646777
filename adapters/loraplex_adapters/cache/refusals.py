"""What is said of a content that cannot be had. Texts only: who says them, and when, is the tables' matter."""

from __future__ import annotations

from loraplex_adapters.cache.states import KeyRecord
from loraplex_proto.errors import AdapterMemoryFull, FailedPrecondition, SourceUnavailable

RETRY_AFTER_S = 1.0


def too_large(record: KeyRecord, device_budget: int, host_budget: int) -> AdapterMemoryFull:
    """No waiting would help."""
    return AdapterMemoryFull(
        f"the adapter takes {record.num_bytes} bytes; the server has {device_budget} for adapters on the device and "
        f"{host_budget} on the host (--adapter-device-memory, --adapter-host-memory)",
        resource=record.last_name,
    )


def no_room_beside_pins(record: KeyRecord) -> AdapterMemoryFull:
    """What the operator has pinned leaves too little."""
    return AdapterMemoryFull(
        f"the adapter takes {record.num_bytes} bytes, and pinned adapters leave no such room on the device; unload one "
        "of them",
        resource=record.last_name,
        retry_after_s=RETRY_AFTER_S,
    )


def gone_and_changed(name: str) -> FailedPrecondition:
    """The store has dropped the bytes, and the source has others by now."""
    return FailedPrecondition(
        f"the files of adapter {name!a} have changed and the version in use is no longer in the store; call "
        "LoadAdapter to take the new one",
        resource=name,
    )


def gone_without_a_name() -> SourceUnavailable:
    """The store has dropped the bytes, and nobody knows where they came from."""
    return SourceUnavailable("the weights are gone from the store, and their name was unloaded")
