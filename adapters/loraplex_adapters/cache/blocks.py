"""Memory of the CPU for whole adapters, and the adapters that were imported last in such memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from loraplex_adapters.layout.adapter import AdapterLayout
from loraplex_contracts.adapters import AdapterKey

# Of an adapter's memory that is kept when it goes, and of those imported last: both beyond all budgets.
MAX_SPARE_BYTES = 16 << 20
MAX_LANDED_BYTES = 24 << 20


class Blocks:
    """Memory of the CPU for one adapter each. Owns one block that has come back, for the next adapter of that size:
    new memory is cleared page by page, which takes longer than the copy into it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spare: mmap.mmap | None = None

    @property
    def spare_bytes(self) -> int:
        spare = self._spare
        return 0 if spare is None else len(spare)

    def take(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], whatever is in it. The block comes back with the last tensor that looks into it."""
        with self._lock:
            block, self._spare = self._spare, None
        if block is None or len(block) != num_bytes:
            block = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without them
                    block.madvise(mmap.MADV_HUGEPAGE)  # fewer pages: faster to clear, faster to read
        view = memoryview(block)
        weakref.finalize(view, self._take_back, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _take_back(self, block: mmap.mmap) -> None:
        """Called on whatever thread lets go of the last tensor, also while that one is in `take`: no lock."""
        if len(block) <= MAX_SPARE_BYTES:
            self._spare = block


@dataclass(frozen=True, slots=True)
class Landed:
    """An adapter in host memory, as the store has it."""

    key: AdapterKey
    layout: AdapterLayout
    payload: Tensor  # uint8 [layout.num_bytes]


class Landing:
    """Where imported adapters land on their way to the store: the latest stay in memory, so that their first move need
    not read them from there. Owns them, MAX_LANDED_BYTES at most, until they are taken or others come. Thread-safe."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._lock = threading.Lock()
        self._landed: OrderedDict[AdapterKey, Landed] = OrderedDict()  # the oldest first

    def memory(self, num_bytes: int) -> Tensor | None:
        """For the next one, in place of as many of the oldest as it takes. None for one that is too large, and where
        there is no memory."""
        self._make_room(num_bytes)
        if not 0 < num_bytes <= MAX_LANDED_BYTES:
            return None
        try:
            return self._blocks.take(num_bytes)
        except OSError:
            return None

    def put(self, landed: Landed) -> None:
        with self._lock:
            self._landed[landed.key] = landed
            self._landed.move_to_end(landed.key)

    def find(self, key: AdapterKey) -> Landed | None:
        """It stays."""
        with self._lock:
            return self._landed.get(key)

    def take(self, key: AdapterKey) -> Landed | None:
        """To be kept by whoever asks."""
        with self._lock:
            return self._landed.pop(key, None)

    def clear(self) -> None:
        """Gives all of them up."""
        with self._lock:
            self._landed.clear()

    def _make_room(self, num_bytes: int) -> None:
        with self._lock:
            left = sum(landed.layout.num_bytes for landed in self._landed.values())
            while self._landed and left + num_bytes > MAX_LANDED_BYTES:
                _, oldest = self._landed.popitem(last=False)
                left -= oldest.layout.num_bytes
