"""The worker's configuration: nested frozen dataclasses, checked once. The only place that reads the environment.

The command's flags are made from these fields (cli/), so a field's comment is what its help says.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from loraplex_proto.errors import InvalidArgument

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str) -> int:
    """'512MiB', '8g', '1048576' -> bytes. Raises InvalidArgument."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text.lower())
    if not found:
        raise InvalidArgument(f"{text!r} is not a size; write it as 512MiB, 8GiB or a number of bytes")
    return int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The base model."""

    model: str  # a directory, or a Hub id
    revision: str | None = None
    dtype: str = "auto"  # "auto": as the checkpoint says
    device: str = "auto"  # "auto": cuda where there is one
    max_context_tokens: int | None = None  # None: as the model has it


@dataclass(frozen=True, slots=True)
class KvConfig:
    """The paged KV cache."""

    block_size: int = 16
    memory_bytes: int | None = None  # None: a share of what is free after the weights
    prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How much one step takes on."""

    max_running: int = 64
    max_step_tokens: int = 1024
    max_queued: int = 4096


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Where adapters come from and how much memory they may take."""

    root: Path | None = None  # adapter_id NAME is the directory root/NAME
    hub: bool = False  # ids of the form org/name are fetched from the Hub where the root does not have them
    max_rank: int = 256
    num_device_slots: int = 64
    device_bytes: int = 1 << 30
    host_bytes: int = 4 << 30
    disk_bytes: int = 64 << 30
    store_dir: Path | None = None  # None: a temporary one


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that the engine's process needs."""

    model: ModelConfig
    kv: KvConfig = field(default_factory=KvConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    adapters: AdaptersConfig = field(default_factory=AdaptersConfig)
    num_threads: int | None = None  # CPU threads of the engine; None: all cores
    log_level: str = "info"

    def __post_init__(self) -> None:
        check = (
            (1 <= self.kv.block_size <= 256, "kv.block_size", "must be 1 to 256"),
            (self.batch.max_running >= 1, "batch.max_running", "must be at least 1"),
            (
                self.batch.max_step_tokens >= self.batch.max_running,
                "batch.max_step_tokens",
                "must be at least max_running, so that every running request gets its token",
            ),
            (self.adapters.num_device_slots >= 1, "adapters.num_device_slots", "must be at least 1"),
            (self.adapters.max_rank >= 1, "adapters.max_rank", "must be at least 1"),
        )
        for is_ok, name, rule in check:
            if not is_ok:
                raise InvalidArgument(f"{name} {rule}", field=name)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker: an engine and the gRPC server in front of it."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 50051  # 0: any free one
    metrics_port: int | None = None
    auth_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_message_bytes: int = 4 << 20
    max_unread_tokens: int = 16384
    drain_s: float = 30.0


def hub_token() -> str | None:
    """The operator's Hub token."""
    return os.environ.get("HF_TOKEN")
