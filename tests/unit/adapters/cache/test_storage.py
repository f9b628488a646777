"""The copies between the tiers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import resource
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.adapter_files import DOWN_PROJ, PREFIX, Q_PROJ, base_targets, lora_tensors, write_adapter

from loraplex_adapters.cache import storage as storage_module
from loraplex_adapters.cache.storage import (
    HostCopy,
    RecentImports,
    SpareMemory,
    Storage,
    import_adapter,
    page_locked_sizes,
)
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.store import AdapterStore, WriteFn
from loraplex_adapters.weights import AdapterLayout, FactorShape, place_adapter
from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import NonFinite


def stored(folder: Path, dtype: str) -> tuple[AdapterStore, AdapterKey]:
    write_adapter(folder / "x", seed=3)
    store = AdapterStore(folder / "store", 1 << 20)
    return store, import_adapter("x", DirectorySource(folder), base_targets(dtype), store).key


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_from_store_to_device(tmp_path: Path, dtype: str, device: str) -> None:
    store, key = stored(tmp_path, dtype)
    storage = Storage(store, torch.device(device))
    host = storage.stage(key)
    assert host is not None
    weights = storage.promote(host)
    assert weights is not None
    storage.hand_over(weights)
    assert weights.storage.device.type == device
    assert weights.storage.dtype == torch.uint8
    assert weights.num_bytes == host.layout.num_bytes
    expected = lora_tensors(seed=3)
    for path in (Q_PROJ, DOWN_PROJ):
        factors = weights.factors[path]
        assert torch.equal(factors.a.cpu(), expected[f"{PREFIX}{path}.lora_A.weight"].to(getattr(torch, dtype)))
        assert torch.equal(factors.b.cpu(), expected[f"{PREFIX}{path}.lora_B.weight"].to(getattr(torch, dtype)))
        assert factors.a.data_ptr() % 64 == 0
        assert factors.b.data_ptr() % 64 == 0
    # A copy, not the mapping: the store may drop the file.
    store.remove(key)
    del host
    assert weights.factors[Q_PROJ].a.abs().sum() > 0


def test_a_layout_of_another_release_is_not_there_and_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After a step back to an older release, which would leave out what it does not know."""
    store = AdapterStore(tmp_path, 1 << 20)
    layout = {"dtype": "float32", "factors": [], "twist": 1}
    key = store.put("lora", layout, 64, lambda write: write(memoryview(bytes(64))))
    assert Storage(store, torch.device("cpu")).find(key) is None
    assert "a layout of another release, with twist" in caplog.text
    assert key in store


# --- devices with memory of their own ---------------------------------------------------------------------------------


class FakeDevice:
    """Implements CudaMemory in plain memory, and writes down what was asked of it."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.log: list[str] = []

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        self.pinned.append(num_bytes)
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def fetch(self, pieces: Sequence[torch.Tensor], num_bytes: int) -> torch.Tensor:
        self.log.append("fetched")
        return torch.cat(list(pieces))[:num_bytes].clone()

    def hand_over(self, storage: torch.Tensor) -> None:
        self.log.append("handed over")


def test_through_pinned_pieces_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes arrive in order however small the pieces are; the file is not needed any more once they are on the
    host."""
    monkeypatch.setattr(storage_module, "MAX_PAGE_LOCKED_BYTES", 256)
    monkeypatch.setattr(storage_module, "MIN_PAGE_LOCKED_BYTES", 64)
    monkeypatch.setattr(storage_module, "COPY_PIECE_BYTES", 100)
    store, key = stored(tmp_path, "float32")
    device = FakeDevice()
    storage = Storage(store, torch.device("cpu"), device)
    host = storage.stage(key)
    assert host is not None
    store.remove(key)
    assert 0 <= sum(device.pinned) - host.layout.num_bytes < 64
    assert len(device.pinned) > 3
    weights = storage.promote(host)
    assert weights is not None
    storage.hand_over(weights)
    assert device.log == ["fetched", "handed over"]
    assert (storage.host_reads.num, storage.host_reads.num_bytes) == (1, host.layout.num_bytes)
    assert weights.num_bytes == host.layout.num_bytes
    expected = lora_tensors(seed=3)
    for path in (Q_PROJ, DOWN_PROJ):
        assert torch.equal(weights.factors[path].a, expected[f"{PREFIX}{path}.lora_A.weight"])
        assert torch.equal(weights.factors[path].b, expected[f"{PREFIX}{path}.lora_B.weight"])


