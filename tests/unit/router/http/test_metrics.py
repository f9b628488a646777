"""Gauges for endpoint pickers, read by the rules of the Gateway API Inference Extension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from loraplex_proto.v1 import worker_pb2
from loraplex_router.http.metrics import EngineMetrics
from loraplex_router.replicas import Replicas


@dataclass
class Picked:
    waiting: float
    running: float
    kv_usage: float
    max_lora: int
    adapters: dict[str, str]  # "running" or "waiting", by name
    block_size: int
    num_blocks: int


def pick(page: str, prefix: str, kv_usage: str) -> Picked:
    """As the picker does: the latest sample of a name, of the adapters' the one with the largest value."""
    samples: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        samples[family.name] = family.samples
    info = max(samples[f"{prefix}lora_requests_info"], key=lambda one: one.value).labels
    adapters: dict[str, str] = {}
    for state in ("waiting", "running"):
        names = [name.strip() for name in info[f"{state}_lora_adapters"].split(",")]
        adapters |= {name: state for name in names if name}
    blocks = samples[f"{prefix}cache_config_info"][-1].labels
    return Picked(
        waiting=samples[f"{prefix}num_requests_waiting"][-1].value,
        running=samples[f"{prefix}num_requests_running"][-1].value,
        kv_usage=samples[prefix + kv_usage][-1].value,
        max_lora=int(info["max_lora"]),
        adapters=adapters,
        block_size=int(blocks["block_size"]),
        num_blocks=int(blocks["num_gpu_blocks"]),
    )


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
    ("prefix", "kv_usage"),
    [("loraplex:", "kv_cache_usage"), ("vllm:", "kv_cache_usage_perc"), ("vllm:", "gpu_cache_usage_perc")],
)
def test_a_picker_reads_them(prefix: str, kv_usage: str) -> None:
    found = pick(page(two_workers(), with_vllm=True), prefix, kv_usage)
    assert (found.waiting, found.running, found.kv_usage) == (3, 2, 0.375)
    assert (found.max_lora, found.block_size, found.num_blocks) == (8, 16, 200)
    # Idle ones that are on a device count, those on disk do not.
    assert found.adapters == {"json": "running", "sql": "running", "new": "waiting"}


def test_vllms_names_are_an_option() -> None:
    assert "vllm:" not in page(two_workers(), with_vllm=False)


def test_without_workers_they_are_zero() -> None:
    replicas = two_workers()
    for worker in ("a", "b"):
        replicas.on_lost(worker, "gone")
    found = pick(page(replicas, with_vllm=True), "vllm:", "kv_cache_usage_perc")
    assert found == Picked(0, 0, 0, 0, {}, 0, 0)
