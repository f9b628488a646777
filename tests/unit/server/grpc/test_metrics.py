"""A worker's metrics out of what its engine last said."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from support.listings import info

from loraplex_adapters.cache.listing import Listing
from loraplex_contracts.adapters import AdapterInfo, CacheUsage
from loraplex_contracts.load import Load
from loraplex_runtime.telemetry import new_registry
from loraplex_server.engine.client import EngineState
from loraplex_server.grpc.metrics import MAX_NAMED_ADAPTERS, WorkerCollector


def listing(rows: Sequence[AdapterInfo]) -> Listing:
    held = Listing()
    held.apply_changes({row.adapter_id: (row,) for row in rows})
    return held


def samples(registry: Any, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Label pairs -> value of every sample with that name."""
    found = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
    return {tuple(sorted(sample.labels.items())): sample.value for sample in found}


def value(registry: Any, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_a_worker_is_shown_as_it_is_at_the_scrape() -> None:
    registry = new_registry()
    load = Load(
        num_running=3,
        num_queued=2,
        num_blocks=8,
        num_free_blocks=6,
        drafted={"medusa": 8, "prompt_lookup": 3},
        accepted={"medusa": 5, "prompt_lookup": 0},
    )
    usage = CacheUsage(
        *(0, 0, 0, 0, 8, 2),
        hits=5,
        misses=1,
        device_evictions=4,
        host_evictions=6,
        load_seconds_total=0.5,
        loads_total=2,
    )
    rows = [info("sql"), info("json"), info("xml", "fetching", "source")]
    state = EngineState(load, usage, listing(rows))
    WorkerCollector(registry, lambda: state, clock=lambda: 1234.5)
    assert value(registry, "loraplex:num_requests_running") == 3
    assert value(registry, "loraplex:num_requests_waiting") == 2
    assert value(registry, "loraplex:kv_cache_usage") == 0.25
    assert samples(registry, "loraplex:lora_requests_info") == {
        (("max_lora", "8"), ("running_lora_adapters", "json,sql"), ("waiting_lora_adapters", "xml")): 1234.5
    }
    assert value(registry, "loraplex:adapter_cache_hits_total", tier="device") == 5
    assert value(registry, "loraplex:adapter_cache_misses_total", tier="device") == 1
    assert value(registry, "loraplex:adapter_cache_evictions_total", tier="device") == 4
    assert value(registry, "loraplex:adapter_cache_evictions_total", tier="host") == 6
    assert value(registry, "loraplex:adapter_load_seconds_count") == 2
    assert value(registry, "loraplex:adapter_load_seconds_sum") == 0.5
    assert value(registry, "loraplex:draft_tokens_total", proposer="medusa") == 8
    assert value(registry, "loraplex:accepted_tokens_total", proposer="medusa") == 5
    assert value(registry, "loraplex:accepted_tokens_total", proposer="prompt_lookup") == 0
    state = EngineState(Load(), usage, listing([info("xml")]))
    # The label set of a moment ago is gone.
    assert list(samples(registry, "loraplex:lora_requests_info")) == [
        (("max_lora", "8"), ("running_lora_adapters", "xml"), ("waiting_lora_adapters", ""))
    ]


def test_residents_are_shown_and_forgotten() -> None:
    registry = new_registry()
    sql = replace(info("sql"), pinned=True)
    state = EngineState(Load(), listing=listing([sql, info("json", "known", "disk")]))
    WorkerCollector(registry, lambda: state)
    name = "loraplex:adapter_resident"
    assert value(registry, name, adapter="sql", tier="device", pinned="true") == 1
    assert value(registry, name, adapter="json", tier="disk", pinned="false") == 1
    state.listing = listing([sql])
    assert value(registry, name, adapter="json", tier="disk", pinned="false") is None
    assert value(registry, name, adapter="sql", tier="device", pinned="true") == 1


def test_many_residents_are_counted_together() -> None:
    registry = new_registry()
    tiers = ["device"] * MAX_NAMED_ADAPTERS + ["host"] * 30 + ["disk"] * 70
    rows = [info(f"a{number:03}", "known", tier) for number, tier in enumerate(tiers)]  # type: ignore[arg-type]
    WorkerCollector(registry, lambda: EngineState(Load(), listing=listing(rows)))
    shown = samples(registry, "loraplex:adapter_resident")
    assert len(shown) == MAX_NAMED_ADAPTERS + 2
    assert sum(shown.values()) == 200
    assert value(registry, "loraplex:adapter_resident", adapter="other", tier="disk", pinned="false") == 70


def test_drafts_are_counted_by_proposer() -> None:
    load = Load(drafted={"medusa": 9, "prompt_lookup": 4}, accepted={"medusa": 6, "prompt_lookup": 0})
    state = EngineState(pickle.loads(pickle.dumps(load)))  # as it comes through the pipe
    registry = new_registry()
    WorkerCollector(registry, lambda: state)

    def value(name: str, proposer: str) -> float | None:
        return registry.get_sample_value(f"loraplex:{name}_total", {"proposer": proposer})

    assert (value("draft_tokens", "medusa"), value("accepted_tokens", "medusa")) == (9, 6)
    assert (value("draft_tokens", "prompt_lookup"), value("accepted_tokens", "prompt_lookup")) == (4, 0)
    state.load = Load(drafted={"medusa": 12}, accepted={"medusa": 7})
    assert value("draft_tokens", "medusa") == 12
    assert value("draft_tokens", "universal") is None


def test_before_the_first_draft() -> None:
    registry = new_registry()
    WorkerCollector(registry, lambda: EngineState(Load()))
    assert registry.get_sample_value("loraplex:num_requests_running") == 0
    assert not [s for family in registry.collect() for s in family.samples if "draft" in s.name]