def test_copies_to_a_device_touch_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first device as its current one, and some calls would take memory there."""
    log: list[str] = []

    @contextmanager
    def entered(what: object) -> Generator[None]:
        log.append(f"in {what}")
        yield
        log.append(f"out of {what}")

    class Event:
        def __init__(self, blocking: bool) -> None: ...
        def record(self, stream: str) -> None: ...
        def synchronize(self) -> None:
            log.append("waited")

    fakes = {"device": entered, "stream": entered, "Stream": lambda device: "stream", "Event": Event}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    memory = storage_module.CudaMemory(torch.device("cpu"))
    pieces = [torch.full((4,), 1, dtype=torch.uint8), torch.full((4,), 2, dtype=torch.uint8)]
    assert memory.fetch(pieces, 6).tolist() == [1, 1, 1, 1, 2, 2]
    assert log == ["in cpu", "in stream", "out of stream", "waited", "out of cpu"]


@pytest.mark.parametrize("num_bytes", [1, 64 << 10, (64 << 10) + 1, 600_000, 5 << 20, 84_000_000])
def test_pinned_memory_is_what_the_budget_counts(num_bytes: int) -> None:
    """PyTorch pins the next power of two: of a piece that is one, exactly the piece."""
    sizes = list(page_locked_sizes(num_bytes))
    assert all(size & (size - 1) == 0 for size in sizes)
    assert max(sizes) <= 4 << 20
    assert sizes == sorted(sizes, reverse=True)
    assert 0 <= sum(sizes) - num_bytes < 64 << 10


def test_what_the_store_has_not(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    store.remove(key)
    assert Storage(store, torch.device("cpu")).stage(key) is None


def test_a_store_that_drops_what_is_staged(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    storage = Storage(store, torch.device("cpu"))
    host = storage.stage(key)
    assert host is not None
    store.remove(key)
    assert storage.promote(host) is None


@pytest.mark.parametrize("has_memory", [False, True])
def test_what_has_just_landed_is_not_read_back(tmp_path: Path, has_memory: bool) -> None:
    write_adapter(tmp_path / "x", seed=3)
    store = AdapterStore(tmp_path / "store", 1 << 20)
    storage = Storage(store, torch.device("cpu"), FakeDevice() if has_memory else None)
    key = import_adapter("x", DirectorySource(tmp_path), base_targets("float32"), store, storage.recent).key
    stored = store.open(key)
    assert stored is not None
    want = bytes(stored.payload)
    store.remove(key)
    host = storage.stage(key)
    assert host is not None
    weights = storage.promote(host)
    assert weights is not None
    assert bytes(weights.storage.numpy()) == want
    assert storage.recent.find(key) is None  # it has moved on
    assert storage.stage(key) is None


@contextlib.contextmanager
def few_files(num_free: int) -> Generator[None]:
    """The process may open `num_free` more files, at least."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + num_free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_adapters_on_the_host_take_no_file_descriptors(tmp_path: Path) -> None:
    store = AdapterStore(tmp_path / "store", 1 << 24)
    layout = place_adapter("float32", [FactorShape(Q_PROJ, 4, 16, 16, 2.0)])
    storage = Storage(store, torch.device("cpu"))
    keys = [
        store.put("lora", layout.to_json(), layout.num_bytes, lambda write, idx=idx: filled(write, layout, idx))
        for idx in range(200)
    ]
    with few_files(8):
        copies = [storage.stage(key) for key in keys]
        weights = [storage.promote(copy) for copy in copies if copy is not None]
    assert [w.storage[0].item() for w in weights if w is not None] == list(range(200))


