"""Prometheus gauges of all workers together, for endpoint pickers that scrape the HTTP port.

Names, labels and meaning are those that the Gateway API Inference Extension reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric

from loraplex_proto.v1 import adapter_pb2
from loraplex_router.replicas import Replica, Replicas
from loraplex_runtime.metrics import PREFIX

VLLM_PREFIX: Final = "vllm:"


class EngineMetrics:
    """Collector of the router's own metrics and of its workers' gauges: sums over those that can take requests."""

    def __init__(
        self,
        registry: CollectorRegistry,
        replicas: Replicas,
        *,
        with_vllm: bool = False,
        hides_tenants: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`with_vllm`: the gauges under vLLM's names, too. `hides_tenants`: without metrics by tenant."""
        self._registry = registry
        self._replicas = replicas
        self._with_vllm = with_vllm
        self._hides_tenants = hides_tenants
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if not (self._hides_tenants and any("tenant" in sample.labels for sample in family.samples)):
                yield family
        workers = [worker for worker in self._replicas.connected() if worker.is_routable]
        waiting = sum(worker.load.num_queued for worker in workers)
        running = sum(worker.load.num_running for worker in workers)
        num_blocks = sum(worker.load.num_blocks for worker in workers)
        num_free = sum(worker.load.num_free_blocks for worker in workers)
        usage = 1 - num_free / num_blocks if num_blocks else 0.0
        blocks = {
            "block_size": str(max((worker.load.block_tokens for worker in workers), default=0)),
            "num_gpu_blocks": str(num_blocks),
        }
        for prefix in (PREFIX, VLLM_PREFIX) if self._with_vllm else (PREFIX,):
            yield _gauge(f"{prefix}num_requests_waiting", "Requests that wait to run.", waiting)
            yield _gauge(f"{prefix}num_requests_running", "Requests in the running batches.", running)
            yield _gauge(f"{prefix}lora_requests_info", _ADAPTERS_TEXT, self._clock(), _adapters(workers))
            yield _gauge(f"{prefix}cache_config_info", "Tokens of a KV block, and KV blocks.", 1, blocks)
        text = "Share of the KV blocks that are taken, 0 to 1."
        yield _gauge(f"{PREFIX}kv_cache_usage", text, usage)
        if self._with_vllm:
            yield _gauge(f"{VLLM_PREFIX}kv_cache_usage_perc", text, usage)
            yield _gauge(f"{VLLM_PREFIX}gpu_cache_usage_perc", text, usage)  # vLLM's former name


_ADAPTERS_TEXT: Final = "Adapters on a device, idle ones too, and waiting for one; the value is the time."


def _adapters(workers: list[Replica]) -> dict[str, str]:
    on_device = {
        adapter_id
        for worker in workers
        for adapter_id, tier in worker.tiers.items()
        if tier == adapter_pb2.ADAPTER_TIER_DEVICE
    }
    waiting = {adapter_id for worker in workers for adapter_id in worker.waiting_adapters} - on_device
    return {
        "max_lora": str(sum(worker.max_device_adapters for worker in workers)),
        "running_lora_adapters": ",".join(sorted(on_device)),
        "waiting_lora_adapters": ",".join(sorted(waiting)),
    }


def _gauge(name: str, text: str, value: float, labels: Mapping[str, str] | None = None) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels or {}))
    family.add_metric(list((labels or {}).values()), value)
    return family
