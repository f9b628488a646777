"""Which attention back ends there are, whether they can be used here, and which one is taken.

A back end is a function in `BACKENDS` that says what `loraplex doctor` shows of it; its module is imported only where
it can be used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from loraplex_contracts.errors import InvalidArgument
from loraplex_server.backends.cpu import attention as native_paged
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.cpu.native.library import load as load_native
from loraplex_server.backends.reference.attention import TorchPagedAttention
from loraplex_server.layers.attention import AttentionBackend, PagedAttention
from loraplex_server.layers.spec import AttentionSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What attention is to be chosen for. A field without a value forbids nothing."""

    device: torch.device | None = None
    specs: tuple[AttentionSpec, ...] = ()
    dtype: torch.dtype | None = None
    kernels: NativeKernels | None = None  # on a CPU: those that are in use


def available_attention(
    device: torch.device | None = None,
    specs: Sequence[AttentionSpec] = (),
    dtype: torch.dtype | None = None,
    kernels: NativeKernels | None = None,
) -> list[AttentionBackend]:
    """All back ends, best first, for the attention layers of a model in `dtype` on `device`, with the native CPU
    `kernels` that are in use. Without a device: what this machine has."""
    wanted = Wanted(device, tuple(dict.fromkeys(specs)), dtype, kernels)
    return [describe(wanted) for describe in BACKENDS]


def make_attention(
    name: str = "auto",
    device: torch.device | None = None,
    specs: Sequence[AttentionSpec] = (),
    dtype: torch.dtype | None = None,
    kernels: NativeKernels | None = None,
) -> PagedAttention:
    """The back end called `name`, or the best usable one, for the layers of one model. Raises InvalidArgument."""
    backends = available_attention(device, specs, dtype, kernels)
    for backend in backends:
        if backend.name == name or (name == "auto" and backend.is_usable):
            if backend.make is None or not backend.is_usable:
                raise InvalidArgument(f"the attention back end {name!r} cannot be used here: {backend.reason}")
            log.info("attention over the paged KV cache: %s (%s)", backend.name, backend.reason)
            return backend.make(specs)
    known = ", ".join(backend.name for backend in backends)
    raise InvalidArgument(f"there is no attention back end {name!r}; known are: auto, {known}")


def _flashinfer(wanted: Wanted) -> AttentionBackend:
    def no(reason: str) -> AttentionBackend:
        return AttentionBackend("flashinfer", False, reason)

    if find_spec("flashinfer") is None:
        return no("the package flashinfer-python is not installed")
    if problem := _cuda_problem(wanted) or _triton_problem():
        return no(problem)
    from loraplex_server.backends.cuda.attention import flashinfer as ours
    from loraplex_server.backends.cuda.attention.paged import write_pages

    if problem := ours.reason_against(wanted.specs, wanted.dtype):
        return no(problem)
    try:
        package: Any = import_module("flashinfer")
    except Exception as error:  # it compiles and loads libraries: anything may go wrong
        return no(f"the package flashinfer does not load: {(str(error) or type(error).__name__).splitlines()[0]}")
    reason = "FlashInfer, for CUDA devices"
    return AttentionBackend(
        "flashinfer", True, reason, lambda specs: ours.FlashInferAttention(specs, package, write_pages)
    )


def _triton(wanted: Wanted) -> AttentionBackend:
    if problem := _triton_problem() or _cuda_problem(wanted):
        return AttentionBackend("triton", False, problem)
    # Importing triton takes seconds, and where there is no triton the module does not import.
    from loraplex_server.backends.cuda.attention.paged import TritonPagedAttention

    return AttentionBackend("triton", True, "own kernels, for CUDA devices", TritonPagedAttention)


def _native(wanted: Wanted) -> AttentionBackend:
    def no(reason: str) -> AttentionBackend:
        return AttentionBackend("native", False, reason)

    if wanted.device is not None and wanted.device.type != "cpu":
        return no(f"it is for the CPU, not for {wanted.device.type}")
    kernels, isa = wanted.kernels, wanted.kernels.isa if wanted.kernels is not None else ""
    if kernels is None:
        status = load_native().status
        if not status.usable:
            return no(f"the native CPU kernels are missing: {status.reason}")
        if wanted.device is not None:
            return no("the native CPU kernels are not in use")
        isa = status.isa
    for spec in wanted.specs:
        if problem := native_paged.reason_against(spec, wanted.dtype):
            return no(problem)
    make = (lambda _: native_paged.NativePagedAttention(kernels)) if kernels is not None else None
    return AttentionBackend("native", True, f"own kernels, for the CPU, {isa}", make)


def _torch(wanted: Wanted) -> AttentionBackend:
    return AttentionBackend("torch", True, "plain torch, any device", lambda _: TorchPagedAttention())


def _triton_problem() -> str:
    return "" if find_spec("triton") is not None else "the package triton is not installed"


def _cuda_problem(wanted: Wanted) -> str:
    if not torch.cuda.is_available():
        return "no CUDA device"
    if wanted.device is not None and wanted.device.type != "cuda":
        return f"it is for CUDA devices, not for {wanted.device.type}"
    return ""


# Best first. What cannot be used on a device says so.
BACKENDS: Final[tuple[Callable[[Wanted], AttentionBackend], ...]] = (_flashinfer, _triton, _native, _torch)