def filled(write: WriteFn, layout: AdapterLayout, value: int) -> None:
    write(memoryview(bytes([value]) * layout.num_bytes))


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_a_process_out_of_files_keeps_its_store(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    storage = Storage(store, torch.device("cpu"))
    opened: list[int] = []
    with few_files(2):
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            storage.stage(key)
        for fd in opened:
            os.close(fd)
    assert key in store
    host = storage.stage(key)
    assert host is not None
    assert storage.promote(host) is not None


def test_a_layout_survives_its_json() -> None:
    layout = place_adapter(
        "bfloat16",
        [FactorShape("b", 3, 5, 7, 1 / 3), FactorShape("a", 1, 2, 3, 2.0), FactorShape("c", 8, 64, 64, 1e-9)],
    )
    assert AdapterLayout.from_json(layout.to_json()) == layout
    assert [p.shape.path for p in layout.factors] == ["a", "b", "c"]
    ends = [(p.a_offset, p.b_offset, p.b_offset + 2 * p.shape.rank * p.shape.out_features) for p in layout.factors]
    assert all(a < b < end <= layout.num_bytes for a, b, end in ends)
    assert all(end <= following[0] for (_, _, end), following in itertools.pairwise(ends))


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"dtype": "int8", "factors": []},
        {"dtype": "float32", "factors": [["a", 0, 1, 1, "0x1p0"]]},
        {"dtype": "float32", "factors": [["a", 1, 1, 1, "nan"]]},
        {"dtype": "float32", "factors": [["a", 1, 1, 1]]},
        {"dtype": "float32", "factors": [[1, 1, 1, 1, "0x1p0"]]},
    ],
)
def test_a_layout_from_anywhere_else_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        AdapterLayout.from_json(value)


# --- memory of the CPU ------------------------------------------------------------------------------------------------


def test_a_block_comes_back_with_the_last_view_of_it() -> None:
    """A block is not given out again while a view of it lives."""
    memory = SpareMemory()
    first = memory.allocate(8192)
    address = first.data_ptr()
    first.fill_(7)
    view = first[4096:].view(torch.float32)
    del first
    second = memory.allocate(8192)
    assert second.data_ptr() != address
    second.fill_(8)
    assert view.view(torch.uint8).tolist() == [7] * 4096
    del view
    assert memory.allocate(8192).data_ptr() == address


def test_a_spare_block_is_only_for_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_SPARE_BYTES", 8192)
    memory = SpareMemory()
    memory.allocate(8192)  # comes back at once
    assert memory._spare is not None
    assert len(memory._spare) == 8192
    assert memory.allocate(4096).numel() == 4096
    assert len(memory._spare) == 4096  # and the one that did not fit is gone
    memory.allocate(8193)
    assert memory._spare is None  # too large to be kept


# --- recent imports --------------------------------------------------------------------------------------------------


NUM_BYTES = place_adapter("float32", [FactorShape("q", 4, 8, 8, 1.0)]).num_bytes


def imported(recent: RecentImports, digit: str) -> HostCopy:
    layout = place_adapter("float32", [FactorShape("q", 4, 8, 8, 1.0)])
    payload = recent.allocate(NUM_BYTES)
    assert payload is not None
    found = HostCopy(AdapterKey("lora", digit * 64), layout, (payload,))
    recent.keep(found)
    return found


def test_each_is_found_until_it_is_taken() -> None:
    recent = RecentImports(SpareMemory())
    first, second = imported(recent, "a"), imported(recent, "b")
    assert recent.find(AdapterKey("lora", "c" * 64)) is None
    assert recent.take(AdapterKey("lora", "c" * 64)) is None
    assert recent.find(first.key) is first
    assert recent.take(first.key) is first
    assert recent.find(first.key) is None
    assert recent.find(second.key) is second


