"""Base weights packed for the native CPU kernels."""

from __future__ import annotations

from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.linear import BaseLinear, BaseLinearFactory
from loraplex_server.layers.packed_linear import packed_linear


class NativeLinear:
    """`x @ W.T + bias` from a packed copy of W. A row's result does not depend on how many rows there are."""

    __slots__ = ("_kernels", "bias", "packed")
    is_copy = True

    def __init__(self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, *, int8: bool = False) -> None:
        self._kernels = kernels
        self.packed = kernels.pack([weight], int8=int8)
        self.bias = bias.detach().contiguous() if bias is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self.packed, self.bias)


def native_linears(
    kernels: NativeKernels, otherwise: BaseLinearFactory = packed_linear, *, int8: bool = False
) -> BaseLinearFactory:
    """Makes native linears, with weights in eight bits if so wanted; `otherwise` of weights that the kernels do not
    know."""

    def make(weight: Tensor, bias: Tensor | None) -> BaseLinear:
        if not kernels.can_pack(weight):
            return otherwise(weight, bias)
        return NativeLinear(kernels, weight, bias, int8=int8)

    return make


class AbsorbedLinear:
    """A linear that is part of a stack, where its weight is now. Called by nobody."""

    __slots__ = ()
    is_copy = True

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("this linear is computed by the stack of layers that it is part of")


def absorbing(otherwise: BaseLinearFactory) -> BaseLinearFactory:
    """Makes nothing of weights that a stack has taken."""

    def make(weight: Tensor, bias: Tensor | None) -> BaseLinear:
        return AbsorbedLinear() if weight.is_meta else otherwise(weight, bias)

    return make
