"""The copies between tiers: the store, host memory, device memory. Runs on the mover's thread.

On a CPU the host tier is the store's file, which the system keeps in its page cache from the first copy on, and the
device tier a flat tensor that kernels read in place: the file is mapped for the copy only, because every mapping takes
a file descriptor. With CUDA the host tier is pinned memory, and the copy to the device runs on a stream of its own, so
that it overlaps with steps; it has ended before anybody hears of it, so that no step ever waits for one.

Pinned memory is asked for in pieces that are powers of two: PyTorch would round anything else up to the next one, to up
to twice what the host's budget counts, and what is given back it would keep for requests of that size only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.cache.blocks import Blocks, Landing
from loraplex_adapters.io.throttle import checkpoint
from loraplex_adapters.layout.adapter import AdapterLayout, weights_at
from loraplex_adapters.store import REMEMBERED_HEADERS, AdapterStore, header_content
from loraplex_adapters.weights import AdapterWeights
from loraplex_contracts.adapters import AdapterKey

COPY_PIECE_BYTES = 256 << 10
# Of pinned memory. The smallest is what an adapter may take beyond its size.
MAX_PINNED_BYTES, MIN_PINNED_BYTES = 4 << 20, 64 << 10


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One adapter on the host. Where the device reads host memory it holds no bytes of its own."""

    key: AdapterKey
    layout: AdapterLayout
    pinned: tuple[Tensor, ...] = ()  # uint8, the payload one after the other; the last one may have room left


class DeviceMemory(Protocol):
    """Memory of a device that cannot read the host's."""

    def pin(self, num_bytes: int) -> Tensor:
        """Host memory uint8 [num_bytes] from which `fetch` copies."""
        ...

    def fetch(self, pieces: Sequence[Tensor], num_bytes: int) -> Tensor:
        """The pieces as one tensor uint8 [num_bytes] on the device. Returns when it is complete there; meanwhile steps
        run."""
        ...

    def hand_over(self, storage: Tensor) -> None:
        """Called where the steps run: from here on they may read it, and freeing it waits for those that do."""
        ...


class CudaMemory:
    """Implements DeviceMemory. Owns the copy stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def pin(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def fetch(self, pieces: Sequence[Tensor], num_bytes: int) -> Tensor:
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
        storage.record_stream(torch.cuda.current_stream(self._device))


class Tiers:
    """The store and, where the device has memory of its own, that."""

    def __init__(self, store: AdapterStore, device: torch.device, memory: DeviceMemory | None = None) -> None:
        """`memory` is made for the device unless it is given."""
        self._store = store
        self._memory = memory or (CudaMemory(device) if device.type == "cuda" else None)
        self._blocks = Blocks()
        self.landing = Landing(self._blocks)

    def stage(self, key: AdapterKey) -> HostCopy | None:
        """From the store, or from where it has just landed. None when the store has dropped the adapter."""
        landed = self.landing.find(key) if self._memory is None else self.landing.take(key)
        if landed is not None:
            layout, payload = landed.layout, landed.payload.numpy()
        else:
            stored = self._store.open(key)
            if stored is None:
                return None
            layout, payload = _layout(stored.header), np.frombuffer(stored.payload, dtype=np.uint8)
        if self._memory is None:
            return HostCopy(key, layout)
        pieces = tuple(self._memory.pin(num_bytes) for num_bytes in pinned_sizes(layout.num_bytes))
        _copy([piece.numpy() for piece in pieces], payload, layout.num_bytes)
        return HostCopy(key, layout, pieces)

    def promote(self, host: HostCopy) -> AdapterWeights | None:
        """A copy on the device, complete. None when it was to come from the store, and that has dropped the adapter."""
        num_bytes = host.layout.num_bytes
        if self._memory is not None:
            storage = self._memory.fetch(host.pinned, num_bytes)
        elif (landed := self.landing.take(host.key)) is not None:
            storage = landed.payload
        else:
            stored = self._store.open(host.key)
            if stored is None:
                return None
            storage = self._blocks.take(num_bytes)
            _copy([storage.numpy()], np.frombuffer(stored.payload, dtype=np.uint8), num_bytes)
        return weights_at(host.key, host.layout, storage)

    def hand_over(self, weights: AdapterWeights) -> None:
        """Called where the steps run, before the first one that reads the weights."""
        if self._memory is not None:
            self._memory.hand_over(weights.storage)


@lru_cache(maxsize=REMEMBERED_HEADERS)
def _layout(header: bytes) -> AdapterLayout:
    """Reading it takes as long as copying a small adapter, and most adapters of a server have the same."""
    return AdapterLayout.from_json(header_content(header)["layout"])


def pinned_sizes(num_bytes: int) -> Iterator[int]:
    """Powers of two that hold `num_bytes` together, with less than MIN_PINNED_BYTES to spare; the largest first."""
    size = MAX_PINNED_BYTES
    left = -(-num_bytes // MIN_PINNED_BYTES) * MIN_PINNED_BYTES
    while left:
        if size <= left:
            yield size
            left -= size
        else:
            size //= 2


def _copy(targets: Sequence[NDArray[np.uint8]], source: NDArray[np.uint8], num_bytes: int) -> None:
    """By numpy and in pieces: without the interpreter lock, and without torch's team of threads."""
    assert source.size == num_bytes, "a stored payload is as large as its layout"
    begin = 0
    for target in targets:
        part = source[begin : begin + target.size]
        for start in range(0, part.size, COPY_PIECE_BYTES):
            piece = part[start : start + COPY_PIECE_BYTES]
            np.copyto(target[start : start + piece.size], piece)
            checkpoint()
        begin += target.size
