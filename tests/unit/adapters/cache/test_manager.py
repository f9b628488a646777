"""The cache with its threads, store and files."""

from __future__ import annotations

import gc
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.adapter_files import DOWN_PROJ, PREFIX, Q_PROJ, Engine, lora_tensors, write_adapter

from loraplex_adapters.cache import manager as manager_module
from loraplex_adapters.cache.storage import RecentImports, Storage
from loraplex_adapters.formats.peft_rotations import Rotation
from loraplex_adapters.io.source_files import AdapterFiles
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterId, AdapterKey, AdapterOrigin, LoadOptions
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterLoadsBusy,
    AdapterMemoryFull,
    AdapterNotFound,
    AdapterVersionNotFound,
    DiskFull,
    FailedPrecondition,
    Internal,
    SourceUnavailable,
    adapter_not_found,
)
from loraplex_contracts.mixtures import Member, Merge, Mixture

RANK_4_BYTES = 1280  # q_proj and down_proj of rank 4 in float32


class CountingSource(DirectorySource):
    """A source that counts, and can be held up or made to fail."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.opened: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:  # type: ignore[override]
        self.opened.append(adapter_id)
        self.gate.wait(10)
        if self.error is not None:
            raise self.error
        return super().open(adapter_id, origin)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    for idx in range(8):
        write_adapter(folder / f"a{idx}", rank=(2, 4, 8)[idx % 3], seed=idx)
    return folder


@pytest.fixture
def source(root: Path) -> CountingSource:
    return CountingSource(root)


@pytest.fixture
def make_engine(source: CountingSource) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**options: object) -> Engine:
        engines.append(Engine(source, **options))
        return engines[-1]

    yield make
    for engine in engines:
        source.gate.set()
        engine.cache.close()


def assert_installed(engine: Engine, slot: int, folder: Path) -> None:
    """The slot holds exactly what the file says."""
    weights = engine.slots.installed[slot]
    file = load_file(folder / "adapter_model.safetensors")
    for path in (Q_PROJ, DOWN_PROJ):
        assert torch.equal(weights.factors[path].a, file[f"{PREFIX}{path}.lora_A.weight"])
        assert torch.equal(weights.factors[path].b, file[f"{PREFIX}{path}.lora_B.weight"])
        assert weights.factors[path].scale == 2.0
        assert weights.factors[path].a.data_ptr() % 64 == 0


def use(engine: Engine, adapter_id: str) -> AdapterKey:
    """One request from beginning to end."""
    key = engine.resolve(adapter_id)
    engine.acquire(key)
    engine.cache.release(key)
    engine.cache.drop_hold(key, name=adapter_id)
    return key


def test_many_more_adapters_than_fit(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine(num_device_slots=2, device_bytes=4096, host_bytes=6000)
    for _ in range(2):
        for idx in range(8):
            key = engine.resolve(f"a{idx}")
            slot = engine.acquire(key)
            assert_installed(engine, slot, root / f"a{idx}")
            engine.cache.release(key)
            engine.cache.drop_hold(key, name=f"a{idx}")
    usage = engine.cache.usage()
    assert usage.device_evictions >= 8
    assert usage.source_reads.num == 8
    assert usage.disk_reads.num >= 4
    assert min(usage.disk_reads) > 0
    assert usage.host_reads.num == 0  # kernels of a CPU read what the store maps
    assert usage.host_evictions >= 4
    assert usage.device_bytes <= 4096
    assert usage.host_bytes <= 6000
    assert engine.slots.threads == {threading.get_ident()}
    engine.close()


def test_one_fetch_for_many_requests(make_engine: Callable[..., Engine], source: CountingSource) -> None:
    engine = make_engine()
    source.gate.clear()
    assert [engine.cache.resolve("a0", engine.now) for _ in range(20)] == [None] * 20
    source.gate.set()
    keys = {engine.resolve("a0") for _ in range(20)}
    assert len(keys) == 1
    assert source.opened == ["a0"]


def test_two_names_with_the_same_bytes_share_one_key(make_engine: Callable[..., Engine], root: Path) -> None:
    write_adapter(root / "twin", rank=2, seed=0)
    write_adapter(root / "half", rank=2, seed=0, lora_alpha=2)  # the same tensors, another scale
    engine = make_engine()
    first, twin, half = (engine.resolve(name) for name in ("a0", "twin", "half"))
    assert first == twin
    assert half != first
    engine.acquire(first)
    engine.settle()
    assert len(engine.slots.installed) == 2


def test_content_decides_and_running_requests_keep_what_they_have(
    make_engine: Callable[..., Engine], root: Path
) -> None:
    engine = make_engine()
    old = engine.resolve("a0")
    slot = engine.acquire(old)
    before = engine.slots.installed[slot].storage.clone()
    write_adapter(root / "a0", rank=4, seed=99)
    assert engine.resolve("a0") == old  # bound: files are not looked at on a request's path
    info = engine.load("a0")
    assert info.digest != old.digest
    new = engine.resolve("a0")
    assert new.digest == info.digest
    new_slot = engine.acquire(new)
    assert new_slot != slot
    assert torch.equal(engine.slots.installed[slot].storage, before)
    states = {row.digest: row.state for row in engine.listed()}
    assert states == {old.digest: "draining", new.digest: "on_device"}
    for key in (old, old):
        engine.cache.drop_hold(key, name="a0")
    engine.cache.release(old)
    engine.settle()
    assert list(engine.slots.installed) == [new_slot]


def test_files_cut_or_replaced_while_in_use_do_no_harm(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine(num_device_slots=1)
    key = engine.resolve("a0")
    slot = engine.acquire(key)
    before = engine.slots.installed[slot].storage.clone()
    os.truncate(root / "a0" / "adapter_model.safetensors", 10)
    (root / "a0" / "adapter_config.json").unlink()
    assert torch.equal(engine.slots.installed[slot].storage, before)
    # Nor once it has been off the device: the store has the bytes.
    engine.cache.release(key)
    other = engine.resolve("a1")
    engine.acquire(other)
    engine.cache.release(other)
    assert torch.equal(engine.slots.installed[engine.acquire(key)].storage, before)


def test_unload_frees(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    key = engine.resolve("a0")
    slot = engine.acquire(key)
    gone = weakref.ref(engine.slots.installed[slot].storage)
    assert engine.cache.unload("a0").state == "draining"
    with pytest.raises(AdapterNotFound):
        engine.cache.unload("a0")
    engine.settle()
    assert gone() is not None  # a request still runs with it
    engine.cache.release(key)
    engine.cache.drop_hold(key, name="a0")
    engine.settle()
    assert engine.slots.installed == {}
    usage = engine.cache.usage()
    assert (usage.device_bytes, usage.host_bytes) == (0, 0)
    engine.close()
    gc.collect()
    assert gone() is None


def test_unload_of_an_idle_adapter_needs_no_further_request(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    assert engine.load("a0").state == "on_device"
    info = engine.cache.unload("a0")
    assert (info.adapter_id, info.state, info.tier) == ("a0", "known", "disk")
    assert engine.turn()  # it woke the engine by itself
    assert engine.slots.installed == {}


def test_a_bad_adapter_is_read_once_in_a_while(
    make_engine: Callable[..., Engine], source: CountingSource, root: Path
) -> None:
    (root / "a0" / "adapter_model.safetensors").write_bytes(b"junk")
    engine = make_engine(failure_ttl_s=30.0)
    for _ in range(50):
        with pytest.raises(AdapterInvalid, match="adapter 'a0'"):
            engine.resolve("a0")
    assert source.opened == ["a0"]
    write_adapter(root / "a0")
    engine.now += 31
    assert engine.resolve("a0")
    assert source.opened == ["a0", "a0"]


@pytest.mark.parametrize(("has_remote", "ttl_s"), [(False, manager_module.ABSENT_TTL_S), (True, 30.0)])
def test_an_adapter_that_was_not_there_is_looked_for_again(
    make_engine: Callable[..., Engine], source: CountingSource, root: Path, has_remote: bool, ttl_s: float
) -> None:
    """A directory is asked again after a moment. A Hub is not."""
    (root.parent / "hub").mkdir()
    engine = make_engine(failure_ttl_s=30.0, remote=DirectorySource(root.parent / "hub") if has_remote else None)
    with pytest.raises(AdapterNotFound):
        engine.resolve("late")
    write_adapter(root / "late")
    began_s = engine.now
    engine.now = began_s + ttl_s - 0.5
    with pytest.raises(AdapterNotFound):
        engine.resolve("late")
    assert source.opened == ["late"]
    engine.now = began_s + ttl_s + 0.5
    assert engine.resolve("late")


def test_load_storm(make_engine: Callable[..., Engine], source: CountingSource) -> None:
    engine = make_engine(max_pending_loads=4)
    resident = engine.resolve("a0")
    engine.acquire(resident)
    source.gate.clear()
    for idx in range(4):
        assert engine.cache.resolve(f"x{idx}", engine.now) is None
    for idx in range(4, 50):
        with pytest.raises(AdapterLoadsBusy) as raised:
            engine.cache.resolve(f"x{idx}", engine.now)
        assert raised.value.retry_after_s
    assert engine.cache.acquire(resident) is not None


def test_a_source_that_hangs_does_not_keep_resident_adapters_from_moving(
    make_engine: Callable[..., Engine], source: CountingSource
) -> None:
    engine = make_engine(num_device_slots=1)
    first, second = engine.resolve("a0"), engine.resolve("a1")
    source.gate.clear()
    assert engine.cache.resolve("a2", engine.now) is None
    for _ in range(3):
        for key in (first, second):
            engine.acquire(key)
            engine.cache.release(key)
    assert engine.cache.resolve("a2", engine.now) is None


def test_what_the_disk_has_dropped_comes_back_from_the_source(
    make_engine: Callable[..., Engine], root: Path, source: CountingSource
) -> None:
    engine = make_engine(disk_bytes=3 * 8192, host_bytes=3000, num_device_slots=1)
    first = use(engine, "a0")
    for idx in range(1, 6):
        use(engine, f"a{idx}")
    assert len(os.listdir(engine.cache._store._root)) - 1 < 6
    again = engine.resolve("a0")
    assert again == first
    slot = engine.acquire(again)
    assert_installed(engine, slot, root / "a0")
    assert source.opened.count("a0") == 2


class OneRepository:
    """The Hub, with one adapter."""

    def __init__(self, root: Path) -> None:
        self._files = DirectorySource(root)
        self.num_opened = 0

    def open(self, adapter_id: str, origin: AdapterOrigin = OWN_ORIGIN) -> AdapterFiles:
        if origin.source != "hub:org/sql":
            raise adapter_not_found(adapter_id)
        self.num_opened += 1
        return self._files.open(adapter_id, AdapterOrigin("a4"))

    def list(self) -> Sequence[str]:
        return []


def test_members_of_a_merge_come_back_from_where_they_came(make_engine: Callable[..., Engine], root: Path) -> None:
    hub = OneRepository(root)
    engine = make_engine(remote=hub)
    first = engine.load("mine", options=LoadOptions(AdapterOrigin("a1")))
    second = engine.load("far", options=LoadOptions(AdapterOrigin("hub:org/sql")))
    assert first.digest != second.digest
    for file in Path(engine.cache._store._root).glob("*lora*"):
        file.unlink()
    members = (Member(AdapterId("mine"), 0.5), Member(AdapterId("far"), 2.0))
    mixture = Mixture(members, Merge("linear"))
    (key,) = engine.until(lambda: engine.cache.resolve_mixture(mixture, engine.now))
    assert hub.num_opened == 2
    plain = Mixture((Member(AdapterId("a1"), 0.5), Member(AdapterId("a4"), 2.0)), Merge("linear"))
    assert engine.until(lambda: engine.cache.resolve_mixture(plain, engine.now)) == (key,)
    for _ in range(2):
        engine.cache.drop_hold(key)


@pytest.mark.parametrize("what", ["merge", "rotation"])
def test_a_long_computation_holds_up_no_other_fetch(
    what: str, make_engine: Callable[..., Engine], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, has_begun = threading.Event(), threading.Event()

    def hold_up(*given: object) -> object:
        has_begun.set()
        assert gate.wait(10)
        return compute(*given)

    if what == "merge":
        compute = manager_module.merge_loras
        monkeypatch.setattr(manager_module, "merge_loras", hold_up)
        mixture = Mixture((Member(AdapterId("a1"), 0.5), Member(AdapterId("a4"), 2.0)), Merge("linear"))
    else:
        tensors = {f"{PREFIX}{Q_PROJ}.oft_R.weight": torch.ones(2, 28)}
        write_adapter(root / "oft", tensors=tensors)
        config = {"peft_type": "OFT", "oft_block_size": 8, "target_modules": ["q_proj"]}
        (root / "oft/adapter_config.json").write_text(json.dumps(config))
        compute = Rotation._series
        monkeypatch.setattr(Rotation, "_series", hold_up)
        mixture = Mixture((Member(AdapterId("oft"), 1.0),))
    engine = make_engine()
    resolve = engine.cache.resolve_mixture if what == "merge" else lambda *_: engine.cache.resolve("oft", engine.now)
    while not has_begun.is_set():
        assert resolve(mixture, engine.now) is None
        engine.turn(0.02)
    assert engine.load("a0").state == "on_device"
    gate.set()
    assert engine.until(lambda: resolve(mixture, engine.now)) is not None


def test_changed_files_never_take_the_place_of_a_bound_content(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine(disk_bytes=3 * 8192, host_bytes=3000, num_device_slots=1)
    use(engine, "a0")
    for idx in range(1, 6):
        use(engine, f"a{idx}")
    write_adapter(root / "a0", seed=77)
    key = engine.resolve("a0")
    assert engine.cache.acquire(key) is None
    error = engine.until(lambda: engine.cache.failure(key))
    assert isinstance(error, FailedPrecondition)
    assert "LoadAdapter" in str(error)
    assert engine.load("a0").digest != key.digest
    assert engine.acquire(engine.resolve("a0")) is not None


def test_larger_than_the_device(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(device_bytes=RANK_4_BYTES)
    small, large = engine.resolve("a1"), engine.resolve("a2")
    assert isinstance(engine.cache.failure(large), AdapterMemoryFull)
    assert engine.cache.acquire(large) is None
    assert engine.cache.failure(small) is None
    assert engine.acquire(small) is not None
    with pytest.raises(AdapterMemoryFull):
        engine.load("a5")
    assert "a5" not in {row.adapter_id for row in engine.listed() if row.state != "failed"}


def test_names_that_nobody_has_are_not_listed(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine()
    with pytest.raises(AdapterNotFound):
        engine.resolve("nobody")
    (root / "a0/adapter_model.safetensors").write_bytes(b"cut")
    with pytest.raises(AdapterInvalid):
        engine.resolve("a0")
    assert [(row.adapter_id, row.state) for row in engine.listed()] == [("a0", "failed")]
    with pytest.raises(AdapterNotFound):
        engine.cache.get("nobody")


def test_a_full_store_is_an_error_and_resident_adapters_go_on(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(disk_bytes=8192)
    resident = engine.resolve("a0")
    engine.acquire(resident)
    with pytest.raises(DiskFull) as raised:
        engine.resolve("a1")
    assert raised.value.retry_after_s
    assert engine.cache.acquire(resident) is not None


def test_a_load_that_failed_keeps_no_memory(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load keeps no memory, not even until the next collection: the error is kept, and must not keep the frames
    that it came through."""
    taken: list[weakref.ref[torch.Tensor]] = []
    allocate = RecentImports.allocate

    def watched(self: RecentImports, num_bytes: int) -> torch.Tensor | None:
        found = allocate(self, num_bytes)
        assert found is not None
        taken.append(weakref.ref(found))
        return found

    monkeypatch.setattr(RecentImports, "allocate", watched)
    engine = make_engine(disk_bytes=8192)
    engine.acquire(engine.resolve("a0"))
    gc.disable()
    try:
        with pytest.raises(DiskFull):
            engine.resolve("a1")
        assert len(taken) == 2
        assert taken[1]() is None
    finally:
        gc.enable()


