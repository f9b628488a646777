"""The copies between the tiers."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import torch
from support.adapter_files import DOWN_PROJ, PREFIX, Q_PROJ, base_targets, lora_tensors, write_adapter

from loraplex_adapters.cache import tiers as tiers_module
from loraplex_adapters.cache.loader import import_adapter
from loraplex_adapters.cache.tiers import Tiers, pinned_sizes
from loraplex_adapters.io.throttle import MAX_SHARE, SHARE, Throttle
from loraplex_adapters.layout.lora import FactorShape, LoraLayout, place
from loraplex_adapters.sources.directory import DirectorySource
from loraplex_adapters.store import AdapterStore, WriteFn
from loraplex_contracts.adapters import AdapterKey


def stored(folder: Path, dtype: str) -> tuple[AdapterStore, AdapterKey]:
    write_adapter(folder / "x", seed=3)
    store = AdapterStore(folder / "store", 1 << 20)
    return store, import_adapter("x", DirectorySource(folder), base_targets(dtype), store).key


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_from_store_to_device(tmp_path: Path, dtype: str, device: str) -> None:
    store, key = stored(tmp_path, dtype)
    tiers = Tiers(store, torch.device(device))
    host = tiers.stage(key)
    assert host is not None
    weights = tiers.promote(host)
    assert weights is not None
    tiers.hand_over(weights)
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


# --- devices with memory of their own ---------------------------------------------------------------------------------


class FakeDevice:
    """Implements DeviceMemory in plain memory, and writes down what was asked of it."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.log: list[str] = []

    def pin(self, num_bytes: int) -> torch.Tensor:
        self.pinned.append(num_bytes)
        return torch.full((num_bytes,), 0xEE, dtype=torch.uint8)

    def fetch(self, pieces: Sequence[torch.Tensor], num_bytes: int) -> torch.Tensor:
        self.log.append("fetched")
        return torch.cat(list(pieces))[:num_bytes].clone()

    def hand_over(self, storage: torch.Tensor) -> None:
        self.log.append("handed over")


