"""The most likely token of each row by the native CPU kernels."""

from __future__ import annotations

from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.sampling.draw import row_argmax
from loraplex_server.sampling.sampler import Argmax


def native_argmax(kernels: NativeKernels | None) -> Argmax:
    """torch's of dtypes that the kernels do not know, and of all where there are no kernels."""
    if kernels is None:
        return row_argmax

    def argmax(values: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.argmax(values) if values.dtype in DTYPES else row_argmax(values)

    return argmax
