"""Copies of adapters between source, store, host and device.

Importing reads a source into the store; everything that a user's files can cause ends as a typed error.

Moving runs on the mover's thread. On a CPU the host tier is the store's file, which the system keeps in its page cache
from the first copy on, and the device tier a flat tensor that kernels read in place: the file is mapped for the copy
only, because every mapping takes a file descriptor. With CUDA the host tier is page-locked memory, and the copy to the
device runs on a stream of its own, so that it overlaps with steps; an adapter counts as on the device only when its
copy is complete, so no step ever waits for one.

Page-locked memory is asked for in pieces that are powers of two: PyTorch would round anything else up to the next one,
to up to twice what the host's budget counts, and what is given back it would keep for requests of that size only.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.formats.adapter import AdapterPlan, declared_base, plan_adapter
from loraplex_adapters.formats.medusa import without_base_head, write_heads
from loraplex_adapters.formats.peft_write import write_classifier, write_lora, write_saved
from loraplex_adapters.io.safetensors import PieceReader, PieceWriter, WriteFn, bytes_of
from loraplex_adapters.io.source_files import AdapterSource
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.store import REMEMBERED_HEADERS, AdapterStore, header_content
from loraplex_adapters.weights import AdapterLayout, AdapterWeights, BaseTargets, weights_at
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterKey, AdapterOrigin, ReadCount

log = logging.getLogger(__name__)

COPY_PIECE_BYTES = 256 << 10  # between two checkpoints: tens of microseconds
# Sizes of pieces of page-locked memory. The smallest is what an adapter may take beyond its size.
MAX_PAGE_LOCKED_BYTES, MIN_PAGE_LOCKED_BYTES = 4 << 20, 64 << 10
# Memory that is kept: of one freed adapter, and of the adapters imported last; both beyond all budgets.
MAX_SPARE_BYTES = 16 << 20
MAX_RECENT_BYTES = 24 << 20


class SpareMemory:
    """Memory of the CPU for one adapter each. Keeps the last one that came back for the next adapter of that size: new
    memory is cleared page by page, which takes longer than the copy into it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: mmap.mmap | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory uint8 [num_bytes], uninitialised. It comes back with the last tensor that looks into it."""
        with self._lock:
            region, self._spare = self._spare, None
        if region is None or len(region) != num_bytes:
            region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    region.madvise(mmap.MADV_HUGEPAGE)  # fewer pages: faster to clear, faster to read
        view = memoryview(region)
        weakref.finalize(view, self._take_back, region).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _take_back(self, region: mmap.mmap) -> None:
        """Takes memory back. Called on whichever thread frees the last tensor, also while that one is in `allocate`: no
        lock."""
        if len(region) <= MAX_SPARE_BYTES:
            self._spare = region


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One adapter of the store. `pieces` are its bytes where it is in memory of the host too."""

    key: AdapterKey
    layout: AdapterLayout
    pieces: tuple[Tensor, ...] = ()  # uint8, the payload one after the other; the last one may have room left
    base: str = ""  # of one just imported: the base model that its files name


