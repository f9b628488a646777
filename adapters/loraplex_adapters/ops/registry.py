"""Which implementations of segmented LoRA and of dense products this machine has, and which one a device gets."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

import torch

from loraplex_adapters.native.library import Library
from loraplex_adapters.ops.base import SegmentedLora
from loraplex_adapters.ops.cpu import CpuOps
from loraplex_adapters.ops.dense import ReferenceDense, SegmentedDense
from loraplex_adapters.ops.dense_cpu import CpuDense
from loraplex_adapters.ops.reference import ReferenceOps


class OpsStatus(NamedTuple):
    name: str
    usable: bool
    reason: str  # what it is for, or why it cannot be used


def available_ops() -> list[OpsStatus]:
    """Every implementation, the fastest of a device first. Imports no triton."""
    problem = _triton_problem()
    return [
        OpsStatus("triton", not problem, problem or "for CUDA devices"),
        OpsStatus("cpu", True, "for the CPU"),
        OpsStatus("reference", True, "for every device, slow; what the others are tested against"),
    ]


def choose_ops(device: torch.device | str, native: Library | None = None) -> SegmentedLora:
    """The fastest implementation that works for tensors on `device`. `native`: the CPU kernels in C++, if they are to
    be used."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuOps()
    if kind == "cuda" and not _triton_problem():
        # Importing triton takes seconds, and where there is no triton the module does not import.
        from loraplex_adapters.ops.triton.lora import TritonOps

        return TritonOps()
    return ReferenceOps()


def choose_dense(device: torch.device | str) -> SegmentedDense:
    """The same for dense products."""
    kind = torch.device(device).type
    if kind == "cpu":
        return CpuDense()
    if kind == "cuda" and not _triton_problem():
        from loraplex_adapters.ops.triton.dense import TritonDense

        return TritonDense()
    return ReferenceDense()


def _triton_problem() -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return ""
