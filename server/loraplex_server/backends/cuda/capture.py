"""Capture of CUDA graphs.

The function runs twice on the capturing stream before it is captured: the first run compiles kernels and allocates
workspaces; in the second a wait for the device raises, because inside a capture its error would be hard to read.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

Replay = Callable[[], None]
# Makes a graph of what a function launches; the function may be called several times for that.
Capture = Callable[[Callable[[], object]], Replay]


class CudaCapture:
    """Captures graphs that share one pool of memory: only one of them runs at a time. Owns stream and pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Callable[[], object]) -> Replay:
        """Raises RuntimeError, or what `launch` raises. The device is as usable as before then."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            self._stream.wait_stream(before)
            # Also around the capture, whose own end does not restore the stream when it raises.
            with torch.cuda.stream(self._stream):
                launch()
                with _waiting_raises():
                    launch()
                graph = torch.cuda.CUDAGraph()
                # Other threads may load adapters meanwhile.
                with (
                    _no_garbage_collection(),
                    torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
                ):
                    launch()
            before.wait_stream(self._stream)
        return graph.replay


@contextmanager
def _waiting_raises() -> Generator[None]:
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode misses some waits, which the capture finds
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def _no_garbage_collection() -> Generator[None]:
    """What a collection frees on the device may not be freed during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