class RecentImports:
    """The adapters imported last, still in memory, so that their first move need not read them from the store. Owns
    MAX_RECENT_BYTES of them at most. Thread-safe."""

    def __init__(self, memory: SpareMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._imported: OrderedDict[AdapterKey, HostCopy] = OrderedDict()  # the oldest first
        self._num_bytes = 0  # of all of them

    def allocate(self, num_bytes: int) -> Tensor | None:
        """Memory for the next import, in place of the oldest. None where it is too large, or there is no memory."""
        with self._lock:
            while self._imported and self._num_bytes + num_bytes > MAX_RECENT_BYTES:
                self._remove_locked(next(iter(self._imported)))  # no variable keeps its memory
        if not 0 < num_bytes <= MAX_RECENT_BYTES:
            return None
        try:
            return self._memory.allocate(num_bytes)
        except OSError:
            return None

    def keep(self, imported: HostCopy) -> None:
        with self._lock:
            self._remove_locked(imported.key)
            self._imported[imported.key] = imported
            self._num_bytes += imported.layout.num_bytes
            # Several threads may have allocated before any of them came here.
            while len(self._imported) > 1 and self._num_bytes > MAX_RECENT_BYTES:
                self._remove_locked(next(iter(self._imported)))

    def find(self, key: AdapterKey) -> HostCopy | None:
        """The adapter, which is left here; None where it is not among the last."""
        with self._lock:
            return self._imported.get(key)

    def take(self, key: AdapterKey) -> HostCopy | None:
        """The adapter, which the caller owns from here on; None where it is not among the last."""
        with self._lock:
            return self._remove_locked(key)

    def clear(self) -> None:
        """Frees all imported adapters."""
        with self._lock:
            self._imported.clear()
            self._num_bytes = 0

    def _remove_locked(self, key: AdapterKey) -> HostCopy | None:
        removed = self._imported.pop(key, None)
        if removed is not None:
            self._num_bytes -= removed.layout.num_bytes
        return removed


class CudaMemory:
    """Memory of a device that cannot read the host's. Owns the copy stream.

    A thread's current device is the first one unless it is told otherwise, and some calls would take memory there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Page-locked host memory uint8 [num_bytes] from which `fetch` copies."""
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, pieces: Sequence[Tensor], num_bytes: int) -> Tensor:
        """The pieces as one tensor uint8 [num_bytes] on the device, complete. Steps run meanwhile."""
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            with torch.cuda.stream(self._stream):
                storage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
                start = 0
                for piece in pieces:
                    target = storage[start : start + len(piece)]
                    target.copy_(piece[: len(target)], non_blocking=True)
                    start += len(piece)
                done = torch.cuda.Event(blocking=True)  # sleeps instead of taking a core from the steps
                done.record(self._stream)
            done.synchronize()
        return storage

    def hand_over(self, storage: Tensor) -> None:
        """Hands weights over to the steps' thread, which calls this: steps may read them from here on, and freeing them
        waits for those that do."""
        storage.record_stream(torch.cuda.current_stream(self._device))


class Storage:
    """Copies between the store, the host, and the device where it has memory of its own."""

    def __init__(self, store: AdapterStore, device: torch.device, memory: CudaMemory | None = None) -> None:
        """`memory` is made for the device unless it is given."""
        self._store = store
        self._memory = memory or (CudaMemory(device) if device.type == "cuda" else None)
        self._spare = SpareMemory()
        self.disk_reads = ReadCount()
        self.host_reads = ReadCount()  # to a device with memory of its own
        self.recent = RecentImports(self._spare)

    def find(self, key: AdapterKey) -> HostCopy | None:
        """An adapter that is in the store; None where it is not, or has a layout of another release. Nothing is
        copied."""
        stored = self._store.open(key)
        if stored is None:
            return None
        try:
            return HostCopy(key, _layout(stored.header))
        except ValueError as error:
            log.warning("the adapter store has %s %s, which cannot be served: %s", key.kind, key.digest, error)
            return None

    def stage(self, key: AdapterKey) -> HostCopy | None:
        """Copies an adapter's weights to the host. None when the store has dropped the adapter."""
        started_s = time.perf_counter()
        imported = self.recent.find(key) if self._memory is None else self.recent.take(key)
        if imported is not None:
            layout, payload = imported.layout, imported.pieces[0].numpy()
        else:
            stored = self._store.open(key)
            if stored is None:
                return None
            layout, payload = _layout(stored.header), np.frombuffer(stored.payload, dtype=np.uint8)
        if self._memory is None:
            return HostCopy(key, layout)
        pieces = tuple(self._memory.allocate_host(num_bytes) for num_bytes in page_locked_sizes(layout.num_bytes))
        _copy([piece.numpy() for piece in pieces], payload, layout.num_bytes)
        if imported is None:
            self._count_read(started_s, layout.num_bytes)
        return HostCopy(key, layout, pieces)

    def read(self, key: AdapterKey) -> tuple[AdapterLayout, NDArray[np.uint8]] | None:
        """Layout and bytes in the store; None when it has dropped the adapter."""
        stored = self._store.open(key)
        if stored is None:
            return None
        return _layout(stored.header), np.frombuffer(stored.payload, dtype=np.uint8)

    def promote(self, host: HostCopy) -> AdapterWeights | None:
        """A complete copy on the device. None when it was to come from the store, which has dropped the adapter."""
        num_bytes, started_s = host.layout.num_bytes, time.perf_counter()
        if self._memory is not None:
            storage = self._memory.fetch(host.pieces, num_bytes)
            self.host_reads = self.host_reads.plus(time.perf_counter() - started_s, num_bytes)
        elif (imported := self.recent.take(host.key)) is not None:
            storage = imported.pieces[0]
        else:
            stored = self._store.open(host.key)
            if stored is None:
                return None
            storage = self._spare.allocate(num_bytes)
            _copy([storage.numpy()], np.frombuffer(stored.payload, dtype=np.uint8), num_bytes)
            self._count_read(started_s, num_bytes)
        return weights_at(host.key, host.layout, storage)

    def _count_read(self, started_s: float, num_bytes: int) -> None:
        self.disk_reads = self.disk_reads.plus(time.perf_counter() - started_s, num_bytes)

    def hand_over(self, weights: AdapterWeights) -> None:
        """Hands weights over to the steps' thread, which calls this before the first step that reads them."""
        if self._memory is not None:
            self._memory.hand_over(weights.storage)


