"""Configuration of engines around models that are in memory already."""

from __future__ import annotations

from loraplex_server.config import AdaptersConfig, BatchConfig, EngineConfig, KvConfig, ModelConfig

BLOCK_SIZE = 16
ADAPTER_BYTES = 1 << 20
ADAPTERS = AdaptersConfig(device_bytes=ADAPTER_BYTES, host_bytes=1 << 20, disk_bytes=1 << 20, num_device_slots=2)


def config_of(
    memory_bytes: int | None, max_running: int = 4, max_step_tokens: int = 64, adapters: AdaptersConfig = ADAPTERS
) -> EngineConfig:
    kv = KvConfig(block_size=BLOCK_SIZE, memory_bytes=memory_bytes)
    return EngineConfig(ModelConfig("./none"), kv, BatchConfig(max_running, max_step_tokens), adapters)
