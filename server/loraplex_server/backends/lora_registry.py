"""Which implementations of segmented LoRA and of dense products this machine has, and which one a device gets."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, cast

import torch

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.backends.cpu.lora import NativeDense, NativeOps
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load as load_native
from loraplex_server.backends.cpu.torch_dense import CpuDense
from loraplex_server.backends.cpu.torch_lora import CpuOps
from loraplex_server.backends.cuda.punica import PunicaFunctions, PunicaOps
from loraplex_server.backends.reference.lora import ReferenceOps
from loraplex_server.layers.lora import SegmentedLora
from loraplex_server.layers.segmented_dense import ReferenceDense, SegmentedDense


class OpsStatus(NamedTuple):
    name: str
    usable: bool
    reason: str  # what it is for, or why it cannot be used


def available_ops() -> list[OpsStatus]:
    """Every implementation, the fastest of a device first. Imports no triton."""
    problem, punica, native = _triton_problem(), _punica_problem(), load_native().status
    return [
        OpsStatus("triton", not problem, problem or "for CUDA devices"),
        OpsStatus("punica", not punica, punica or "for CUDA devices, with --lora-kernels punica"),
        OpsStatus("native", native.usable, native.reason or f"for the CPU, {native.isa}"),
        OpsStatus("cpu", True, "for the CPU"),
        OpsStatus("reference", True, "for every device, slow; what the others are tested against"),
    ]


def choose_ops(
    device: torch.device | str, native: NativeKernels | None = None, max_rank: int = 256, name: str = "auto"
) -> SegmentedLora:
    """The fastest implementation that works for tensors on `device`, or the one called `name`, which is for GPUs.
    `native`: the CPU kernels in C++, if they are to be used. `max_rank`: of any adapter that will come; what is
    captured in CUDA graphs has room for it. Raises InvalidArgument where the one asked for cannot be used."""
    kind = torch.device(device).type
    if name != "auto":
        return _ops_called(name, kind, max_rank)
    if kind == "cpu":
        return NativeOps(native) if native is not None else CpuOps()
    if kind == "cuda" and not _triton_problem():
        # Importing triton takes seconds, and where there is no triton the module does not import.
        from loraplex_server.backends.cuda.lora.operation import TritonOps

        return TritonOps(max_rank)
    return ReferenceOps()


def _ops_called(name: str, kind: str, max_rank: int) -> SegmentedLora:
    field = "--lora-kernels"
    if kind == "cpu":
        raise InvalidArgument(f"{field} {name} is for GPUs; on a CPU --cpu-kernels says what computes", field=field)
    if name == "reference":
        return ReferenceOps()
    if name == "punica":
        return choose_punica()
    if name != "triton":
        raise InvalidArgument(f"{field} takes auto, triton, punica or reference, not {name!a}", field=field)
    if problem := _triton_problem():
        raise InvalidArgument(f"{field} triton: {problem}", field=field)
    return choose_ops(kind, max_rank=max_rank)


def choose_punica() -> SegmentedLora:
    """The Punica package's operators, and for what they do not compute what CUDA gets otherwise. Never chosen by
    itself: its calls cannot be part of a CUDA graph. Raises InvalidArgument where it cannot be used."""
    if problem := _punica_problem():
        raise InvalidArgument(f"Punica's kernels cannot be used: {problem}", field="--lora-kernels")
    return PunicaOps(cast(PunicaFunctions, import_module("punica.ops")), choose_ops("cuda"))


def choose_dense(device: torch.device | str, native: NativeKernels | None = None) -> SegmentedDense:
    """The same for dense products."""
    kind = torch.device(device).type
    if kind == "cpu":
        return NativeDense(native) if native is not None else CpuDense()
    if kind == "cuda" and not _triton_problem():
        from loraplex_server.backends.cuda.lora.dense import TritonDense

        return TritonDense()
    return ReferenceDense()


def _triton_problem() -> str:
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return ""


def _punica_problem() -> str:
    """On PyPI a stranger has Punica's name: ours is told by its functions, as its file has them. Nothing is run."""
    spec = find_spec("punica")
    if spec is None:
        return "the package punica is not installed"
    files = [Path(folder, "ops", "__init__.py") for folder in spec.submodule_search_locations or ()]
    text = "".join(file.read_text(errors="replace") for file in files if file.is_file())
    if not all(f"def {name}(" in text for name in PunicaFunctions.__annotations__):
        return "the package punica that is installed is another one, without LoRA operators"
    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if torch.cuda.get_device_capability()[0] >= 8 else "the GPU's compute capability is below 8.0"
