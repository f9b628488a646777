"""Memory of host and device, and asynchronous copies between them.

On a CPU nothing is copied. With CUDA every copy has page-locked memory of its own. The caching allocator reuses it only
when the copy has happened, so that no step can overwrite what an earlier one still sends.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGE_PAGE = 2 << 20


def large_pages(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor. A CPU's is on large pages where the system gives them: the kernels prefetch keys and
    values, and each page is looked up first. Takes memory from the system as pages are first used."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type == "cpu" and num_bytes >= LARGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # not enough memory, which torch.empty says better, or no such pages
            region = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            region.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(region, dtype=dtype).view(*shape)
    return torch.empty(*shape, dtype=dtype, device=device)


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. On a CPU the tensor itself."""
    if device.type == "cpu":
        return host
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


def refill(target: Tensor, host: Tensor) -> None:
    """Overwrites a device tensor, which stays where it is."""
    target.copy_(host.pin_memory() if target.device.type == "cuda" else host, non_blocking=True)


def host_ints(size: int, device: torch.device) -> Tensor:
    """Host memory, int32 [size], from which a copy to `device` is asynchronous."""
    return torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")


@dataclass(frozen=True, slots=True)
class Download:
    """Values on their way to the host, or there already."""

    values: Tensor  # on the host; page-locked where they come from CUDA
    done: torch.cuda.Event | None = None

    def wait(self) -> Tensor:
        """The values, on the host."""
        if self.done is not None:
            self.done.synchronize()
        return self.values


def download(values: Tensor) -> Download:
    """Starts the copy behind what the current stream has been given so far."""
    if values.device.type != "cuda":
        return Download(values)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))
    return Download(host, done)
