"""Memory for whole adapters."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import pytest
import torch
from support.adapter_files import base_targets, lora_tensors, write_adapter

from loraplex_adapters.cache import blocks as blocks_module
from loraplex_adapters.cache.blocks import Blocks, Landed, Landing
from loraplex_adapters.cache.loader import import_adapter
from loraplex_adapters.layout.adapter import adapter_layout
from loraplex_adapters.layout.lora import FactorShape, place
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.store import AdapterStore
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import NonFinite


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


NUM_BYTES = adapter_layout(place("float32", [FactorShape("q", 4, 8, 8, 1.0)]), None).num_bytes


def landed(landing: Landing, digit: str) -> Landed:
    layout = adapter_layout(place("float32", [FactorShape("q", 4, 8, 8, 1.0)]), None)
    payload = landing.memory(NUM_BYTES)
    assert payload is not None
    found = Landed(AdapterKey("lora", digit * 64), layout, payload)
    landing.put(found)
    return found


def test_each_is_found_until_it_is_taken() -> None:
    landing = Landing(Blocks())
    first, second = landed(landing, "a"), landed(landing, "b")
    assert landing.find(AdapterKey("lora", "c" * 64)) is None
    assert landing.take(AdapterKey("lora", "c" * 64)) is None
    assert landing.find(first.key) is first
    assert landing.take(first.key) is first
    assert landing.find(first.key) is None
    assert landing.find(second.key) is second


def test_the_next_one_takes_the_memory_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And never that of one that was taken."""
    monkeypatch.setattr(blocks_module, "MAX_LANDED_BYTES", 2 * NUM_BYTES)
    landing = Landing(Blocks())
    keys = [landed(landing, "a").key]
    oldest = landing.find(keys[0])
    assert oldest is not None
    address = oldest.payload.data_ptr()
    del oldest
    keys.append(landed(landing, "b").key)
    third = landed(landing, "c")
    assert landing.find(keys[0]) is None
    assert landing.find(keys[1]) is not None
    assert third.payload.data_ptr() == address
    assert landing.take(third.key) is third
    for digit in "def":
        assert landed(landing, digit).payload.data_ptr() != address


def test_no_memory_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_LANDED_BYTES", NUM_BYTES)
    landing = Landing(Blocks())
    key = landed(landing, "a").key
    assert landing.memory(NUM_BYTES + 1) is None
    assert landing.find(key) is None  # its memory is not kept beside a large one's


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", seed=1)
    write_adapter(tmp_path / "bad", tensors={name: tensor / 0 for name, tensor in lora_tensors().items()})
    store = AdapterStore(tmp_path / "store", 1 << 20)
    landing = Landing(Blocks())
    source, targets = DirectorySource(tmp_path), base_targets("float32")
    good = import_adapter("good", source, targets, store, landing)
    with pytest.raises(NonFinite):
        import_adapter("bad", source, targets, store, landing)
    assert landing.find(good.key) is not None
    assert store.keys() == [good.key]
    assert len(list((tmp_path / "store").glob("*.adapter"))) == 1
    assert not list((tmp_path / "store").glob(".incoming*"))


def test_without_memory_nothing_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    landing = Landing(Blocks())

    def none_left(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", none_left)
    assert landing.memory(NUM_BYTES) is None


def test_one_that_lands_again_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "MAX_LANDED_BYTES", 3 * NUM_BYTES)
    landing = Landing(Blocks())
    first, second = landed(landing, "a"), landed(landing, "b")
    landed(landing, "a")
    landed(landing, "c")
    landed(landing, "d")
    assert landing.find(first.key) is not None
    assert landing.find(second.key) is None
    landing.clear()
    assert landing.find(first.key) is None
