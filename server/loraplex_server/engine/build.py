"""Puts an engine together from its configuration: model, KV cache, adapter cache, runner, scheduler.

Runs in the engine's process. The only place that knows all the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from loraplex_adapters.cache.config import AdapterCacheConfig
from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.ops.registry import choose_dense, choose_ops
from loraplex_adapters.sources.chain import make_source
from loraplex_adapters.weights import AdapterWeights
from loraplex_proto.errors import OutOfMemory
from loraplex_server.config import AdaptersConfig, EngineConfig, KvConfig, hub_token
from loraplex_server.engine.core import Engine
from loraplex_server.engine.messages import ModelInfo
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.model.attention.registry import make_attention
from loraplex_server.model.heads import HeadSlots
from loraplex_server.model.kv import KvCache, free_memory_bytes, num_blocks_for
from loraplex_server.model.loader import LoadedModel, load_model
from loraplex_server.model.memory import step_bytes
from loraplex_server.model.packed import packed_linear
from loraplex_server.model.runner import ModelRunner
from loraplex_server.sampling.sampler import Sampler
from loraplex_server.scheduler.config import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.speculation.build import Target, build_speculator
from loraplex_server.speculation.measure import measure_runner

log = logging.getLogger(__name__)

# Of the memory that is free after the weights, the adapters' budget and, on a GPU, the largest step. On a CPU the rest
# of the machine needs its share, of which a step takes what it needs, and nobody gains from a cache larger than
# CPU_KV_BYTES.
KV_SHARE = {"cuda": 0.9, "cpu": 0.25}
CPU_KV_BYTES = 4 << 30


def build_engine(config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]) -> Engine:
    """Loads everything. Raises the typed error of what cannot be had."""
    logging.getLogger("loraplex_server").setLevel(config.log_level.upper())
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    progress(f"loading {config.model.model}")
    loaded = load_model(
        config.model.model,
        dtype=config.model.dtype,
        device=config.model.device,
        revision=config.model.revision,
        max_context_tokens=config.model.max_context_tokens,
        make_base=packed_linear,
    )
    return assemble(loaded, config, progress, notify)


def assemble(
    loaded: LoadedModel, config: EngineConfig, progress: Callable[[str], None], notify: Callable[[], None]
) -> Engine:
    """An engine around a model that is loaded already."""
    adapters, spec = config.adapters, loaded.spec
    slots = loaded.adapter_slots(choose_ops(loaded.device), adapters.num_device_slots)
    num_blocks = _num_blocks(config, loaded)
    progress(f"{num_blocks * config.kv.block_size:,} tokens of KV cache in {loaded.dtype_name} on {loaded.device}")
    max_context_tokens = _max_context_tokens(spec.max_context_tokens, num_blocks, config.kv.block_size, progress)
    heads = HeadSlots(loaded, slots, choose_dense(loaded.device))

    def install(slot: int, weights: AdapterWeights | None) -> None:
        slots.install(slot, weights)
        heads.install(slot, weights)

    cache = KvCache(spec, num_blocks, config.kv.block_size, loaded.dtype, loaded.device)
    runner = ModelRunner(
        loaded,
        cache,
        make_attention("auto", loaded.device),
        slots,
        Sampler(config.batch.max_running, spec.num_logits, loaded.device),
        max_rows=config.batch.max_running,
    )
    manager = AdapterManager(
        _cache_config(adapters),
        make_source(adapters.root, adapters.hub, hub_token()),
        loaded.base_targets(adapters.max_rank),
        loaded.device,
        install,
        notify,
    )
    batch = config.batch
    step_costs = measure_runner(
        runner, max_rows=batch.max_running, num_blocks=num_blocks, block_size=config.kv.block_size
    )
    speculator = build_speculator(
        config.speculation,
        Target(loaded, runner, manager, heads, batch.max_running, batch.max_step_tokens),
        {},
        step_costs,
        progress,
        config.speculation.default_medusa,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            max_running=config.batch.max_running,
            max_step_tokens=config.batch.max_step_tokens,
            max_context_tokens=max_context_tokens,
            max_queued=config.batch.max_queued,
            model_digest=loaded.model_id,
        ),
        BlockPool(num_blocks, config.kv.block_size, prefix_caching=config.kv.prefix_caching),
        manager,
        frozenset(spec.eos_token_ids),
    )
    info = ModelInfo(
        model_id=loaded.model_id,
        model_type=loaded.model_type,
        dtype=loaded.dtype_name,
        device=str(loaded.device),
        vocab_size=spec.vocab_size,
        max_context_tokens=max_context_tokens,
        max_lora_rank=adapters.max_rank,
        eos_token_ids=spec.eos_token_ids,
        speculation=speculator.kinds,
    )
    return Engine(info, scheduler, manager, runner, speculator=speculator)


def _cache_config(config: AdaptersConfig) -> AdapterCacheConfig:
    return AdapterCacheConfig(
        host_bytes=config.host_bytes,
        device_bytes=config.device_bytes,
        num_device_slots=config.num_device_slots,
        disk_bytes=config.disk_bytes,
        store_dir=config.store_dir,
    )


def _num_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Blocks of the KV cache: what the budget holds, and no more than all rows could fill."""
    kv: KvConfig = config.kv
    budget = kv.memory_bytes
    if budget is None:
        free = free_memory_bytes(loaded.device) - config.adapters.device_bytes
        if loaded.device.type != "cpu":
            free -= step_bytes(loaded, config.batch.max_step_tokens, config.batch.max_running)
        budget = int(max(0, free) * KV_SHARE.get(loaded.device.type, 0.25))
        if loaded.device.type == "cpu":
            budget = min(budget, CPU_KV_BYTES)
    per_row = -(-loaded.spec.max_context_tokens // kv.block_size)
    num_blocks = min(
        num_blocks_for(loaded.spec, kv.block_size, loaded.dtype, budget), config.batch.max_running * per_row + 2
    )
    if num_blocks < 3:
        raise OutOfMemory(
            f"{budget / 2**20:.0f} MiB of KV cache hold less than three blocks; give more with --kv-memory"
        )
    return num_blocks


def _max_context_tokens(of_model: int, num_blocks: int, block_size: int, progress: Callable[[str], None]) -> int:
    """The model's context, or as much of it as the whole KV cache holds: what is promised is not cut short later."""
    num_kv_tokens = (num_blocks - 1) * block_size  # block 0 is for padding
    if num_kv_tokens < of_model:
        progress(
            f"a request may have {num_kv_tokens:,} tokens, all that the KV cache holds, and not the model's "
            f"{of_model:,}; give more with --kv-memory"
        )
    return min(of_model, num_kv_tokens)
