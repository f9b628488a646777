"""Steps that nobody asked for, so that no request waits for a compiler: kernels are compiled when they first run.

One text of every length that is a power of two, and the longest step that there may be: so each size of block comes up
that attention and adapters choose among. The kernels of adapters run over segments in which nobody has one.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from loraplex_server.layers.adapter_slots import AdapterSlots, as_if_installed
from loraplex_server.layers.attention import AttentionBatch, PagedAttention
from loraplex_server.layers.kv_memory import KvCache
from loraplex_server.layers.lora import ReplayableLora
from loraplex_server.model.loaded_model import LoadedModel

REPORT_EVERY_S = 5.0


def warm_up(
    loaded: LoadedModel,
    cache: KvCache,
    attention: PagedAttention,
    slots: AdapterSlots,
    max_tokens: int,
    progress: Callable[[str], None],
) -> None:
    """Writes to KV blocks that nobody has. `progress` is told where it takes long, as it does the first time."""
    longest = min(max_tokens, cache.num_blocks * cache.block_size, loaded.spec.max_context_tokens)
    lengths = [*(1 << exponent for exponent in range((longest - 1).bit_length())), longest]
    start_s = said_s = time.perf_counter()
    with torch.inference_mode(), as_if_installed(loaded.targets):
        for done, num_tokens in enumerate(lengths):
            _run(loaded, cache, attention, slots, num_tokens)
            if (now_s := time.perf_counter()) - said_s > REPORT_EVERY_S:
                progress(f"compiling kernels: {done + 1} of {len(lengths)} lengths of steps")
                said_s = now_s
    if said_s > start_s:
        progress(f"kernels compiled in {time.perf_counter() - start_s:.0f} s; the next start finds them on disk")


def _run(loaded: LoadedModel, cache: KvCache, attention: PagedAttention, slots: AdapterSlots, num_tokens: int) -> None:
    context, device = loaded.context, loaded.device
    length = np.array([num_tokens], dtype=np.int64)
    tables = np.arange(-(-num_tokens // cache.block_size), dtype=np.int64)[None, :]
    places = torch.arange(num_tokens, device=device)
    ops = slots.ops
    try:
        batch = AttentionBatch(length, length, tables, cache.block_size, places)
        context.attention = attention.plan(batch, cache.dtype, device)
        if isinstance(ops, ReplayableLora):
            context.token_segments = ops.reserve(num_tokens, slots.num_slots, device)
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=device)
        loaded.model(input_ids=ids, position_ids=places.unsqueeze(0), use_cache=False, logits_to_keep=1)
    finally:
        context.clear()
