"""Gauges for endpoint pickers, read by the rules of the Gateway API Inference Extension."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from support.pickers import VLLM, Picked, pick

from loraplex_proto.v1 import worker_pb2
from loraplex_router.http.metrics import EngineMetrics
from loraplex_router.replicas import Replicas
from loraplex_runtime.metrics import PREFIX
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.usage import UsageCollector


def report(waiting: list[str], tiers: dict[str, int], **fields: Any) -> worker_pb2.Load:
    load = worker_pb2.Load(waiting_adapter_ids=waiting, max_device_adapters=4, kv_block_tokens=16, **fields)
    for name, tier in tiers.items():
        load.adapters.add(adapter_id=name, tier=tier)
    return load


def page(replicas: Replicas, *, with_vllm: bool) -> str:
    metrics: object = EngineMetrics(CollectorRegistry(), replicas, with_vllm=with_vllm, clock=lambda: 5.0)
    return generate_latest(metrics).decode()  # type: ignore[arg-type]


def two_workers() -> Replicas:
    replicas = Replicas(["a", "b", "gone"])
    first = report(["new", "sql"], {"json": 4, "disk": 2}, running_requests=2, total_kv_blocks=100, free_kv_blocks=25)
    second = report([], {"json": 4, "sql": 4}, queued_requests=3, total_kv_blocks=100, free_kv_blocks=100)
    replicas.on_report("a", first, 0.0)
    replicas.on_report("b", second, 0.0)
    return replicas


@pytest.mark.parametrize(
    "config",
    [
        VLLM,
        {**VLLM, "kvUsageSpec": "vllm:gpu_cache_usage_perc"},
        {spec: name.replace("vllm:", "loraplex:").removesuffix("_perc") for spec, name in VLLM.items()},
    ],
)
def test_a_picker_reads_them(config: dict[str, str]) -> None:
    found = pick(page(two_workers(), with_vllm=True), config)
    # Idle ones that are on a device count, those on disk do not.
    active, waiting = frozenset({"json", "sql"}), frozenset({"new"})
    assert found == Picked(3, 2, 0.375, 8, active, waiting, 16, 200)


def test_vllms_names_are_an_option() -> None:
    assert "vllm:" not in page(two_workers(), with_vllm=False)


@pytest.mark.parametrize("hides_tenants", [False, True])
def test_tenants_can_be_left_out(hides_tenants: bool) -> None:
    registry = CollectorRegistry()
    record = RequestRecord("Generate", code="OK", tenant="acme", adapter="sql", num_output_tokens=7)
    UsageCollector(registry, f"{PREFIX}router_").add(record)
    metrics: object = EngineMetrics(registry, two_workers(), hides_tenants=hides_tenants)
    text = generate_latest(metrics).decode()  # type: ignore[arg-type]
    assert ("acme" in text) is not hides_tenants
    assert 'loraplex:router_adapter_generation_tokens_total{adapter="sql"} 7.0' in text
    assert "loraplex:num_requests_running" in text


def test_without_workers_they_are_zero() -> None:
    replicas = two_workers()
    for worker in ("a", "b"):
        replicas.on_lost(worker, "gone")
    nothing = frozenset[str]()
    assert pick(page(replicas, with_vllm=True), VLLM) == Picked(0, 0, 0, 0, nothing, nothing, 0, 0)
