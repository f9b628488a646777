"""Hostile and broken adapters: typed errors, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.adapter_files import Engine, base_targets, write_adapter
from support.hostile_adapters import CASES, Spoil, with_value

from loraplex_adapters.sources.directory import DirectorySource
from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import (
    AdapterMemoryFull,
    AdapterNotFound,
    AdapterOutsideRoot,
    Code,
    DiskFull,
    LoraplexError,
    NonFinite,
    by_reason,
)


@pytest.mark.parametrize(("spoil", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("verb", ["resolve", "load"])
def test_typed_error_and_nothing_left(spoil: Spoil, expected: type[LoraplexError], verb: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_adapter(root / "good", seed=5)
    spoil(root / "bad")
    engine = Engine(DirectorySource(root), store_dir=tmp_path / "store")
    good = engine.resolve("good")
    slot = engine.acquire(good)
    before = engine.slots.installed[slot].storage.clone()
    engine.settle()
    files, usage, fds = set(os.listdir(tmp_path / "store")), engine.cache.usage(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(LoraplexError) as raised:
        _ = engine.resolve("bad") if verb == "resolve" else engine.load("bad")
    error = raised.value
    assert type(error) is expected
    assert error.code is (Code.NOT_FOUND if issubclass(expected, AdapterNotFound) else Code.FAILED_PRECONDITION)
    assert by_reason()[error.reason] is expected
    assert str(tmp_path) not in error.message  # no path of the server's
    assert error.message.isascii()
    assert "'bad'" in error.message
    assert len(error.message) < 800
    # Nothing of it stays but the reason, until it is loaded well or unloaded: no file, no byte, no descriptor.
    assert set(os.listdir(tmp_path / "store")) == files
    assert engine.cache.usage() == usage
    assert len(os.listdir("/proc/self/fd")) == fds
    engine.now += 31
    engine.cache.poll(engine.now)
    engine.cache.poll(engine.now)
    is_known = expected is AdapterOutsideRoot or not issubclass(expected, AdapterNotFound)
    assert [row.adapter_id for row in engine.listed()] == (["bad", "good"] if is_known else ["good"])
    if is_known:
        assert engine.cache.get(AdapterId("bad")).last_error_reason == error.reason
        gone = engine.cache.unload(AdapterId("bad"))
        assert (gone.state, gone.tier) == ("known", "source")  # by which HTTP tells that nothing was loaded
    assert [row.adapter_id for row in engine.listed()] == ["good"]
    assert not (root / "bad" / "was-run").exists()
    # The neighbour is untouched.
    assert torch.equal(engine.slots.installed[slot].storage, before)
    engine.cache.release(good)
    engine.cache.drop_hold(good, name="good")
    engine.close()


def test_values_beyond_the_served_dtype_are_not_finite(tmp_path: Path) -> None:
    write_adapter(tmp_path / "big", tensors=with_value(1e6))
    engine = Engine(DirectorySource(tmp_path), base_targets("float16"))
    with pytest.raises(NonFinite, match="float16"):
        engine.resolve("big")
    engine.close()
    engine = Engine(DirectorySource(tmp_path), base_targets("bfloat16"))
    assert engine.resolve("big")
    engine.cache.close()


def test_an_adapter_that_no_tier_could_hold(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", rank=16)
    engine = Engine(DirectorySource(tmp_path), device_bytes=1024)
    for call in (engine.load, engine.resolve):
        with pytest.raises(AdapterMemoryFull, match="no waiting helps") as in_memory:
            call("x")
        assert in_memory.value.retry_after_s is None
        assert in_memory.value.metadata == {"can_ever_fit": "false"}
    engine.close()
    engine = Engine(DirectorySource(tmp_path), disk_bytes=1024)
    with pytest.raises(DiskFull, match=r"the adapter store may have 1024 at most \(--adapter-disk\)") as on_disk:
        engine.resolve("x")
    assert on_disk.value.retry_after_s is None
    assert on_disk.value.metadata == {"can_ever_fit": "false"}
    engine.close()


def test_after_a_bad_file_is_mended_load_takes_it_at_once(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x", tensors=with_value(float("nan")))
    engine = Engine(DirectorySource(tmp_path))
    with pytest.raises(NonFinite):
        engine.resolve("x")
    write_adapter(tmp_path / "x")
    with pytest.raises(NonFinite):  # remembered
        engine.resolve("x")
    assert engine.load("x").state == "on_device"
    engine.close()


def test_a_bad_reload_keeps_the_good_adapter(tmp_path: Path) -> None:
    write_adapter(tmp_path / "x")
    engine = Engine(DirectorySource(tmp_path))
    key = engine.resolve("x")
    write_adapter(tmp_path / "x", tensors=with_value(float("nan")))
    with pytest.raises(NonFinite):
        engine.load("x")
    assert engine.resolve("x") == key
    assert engine.acquire(key) is not None
    for _ in range(2):
        engine.cache.drop_hold(key, name="x")
    engine.cache.release(key)
    engine.close()
