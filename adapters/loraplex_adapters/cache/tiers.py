"""The copies between tiers: the store, host memory, device memory. Runs on the mover's thread.

On a CPU the host tier is the store's file, in the system's page cache, and the device tier a flat tensor that kernels
read in place: the file is mapped for the copy only, because every mapping takes a file descriptor. With CUDA the host
tier is pinned memory, and the copy to the device runs on a stream of its own, so that it overlaps with steps; it has
ended before anybody hears of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loraplex_adapters.key import AdapterKey
from loraplex_adapters.layout import AdapterLayout, weights_at
from loraplex_adapters.pace import Pace
from loraplex_adapters.store import AdapterStore, StoredAdapter
from loraplex_adapters.weights import AdapterWeights

COPY_PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class HostCopy:
    """One adapter on the host. Without CUDA it holds no bytes of its own."""

    key: AdapterKey
    layout: AdapterLayout
    pinned: Tensor | None = None  # uint8 [num_bytes], with CUDA


class Tiers:
    """Knows the device; owns its copy stream."""

    def __init__(self, store: AdapterStore, device: torch.device) -> None:
        self._store = store
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def stage(self, key: AdapterKey) -> HostCopy | None:
        """From the store. None when it has dropped the adapter."""
        stored = self._store.open(key)
        if stored is None:
            return None
        layout = AdapterLayout.from_json(stored.layout)
        if self._device.type != "cuda":
            return HostCopy(key, layout)
        pinned = torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True)
        _copy(pinned.numpy(), stored)
        return HostCopy(key, layout, pinned)

    def promote(self, host: HostCopy, pace: Pace) -> AdapterWeights | None:
        """A copy on the device, complete. None when it was to come from the store, and that has dropped the adapter."""
        num_bytes = host.layout.num_bytes
        if self._device.type != "cuda":
            stored = self._store.open(host.key)
            if stored is None:
                return None
            storage = torch.empty(num_bytes, dtype=torch.uint8)
            _copy(storage.numpy(), stored)
            return weights_at(host.key, host.layout, storage, pace)
        assert host.pinned is not None, "with CUDA the host tier is pinned"
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with torch.cuda.stream(self._stream):
            storage = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            storage.copy_(host.pinned, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()
        return weights_at(host.key, host.layout, storage, pace)

    def hand_over(self, weights: AdapterWeights) -> None:
        """Called where the steps run: tells the allocator that their stream uses the memory from now on, so that
        freeing it later waits for the steps that still read it."""
        if self._device.type == "cuda":
            weights.storage.record_stream(torch.cuda.current_stream(self._device))


def _copy(target: NDArray[np.uint8], stored: StoredAdapter) -> None:
    """By numpy and in pieces: without the interpreter lock, and without torch's team of threads."""
    source = np.frombuffer(stored.payload, dtype=np.uint8)
    assert source.size == target.size, "a stored payload is as large as its layout"
    for start in range(0, source.size, COPY_PIECE_BYTES):
        end = start + COPY_PIECE_BYTES
        np.copyto(target[start:end], source[start:end])