@lru_cache(maxsize=REMEMBERED_HEADERS)
def _layout(header: bytes) -> AdapterLayout:
    """The layout in a header. Cached: reading it takes as long as copying a small adapter, and most adapters of a
    server have the same."""
    return AdapterLayout.from_json(header_content(header)["layout"])


def page_locked_sizes(num_bytes: int) -> Iterator[int]:
    """Powers of two, the largest first, that hold `num_bytes` with less than MIN_PAGE_LOCKED_BYTES to spare."""
    size = MAX_PAGE_LOCKED_BYTES
    left = -(-num_bytes // MIN_PAGE_LOCKED_BYTES) * MIN_PAGE_LOCKED_BYTES
    while left:
        if size <= left:
            yield size
            left -= size
        else:
            size //= 2


def _copy(targets: Sequence[NDArray[np.uint8]], source: NDArray[np.uint8], num_bytes: int) -> None:
    """Copies by numpy and in pieces: without the interpreter lock, and without torch's thread pool."""
    assert source.size == num_bytes, "a stored payload is as large as its layout"
    begin = 0
    for target in targets:
        part = source[begin : begin + target.size]
        for start in range(0, part.size, COPY_PIECE_BYTES):
            piece = part[start : start + COPY_PIECE_BYTES]
            np.copyto(target[start : start + piece.size], piece)
            checkpoint()
        begin += target.size


class TakesLong(Exception):
    """Raised where an adapter must be computed, for minutes perhaps."""


def import_adapter(
    adapter_id: str,
    source: AdapterSource,
    targets: BaseTargets,
    store: AdapterStore,
    recent: RecentImports | None = None,
    *,
    with_templates: bool = False,
    origin: AdapterOrigin = OWN_ORIGIN,
    may_take_long: bool = True,
) -> HostCopy:
    """Reads the source, checks everything, stores. With `recent` the adapter stays in memory for its first move. Raises
    a typed error, or TakesLong where it may not; then nothing is left behind."""
    with source.open(adapter_id, origin) as files:
        plan = plan_adapter(files, targets, with_templates=with_templates)
        if plan.takes_long and not may_take_long:
            raise TakesLong
        reader = PieceReader(files.opened, targets.dtype)
        for warning in plan.warnings:
            log.warning("adapter %s %s", ascii(adapter_id), warning)
        if plan.heads is not None:
            plan = plan.with_heads(without_base_head(plan.heads, targets, reader))
        plan = plan.without_base_copies(reader)
        layout = plan.layout

        def fill(write: WriteFn) -> None:
            out = PieceWriter(write)
            if plan.lora is not None:
                write_lora(plan.lora, layout, out, reader)
            if plan.heads is not None:
                write_heads(plan.heads, layout, targets.vocab_size, out, reader)
            if plan.lora is not None and plan.lora.classifier is not None:
                write_classifier(plan.lora.classifier, layout, out, reader)
            if plan.lora is not None:
                write_saved(plan.lora, layout, out, reader)
            out.pad_to(layout.num_bytes)
            files.check_unchanged()

        payload = recent.allocate(layout.num_bytes) if recent is not None else None
        memory = None if payload is None else bytes_of(payload)
        key = store.put(layout.kind, layout.to_json(), layout.num_bytes, fill, memory)
        if recent is not None and payload is not None:
            recent.keep(HostCopy(key, layout, (payload,)))
        return HostCopy(key, layout, base=declared_base(files))


def check_adapter(adapter_id: str, source: AdapterSource, targets: BaseTargets) -> AdapterPlan:
    """Runs all checks that need only the headers, without loading."""
    with source.open(adapter_id) as files:
        return plan_adapter(files, targets)
