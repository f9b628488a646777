"""Device of the GPU benchmark: its name, bandwidth, and timed runs."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch

from loraplex_server.backends.cuda.graphs import CudaCapture

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "peft")
READ_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}


class Timing(NamedTuple):
    seconds: float  # of one call
    is_graph: bool  # whether launches were replayed from a CUDA graph, so that the host took no part


def describe(device: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu"
    return {"device": name, "python": platform.python_version(), "cuda": torch.version.cuda or "none", **found}


def free_memory(device: torch.device) -> None:
    """Gives back what nobody refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_call(
    call: Callable[[], object], device: torch.device, *, num_calls: int = 10, is_replayable: bool = True
) -> Timing:
    """The median time of a call that is long enough to be timed alone; on CUDA of its replays as a graph. Not
    replayable: it copies from the host, which a replay would do from memory that is somebody else's by then."""
    call()
    synchronize(device)
    replay, is_graph = _captured(call, device) if is_replayable else (call, False)
    replay()
    seconds: list[float] = []
    for _ in range(num_calls):
        synchronize(device)
        start = time.perf_counter()
        replay()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), is_graph)


def _captured(call: Callable[[], object], device: torch.device) -> tuple[Callable[[], object], bool]:
    """The call as a graph; the call itself where there are none, or where it does what cannot be captured."""
    if device.type != "cuda":
        return call, False

    def launch() -> None:
        call()

    try:
        return CudaCapture(device)(launch), True
    except RuntimeError:
        synchronize(device)
        return call, False


def read_bandwidth(device: torch.device) -> float:
    """Bytes per second that the device reads at best, by three ways of reading far more than its caches hold."""
    num_bytes = READ_BYTES[device.type]
    values = torch.randn(num_bytes // 4, device=device)
    matrix = values.bfloat16().view(-1, 8192)
    vector = torch.randn(8192, device=device).bfloat16()
    best = 0.0
    for call, size in (
        (lambda: values.sum(), values.nbytes),
        (lambda: values.amax(), values.nbytes),
        (lambda: torch.mv(matrix, vector), matrix.nbytes),
    ):
        best = max(best, size / time_call(call, device).seconds)
    return best
