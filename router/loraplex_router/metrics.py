"""The router's metrics: how its requests end, what it relays, and what it sees of its workers.

Knows nothing of gRPC. Without a registry everything here does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from loraplex_router.replicas import Replicas
from loraplex_runtime.telemetry import PREFIX, RequestMetrics, gauges

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class RouterMetrics(RequestMetrics):
    """Counters and histograms, written as things happen."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry, "router")
        self._retries: Any = None
        if registry is None:
            return
        from prometheus_client import Counter

        self._retries = Counter(
            f"{PREFIX}router_retries",
            "Requests sent to another worker, by what the first one did.",
            ["cause"],
            registry=registry,
        )
        self._relayed = Counter(f"{PREFIX}router_relayed_messages", "Messages of streams relayed.", registry=registry)

    def retried(self, cause: str) -> None:
        if self._retries is not None:
            self._retries.labels(cause).inc()

    def relayed(self, num_messages: int) -> None:
        """Of one stream, at its end."""
        if self._retries is not None:
            self._relayed.inc(num_messages)


class WorkersCollector:
    """A row per worker, read at the moment of a scrape."""

    def __init__(self, registry: CollectorRegistry, replicas: Replicas) -> None:
        self._replicas = replicas
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def collect(self) -> Iterator[Metric]:
        workers = self._replicas.all()
        rows: list[tuple[str, str, list[float]]] = [
            ("worker_up", "Whether the worker can take requests.", [float(w.is_routable) for w in workers]),
            ("worker_in_flight", "Requests of this router at the worker.", [float(w.num_in_flight) for w in workers]),
            (
                "worker_work_tokens",
                "Tokens of work ahead, as routing sees it.",
                [float(w.work_tokens) for w in workers],
            ),
            ("worker_running", "Requests that the worker runs.", [float(w.num_running) for w in workers]),
            ("worker_queued", "Requests that wait at the worker.", [float(w.num_queued) for w in workers]),
            ("worker_adapters", "Adapters that the worker holds.", [float(len(w.tiers)) for w in workers]),
        ]
        for name, text, values in rows:
            samples = [((w.worker_id,), value) for w, value in zip(workers, values, strict=True)]
            yield gauges(f"router_{name}", text, ("worker",), samples)
