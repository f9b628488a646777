"""Metrics of a worker: its engine at each scrape, its requests as they end."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from loraplex_contracts.adapters import AdapterInfo, CacheUsage
from loraplex_contracts.errors import Code
from loraplex_contracts.load import Load
from loraplex_runtime.metrics import (
    PREFIX,
    RequestMetrics,
    counter,
    gauge,
    gauges,
    histogram,
    new_registry,
    summary,
    total,
)
from loraplex_runtime.request_record import RequestRecord
from loraplex_runtime.usage import MAX_NAMES, OTHER
from loraplex_server.engine.client import EngineState
from loraplex_server.engine.step_sizes import SEQUENCE_BOUNDS, STEP_BOUNDS_S, TOKEN_BOUNDS, StepSizes

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

# --- requests, as they end --------------------------------------------------------------------------------------------

_TIMES_BOUNDS_S: Final = (0.003, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_PER_TOKEN_BOUNDS_S: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_TOKENS_BOUNDS: Final = tuple(float(1 << power) for power in range(0, 18, 2))
# Codes of requests that nobody waits for any more: where such a one never began, all its time was waiting.
GAVE_UP: Final = frozenset({Code.CANCELLED.name, Code.DEADLINE_EXCEEDED.name})
# A request whose adapter is on the device waits for it for less.
STALL_S: Final = 0.001

_FIRST_TOKEN, _QUEUE = "time_to_first_token_seconds", "request_queue_time_seconds"
_PREFILL, _DECODE = "request_prefill_time_seconds", "request_decode_time_seconds"
_STALL = "adapter_wait_seconds"
_TIMES: Final = {
    _FIRST_TOKEN: "From a request's arrival to its first token.",
    _QUEUE: "From a request's arrival to its first step, or to its end where it ended before.",
    _PREFILL: "From a request's first step to its first token.",
    _DECODE: "From a request's first token to its end.",
    _STALL: "Waits for an adapter's weights, of the requests that had to wait.",
}


class WorkerMetrics(RequestMetrics):
    """Metrics of requests: those of every server, and where the time of requests went."""

    def __init__(self, registry: CollectorRegistry | None) -> None:
        from prometheus_client import Histogram

        registry = new_registry() if registry is None else registry
        super().__init__(registry, "worker")

        def made(name: str, text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=bounds, registry=registry)

        self._times = {name: made(name, text, _TIMES_BOUNDS_S) for name, text in _TIMES.items()}
        self._per_token = made(
            "request_time_per_output_token_seconds",
            "Mean time from one token of a request to the next, all of its completions together.",
            _PER_TOKEN_BOUNDS_S,
        )
        self._prompts = made("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS_BOUNDS)
        self._outputs = made("request_generation_tokens", "Tokens that a request made.", _TOKENS_BOUNDS)

    def ended(self, record: RequestRecord) -> None:
        super().ended(record)
        queue_s = record.waited_s if record.queue_s is None else record.queue_s
        if queue_s is None and record.computes and record.code in GAVE_UP:
            queue_s = record.total_s  # before the engine had it, or its client left
        if queue_s is None:
            return  # it was refused at once
        self._times[_QUEUE].observe(queue_s)
        if record.adapter_wait_s >= STALL_S:
            self._times[_STALL].observe(record.adapter_wait_s)
        if record.queue_s is None:
            return  # it never began
        self._prompts.observe(record.num_prompt_tokens)
        first_s, decode_s = record.first_token_s, record.decode_s
        if first_s is None or decode_s is None:
            return
        self._times[_FIRST_TOKEN].observe(first_s)
        self._times[_PREFILL].observe(max(0.0, first_s - record.queue_s))
        self._times[_DECODE].observe(decode_s)
        self._outputs.observe(record.num_output_tokens)
        if record.num_output_tokens > 1:
            self._per_token.observe(decode_s / (record.num_output_tokens - 1))


# --- the engine, at a scrape ------------------------------------------------------------------------------------------

# Counters by tier, in the order of ReadCount's fields.
READS: Final = {
    "adapter_reads": "Adapters read from the tier: source, disk (the store), host (to a GPU).",
    "adapter_read_seconds": "Time that reading adapters took, checks included.",
    "adapter_read_bytes": "Bytes of adapters read from the tier, as they are in memory.",
}


class _WithProcess(Protocol):
    """An engine, which ends with its process."""

    @property
    def pid(self) -> int | None: ...


def describe_engine(registry: CollectorRegistry, engine: _WithProcess) -> None:
    """Registers metrics of the engine's process, where it has one of its own: its memory is the model's."""
    from prometheus_client import ProcessCollector

    if engine.pid is not None:
        ProcessCollector(namespace=f"{PREFIX}engine", pid=lambda: engine.pid or 0, registry=registry)


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
        yield gauge("pending_tokens", "Tokens to compute, and that may still be made.", load.pending_tokens)
        yield gauge("kv_cache_usage", "Share of the KV blocks that are taken, 0 to 1.", kv_cache_usage)
        yield from _state_slots(load)
        yield from _totals(load)
        yield from _steps(state.steps)
        yield self._lora_requests_info(rows, usage.num_device_slots if usage else 0)
        yield _residency(rows)
        hits, misses = {"device": load.num_adapter_hits}, {"device": load.num_adapter_misses}
        evictions = {"device": usage.device_evictions, "host": usage.host_evictions} if usage else {}
        loads = (usage.loads_total, usage.load_seconds_total) if usage else (0, 0.0)
        yield counter("adapter_cache_hits", "Requests that found their adapter in the tier.", "tier", hits)
        yield counter("adapter_cache_misses", "Requests that did not find it there.", "tier", misses)
        yield counter("adapter_cache_evictions", "Adapters that had to leave the tier for others.", "tier", evictions)
        yield summary("adapter_load_seconds", "Time to load an adapter.", *loads)
        yield from _adapter_memory(usage)
        reads = {"source": usage.source_reads, "disk": usage.disk_reads, "host": usage.host_reads} if usage else {}
        for number, (name, text) in enumerate(READS.items()):
            yield counter(name, text, "tier", {tier: read[number] for tier, read in reads.items()})
        yield counter("draft_tokens", "Tokens that speculation has proposed.", "proposer", load.drafted)
        yield counter("accepted_tokens", "Proposed tokens that the model agreed with.", "proposer", load.accepted)

    def _lora_requests_info(self, rows: Sequence[AdapterInfo], max_lora: int) -> Metric:
        """The metric that the Gateway API Inference Extension reads: label names and meaning are that protocol's. Idle
        adapters on the device count as running too: a gateway that routes by this must find them."""
        on_device = [row for row in rows if row.tier == "device"]
        waiting = [row for row in rows if row.state == "fetching"]
        labels = {
            "max_lora": str(max_lora),
            "running_lora_adapters": ",".join(_most_used(on_device)),
            "waiting_lora_adapters": ",".join(_most_used(waiting)),
        }
        text = "Adapters on the device and waiting for it; the value is the time."
        return gauge("lora_requests_info", text, self._clock(), labels)


def _totals(load: Load) -> Iterator[Metric]:
    """Totals since the start. They grow while requests run."""
    for name, text, value in (
        ("prompt_tokens", "Tokens of prompts of requests that have begun.", load.num_prompt_tokens),
        ("generation_tokens", "Tokens that steps have made.", load.num_output_tokens),
        ("prefix_cache_queries", "Tokens of prompts looked for in the prefix cache.", load.num_prompt_tokens),
        ("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", load.num_cached_tokens),
        ("num_preemptions", "Sequences that gave up their KV blocks or their row to others.", load.num_preemptions),
        ("kv_cache_wait_seconds", "Time in which the next request waited for KV blocks to come free.", load.kv_wait_s),
    ):
        yield total(name, text, value)


def _steps(steps: StepSizes) -> Iterator[Metric]:
    """Histograms of steps, as of the engine's last report, a quarter of a second old at most."""
    for name, text, bounds, values in (
        ("step_seconds", "Lengths of steps.", STEP_BOUNDS_S, steps.seconds),
        ("step_tokens", "Tokens computed in a step: of prompts, of texts, and drafts.", TOKEN_BOUNDS, steps.tokens),
        ("step_sequences", "Sequences in a step: the batch size.", SEQUENCE_BOUNDS, steps.sequences),
    ):
        yield histogram(name, text, bounds, values.counts, values.total)


