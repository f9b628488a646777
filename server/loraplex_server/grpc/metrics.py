"""What the engine last said of itself, as the snapshot that metrics are made from."""

from __future__ import annotations

from loraplex_runtime.telemetry import Resident, WorkerSnapshot
from loraplex_server.engine.client import EngineState


def snapshot(state: EngineState) -> WorkerSnapshot:
    """Pure: one scrape's view."""
    load, usage, listed = state.load, state.usage, list(state.listing.rows())
    on_device = [info.adapter_id for info in listed if info.tier == "device"]
    return WorkerSnapshot(
        num_running=load.num_running,
        num_waiting=load.num_queued,
        kv_cache_usage=1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        max_lora=usage.num_device_slots if usage is not None else 0,
        running_adapters=on_device,
        waiting_adapters=[info.adapter_id for info in listed if info.state == "fetching"],
        residents=[Resident(info.adapter_id, info.tier, info.pinned) for info in listed],
        hits={"device": usage.hits} if usage is not None else {},
        misses={"device": usage.misses} if usage is not None else {},
        evictions={"device": usage.device_evictions, "host": usage.host_evictions} if usage is not None else {},
        num_loads=usage.loads_total if usage is not None else 0,
        load_seconds=usage.load_seconds_total if usage is not None else 0.0,
        drafted_tokens=load.drafted,
        accepted_tokens=load.accepted,
    )