def test_through_pinned_pieces_to_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small they are, the bytes arrive in order; the file is not needed any more once they are on the host."""
    monkeypatch.setattr(tiers_module, "MAX_PINNED_BYTES", 256)
    monkeypatch.setattr(tiers_module, "MIN_PINNED_BYTES", 64)
    monkeypatch.setattr(tiers_module, "COPY_PIECE_BYTES", 100)
    store, key = stored(tmp_path, "float32")
    device = FakeDevice()
    tiers = Tiers(store, torch.device("cpu"), device)
    host = tiers.stage(key)
    assert host is not None
    store.remove(key)
    assert 0 <= sum(device.pinned) - host.layout.num_bytes < 64
    assert len(device.pinned) > 3
    weights = tiers.promote(host)
    assert weights is not None
    tiers.hand_over(weights)
    assert device.log == ["fetched", "handed over"]
    assert weights.num_bytes == host.layout.num_bytes
    expected = lora_tensors(seed=3)
    for path in (Q_PROJ, DOWN_PROJ):
        assert torch.equal(weights.factors[path].a, expected[f"{PREFIX}{path}.lora_A.weight"])
        assert torch.equal(weights.factors[path].b, expected[f"{PREFIX}{path}.lora_B.weight"])


@pytest.mark.parametrize("num_bytes", [1, 64 << 10, (64 << 10) + 1, 600_000, 5 << 20, 84_000_000])
def test_pinned_memory_is_what_the_budget_counts(num_bytes: int) -> None:
    """PyTorch pins the next power of two: of a piece that is one, exactly the piece."""
    sizes = list(pinned_sizes(num_bytes))
    assert all(size & (size - 1) == 0 for size in sizes)
    assert max(sizes) <= 4 << 20
    assert sizes == sorted(sizes, reverse=True)
    assert 0 <= sum(sizes) - num_bytes < 64 << 10


def test_what_the_store_has_not(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    store.remove(key)
    assert Tiers(store, torch.device("cpu")).stage(key) is None


def test_a_store_that_drops_what_is_staged(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    tiers = Tiers(store, torch.device("cpu"))
    host = tiers.stage(key)
    assert host is not None
    store.remove(key)
    assert tiers.promote(host) is None


@pytest.mark.parametrize("has_memory", [False, True])
def test_what_has_just_landed_is_not_read_back(tmp_path: Path, has_memory: bool) -> None:
    write_adapter(tmp_path / "x", seed=3)
    store = AdapterStore(tmp_path / "store", 1 << 20)
    tiers = Tiers(store, torch.device("cpu"), FakeDevice() if has_memory else None)
    key = import_adapter("x", DirectorySource(tmp_path), base_targets("float32"), store, tiers.landing).key
    stored = store.open(key)
    assert stored is not None
    want = bytes(stored.payload)
    store.remove(key)
    host = tiers.stage(key)
    assert host is not None
    weights = tiers.promote(host)
    assert weights is not None
    assert bytes(weights.storage.numpy()) == want
    assert tiers.landing.find(key) is None  # it has moved on
    assert tiers.stage(key) is None


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
    layout = place("float32", [FactorShape(Q_PROJ, 4, 16, 16, 2.0)])
    tiers = Tiers(store, torch.device("cpu"))
    keys = [
        store.put("lora", layout.to_json(), layout.num_bytes, lambda write, idx=idx: filled(write, layout, idx))
        for idx in range(200)
    ]
    with few_files(8):
        copies = [tiers.stage(key) for key in keys]
        weights = [tiers.promote(copy) for copy in copies if copy is not None]
    assert [w.storage[0].item() for w in weights if w is not None] == list(range(200))


def filled(write: WriteFn, layout: LoraLayout, value: int) -> None:
    write(memoryview(bytes([value]) * layout.num_bytes))


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_a_process_out_of_files_keeps_its_store(tmp_path: Path) -> None:
    store, key = stored(tmp_path, "float32")
    tiers = Tiers(store, torch.device("cpu"))
    opened: list[int] = []
    with few_files(2):
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            tiers.stage(key)
        for fd in opened:
            os.close(fd)
    assert key in store
    host = tiers.stage(key)
    assert host is not None
    assert tiers.promote(host) is not None


def test_a_layout_survives_its_json() -> None:
    layout = place(
        "bfloat16",
        [FactorShape("b", 3, 5, 7, 1 / 3), FactorShape("a", 1, 2, 3, 2.0), FactorShape("c", 8, 64, 64, 1e-9)],
    )
    assert LoraLayout.from_json(layout.to_json()) == layout
    assert [p.shape.path for p in layout.placed] == ["a", "b", "c"]
    ends = [(p.a_offset, p.b_offset, p.b_offset + 2 * p.shape.rank * p.shape.out_features) for p in layout.placed]
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
        LoraLayout.from_json(value)


class FakeClocks:
    """CPU time of the thread and of its process; while it sleeps the other threads work as much as `others` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float) -> None:
        self.thread_s = self.process_s = 0.0
        self.pauses: list[float] = []
        self._others = others
        monkeypatch.setattr("time.thread_time", lambda: self.thread_s)
        monkeypatch.setattr("time.perf_counter", lambda: self.thread_s + sum(self.pauses))
        monkeypatch.setattr("time.process_time", lambda: self.process_s)
        monkeypatch.setattr("time.sleep", self._sleep)

    def work(self, seconds: float) -> None:
        self.thread_s += seconds
        self.process_s += seconds

    def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.process_s += self._others * seconds


@pytest.mark.parametrize("num_waiting", [0, 1, 3, 20])
def test_beside_busy_threads_it_takes_its_share(monkeypatch: pytest.MonkeyPatch, num_waiting: int) -> None:
    clocks = FakeClocks(monkeypatch, others=1.9)
    throttle = Throttle(lambda: num_waiting)
    for _ in range(1000):
        clocks.work(0.0001)
        throttle()
    assert len(clocks.pauses) >= 40  # in short spells
    share = min(MAX_SHARE, SHARE * (1 + num_waiting))
    assert 0.1 / (0.1 + sum(clocks.pauses)) == pytest.approx(share, rel=0.15)


def test_alone_it_hardly_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = FakeClocks(monkeypatch, others=0.01)
    throttle = Throttle()
    for _ in range(300):
        clocks.work(0.0001)
        throttle()
    assert 0.03 / (0.03 + sum(clocks.pauses)) > 0.65
    assert max(clocks.pauses[1:]) <= 0.001


def test_waiting_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a slow disk costs the steps nothing."""
    clocks = FakeClocks(monkeypatch, others=1.0)
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    throttle = Throttle()
    for _ in range(10):
        now_s[0] += 1.0
        throttle()
    assert clocks.pauses == []