def _state_slots(load: Load) -> Iterator[Metric]:
    """Slots for recurrent states by use; none for models without layers that keep states."""
    if not load.num_state_slots:
        return
    num_held = load.num_state_slots - load.num_free_state_slots
    num_empty = load.num_free_state_slots - load.num_state_snapshots
    uses = {"held": num_held, "snapshot": load.num_state_snapshots, "empty": num_empty}
    text = "Slots for recurrent states, by use: held by requests, snapshots for the prefix cache, empty."
    yield gauges("state_slots", text, ("use",), [((use,), count) for use, count in uses.items()])


def _adapter_memory(usage: CacheUsage | None) -> Iterator[Metric]:
    used = {"device": usage.device_bytes, "host": usage.host_bytes} if usage else {}
    most = {"device": usage.device_budget_bytes, "host": usage.host_budget_bytes} if usage else {}
    for name, text, values in (
        ("adapter_memory_bytes", "Bytes of adapters in the tier.", used),
        ("adapter_memory_limit_bytes", "Bytes that adapters may take there.", most),
    ):
        yield gauges(name, text, ("tier",), [((tier,), value) for tier, value in values.items()])


def _most_used(rows: Sequence[AdapterInfo]) -> list[str]:
    """Names of the MAX_NAMES that were asked for most, in the order of the rows: another order would be another series
    in Prometheus."""
    most = heapq.nlargest(MAX_NAMES, range(len(rows)), key=lambda place: rows[place].num_uses)
    return [rows[place].adapter_id for place in sorted(most)]


def _residency(rows: Sequence[AdapterInfo]) -> Metric:
    samples, named = Counter[tuple[str, str, str]](), frozenset(_most_used(rows))
    for row in rows:
        name = row.adapter_id if row.adapter_id in named else OTHER
        samples[name, row.tier, "true" if row.pinned else "false"] += 1
    labels = ("adapter", "tier", "pinned")
    return gauges("adapter_resident", "Adapters that this worker holds.", labels, list(samples.items()))
