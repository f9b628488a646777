"""Base linears of the CPU: native packed weights, oneDNN's layout, rounding to eight bits.

oneDNN computes the same product as a plain linear, without reordering the weight in every call. Its operators are
private to PyTorch: `packed_linear` answers with a plain linear wherever they are missing or do not take the weight. A
test notices when they go.

A model's linears are rounded before anything else. All later checks and packing see the rounded model alone, so serving
it is as exact as serving any other.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from loraplex_adapters.io.safetensors import weight_sha256
from loraplex_contracts.errors import Unimplemented, UnsupportedModel
from loraplex_server.backends.cpu.native.int8 import TOO_LARGE, round_
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.layers.experts import MakeExpertProducts
from loraplex_server.layers.linear import BaseLinear, BaseLinearFactory, PlainLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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

    def __init__(self, kernels: NativeKernels, weight: Tensor, bias: Tensor | None, *, int8: bool = False) -> None:
        self._kernels = kernels
        self.packed = kernels.pack([weight], int8=int8)
        self.bias = bias.detach().contiguous() if bias is not None else None

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x, self.packed, self.bias)

    def matrix(self) -> Tensor:
        return self.packed.matrix()


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


class NativeExperts:
    """Implements ExpertProducts, with a packed copy of the weights. A row's result does not depend on how many rows
    there are, nor on where they go."""

    __slots__ = ("_kernels", "_num_experts", "_num_outputs", "_packed")

    def __init__(self, kernels: NativeKernels, weight: Tensor) -> None:
        self._kernels = kernels
        self._num_experts, self._num_outputs, _ = weight.shape
        self._packed = kernels.pack_experts(weight)

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        least, most = experts.aminmax()
        if int(least) < 0 or int(most) >= self._num_experts:  # a router's own matter, and an address here
            raise IndexError(f"a router chose an expert that is none of {self._num_experts}")
        return self._kernels.experts(x, experts, self._packed, self._num_outputs)


def native_experts(kernels: NativeKernels) -> MakeExpertProducts:
    """Makes native products of experts; none of weights that the kernels do not know."""
    return lambda weight: NativeExperts(kernels, weight) if kernels.can_pack(weight[0]) else None


# --- rounding to eight bits -------------------------------------------------------------------------------------------

log = logging.getLogger(__name__)


def round_linears(model: PreTrainedModel, kernels: NativeKernels) -> dict[str, str]:
    """Rounds the weights of all linears that the kernels know; an embedding that is tied to one is rounded with it.
    Returns the SHA-256 by path of what the embedding and the head were before.

    Raises Unimplemented where there is no such linear, UnsupportedModel where a weight is not finite or too large.
    """
    digests = _digests(model)
    linears = [
        (path, module) for path, module in model.named_modules() if type(module) is nn.Linear or _is_conv1d(module)
    ]
    known = [(path, module) for path, module in linears if kernels.can_pack(_matrix(module))]
    if not known:
        raise Unimplemented(
            "--quantize int8 is there for linears in float32, or in bfloat16 with a multiple of 32 inputs; this model, "
            f"in {str(model.dtype).removeprefix('torch.')}, has none: leave it out",
            field="--quantize",
        )
    if len(known) < len(linears):
        log.info("%d of %d linears are not rounded: no multiple of 32 inputs", len(linears) - len(known), len(linears))
    done: set[int] = set()
    with torch.no_grad():
        for path, module in known:
            parameter = cast(nn.Parameter, module.weight)
            if id(parameter) in done:
                continue
            if not _weight(module).abs().amax() < TOO_LARGE:  # NaN fails too
                raise UnsupportedModel(
                    f"weights of {path} are not finite, or larger than eight bits are made for: leave out --quantize"
                )
            # A copy: what comes from a file is mapped into memory, and stays in it once it is written to.
            parameter.data = parameter.detach().clone()
            round_(_matrix(module))
            done.add(id(parameter))
    return digests


def _digests(model: PreTrainedModel) -> dict[str, str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    known: dict[int, str] = {}  # tied weights are read once
    digests: dict[str, str] = {}
    for path, module in model.named_modules():
        if any(module is end for end in ends):
            weight = _weight(module)
            if weight.data_ptr() not in known:
                known[weight.data_ptr()] = weight_sha256(weight)
            digests[path] = known[weight.data_ptr()]
    return digests


def _weight(module: nn.Module) -> Tensor:
    return cast(Tensor, module.weight).detach()


def _is_conv1d(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D  # late: seconds, and only models need it

    return isinstance(module, Conv1D)


def _matrix(module: nn.Module) -> Tensor:
    """[out, in]"""
    return _weight(module).t() if _is_conv1d(module) else _weight(module)
