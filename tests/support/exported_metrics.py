"""Metrics that router and worker export, by doubles that have had everything happen once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

import loraplex_proto
from loraplex_adapters.cache.listing import Listing
from loraplex_contracts.adapters import CacheUsage
from loraplex_contracts.errors import QuotaExceeded
from loraplex_contracts.load import Load
from loraplex_proto.v1 import inference_pb2, worker_pb2
from loraplex_router.calls import RouterMetrics
from loraplex_router.http.metrics import EngineMetrics
from loraplex_router.replicas import Replicas, WorkersCollector
from loraplex_runtime.metrics import RequestMetrics, describe_process, new_registry
from loraplex_runtime.refusals import Refusals
from loraplex_runtime.request_record import RequestRecord
from loraplex_server.engine.client import EngineState
from loraplex_server.grpc.metrics import WorkerCollector, WorkerMetrics, describe_engine
from support.listings import info


@dataclass(frozen=True)
class Exported:
    """One metric. `labels` in their order on the page, without a histogram's `le`."""

    name: str  # as queries have it; of a histogram and a summary without _bucket, _sum and _count
    kind: str
    text: str
    labels: tuple[str, ...]

    @property
    def series(self) -> set[str]:
        """Names that a query may have."""
        match self.kind:
            case "histogram":
                return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}
            case "summary":
                return {f"{self.name}_{part}" for part in ("sum", "count")}
            case _:
                return {self.name}


def exported(families: Iterable[Metric]) -> dict[str, Exported]:
    found: dict[str, Exported] = {}
    for family in families:
        name = family.name + "_total" if family.type == "counter" else family.name
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels if label != "le")
        found[name] = Exported(name, family.type, family.documentation, tuple(labels))
    return found


def end_two(metrics: RequestMetrics) -> None:
    """One that ended well, and one that was refused."""
    record = RequestRecord("GenerateStream", "acme", adapter="sql", adapter_digest="d", num_prompt_tokens=8)
    record.num_output_tokens, record.queue_s, record.first_token_s, record.adapter_wait_s = 4, 0.0, 0.1, 0.01
    record.add_drafts("medusa", 4, 2)
    record.end("OK")
    refused = RequestRecord("Generate", "acme", adapter="sql")
    refused.fail(QuotaExceeded("no"))
    refused.end()
    for one in (record, refused):
        metrics.ended(one)
    metrics.first_message("GenerateStream", 0.1)
    metrics.quota_refused("tokens_per_minute")


def worker_metrics() -> dict[str, Exported]:
    return exported(worker_registry().collect())


def worker_registry() -> CollectorRegistry:
    registry = new_registry()
    listing = Listing()
    listing.apply_changes({"sql": (info("sql"),)})
    load = Load(num_state_slots=4, num_free_state_slots=2, drafted={"medusa": 4}, accepted={"medusa": 2})
    state = EngineState(load, CacheUsage(*(0,) * 5), listing=listing)
    describe_process(registry, "worker", loraplex_proto.__version__)
    describe_engine(registry, _Engine())
    Refusals().show_in(registry, "worker")
    WorkerCollector(registry, lambda: state)
    end_two(WorkerMetrics(registry))
    return registry


class _Engine:
    pid = os.getpid()


def router_metrics(*, with_http: bool = True) -> dict[str, Exported]:
    """`with_http`: with the gauges of the HTTP port, which are those of the workers together."""
    registry, replicas = router_registry()
    page: CollectorRegistry | EngineMetrics = EngineMetrics(registry, replicas) if with_http else registry
    return exported(page.collect())


def router_registry() -> tuple[CollectorRegistry, Replicas]:
    registry: Any = new_registry()
    replicas = Replicas(["worker:50051"])
    replicas.on_info("worker:50051", inference_pb2.GetInfoResponse(model_id="base", dtype="bfloat16"))
    replicas.on_report("worker:50051", worker_pb2.Load(total_kv_blocks=8, free_kv_blocks=4), 0.0)
    describe_process(registry, "router", loraplex_proto.__version__)
    Refusals().show_in(registry, "router")
    WorkersCollector(registry, replicas)
    metrics = RouterMetrics(registry)
    end_two(metrics)
    metrics.retried("lost")
    metrics.relayed(1)
    metrics.ignored_field("user")
    return registry, replicas
