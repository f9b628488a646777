"""Memory for whole adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapter_files import base_targets, lora_tensors, write_adapter

from loraplex_adapters.cache import blocks as blocks_module
from loraplex_adapters.cache.blocks import Blocks, Landed, Landing
from loraplex_adapters.cache.loader import import_adapter
from loraplex_adapters.key import AdapterKey
from loraplex_adapters.layout import adapter_layout
from loraplex_adapters.lora.layout import FactorShape, place
from loraplex_adapters.pace import no_pace
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.store import AdapterStore
from loraplex_proto.errors import NonFinite


def test_a_block_comes_back_with_the_last_view_of_it() -> None:
    """And not before: what somebody still looks into is never given out again."""
    blocks = Blocks()
    first = blocks.take(8192)
    address = first.data_ptr()
    first.fill_(7)
    view = first[4096:].view(torch.float32)
    del first
    second = blocks.take(8192)
    assert second.data_ptr() != address
    second.fill_(8)
    assert view.view(torch.uint8).tolist() == [7] * 4096
    del view
    assert blocks.take(8192).data_ptr() == address


def test_a_spare_block_is_only_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_SPARE_BYTES", 8192)
    blocks = Blocks()
    blocks.take(8192)  # comes back at once
    assert blocks.spare_bytes == 8192
    assert blocks.take(4096).numel() == 4096
    assert blocks.spare_bytes == 4096  # and the one that did not fit is gone
    blocks.take(8193)
    assert blocks.spare_bytes == 0  # too large to be kept


# --- what has landed --------------------------------------------------------------------------------------------------


def landed(landing: Landing, digit: str) -> Landed:
    layout = adapter_layout(place("float32", [FactorShape("q", 4, 8, 8, 1.0)]), None)
    payload = landing.memory(layout.num_bytes)
    assert payload is not None
    found = Landed(AdapterKey("lora", digit * 64), layout, payload)
    landing.put(found)
    return found


def test_the_last_one_is_found_until_it_is_taken() -> None:
    landing = Landing(Blocks())
    key = landed(landing, "a").key
    other = AdapterKey("lora", "b" * 64)
    assert landing.find(other) is None
    assert landing.take(other) is None
    found = landing.find(key)
    assert found is not None
    assert landing.take(key) is found
    assert landing.find(key) is None


def test_the_next_one_takes_the_memory_of_the_last() -> None:
    """And never that of one that was taken."""
    landing = Landing(Blocks())
    address = landed(landing, "a").payload.data_ptr()
    second = landed(landing, "b")
    assert landing.find(AdapterKey("lora", "a" * 64)) is None
    assert second.payload.data_ptr() == address
    taken = landing.take(second.key)
    assert taken is second
    assert landed(landing, "c").payload.data_ptr() != address


def test_no_memory_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_SPARE_BYTES", 8192)
    landing = Landing(Blocks())
    key = landed(landing, "a").key
    assert landing.memory(8193) is None
    assert landing.find(key) is None  # its memory is not kept beside a large one's


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", seed=1)
    write_adapter(tmp_path / "bad", tensors={name: tensor / 0 for name, tensor in lora_tensors().items()})
    store = AdapterStore(tmp_path / "store", 1 << 20)
    landing = Landing(Blocks())
    source, targets = DirectorySource(tmp_path), base_targets("float32")
    good = import_adapter("good", source, targets, store, no_pace, landing)
    assert landing.find(good.key) is not None
    with pytest.raises(NonFinite):
        import_adapter("bad", source, targets, store, no_pace, landing)
    assert landing.find(good.key) is None
    assert store.keys() == [good.key]
