"""Capacity of an engine: KV blocks, state slots and context within the free memory."""

from __future__ import annotations

from dataclasses import dataclass

from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cuda.graphs import GraphShape
from loraplex_server.config import EngineConfig
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.memory import (
    adapter_bytes,
    free_memory_bytes,
    kv_budget_bytes,
    layer_bytes,
    num_kv_blocks,
    num_spare_states,
    num_state_slots,
    state_share,
    state_slot_bytes,
    step_bytes,
)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of what an engine keeps of its sequences."""

    num_blocks: int
    num_state_slots: int  # 0 where layers keep no states
    num_spare_states: int  # places beside those of the slots
    max_context_tokens: int  # the model's context, or as much of it as all KV blocks hold


def capacity_of(config: EngineConfig, loaded: LoadedModel, progress: Progress, *, has_adapters: bool) -> Capacity:
    """The capacity of the memory that is free now, beside the weights. `has_adapters`: their budget is kept free.
    Raises OutOfMemory."""
    free_bytes = free_memory_bytes(loaded.device)
    block_size, max_running = config.kv.block_size, config.batch.max_running
    num_slots = state_slots(config, loaded, free_bytes, has_adapters=has_adapters)
    num_spare = num_spare_states(num_slots, max_running)
    states_bytes = (num_slots + num_spare) * state_slot_bytes(loaded)
    num_blocks = kv_blocks(config, loaded, free_bytes - states_bytes, has_adapters=has_adapters)
    progress(f"{num_blocks * block_size:,} tokens of KV cache in {loaded.dtype_name} on {loaded.device}")
    if num_slots:
        fewer = f"; so no more than {num_slots} completions run at a time" if num_slots < max_running else ""
        progress(f"{num_slots} slots for recurrent states, {state_slot_bytes(loaded) / 2**20:.1f} MiB each{fewer}")
    max_context_tokens = _max_context_tokens(loaded.spec.max_context_tokens, num_blocks, block_size, progress)
    return Capacity(num_blocks, num_slots, num_spare, max_context_tokens)


def captured_shapes(config: EngineConfig, backend: Backend) -> list[GraphShape]:
    """The steps that are captured as CUDA graphs."""
    if not config.model.cuda_graphs:
        return []
    batch = config.batch
    return backend.graph_shapes(batch.max_running, config.speculation.max_draft_tokens, batch.max_step_tokens)


def state_slots(config: EngineConfig, loaded: LoadedModel, free_bytes: int, *, has_adapters: bool) -> int:
    """State slots where `free_bytes` are free beside the weights; 0 where layers keep no states. Raises OutOfMemory."""
    if not loaded.states:
        return 0
    budget = config.kv.state_bytes
    if budget is None:
        budget = int(state_share(loaded) * _kv_budget_bytes(config, loaded, free_bytes, has_adapters=has_adapters))
    return num_state_slots(budget, loaded, config.batch.max_running)


def _kv_budget_bytes(config: EngineConfig, loaded: LoadedModel, free_bytes: int, *, has_adapters: bool) -> int:
    if config.kv.memory_bytes is not None:
        return config.kv.memory_bytes
    reserved = adapter_bytes(config.adapters.device_bytes, loaded.device) if has_adapters else 0
    if loaded.device.type != "cpu":
        reserved += step_bytes(loaded, config.batch.max_step_tokens, config.batch.max_running)
        shapes = captured_shapes(config, loaded.backend)
        reserved += loaded.backend.graph_bytes(shapes, loaded.spec, loaded.dtype)
        # Graphs share memory of their own, beside that of eager steps.
        reserved += layer_bytes(loaded, max((shape.num_tokens for shape in shapes), default=0))
    return kv_budget_bytes(loaded.device.type, free_bytes, reserved)


def kv_blocks(config: EngineConfig, loaded: LoadedModel, free_bytes: int, *, has_adapters: bool) -> int:
    """Blocks of the KV cache where `free_bytes` are free beside the weights. `has_adapters`: their budget is kept free.
    Raises OutOfMemory."""
    kv, batch = config.kv, config.batch
    budget = _kv_budget_bytes(config, loaded, free_bytes, has_adapters=has_adapters)
    remedy = "give more with --kv-memory"
    if kv.memory_bytes is None:
        remedy = f"{free_bytes / 2**20:.0f} MiB are free: make room, or name a size with --kv-memory"
        if has_adapters:
            kept = adapter_bytes(config.adapters.device_bytes, loaded.device)
            remedy += f", or keep less than {kept / 2**20:.0f} MiB with --adapter-device-memory"
    per_row = -(-loaded.spec.max_context_tokens // kv.block_size)
    block_bytes = kv_block_bytes(loaded.spec, kv.block_size, loaded.dtype.itemsize)
    return num_kv_blocks(budget, block_bytes, batch.max_running * per_row + 2, remedy)


def _max_context_tokens(of_model: int, num_blocks: int, block_size: int, progress: Progress) -> int:
    """The model's context, or as much of it as the whole KV cache holds."""
    num_kv_tokens = (num_blocks - 1) * block_size  # block 0 is for padding
    if num_kv_tokens < of_model:
        progress(
            f"a request may have {num_kv_tokens:,} tokens, all that the KV cache holds, and not the model's "
            f"{of_model:,}; give more with --kv-memory"
        )
    return min(of_model, num_kv_tokens)
