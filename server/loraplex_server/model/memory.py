"""Memory budgets: free memory, step memory and KV cache.

The KV cache gives no memory back when a long prompt comes, so steps are bounded by their shapes: the tensors that live
at the same time in a decoder layer, in the gathered contexts of one attention layer and behind the head. A model's real
need depends on kernels, so callers leave some slack.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from loraplex_contracts.errors import OutOfMemory, is_out_of_memory
from loraplex_runtime import cgroups
from loraplex_server.backends.reference import MAX_GROUP_TOKENS
from loraplex_server.layers.attention import kv_block_bytes
from loraplex_server.layers.experts import ExpertLinear
from loraplex_server.layers.linear import AdaptedHead, AdaptedLinear
from loraplex_server.model.loaded_model import LoadedModel

# Tensors of a layer at once: the residual, its norm (in float32), queries, keys, values and their rotations; and in the
# MLP gate, its activation, up and their product.
NUM_HIDDEN, NUM_WIDE = 10, 4
# Contexts as gathered, and as a kernel lays them out.
NUM_CONTEXTS = 2
# One layer's states of a step's sequences, as they were and as they become.
NUM_STATES = 2
# Snapshots of states that are kept for each sequence that may run, where memory allows it.
NUM_SNAPSHOTS = 4
# Tokens of the sequence that says how large states are beside keys and values; the least and the most that they get.
SEQUENCE_TOKENS: Final = 2048
STATE_SHARES: Final = (1 / 3, 2 / 3)
# Scores in float32: as they are, tempered, sorted (with ids of 8 bytes), truncated, with noise.
SCORE_BYTES = 4 * 8
# Scores that become logprobs at once, or all of the rows that draw.
NUM_LOGPROBS = 1 << 24
# The KV cache's share of what is left after weights, adapters and, on a GPU, the largest step. On a CPU the rest of the
# machine needs its share, of which a step takes what it needs, and a cache beyond CPU_KV_BYTES gains nothing.
KV_SHARE: Final = {"cuda": 0.9, "cpu": 0.25}
CPU_KV_BYTES: Final = 4 << 30
# Adapters on the device where the operator names no size. In 1 GiB 12 adapters of rank 16 for an 8B model have room, 85
# in a twentieth of an H200. There 32 requests with an adapter each, of 55 MB, loaded all the time with 1 GiB.
ADAPTER_BYTES: Final = 1 << 30
GPU_ADAPTER_SHARE: Final = 1 / 20
MIN_BLOCKS: Final = 3  # one for padding, two for a sequence
UNKNOWN_FREE_BYTES: Final = 4 << 30  # where the system does not tell: a size that a desktop can bear


def layer_bytes(loaded: LoadedModel, num_tokens: int) -> int:
    """Bytes of what decoder layers compute for so many tokens."""
    hidden_size = loaded.spec.hidden_size
    linears = [one for one in loaded.targets.values() if isinstance(one, AdaptedLinear)]
    wide = [linear.out_features for linear in linears if not isinstance(linear, AdaptedHead)]
    wide += [one.out_features for one in loaded.targets.values() if isinstance(one, ExpertLinear)]
    num_elements = NUM_HIDDEN * hidden_size + NUM_WIDE * _experts_per_token(loaded) * max(wide, default=hidden_size)
    return num_tokens * num_elements * loaded.dtype.itemsize


def _experts_per_token(loaded: LoadedModel) -> int:
    """Number of experts that a token goes through at once; 1 in a model without experts."""
    if loaded.experts:
        return max(module.num_chosen for module in loaded.experts)
    named: Any = getattr(loaded.model.config.get_text_config(), "num_experts_per_tok", None) or 1
    return max(named) if isinstance(named, list) else named  # a list has one for each layer


def step_bytes(loaded: LoadedModel, num_tokens: int, max_rows: int) -> int:
    """Bytes of a step: `num_tokens` tokens that may all want logits, and up to `max_rows` sequences that draw."""
    spec, itemsize = loaded.spec, loaded.dtype.itemsize
    num_context_tokens = min(MAX_GROUP_TOKENS, max_rows * spec.max_context_tokens)
    num_context_elements = max((layer.num_kv_heads * (layer.k_dim + layer.v_dim) for layer in spec.layers), default=0)
    num_scores = max(min(max_rows, num_tokens) * spec.num_logits, min(num_tokens * spec.num_logits, NUM_LOGPROBS))
    return (
        layer_bytes(loaded, num_tokens)
        + NUM_CONTEXTS * num_context_tokens * num_context_elements * itemsize
        + num_tokens * spec.num_logits * itemsize
        + num_scores * SCORE_BYTES
        + NUM_STATES * max_rows * max((one.num_bytes for one in loaded.states), default=0)
    )


def state_slot_bytes(loaded: LoadedModel) -> int:
    """Bytes of one sequence's states; 0 where layers keep none. 1 for empty ones, as convolutions of width 1 have."""
    return max(1, sum(spec.num_bytes for spec in loaded.states)) if loaded.states else 0


