"""Capacity: KV blocks within the free memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.engine_config import ADAPTER_BYTES, BLOCK_SIZE, config_of
from support.zoo import MAX_LEN

from loraplex_contracts.errors import OutOfMemory
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.backends.cuda.graphs import graph_bytes, graph_shapes
from loraplex_server.config import EngineConfig
from loraplex_server.engine.capacity import captured_shapes, kv_blocks
from loraplex_server.layers.attention import kv_block_bytes, num_blocks_for
from loraplex_server.model.loaded_model import LoadedModel
from loraplex_server.model.memory import CPU_KV_BYTES, SEQUENCE_TOKENS, layer_bytes, state_share, step_bytes
from loraplex_server.model.states import StateSpec


def blocks(config: EngineConfig, loaded: LoadedModel, free_bytes: int = 1 << 40) -> int:
    return kv_blocks(config, loaded, free_bytes, has_adapters=True)


def on_cuda(loaded: LoadedModel) -> LoadedModel:
    """The model as if on CUDA, for arithmetic only."""
    return replace(loaded, device=torch.device("cuda"), backend=CudaBackend())


def test_what_is_given_is_what_is_taken(loaded: LoadedModel, block_bytes: int) -> None:
    config = config_of(7 * block_bytes + 1)
    assert blocks(config, loaded) == blocks(config, on_cuda(loaded)) == 7


def test_no_more_than_all_rows_could_fill(loaded: LoadedModel) -> None:
    assert blocks(config_of(1 << 40), loaded) == 4 * MAX_LEN // BLOCK_SIZE + 2


@pytest.mark.parametrize(("size", "share"), [(1 / 1000, 1 / 3), (1, 1 / 2), (1000, 2 / 3)])
def test_the_share_of_states_follows_their_size(size: float, share: float, loaded: LoadedModel) -> None:
    """`size`: of a sequence's state, before and after a token, beside its keys and values."""
    kv_bytes = kv_block_bytes(loaded.spec, loaded.spec.max_context_tokens, loaded.dtype.itemsize)
    assert loaded.spec.max_context_tokens < SEQUENCE_TOKENS
    states = (StateSpec((max(1, int(size * kv_bytes) // 8),), torch.float32),)
    assert state_share(replace(loaded, states=states)) == pytest.approx(share)


def test_two_blocks_are_too_few(loaded: LoadedModel, block_bytes: int) -> None:
    assert blocks(config_of(3 * block_bytes), loaded) == 3
    with pytest.raises(OutOfMemory, match="--kv-memory"):
        blocks(config_of(3 * block_bytes - 1), loaded)


def test_a_cpu_gives_a_quarter_of_what_is_free(loaded: LoadedModel, block_bytes: int) -> None:
    config = config_of(None)
    assert blocks(config, loaded, 4 * 9 * block_bytes + ADAPTER_BYTES) == 9
    with pytest.raises(OutOfMemory):
        blocks(config, loaded, ADAPTER_BYTES - 1)
    many = config_of(None, max_running=1 << 20, max_step_tokens=1 << 20)
    assert blocks(many, loaded, 1 << 50) == num_blocks_for(loaded.spec, BLOCK_SIZE, loaded.dtype, CPU_KV_BYTES)


def test_the_budget_of_adapters_is_kept_free_only_where_there_are_any(loaded: LoadedModel, block_bytes: int) -> None:
    config = config_of(None)
    assert kv_blocks(config, loaded, 4 * 9 * block_bytes, has_adapters=False) == 9
    with pytest.raises(OutOfMemory, match="--adapter-device-memory"):
        blocks(config, loaded, ADAPTER_BYTES - 1)
    with pytest.raises(OutOfMemory) as without:
        kv_blocks(config, loaded, block_bytes, has_adapters=False)
    assert "--kv-memory" in without.value.message
    assert "--adapter-device-memory" not in without.value.message


@pytest.mark.parametrize("max_step_tokens", [64, 4096])
def test_a_gpu_keeps_room_for_the_largest_step(max_step_tokens: int, loaded: LoadedModel, block_bytes: int) -> None:
    config = config_of(None, max_running=64, max_step_tokens=max_step_tokens)
    shapes = captured_shapes(config, CudaBackend())
    graphs = graph_bytes(shapes, loaded.spec, loaded.dtype)
    assert graphs > 0
    largest = max(shape.num_tokens for shape in shapes)
    assert largest == (192 if max_step_tokens == 64 else 2048)
    graphs += layer_bytes(loaded, largest)
    free = ADAPTER_BYTES + step_bytes(loaded, max_step_tokens, 64) + graphs + 100 * block_bytes
    assert blocks(config, on_cuda(loaded), free) == 90


def test_steps_are_captured_on_a_gpu_unless_told_otherwise(loaded: LoadedModel) -> None:
    config = config_of(None, max_running=8)
    assert captured_shapes(config, CpuBackend()) == []
    wanted = graph_shapes(8, config.speculation.max_draft_tokens, config.batch.max_step_tokens)
    assert captured_shapes(config, CudaBackend()) == wanted
    without = replace(config, model=replace(config.model, cuda_graphs=False))
    assert captured_shapes(without, CudaBackend()) == []
    assert graph_bytes([], loaded.spec, loaded.dtype) == 0
