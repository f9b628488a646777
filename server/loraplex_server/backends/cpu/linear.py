"""Base linears of the CPU: native packed weights, and oneDNN's layout.

oneDNN computes the same product as a plain linear, without reordering the weight in every call. Its operators are
private to PyTorch: `packed_linear` answers with a plain linear wherever they are missing or do not take the weight. A
test notices when they go.
"""

from __future__ import annotations

import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.linear import BaseLinear, BaseLinearFactory, PlainLinear
from loraplex_server.layers.quantization import WeightFormat

# oneDNN has no float64, and on most CPUs its float16 is slower than a plain product.
_DTYPES = (torch.bfloat16, torch.float32)


class PackedLinear:
    """`x @ W.T + bias` from a prepacked copy of W."""

    __slots__ = ("_bias", "_packed")
    is_copy = True

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # 8: the number of rows that the layout is chosen for; the choices differ little.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 8)
        self._bias = bias.detach() if bias is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def matrix(self) -> Tensor:
        return self._packed.to_dense()


def packed_linear(weight: Tensor, bias: Tensor | None) -> BaseLinear:
    """A prepacked linear where there is one for this weight, else a plain one."""
    if not can_pack(weight):
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias)


def can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class NativeLinear:
    """`x @ W.T + bias` from a packed copy of W. A row's result does not depend on how many rows there are."""

    __slots__ = ("_kernels", "bias", "packed")
    is_copy = True

    def __init__(
        self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, form: WeightFormat | None = None
    ) -> None:
        self._kernels = kernels
        self.packed = kernels.pack([weight], form)
        self.bias = bias.detach().contiguous() if bias is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self.packed, self.bias)

    def matrix(self) -> Tensor:
        return self.packed.matrix()


def native_linears(
    kernels: NativeKernels, otherwise: BaseLinearFactory = packed_linear, form: WeightFormat | None = None
) -> BaseLinearFactory:
    """A factory of native linears, with weights of few bits if so wanted; `otherwise` makes linears of weights that the
    kernels do not know."""

    def make(weight: Tensor, bias: Tensor | None) -> BaseLinear:
        if not kernels.can_pack(weight):
            return otherwise(weight, bias)
        return NativeLinear(kernels, weight, bias, form)

    return make
