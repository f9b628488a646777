"""What the adapter cache may use. Checked once; owned by nobody else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loraplex_contracts.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class AdapterCacheConfig:
    """Budgets in bytes, by tier. `store_dir` None: a private temporary directory, removed at close."""

    host_bytes: int
    device_bytes: int
    num_device_slots: int
    disk_bytes: int
    store_dir: Path | None = None
    max_pending_loads: int = 64  # names being fetched at the same time; more are refused with a retry hint
    failure_ttl_s: float = 30.0  # how long a bad adapter is answered from memory

    def __post_init__(self) -> None:
        for name in ("host_bytes", "device_bytes", "num_device_slots", "disk_bytes", "max_pending_loads"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} of the adapter cache must be at least 1", field=name)
        if not self.failure_ttl_s > 0:
            raise InvalidArgument(
                "failure_ttl_s of the adapter cache must be more than 0 seconds", field="failure_ttl_s"
            )
