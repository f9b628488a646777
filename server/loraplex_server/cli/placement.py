"""Placement of a machine's workers on its GPUs and cores."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and cores of one worker."""

    device: str
    cores: tuple[frozenset[int], ...] = ()  # logical CPUs of each core; empty: all that the process may use


def place(index: int, num_workers: int, device: str, num_gpus: int, cores: Sequence[frozenset[int]]) -> Placement:
    """Placement of worker `index` of `num_workers`. `device` is the flag, `cores` those of the machine in NUMA order.

    `auto` and `cuda` spread the workers over all GPUs, `cuda:N` over those from N on. Where there are more workers than
    GPUs or cores, several share one.
    """
    if device in ("cpu", "cpu:0") or (device == "auto" and not num_gpus):
        if len(cores) < num_workers:
            return Placement(device, (cores[index % len(cores)],))
        first, end = (number * len(cores) // num_workers for number in (index, index + 1))
        return Placement(device, tuple(cores[first:end]))
    first_gpu = int(device[5:]) if device.startswith("cuda:") and device[5:].isdecimal() else 0
    if device not in ("auto", "cuda", f"cuda:{first_gpu}") or first_gpu >= num_gpus:
        return Placement(device)  # loading the model says what is wrong with it
    return Placement(f"cuda:{first_gpu + index % (num_gpus - first_gpu)}")


def parse_placement(text: str) -> tuple[int, int]:
    """INDEX/COUNT of `--placement`. Raises InvalidArgument."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise InvalidArgument(f"--placement takes INDEX/COUNT, not {text!a}", field="--placement")
    return int(index), int(count)


def count_gpus() -> int:
    """Number of GPUs that torch sees. Without a driver there is none, and torch is not imported: that takes seconds."""
    if not any(map(_loads, ("libcuda.so.1", "libamdhip64.so"))):
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def apply_placement(config: WorkerConfig, index: int, num_workers: int) -> WorkerConfig:
    """Binds this process to its cores, and returns the configuration with its device. Children inherit the cores."""
    from loraplex_server.backends.cpu.cores import default_num_threads, own_cores

    engine = config.engine
    placement = place(index, num_workers, engine.model.device, count_gpus(), own_cores())
    num_threads = engine.num_threads
    if placement.cores:
        if hasattr(os, "sched_setaffinity"):  # Linux
            os.sched_setaffinity(0, frozenset().union(*placement.cores))
        num_threads = num_threads or min(default_num_threads(num_workers), len(placement.cores))
    model = replace(engine.model, device=placement.device)
    return replace(config, engine=replace(engine, model=model, num_threads=num_threads))
