"""Metrics of a router: its requests, what it relays, its workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from loraplex_router.replicas import Replica, Replicas
from loraplex_runtime.telemetry import PREFIX, RequestMetrics, gauges, new_registry

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric


class RouterMetrics(RequestMetrics):
    """Counters and histograms, written as things happen."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import Counter

        registry = new_registry() if registry is None else registry
        super().__init__(registry, "router")
        self._retries = Counter(
            f"{PREFIX}router_retries",
            "Requests sent to another worker, by what the first one did.",
            ["cause"],
            registry=registry,
        )
        self._relayed = Counter(f"{PREFIX}router_relayed_messages", "Messages of streams relayed.", registry=registry)

    def retried(self, cause: str) -> None:
        self._retries.labels(cause).inc()

    def relayed(self, num_messages: int) -> None:
        """Of one stream, at its end."""
        self._relayed.inc(num_messages)


_WORKER_GAUGES: Final[tuple[tuple[str, str, Callable[[Replica], float]], ...]] = (
    ("up", "Whether the worker can take requests.", lambda worker: worker.is_routable),
    ("in_flight", "Requests of this router at the worker.", lambda worker: worker.num_in_flight),
    ("work_tokens", "Tokens of work ahead, as routing sees it.", lambda worker: worker.work_tokens),
    ("running", "Requests that the worker runs.", lambda worker: worker.load.num_running),
    ("queued", "Requests that wait at the worker.", lambda worker: worker.load.num_queued),
    ("adapters", "Adapters that the worker holds.", lambda worker: len(worker.tiers)),
)


class WorkersCollector:
    """A sample per worker, read at the moment of a scrape."""

    def __init__(self, registry: CollectorRegistry, replicas: Replicas) -> None:
        self._replicas = replicas
        registry.register(self)  # pyright: ignore[reportArgumentType]  # the protocol is `collect` alone

    def collect(self) -> Iterator[Metric]:
        workers = self._replicas.all()
        for name, text, value in _WORKER_GAUGES:
            samples = [((worker.worker_id,), float(value(worker))) for worker in workers]
            yield gauges(f"router_worker_{name}", text, ("worker",), samples)
