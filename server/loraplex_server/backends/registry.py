"""Registry of back ends, and the choice for a device.

A new back end is a folder with a subclass of `Backend`, and a line in BACKENDS.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

import torch

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.reports import Progress
from loraplex_server.backends.backend import AttentionRequirements, Backend, Implementation
from loraplex_server.backends.cpu.backend import CpuBackend
from loraplex_server.backends.cuda.backend import CudaBackend
from loraplex_server.layers.attention import AttentionSpec, PagedAttention

log = logging.getLogger(__name__)

# A device gets the first that serves it. The plain one, which serves every device, comes last.
BACKENDS: Final[tuple[type[Backend], ...]] = (CudaBackend, CpuBackend, Backend)


def choose_backend(
    device: torch.device | str,
    *,
    cpu_kernels: str = "auto",
    num_threads: int | None = None,
    progress: Progress = log.debug,
) -> Backend:
    """The back end for `device`. `cpu_kernels`: "native", "torch", or "auto" for native ones where they run.
    `num_threads`: of native kernels, by default one for each core. Raises InvalidArgument."""
    device = torch.device(device)
    found = next(backend for backend in BACKENDS if backend.serves(device.type))
    return found.create(device, cpu_kernels=cpu_kernels, num_threads=num_threads, progress=progress)


def plain_backend(device: torch.device) -> Backend:
    """The back end for `device`, with the plain reference in place of a CPU's: for tools and tests that name none."""
    return Backend(device) if device.type == "cpu" else choose_backend(device)


def lora_operations() -> list[Implementation]:
    """Every implementation of segmented LoRA. Imports no triton."""
    return [found for backend in BACKENDS for found in backend.lora_operations()]


def attention_kernels(
    backend: Backend | None = None, specs: Sequence[AttentionSpec] = (), dtype: torch.dtype | None = None
) -> list[Implementation]:
    """Every implementation of attention, best first, for the layers of a model in `dtype` on the back end's device.
    Without a back end: what this machine has."""
    wanted = AttentionRequirements(backend, tuple(dict.fromkeys(specs)), dtype)
    return [found for kind in BACKENDS for found in kind.attention_kernels(wanted)]


def choose_attention(
    name: str, backend: Backend, specs: Sequence[AttentionSpec] = (), dtype: torch.dtype | None = None
) -> Implementation:
    """The attention called `name`, or the best that can be used for "auto". Without `specs`, whatever the layers are.
    Raises InvalidArgument."""
    flag, found = "--attention", attention_kernels(backend, specs, dtype)
    for one in found:
        if one.name == name or (name == "auto" and one.usable):
            if one.make is None or not one.usable:
                raise InvalidArgument(f"{flag} {name} cannot be used here: {one.reason}", field=flag)
            return one
    raise InvalidArgument(f"{flag} must be auto, {', '.join(one.name for one in found)}, not {name!a}", field=flag)


def make_attention(
    name: str, backend: Backend, specs: Sequence[AttentionSpec] = (), dtype: torch.dtype | None = None
) -> PagedAttention:
    """Attention as `choose_attention` chooses it. Raises InvalidArgument."""
    one = choose_attention(name, backend, specs, dtype)
    assert one.make is not None
    log.info("attention over the paged KV cache: %s (%s)", one.name, one.reason)
    return one.make(specs)
