"""RMS norms and gates by native CPU kernels, proven equal to a model's own."""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.fusion import NormForm


class NativeFused:
    """Implements FusedOps, without rotary embeddings."""

    name = "native"

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        if x.dtype not in DTYPES or (form.narrows and form.offset):
            raise TypeError(f"no norm of this form in {x.dtype}")
        return self._kernels.rms_norm(x, weight, eps, offset=form.offset, narrows=form.narrows)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        if weight.dtype not in DTYPES or x.dtype not in (weight.dtype, torch.float32):
            raise TypeError(f"no norm beside a gate of {x.dtype} by {weight.dtype}")
        return self._kernels.gated_norm(x, gate, weight, eps, gates_first=gates_first)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        raise TypeError("rotary embeddings are left to the model")

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        if gate.dtype not in DTYPES or gate.shape != up.shape or gate.dtype != up.dtype:
            raise TypeError(f"no gate of {gate.dtype} {tuple(gate.shape)} by {up.dtype} {tuple(up.shape)}")
        return self._kernels.silu_product(gate, up)