def test_a_source_that_is_down(make_engine: Callable[..., Engine], source: CountingSource) -> None:
    engine = make_engine()
    resident = engine.resolve("a0")
    source.error = SourceUnavailable("the source is down; try again later", retry_after_s=5.0)
    with pytest.raises(SourceUnavailable):
        engine.resolve("a1")
    assert engine.acquire(resident) is not None


def test_a_bug_is_opaque(
    make_engine: Callable[..., Engine], source: CountingSource, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine()
    source.error = ZeroDivisionError("/secret/path")
    with caplog.at_level(logging.ERROR), pytest.raises(Internal) as raised:
        engine.resolve("a0")
    assert "/secret/path" not in str(raised.value)
    error_id = raised.value.metadata["error_id"]
    assert error_id in str(raised.value)
    assert error_id in caplog.text
    source.error = None
    assert engine.resolve("a1")  # the thread lives


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("2 GiB"), RuntimeError("CUDA error: out of memory")], ids=repr
)
def test_a_copy_that_fails_is_that_adapters_failure(
    error: Exception, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def no_memory(*args: object) -> AdapterWeights:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "promote", no_memory)
        key = engine.resolve("a0")
        assert engine.cache.acquire(key) is None
        assert isinstance(engine.until(lambda: engine.cache.failure(key)), AdapterMemoryFull)
    assert engine.cache.usage().device_bytes == 0
    engine.now += 31
    engine.cache.poll(engine.now)
    assert engine.acquire(key) is not None


