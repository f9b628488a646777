"""RMS norms by native CPU kernels, where proven equal to a model's own."""

from __future__ import annotations

from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.fusion import NormForm


class NativeFused:
    """Implements FusedOps, without rotary embeddings and gates."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        if x.dtype not in DTYPES or (form.narrows and form.offset):
            raise TypeError(f"no norm of this form in {x.dtype}")
        return self._kernels.rms_norm(x, weight, eps, offset=form.offset, narrows=form.narrows)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("rotary embeddings are left to the model")

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        raise TypeError("gates are left to the model")
