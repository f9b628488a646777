"""Load of a worker: WorkerService for its routers, and its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from loraplex_adapters.cache.listing import Resident
from loraplex_contracts.adapters import AdapterInfo
from loraplex_contracts.load import Load
from loraplex_proto import validate
from loraplex_proto.v1 import worker_pb2, worker_pb2_grpc
from loraplex_runtime.auth import recheck_identity
from loraplex_runtime.telemetry import counter, gauge, gauges, summary
from loraplex_server.engine.client import EngineClient, EngineState
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.middleware import RequestGate, handles_errors, handles_stream_errors

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

Context = Any
# Every step changes the number of pending tokens, and on a CPU each message takes time from the steps. A change of less
# than this number, or than this share of the number sent last, waits for the heartbeat.
MIN_CHANGED_TOKENS = 512
MIN_CHANGED_SHARE = 1 / 8


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Reads the engine's last report; never asks the engine."""

    def __init__(self, engine: EngineClient, gate: RequestGate) -> None:
        self._engine = engine
        self._gate = gate
        # The nearest adapters as they were last, and their messages.
        self._nearest: Sequence[Resident] = ()
        self._adapters: list[worker_pb2.ResidentAdapter] = []

    @handles_errors
    async def GetLoad(self, request: worker_pb2.GetLoadRequest, context: Context) -> worker_pb2.GetLoadResponse:
        validate.refuse_unhandled(request)
        return worker_pb2.GetLoadResponse(load=self._load())

    @handles_stream_errors
    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Sends the load when the engine's report changes, `min_interval_s` apart or more, and at each heartbeat. Ends
        when the caller's credential does."""
        validate.check_watch_load(request)
        interval_s = validate.watch_interval_s(request)
        clock = asyncio.get_running_loop().time
        sent: worker_pb2.Load | None = None
        due_s = 0.0
        while not self._engine.lost.is_set():
            recheck_identity()
            change, looked_s = self._engine.changes.next(), clock()
            load = self._load()
            is_last = load.draining and not load.running_requests and not load.queued_requests
            if sent is None or is_last or looked_s >= due_s or is_worth_sending(load, sent):
                yield worker_pb2.WatchLoadResponse(load=load)
                # A router that sent or ended a request just now cannot know which came first. Of the next it can.
                num_intervals = validate.HEARTBEAT_INTERVALS if sent is None or has_same_requests(load, sent) else 1
                sent, due_s = load, looked_s + num_intervals * interval_s
            if is_last:
                return  # an open watch would hold the server for its whole grace period
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_s):
                    await change.wait()
            await asyncio.sleep(looked_s + interval_s - clock())

    def _load(self) -> worker_pb2.Load:
        state = self._engine.state
        nearest = state.listing.nearest()
        if nearest is not self._nearest:
            self._nearest, self._adapters = nearest, protobuf.residents_to_pb(nearest)
        fetching = state.listing.fetching()
        load = protobuf.load_to_pb(state.load, self._adapters, state.usage, self._gate.is_leaving, fetching)
        load.stalled = bool(self._engine.stalled)
        return load


def is_worth_sending(load: worker_pb2.Load, sent: worker_pb2.Load) -> bool:
    """True where a router might choose differently with `load` than with the one sent last."""
    if abs(load.pending_tokens - sent.pending_tokens) > max(
        MIN_CHANGED_TOKENS, MIN_CHANGED_SHARE * sent.pending_tokens
    ):
        return True
    if (load.draining, load.stalled) != (sent.draining, sent.stalled):
        return True
    same_adapters = load.adapters == sent.adapters and load.waiting_adapter_ids == sent.waiting_adapter_ids
    return not has_same_requests(load, sent) or not same_adapters


def has_same_requests(load: worker_pb2.Load, sent: worker_pb2.Load) -> bool:
    """True where the numbers are equal."""
    return (load.running_requests, load.queued_requests) == (sent.running_requests, sent.queued_requests)


# --- metrics ----------------------------------------------------------------------------------------------------------

# Adapters that are shown by name; the rest are counted together.
MAX_NAMED_ADAPTERS: Final = 100
OTHER: Final = "other"
# Counters by tier, in the order of ReadCount's fields.
READS: Final = {
    "adapter_reads": "Adapters read from the tier.",
    "adapter_read_seconds": "Time that reading them took, checks included.",
    "adapter_read_bytes": "Their bytes in memory.",
}


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
        yield from _state_slots(load)
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
        reads = {"source": usage.source_reads, "disk": usage.disk_reads} if usage else {}
        for number, (name, text) in enumerate(READS.items()):
            yield counter(name, text, "tier", {tier: read[number] for tier, read in reads.items()})
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


def _state_slots(load: Load) -> Iterator[Metric]:
    """Of models with layers that keep states."""
    if not load.num_state_slots:
        return
    num_held = load.num_state_slots - load.num_free_state_slots
    num_empty = load.num_free_state_slots - load.num_state_snapshots
    uses = {"held": num_held, "snapshot": load.num_state_snapshots, "empty": num_empty}
    text = "Slots for recurrent states, by use: held by requests, snapshots for the prefix cache, empty."
    yield gauges("state_slots", text, ("use",), [((use,), count) for use, count in uses.items()])


def _residency(rows: Sequence[AdapterInfo]) -> Metric:
    samples = Counter[tuple[str, str, str]]()
    for number, row in enumerate(rows):
        name = row.adapter_id if number < MAX_NAMED_ADAPTERS else OTHER
        samples[name, row.tier, "true" if row.pinned else "false"] += 1
    labels = ("adapter", "tier", "pinned")
    return gauges("adapter_resident", "Adapters that this worker holds.", labels, list(samples.items()))