def test_the_next_one_takes_the_memory_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new import takes the oldest one's memory, and never the memory of one that was taken."""
    monkeypatch.setattr(storage_module, "MAX_RECENT_BYTES", 2 * NUM_BYTES)
    recent = RecentImports(SpareMemory())
    keys = [imported(recent, "a").key]
    oldest = recent.find(keys[0])
    assert oldest is not None
    address = oldest.pieces[0].data_ptr()
    del oldest
    keys.append(imported(recent, "b").key)
    third = imported(recent, "c")
    assert recent.find(keys[0]) is None
    assert recent.find(keys[1]) is not None
    assert third.pieces[0].data_ptr() == address
    assert recent.take(third.key) is third
    for digit in "def":
        assert imported(recent, digit).pieces[0].data_ptr() != address


def test_those_allocated_at_the_same_time_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_RECENT_BYTES", 2 * NUM_BYTES)
    recent = RecentImports(SpareMemory())
    layout = place_adapter("float32", [FactorShape("q", 4, 8, 8, 1.0)])
    payloads = {digit: recent.allocate(NUM_BYTES) for digit in "abc"}
    for digit, payload in payloads.items():
        assert payload is not None
        recent.keep(HostCopy(AdapterKey("lora", digit * 64), layout, (payload,)))
    assert [digit for digit in "abc" if recent.find(AdapterKey("lora", digit * 64))] == ["b", "c"]


def test_no_memory_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_RECENT_BYTES", NUM_BYTES)
    recent = RecentImports(SpareMemory())
    key = imported(recent, "a").key
    assert recent.allocate(NUM_BYTES + 1) is None
    assert recent.find(key) is None  # its memory is not kept beside a large one's


def test_an_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    write_adapter(tmp_path / "good", seed=1)
    write_adapter(tmp_path / "bad", tensors={name: tensor / 0 for name, tensor in lora_tensors().items()})
    store = AdapterStore(tmp_path / "store", 1 << 20)
    recent = RecentImports(SpareMemory())
    source, targets = DirectorySource(tmp_path), base_targets("float32")
    good = import_adapter("good", source, targets, store, recent)
    with pytest.raises(NonFinite):
        import_adapter("bad", source, targets, store, recent)
    assert recent.find(good.key) is not None
    assert store.keys() == [good.key]
    assert len(list((tmp_path / "store").glob("*.adapter"))) == 1
    assert not list((tmp_path / "store").glob(".incoming*"))


def test_without_memory_nothing_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    recent = RecentImports(SpareMemory())

    def none_left(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(mmap, "mmap", none_left)
    assert recent.allocate(NUM_BYTES) is None


def test_the_bound_counts_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """After imports that were taken, freed, displaced, and landed again, as much is kept as at the start."""
    monkeypatch.setattr(storage_module, "MAX_RECENT_BYTES", 3 * NUM_BYTES)
    recent = RecentImports(SpareMemory())
    for digit in "aabcd":
        imported(recent, digit)
    recent.take(AdapterKey("lora", "c" * 64))
    recent.take(AdapterKey("lora", "c" * 64))
    recent.clear()
    keys = [imported(recent, digit).key for digit in "efgh"]
    assert [recent.find(key) is not None for key in keys] == [False, True, True, True]


def test_one_that_lands_again_is_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_RECENT_BYTES", 3 * NUM_BYTES)
    recent = RecentImports(SpareMemory())
    first, second = imported(recent, "a"), imported(recent, "b")
    imported(recent, "a")
    imported(recent, "c")
    imported(recent, "d")
    assert recent.find(first.key) is not None
    assert recent.find(second.key) is None
    recent.clear()
    assert recent.find(first.key) is None
