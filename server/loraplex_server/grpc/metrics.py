"""Metrics of a worker, made from its engine's last report at each scrape."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from loraplex_contracts.adapters import AdapterInfo
from loraplex_runtime.telemetry import counter, gauge, gauges, summary
from loraplex_server.engine.client import EngineState

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

# Adapters that are shown by name; the rest are counted together.
MAX_NAMED_ADAPTERS: Final = 100
OTHER: Final = "other"


class WorkerCollector:
    """Prometheus collector of the worker's metrics. Counters are since the start."""

    def __init__(
        self,
        registry: CollectorRegistry,
        state: Callable[[], EngineState],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._state = state
        self._clock = clock
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def collect(self) -> Iterator[Metric]:
        state = self._state()
        load, usage, rows = state.load, state.usage, list(state.listing.rows())
        kv_cache_usage = 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
        yield gauge("num_requests_running", "Requests in the running batch.", load.num_running)
        yield gauge("num_requests_waiting", "Requests that wait to run.", load.num_queued)
        yield gauge("kv_cache_usage", "Share of the KV blocks that are taken, 0 to 1.", kv_cache_usage)
        yield self._lora_requests_info(rows, usage.num_device_slots if usage else 0)
        yield _residency(rows)
        hits = {"device": usage.hits} if usage else {}
        misses = {"device": usage.misses} if usage else {}
        evictions = {"device": usage.device_evictions, "host": usage.host_evictions} if usage else {}
        loads = (usage.loads_total, usage.load_seconds_total) if usage else (0, 0.0)
        yield counter("adapter_cache_hits", "Requests that found their adapter in the tier.", "tier", hits)
        yield counter("adapter_cache_misses", "Requests that did not.", "tier", misses)
        yield counter("adapter_cache_evictions", "Adapters that had to leave the tier.", "tier", evictions)
        yield summary("adapter_load_seconds", "Time to load an adapter.", *loads)
        yield counter("draft_tokens", "Tokens that speculation has proposed.", "proposer", load.drafted)
        yield counter("accepted_tokens", "Those that the model agreed with.", "proposer", load.accepted)

    def _lora_requests_info(self, rows: Sequence[AdapterInfo], max_lora: int) -> Metric:
        """As the Gateway API Inference Extension reads it: label names and meaning are that protocol's. Idle
        adapters on the device count as running too: a gateway that routes by this must find them."""
        on_device = [row.adapter_id for row in rows if row.tier == "device"]
        waiting = [row.adapter_id for row in rows if row.state == "fetching"]
        labels = {
            "max_lora": str(max_lora),
            "running_lora_adapters": ",".join(on_device[:MAX_NAMED_ADAPTERS]),
            "waiting_lora_adapters": ",".join(waiting[:MAX_NAMED_ADAPTERS]),
        }
        text = "Adapters on the device and waiting for it; the value is the time."
        return gauge("lora_requests_info", text, self._clock(), labels)


def _residency(rows: Sequence[AdapterInfo]) -> Metric:
    samples = Counter[tuple[str, str, str]]()
    for number, row in enumerate(rows):
        name = row.adapter_id if number < MAX_NAMED_ADAPTERS else OTHER
        samples[name, row.tier, "true" if row.pinned else "false"] += 1
    labels = ("adapter", "tier", "pinned")
    return gauges("adapter_resident", "Adapters that this worker holds.", labels, list(samples.items()))
