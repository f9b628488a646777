"""Linears of the CPU: native ones, alone or merged, and oneDNN's layout.

oneDNN computes the same product as a plain linear, without reordering the weight in every call. Its operators are
private to PyTorch: `packed_linear` answers with a plain linear wherever they are missing or do not take the weight. A
test notices when they go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from loraplex_server.backends.cpu.lora import native_table
from loraplex_server.backends.cpu.native.kernels import NO_RUNS, NativeKernels, RunsOfRows
from loraplex_server.backends.cpu.native.library import Member
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import (
    AdaptedLinear,
    BaseLinear,
    BaseLinearFactory,
    Merge,
    MergedLinear,
    PlainLinear,
)
from loraplex_server.layers.lora import FactorTable, PreparedSegments
from loraplex_server.layers.quantization import WeightFormat

# oneDNN has no float64, and on most CPUs its float16 is slower than a plain product.
_DTYPES = (torch.bfloat16, torch.float32)
MAX_MEMBERS = 4  # kMaxModules in src/lora.h


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


class NativeLinears(MergedLinear):
    """Linears that read one input, with all that adapters add, in one native call. Outputs are tensors of their own."""

    def __init__(self, kernels: NativeKernels, members: Sequence[AdaptedLinear], context: StepContext) -> None:
        super().__init__(members, context)
        self._kernels = kernels
        self._packed = [cast(NativeLinear, member.base).packed for member in members]
        self._sizes = [member.out_features for member in members]
        biases = [cast(NativeLinear, member.base).bias for member in members]
        self._linears = (Member * len(members))(
            *(
                Member(packed=packed.address, num_outputs=size, bias=None if bias is None else bias.data_ptr())
                for packed, size, bias in zip(self._packed, self._sizes, biases, strict=True)
            )
        )
        self._tables: list[FactorTable | None] = [None] * len(members)  # which the kernels know

    def _compute(self, x: Tensor, segments: PreparedSegments | None) -> tuple[Tensor, ...]:
        runs, max_rank = NO_RUNS, 0
        if segments is not None:
            assert isinstance(segments.data, RunsOfRows), "native linears need native segments"
            runs = segments.data
            max_rank = max(self._show_table(idx, member) for idx, member in enumerate(self.members))
        y = self._kernels.linears(x, self._packed[0], self._linears, self._sizes, runs, max_rank)
        if segments is not None:
            for member, own in zip(self.members, y, strict=True):
                if any(saved.rows is not None for saved in member.saved.values()):
                    _take_own_rows(member, x, own, segments)
        return y

    def _show_table(self, idx: int, member: AdaptedLinear) -> int:
        """Has the kernels find a member's factors. Returns the largest rank that is installed."""
        table = member.table
        assert table is not None, "a module with adapters has a table"
        native = native_table(table)
        if self._tables[idx] is not table:
            self._linears[idx].table = native.table
            self._tables[idx] = table
        return native.max_rank


def _take_own_rows(member: AdaptedLinear, x: Tensor, y: Tensor, segments: PreparedSegments) -> None:
    """Computes rows anew whose adapter has own rows of a weight, which the kernels do not know."""
    alone, rows = member.alone(x).view(-1, member.out_features), y.view(-1, member.out_features)
    for segment in segments.segments:
        saved = member.saved.get(segment.adapter_slot)
        if saved is not None and saved.rows is not None:
            rows[segment.start : segment.end] = alone[segment.start : segment.end]


def native_merge(kernels: NativeKernels) -> Merge:
    """Merges linears with native products, single ones too: their adapters' terms are part of the call then."""

    def merge(members: Sequence[AdaptedLinear], context: StepContext) -> MergedLinear | None:
        first = members[0].base
        fits = len(members) <= MAX_MEMBERS and all(
            isinstance(first, NativeLinear)
            and isinstance(member.base, NativeLinear)
            and not member.is_conv1d
            and (member.base.packed.dtype, member.base.packed.format) == (first.packed.dtype, first.packed.format)
            for member in members
        )
        return NativeLinears(kernels, members, context) if fits else None

    return merge
