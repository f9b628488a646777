"""Pages: views, copies, clearing, and sizes."""

from __future__ import annotations

import torch

from loraplex_server.layers.kv_memory import KvCache, num_blocks_for
from loraplex_server.layers.spec import AttentionSpec, ModelSpec, kv_block_bytes

LAYERS = (AttentionSpec(4, 2, 8, 8, 1.0), AttentionSpec(4, 1, 8, 4, 1.0), AttentionSpec(4, 2, 8, 8, 1.0))
SPEC = ModelSpec(LAYERS, 10, 10, 8, 64)
CPU = torch.device("cpu")


def cache(num_blocks: int = 6) -> KvCache:
    pages = KvCache(SPEC, num_blocks, 4, torch.float32, CPU)
    pages.clear_blocks(range(num_blocks))
    return pages


def test_layers_have_pages_of_their_own_shape() -> None:
    pages = cache()
    assert [tuple(layer.k.shape) for layer in pages.layers] == [(6, 4, 2, 8), (6, 4, 1, 8), (6, 4, 2, 8)]
    assert tuple(pages.layers[1].v.shape) == (6, 4, 1, 4)
    assert len({layer.k.data_ptr() for layer in pages.layers}) == 3
    assert pages.num_bytes == 6 * kv_block_bytes(SPEC, 4, 4)


def test_write_goes_to_its_slots_only() -> None:
    pages = cache()
    layer = pages.layers[2]
    layer.write(torch.ones(2, 2, 8), 2 * torch.ones(2, 2, 8), torch.tensor([5, 23]))
    assert layer.k.flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist() == [5, 23]
    assert layer.v[1, 1].eq(2).all()
    assert layer.v[5, 3].eq(2).all()
    assert not pages.layers[0].k.any()


def test_copies_read_before_they_write() -> None:
    pages = cache()
    for layer in pages.layers:
        for block in range(6):
            layer.k[block] = block
            layer.v[block] = -block
    pages.copy_blocks([1, 2], [2, 3])
    pages.clear_blocks([5])
    for layer in pages.layers:
        assert layer.k[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 4, 0]
        assert layer.v[:, 0, 0, 0].tolist() == [0, -1, -1, -2, -4, 0]
    pages.copy_blocks([], [])
    pages.clear_blocks([])


def test_budget() -> None:
    block = kv_block_bytes(SPEC, 4, 2)
    assert num_blocks_for(SPEC, 4, torch.bfloat16, 10 * block + 1) == 10
    assert num_blocks_for(SPEC, 4, torch.bfloat16, block - 1) == 0
