"""Metrics of a worker."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.listings import info

from loraplex_adapters.cache.listing import Listing
from loraplex_contracts.adapters import AdapterInfo, CacheUsage, ReadCount
from loraplex_contracts.errors import Overloaded
from loraplex_contracts.load import Load
from loraplex_contracts.plan import Span, StepPlan
from loraplex_runtime.metrics import new_registry
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.usage import MAX_NAMES, OTHER
from loraplex_server.engine.client import EngineState
from loraplex_server.engine.step_sizes import REPORT_EVERY_S, StepTally
from loraplex_server.grpc.metrics import WorkerCollector, WorkerMetrics


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
        num_state_slots=9,
        num_free_state_slots=5,
        num_state_snapshots=2,
        drafted={"medusa": 8, "prompt_lookup": 3},
        accepted={"medusa": 5, "prompt_lookup": 0},
        num_adapter_hits=5,
        num_adapter_misses=1,
    )
    usage = CacheUsage(
        *(70, 100, 30, 200, 8),
        device_evictions=4,
        host_evictions=6,
        load_seconds_total=0.5,
        loads_total=2,
        source_reads=ReadCount(3, 1.5, 300),
        disk_reads=ReadCount().plus(0.25, 100),
        host_reads=ReadCount(7, 0.5, 700),
    )
    rows = [info("sql"), info("json"), info("xml", "fetching", "source")]
    state = EngineState(load, usage, listing(rows))
    WorkerCollector(registry, lambda: state, clock=lambda: 1234.5)
    assert value(registry, "loraplex:num_requests_running") == 3
    assert value(registry, "loraplex:num_requests_waiting") == 2
    assert value(registry, "loraplex:kv_cache_usage") == 0.25
    uses = {use: value(registry, "loraplex:state_slots", use=use) for use in ("held", "snapshot", "empty")}
    assert uses == {"held": 4, "snapshot": 2, "empty": 3}
    assert samples(registry, "loraplex:lora_requests_info") == {
        (("max_lora", "8"), ("running_lora_adapters", "json,sql"), ("waiting_lora_adapters", "xml")): 1234.5
    }
    assert value(registry, "loraplex:adapter_cache_hits_total", tier="device") == 5
    assert value(registry, "loraplex:adapter_cache_misses_total", tier="device") == 1
    assert value(registry, "loraplex:adapter_cache_evictions_total", tier="device") == 4
    assert value(registry, "loraplex:adapter_cache_evictions_total", tier="host") == 6
    assert value(registry, "loraplex:adapter_load_seconds_count") == 2
    assert value(registry, "loraplex:adapter_load_seconds_sum") == 0.5
    for tier, used, most in (("device", 70, 100), ("host", 30, 200)):
        assert value(registry, "loraplex:adapter_memory_bytes", tier=tier) == used
        assert value(registry, "loraplex:adapter_memory_limit_bytes", tier=tier) == most
    for name, of_source, of_disk, of_host in (("", 3, 1, 7), ("_seconds", 1.5, 0.25, 0.5), ("_bytes", 300, 100, 700)):
        name = f"loraplex:adapter_read{name}_total" if name else "loraplex:adapter_reads_total"
        assert value(registry, name, tier="source") == of_source
        assert value(registry, name, tier="disk") == of_disk
        assert value(registry, name, tier="host") == of_host
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
    tiers = ["device"] * MAX_NAMES + ["host"] * 30 + ["disk"] * 70
    rows = [info(f"a{number:03}", "known", tier) for number, tier in enumerate(tiers)]  # type: ignore[arg-type]
    WorkerCollector(registry, lambda: EngineState(Load(), listing=listing(rows)))
    shown = samples(registry, "loraplex:adapter_resident")
    assert len(shown) == MAX_NAMES + 2
    assert sum(shown.values()) == 200
    assert value(registry, "loraplex:adapter_resident", adapter="(other)", tier="disk", pinned="false") == 70


def test_the_residents_that_are_used_most_have_their_names() -> None:
    registry = new_registry()
    rows = [replace(info(f"a{number:03}"), num_uses=number) for number in range(MAX_NAMES + 2)]
    WorkerCollector(registry, lambda: EngineState(Load(), listing=listing(rows)))
    resident = samples(registry, "loraplex:adapter_resident")
    names = {dict(labels)["adapter"] for labels in resident}
    assert names == {OTHER, *(row.adapter_id for row in rows[2:])}
    (labels,) = samples(registry, "loraplex:lora_requests_info")
    assert dict(labels)["running_lora_adapters"].split(",") == [row.adapter_id for row in rows[2:]]


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


# --- steps and totals -------------------------------------------------------------------------------------------------


def plan(num_sequences: int) -> StepPlan:
    return StepPlan(0, tuple(Span(str(row), row, 0, 1, 1) for row in range(num_sequences)))


def test_steps_are_shown_with_their_length_tokens_and_sequences() -> None:
    tally = StepTally()
    tally.add(plan(3), 40, 10.0, 10.004)
    tally.add(plan(4), 4, 10.001, 10.034)  # planned while the first one ran: it took 30 ms more
    steps = tally.report(11.0, is_idle=False)
    assert steps is not None
    registry = new_registry()
    WorkerCollector(registry, lambda: EngineState(Load(), steps=pickle.loads(pickle.dumps(steps))))
    assert value(registry, "loraplex:step_seconds_count") == 2
    assert value(registry, "loraplex:step_seconds_sum") == pytest.approx(0.034)
    found = {le: value(registry, "loraplex:step_seconds_bucket", le=le) for le in ("0.005", "0.02", "0.05", "+Inf")}
    assert found == {"0.005": 1, "0.02": 1, "0.05": 2, "+Inf": 2}
    assert value(registry, "loraplex:step_tokens_sum") == 44
    assert value(registry, "loraplex:step_tokens_bucket", le="4.0") == 1
    assert value(registry, "loraplex:step_sequences_sum") == 7
    assert value(registry, "loraplex:step_sequences_bucket", le="4.0") == 2


def test_steps_are_told_now_and_then_and_when_the_last_request_ends() -> None:
    tally = StepTally()
    assert tally.report(0.0, is_idle=False) is not None
    tally.add(plan(1), 1, 0.0, 0.1)
    assert tally.report(REPORT_EVERY_S / 2, is_idle=False) is None
    assert tally.report(REPORT_EVERY_S / 2, is_idle=True) is not None
    assert tally.report(10.0, is_idle=True) is None  # nothing new


def test_totals_grow_while_requests_run() -> None:
    registry = new_registry()
    load = Load(num_prompt_tokens=90, num_cached_tokens=30, num_output_tokens=7, num_preemptions=2, kv_wait_s=1.5)
    WorkerCollector(registry, lambda: EngineState(load))
    names = ("prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "generation_tokens", "num_preemptions")
    assert [value(registry, f"loraplex:{name}_total") for name in names] == [90, 90, 30, 7, 2]
    assert value(registry, "loraplex:kv_cache_wait_seconds_total") == 1.5


# --- requests ---------------------------------------------------------------------------------------------------------


def ended(**fields: Any) -> RequestRecord:
    record = RequestRecord("GenerateStream", "acme", adapter="sql", adapter_digest="d" * 64, code="OK")
    for name, given in fields.items():
        setattr(record, name, given)
    return record


def test_a_request_is_observed_at_its_end() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry)
    record = ended(
        num_prompt_tokens=64, num_output_tokens=11, queue_s=0.2, adapter_wait_s=0.15, first_token_s=0.5, total_s=1.5
    )
    record.add_drafts("medusa", 8, 5)
    metrics.ended(record)

    def seconds(name: str) -> tuple[float | None, float | None]:
        return value(registry, f"loraplex:{name}_count"), value(registry, f"loraplex:{name}_sum")

    assert seconds("request_queue_time_seconds") == (1, 0.2)
    assert seconds("adapter_wait_seconds") == (1, 0.15)
    assert seconds("time_to_first_token_seconds") == (1, 0.5)
    assert seconds("request_prefill_time_seconds") == (1, pytest.approx(0.3))
    assert seconds("request_decode_time_seconds") == (1, 1.0)
    assert seconds("request_time_per_output_token_seconds") == (1, pytest.approx(0.1))
    assert seconds("request_prompt_tokens") == (1, 64)
    assert seconds("request_generation_tokens") == (1, 11)
    assert value(registry, "loraplex:request_seconds_sum", method="GenerateStream") == 1.5
    assert value(registry, "loraplex:adapter_generation_tokens_total", adapter="sql") == 11
    assert value(registry, "loraplex:adapter_accepted_tokens_total", adapter="sql", proposer="medusa") == 5
    assert value(registry, "loraplex:tenant_prompt_tokens_total", tenant="acme") == 64


def test_what_never_began_or_has_one_token_is_no_latency() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry)
    refused = ended(adapter_digest="")
    refused.fail(Overloaded("no"))
    metrics.ended(refused)
    assert value(registry, "loraplex:request_queue_time_seconds_count") == 0
    assert value(registry, "loraplex:adapter_refusals_total", adapter="(other)", reason="OVERLOADED") == 1
    assert value(registry, "loraplex:tenant_refusals_total", tenant="acme", reason="OVERLOADED") == 1
    metrics.ended(ended(num_prompt_tokens=4, num_output_tokens=1, queue_s=0.0, first_token_s=0.1, total_s=0.1))
    assert value(registry, "loraplex:time_to_first_token_seconds_count") == 1
    assert value(registry, "loraplex:request_time_per_output_token_seconds_count") == 0
    assert value(registry, "loraplex:adapter_wait_seconds_count") == 0
    metrics.ended(ended(num_prompt_tokens=9, queue_s=0.1, total_s=0.2))  # an embedding
    assert value(registry, "loraplex:request_prompt_tokens_count") == 2
    assert value(registry, "loraplex:time_to_first_token_seconds_count") == 1


def test_waits_that_end_badly_count_too() -> None:
    registry = new_registry()
    metrics = WorkerMetrics(registry)
    metrics.ended(ended(code="DEADLINE_EXCEEDED", waited_s=9.0, adapter_wait_s=8.0, total_s=9.1))
    assert value(registry, "loraplex:request_queue_time_seconds_sum") == 9.0
    assert value(registry, "loraplex:adapter_wait_seconds_sum") == 8.0
    metrics.ended(ended(code="CANCELLED", total_s=3.0))  # its client left before the engine said anything
    assert value(registry, "loraplex:request_queue_time_seconds_sum") == 12.0
    metrics.ended(ended(code="NOT_FOUND", total_s=0.1))
    watch = RequestRecord("WatchLoad", code="CANCELLED", total_s=900.0)
    metrics.ended(watch)
    assert value(registry, "loraplex:request_queue_time_seconds_count") == 2
    assert value(registry, "loraplex:request_prompt_tokens_count") == 0