def test_an_adapter_for_which_its_slot_has_no_memory_fails_alone(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    slot = engine.acquire(engine.resolve("a1"))

    def install(slot: int, weights: AdapterWeights | None) -> None:
        engine.slots.install(slot, weights)
        if weights is not None:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 MiB")

    with monkeypatch.context() as patched:
        patched.setattr(engine.cache, "_install", install)
        key = engine.resolve("a0")
        assert engine.cache.acquire(key) is None
        assert isinstance(engine.until(lambda: engine.cache.failure(key)), AdapterMemoryFull)
    assert set(engine.slots.installed) == {slot}
    assert engine.cache.usage().device_bytes == engine.slots.installed[slot].num_bytes
    engine.now += 31
    engine.cache.poll(engine.now)
    assert engine.acquire(key) is not None


def test_pinned_adapters_stay(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(num_device_slots=2)
    assert engine.load("a0", pin=True).pinned
    for idx in range(1, 6):
        use(engine, f"a{idx}")
    row = engine.cache.get("a0")
    assert (row.state, row.pinned) == ("on_device", True)
    engine.close()


def test_listing(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine()
    assert engine.listed() == []
    engine.settle()
    key = engine.resolve("a1")
    engine.acquire(key)
    (root / "a3" / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(AdapterInvalid):
        engine.resolve("a3")
    loaded = {row.adapter_id: row for row in engine.listed()}
    assert set(loaded) == {"a1", "a3"}
    assert loaded["a1"].num_running == 1
    assert loaded["a1"].rank == 4
    assert loaded["a1"].num_bytes == RANK_4_BYTES
    assert loaded["a1"].digest == key.digest
    assert (loaded["a3"].state, loaded["a3"].error_reason) == ("failed", "ADAPTER_INVALID")
    assert engine.cache.get("a3").error
    for name in ("a5", "nothing"):  # what nobody has asked for is the source's to list
        with pytest.raises(AdapterNotFound):
            engine.cache.get(name)


def test_integrity_notices_what_was_not_given_back(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    key = engine.resolve("a0")
    engine.acquire(key)
    with pytest.raises(AssertionError, match="held"):
        engine.cache.check_integrity()
    engine.cache.drop_hold(key, name="a0")
    with pytest.raises(AssertionError, match="leases"):
        engine.cache.check_integrity()
    engine.cache.release(key)
    engine.cache.check_integrity()


def test_the_temporary_store_goes_with_the_cache(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.resolve("a0")
    folder = engine.cache._store._root
    assert list(folder.glob("*.adapter"))
    engine.cache.close()
    assert not folder.exists()


def test_a_store_of_the_operators_survives(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    first = make_engine(store_dir=tmp_path / "store")
    key = first.resolve("a0")
    first.cache.close()
    second = make_engine(store_dir=tmp_path / "store")
    assert second.resolve("a0") == key
    assert second.acquire(key) is not None
    assert len(list((tmp_path / "store").glob("*.adapter"))) == 1


def test_versions_are_known_after_a_restart(make_engine: Callable[..., Engine], root: Path, tmp_path: Path) -> None:
    first = make_engine(store_dir=tmp_path / "store")
    old = first.load("a0").digest
    write_adapter(root / "a0", rank=2, seed=99)
    new = first.load("a0").digest
    first.load("a1")
    first.cache.unload("a1")
    other = first.resolve("a2")
    first.cache.close()
    second = make_engine(store_dir=tmp_path / "store")
    assert second.cache.get(f"a0@{old[:8]}").tier == "disk"
    assert second.resolve(f"a0@{old[:8]}").digest == old
    assert second.resolve("a0").digest == new
    for name in (f"a1@{old[:8]}", f"a0@{other.digest[:8]}"):
        with pytest.raises(AdapterVersionNotFound):
            second.cache.get(name)
    second.cache.close()
    third = make_engine(store_dir=tmp_path / "store", with_templates=True)
    with pytest.raises(AdapterVersionNotFound):
        third.cache.get(f"a0@{old[:8]}")
    third.load("a1")
    third.cache.close()
    assert make_engine(store_dir=tmp_path / "store").resolve(f"a0@{old[:8]}").digest == old, "the third took none away"


def test_a_restarted_server_reads_a_name_from_where_a_load_had_bound_it(
    make_engine: Callable[..., Engine], root: Path, tmp_path: Path
) -> None:
    first = make_engine(store_dir=tmp_path / "store")
    own = first.resolve("a0")
    options = LoadOptions(AdapterOrigin("a1"))
    bound = first.load("a0", options=options).digest
    for name in ("elsewhere", "unloaded"):
        first.load(name, options=options)
    assert first.cache.get("a0").is_sourced
    first.cache.close()
    second = make_engine(store_dir=tmp_path / "store")
    with pytest.raises(AdapterNotFound):
        second.cache.unload("unloaded")
    assert second.resolve("a0").digest == second.resolve("elsewhere").digest == bound != own.digest
    row = second.cache.get("a0")
    assert (row.source, row.is_sourced) == ("a1", False), "other workers may have had another load meanwhile"
    with pytest.raises(AdapterNotFound):
        second.resolve("unloaded")
    second.load("a0")
    assert not second.cache.get("a0").is_sourced
    second.load("a0", options=options)
    assert second.cache.get("a0").is_sourced
    second.cache.unload("a0")
    second.cache.close()
    assert make_engine(store_dir=tmp_path / "store").resolve("a0") == own


def test_what_a_restarted_server_unloads_by_an_idle_name_is_gone_at_once(
    make_engine: Callable[..., Engine], root: Path, tmp_path: Path
) -> None:
    first = make_engine(store_dir=tmp_path / "store")
    old = first.load("a0").digest
    write_adapter(root / "a0", rank=2, seed=99)
    first.load("a0")
    first.cache.close()
    second = make_engine(store_dir=tmp_path / "store")
    key = second.resolve(f"a0@{old}")
    second.acquire(key)
    second.cache.release(key)
    second.cache.drop_hold(key, name="a0")
    assert any(second.slots.installed.values())
    while second.turn(0.1):
        pass  # now it is idle
    with pytest.raises(AdapterNotFound):
        second.cache.unload("a0")
    log = next((tmp_path / "store").glob("versions-*"))
    assert old not in log.read_text()
    assert second.turn(0.1), "nobody woke the engine for weights that may go"
    assert not any(second.slots.installed.values())


def test_templates_beside_an_adapter_are_reported_and_not_touched(
    make_engine: Callable[..., Engine], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "a0" / "chat_template.jinja").write_text("{{ 1 / 0 }}")
    engine = make_engine()
    with caplog.at_level(logging.WARNING):
        engine.resolve("a0")
    assert "chat_template.jinja" in caplog.text


def test_a_wrong_name_leaves_no_line_but_its_requests(
    make_engine: Callable[..., Engine], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    engine = make_engine()
    with caplog.at_level(logging.INFO):
        with pytest.raises(AdapterNotFound):
            engine.resolve("missing")
        assert "missing" not in caplog.text
        with pytest.raises(AdapterInvalid):
            engine.resolve("broken")
        assert "adapter broken: " in caplog.text


def test_counters(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    key: AdapterKey = engine.resolve("a0")
    engine.acquire(key)
    usage = engine.cache.usage()
    assert usage.loads_total == 1
    assert usage.load_seconds_total > 0
    assert usage.num_device_slots == 3


def test_adapters_of_one_module_leave_the_others_alone(make_engine: Callable[..., Engine], root: Path) -> None:
    write_adapter(root / "one", tensors=lora_tensors(4, paths=[Q_PROJ]))
    engine = make_engine()
    slot = engine.acquire(engine.resolve("one"))
    assert set(engine.slots.installed[slot].factors) == {Q_PROJ}


class SlowDevice:
    """CudaMemory whose copies wait until they are let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.handed_over_by: set[int] = set()

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def fetch(self, pieces: Sequence[torch.Tensor], num_bytes: int) -> torch.Tensor:
        assert self.gate.wait(10)
        return torch.cat(list(pieces))[:num_bytes].clone()

    def hand_over(self, storage: torch.Tensor) -> None:
        self.handed_over_by.add(threading.get_ident())


def test_a_copy_under_way_holds_up_only_who_wants_it(
    make_engine: Callable[..., Engine], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SlowDevice()
    monkeypatch.setattr(manager_module, "Storage", lambda store, where: Storage(store, where, device))
    engine = make_engine(num_device_slots=2)
    resident, wanted = engine.resolve("a0"), engine.resolve("a1")
    engine.acquire(resident)
    device.gate.clear()
    assert engine.cache.acquire(wanted) is None
    for _ in range(50):  # turns of the loop; each returns although the copy does not
        engine.cache.poll(engine.now)
        assert engine.cache.acquire(wanted) is None
    slot = engine.cache.acquire(resident)
    assert slot is not None
    assert_installed(engine, slot, root / "a0")
    device.gate.set()
    assert_installed(engine, engine.acquire(wanted), root / "a1")
    assert device.handed_over_by == {threading.get_ident()}
    for key in (resident, resident, wanted):
        engine.cache.release(key)
    for key, name in ((resident, "a0"), (wanted, "a1")):
        engine.cache.drop_hold(key, name=name)
    engine.close()


def test_a_want_that_is_put_first_wakes_the_engine(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(device_bytes=5 * RANK_4_BYTES // 2)
    largest = engine.resolve("a2")
    engine.acquire(largest)
    larger = engine.resolve("a1")
    assert engine.cache.acquire(larger) is None  # there is no room
    engine.settle()
    small = engine.resolve("a0")
    assert engine.cache.acquire(small) is None  # it would fit, but came later
    engine.settle()
    assert engine.cache.acquire(small) is None
    engine.cache.put_first([small])
    assert engine.turn()
    engine.acquire(small)
    for key in (largest, small):
        engine.cache.release(key)
    for key, name in ((largest, "a2"), (larger, "a1"), (small, "a0")):
        engine.cache.drop_hold(key, name=name)
    engine.close()


def test_a_remote_source_that_hangs_holds_up_no_local_one(source: CountingSource, tmp_path: Path) -> None:
    """The remote source is asked for what the local one does not have; four names wait for it, and the fifth local one
    loads."""
    write_adapter(tmp_path / "remote" / "far")
    remote = CountingSource(tmp_path / "remote")
    remote.gate.clear()
    engine = Engine(source, remote=remote)
    try:
        for name in ("far", "r1", "r2", "r3", "r4"):
            assert engine.cache.resolve(AdapterId(name), engine.now) is None
        use(engine, "a0")
        assert "a0" not in remote.opened
        remote.gate.set()
        use(engine, "far")
        with pytest.raises(AdapterNotFound):
            engine.resolve("r4")
    finally:
        remote.gate.set()
        engine.cache.close()


def test_an_older_version_comes_from_the_store(make_engine: Callable[..., Engine], root: Path) -> None:
    engine = make_engine(num_device_slots=2)
    old = use(engine, "a1")
    kept = engine.slots.installed[0].storage.clone()
    write_adapter(root / "a1", rank=4, seed=99)
    assert engine.load("a1").digest != old.digest
    engine.settle()
    assert engine.resolve("a1") != old
    assert engine.resolve(f"a1@{old.digest[:12]}") == old
    assert torch.equal(engine.slots.installed[engine.acquire(old)].storage, kept)
    engine.cache.release(old)
    for key in (old, engine.resolve("a1")):
        engine.cache.drop_hold(key, name="a1")
    engine.cache.drop_hold(engine.resolve("a1"), name="a1")
    with pytest.raises(AdapterVersionNotFound):
        engine.resolve("a1@00000000")
