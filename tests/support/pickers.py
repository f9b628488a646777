"""Metrics as endpoint pickers of the Gateway API Inference Extension read them.

After llm-d-router ebab687, pkg/epp/framework/plugins/datalayer/extractor/metrics and scorer/loraaffinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# What a picker reads unless it is told otherwise.
VLLM: Final = {
    "name": "vllm",
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "loraSpec": "vllm:lora_requests_info",
    "cacheInfoSpec": "vllm:cache_config_info",
}


@dataclass(frozen=True)
class Picked:
    waiting: int
    running: int
    kv_usage: float
    max_lora: int
    active_adapters: frozenset[str]
    waiting_adapters: frozenset[str]
    block_size: int
    num_blocks: int

    def affinity(self, adapter: str) -> float:
        """Score of this endpoint for a request to the adapter."""
        if adapter in self.active_adapters:
            return 1.0
        if len(self.active_adapters) + len(self.waiting_adapters) < self.max_lora:
            return 0.8
        return 0.6 if adapter in self.waiting_adapters else 0.0


def pick(page: str, config: Mapping[str, str]) -> Picked:
    """`config` is an entry of `engineConfigs`. Raises KeyError for a metric or label that is not there, ValueError for
    one that cannot be read."""
    families = {family.name: family for family in text_string_to_metric_families(page)}

    def samples(spec: str) -> list[Sample]:
        family = families[config[spec]]
        if family.type != "gauge" or not family.samples:
            raise ValueError(f"{config[spec]} is a {family.type} with {len(family.samples)} series")
        return family.samples

    def value(spec: str) -> float:
        """Value of the newest series; of the first, where none has a time."""
        return max(samples(spec), key=lambda sample: float(sample.timestamp or 0)).value

    adapters = max(samples("loraSpec"), key=lambda sample: sample.value).labels
    blocks = max(samples("cacheInfoSpec"), key=lambda sample: float(sample.timestamp or 0)).labels
    return Picked(
        waiting=int(value("queuedRequestsSpec")),
        running=int(value("runningRequestsSpec")),
        kv_usage=value("kvUsageSpec"),
        max_lora=int(adapters["max_lora"]),
        active_adapters=_names(adapters["running_lora_adapters"]),
        waiting_adapters=_names(adapters["waiting_lora_adapters"]),
        block_size=int(blocks["block_size"]),
        num_blocks=int(blocks["num_gpu_blocks"]),
    )


def _names(joined: str) -> frozenset[str]:
    return frozenset(name.strip() for name in joined.split(",") if name.strip())