def state_share(loaded: LoadedModel) -> float:
    """The part of the KV cache's memory that states get beside it: as many sequences should find room for their states,
    now and after the next token, as for their keys and values."""
    state_bytes = 2 * state_slot_bytes(loaded)
    kv_bytes = kv_block_bytes(loaded.spec, min(SEQUENCE_TOKENS, loaded.spec.max_context_tokens), loaded.dtype.itemsize)
    least, most = STATE_SHARES
    return min(most, max(least, state_bytes / (state_bytes + kv_bytes)))


def num_state_slots(budget_bytes: int, loaded: LoadedModel, max_running: int) -> int:
    """State slots within the budget, and no more than are of use: one for each running sequence, and snapshots. Beside
    them each sequence of a step has a place where its next state goes (`num_spare_states`). Raises OutOfMemory where
    not even one fits."""
    slot_bytes = state_slot_bytes(loaded)
    num_places = budget_bytes // slot_bytes
    num_slots = min(num_places - num_spare_states(num_places // 2, max_running), (1 + NUM_SNAPSHOTS) * max_running)
    if num_places < 2:
        raise OutOfMemory(
            f"{budget_bytes / 2**20:.0f} MiB do not hold the states of one sequence, now and after the next token, "
            f"{2 * slot_bytes / 2**20:.1f} MiB; give more with --state-memory"
        )
    return num_slots


def num_spare_states(num_slots: int, max_running: int) -> int:
    """Places of states beside those of the slots."""
    return min(num_slots, max_running)


def kv_budget_bytes(device_type: str, free_bytes: int, reserved_bytes: int) -> int:
    """Bytes of KV cache where the operator names none. `reserved_bytes`: for adapters, steps and graphs."""
    budget = int(max(0, free_bytes - reserved_bytes) * KV_SHARE.get(device_type, 0.25))
    return min(budget, CPU_KV_BYTES) if device_type == "cpu" else budget


def adapter_bytes(asked: int | None, device: torch.device) -> int:
    """Bytes of adapters on the device. `asked`: by the operator."""
    if asked is not None or device.type != "cuda":
        return ADAPTER_BYTES if asked is None else asked
    total_bytes = int(torch.cuda.mem_get_info(device)[1])
    return max(ADAPTER_BYTES, int(total_bytes * GPU_ADAPTER_SHARE))


def num_kv_blocks(budget_bytes: int, block_bytes: int, max_blocks: int, remedy: str) -> int:
    """Blocks of `block_bytes` within the budget, and no more than all rows could fill.

    Raises OutOfMemory where even one sequence would not fit; `remedy` says which flag helps.
    """
    num_blocks = min(budget_bytes // max(1, block_bytes), max_blocks)  # no bytes: a model without attention
    if num_blocks < MIN_BLOCKS:
        raise OutOfMemory(f"{budget_bytes / 2**20:.0f} MiB of KV cache hold less than three blocks; {remedy}")
    return num_blocks


@contextmanager
def fitting(what: str, device: torch.device, remedy: str) -> Generator[None]:
    """Raises OutOfMemory where the block finds the memory full. `what` did not fit; `remedy` says what helps."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{device} has no memory for {what}{_words_of_free(device)}; {remedy}") from error


def _words_of_free(device: torch.device) -> str:
    try:
        return f" ({free_memory_bytes(device) / 2**20:,.0f} MiB are free)"
    except RuntimeError:  # there is not even room for what a process needs to ask
        return ""


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free on the device now; on a CPU, within the container's limit if there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free, left = _available_bytes(), cgroups.free_bytes()
    return free if left is None else min(free, left)


def _available_bytes() -> int:
    for line in cgroups.read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return UNKNOWN_FREE_BYTES
