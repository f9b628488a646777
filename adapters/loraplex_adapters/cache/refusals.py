"""What is said of a content that cannot be had. When it is said is the tables' matter."""

from __future__ import annotations

from loraplex_adapters.cache.states import KeyRecord, KeyState
from loraplex_contracts.errors import AdapterMemoryFull, FailedPrecondition, SourceUnavailable

RETRY_AFTER_S = 1.0


def too_large(num_bytes: int, device_budget: int, host_budget: int, name: str | None = None) -> AdapterMemoryFull:
    """No waiting would help."""
    return AdapterMemoryFull(
        f"the adapter takes {num_bytes} bytes; the server has {device_budget} for adapters on the device and "
        f"{host_budget} on the host (--adapter-device-memory, --adapter-host-memory), so no waiting helps",
        resource=name,
        metadata={"can_ever_fit": "false"},
    )


def no_room_beside_pins(record: KeyRecord) -> AdapterMemoryFull:
    """What the operator has pinned leaves too little."""
    return AdapterMemoryFull(
        f"the adapter takes {record.num_bytes} bytes, and pinned adapters leave no such room on the device; unload one "
        "of them",
        resource=record.last_name,
        retry_after_s=RETRY_AFTER_S,
        metadata={"can_ever_fit": "true"},
    )


def never_fits(
    record: KeyRecord, device_budget: int, host_budget: int, fits_beside_pins: bool
) -> AdapterMemoryFull | None:
    """Why no waiting would bring it to the device; None where waiting may."""
    if record.num_bytes > min(device_budget, host_budget):
        return too_large(record.num_bytes, device_budget, host_budget, record.last_name)
    has_place = record.state in (KeyState.ON_DEVICE, KeyState.PROMOTING)
    return None if has_place or fits_beside_pins else no_room_beside_pins(record)


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
