"""Experts on the CPU, in one native call or by their products.

A row's result does not depend on how many rows there are, nor on where they go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.lora import table_of
from loraplex_server.backends.cpu.native.kernels import ACTIVATIONS, BAND, DTYPES, NativeKernels, RunsOfRows
from loraplex_server.backends.cpu.native.library import Experts, Routed, Runs, Table
from loraplex_server.layers.experts import (
    ExpertLinear,
    Group,
    MakeExpertProducts,
    MakeFusedExperts,
    Uses,
    add_terms,
)
from loraplex_server.layers.quantization import WeightFormat


class NativeExperts:
    """Implements ExpertProducts, with a packed copy of the weights."""

    __slots__ = ("_kernels", "_num_experts", "_num_outputs", "_packed")

    def __init__(self, kernels: NativeKernels, weight: Tensor, form: WeightFormat | None = None) -> None:
        self._kernels = kernels
        self._num_experts, self._num_outputs, _ = weight.shape
        self._packed = kernels.pack_experts(weight, form)

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        least, most = experts.aminmax()
        if int(least) < 0 or int(most) >= self._num_experts:  # a router's own matter, and an address here
            raise IndexError(f"a router chose an expert that is none of {self._num_experts}")
        return self._kernels.experts(x, experts, self._packed, self._num_outputs)


def native_experts(kernels: NativeKernels, form: WeightFormat | None = None) -> MakeExpertProducts:
    """A factory of native products of experts; none of weights that the kernels do not know."""
    return lambda weight: NativeExperts(kernels, weight, form) if kernels.can_pack(weight[0]) else None


class NativeFusedExperts:
    """Implements FusedExperts, with a packed copy of the weights."""

    __slots__ = ("_experts", "_kernels", "_linears", "_packed")

    def __init__(
        self, kernels: NativeKernels, linears: Sequence[ExpertLinear], weights: Sequence[Tensor], act: int,
        form: WeightFormat | None,
    ) -> None:  # fmt: skip
        """`linears`, `weights`: of gate and up together, and of down."""
        up, down = weights
        self._kernels = kernels
        self._linears = linears
        self._packed = kernels.pack_expert_pairs(up, form), kernels.pack_experts(down, form)
        num_experts, hidden_size, inner_size = down.shape
        self._experts = Experts(
            dtype=DTYPES[up.dtype], format=form.code if form is not None else 0, act=act, num_experts=num_experts,
            hidden=hidden_size, inner=inner_size, gate_up=self._packed[0].address, down=self._packed[1].address,
        )  # fmt: skip

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, uses: Uses | None) -> Tensor:
        rows, experts, shares = x.contiguous(), chosen.contiguous(), weights.to(torch.float32).contiguous()
        y = torch.empty_like(rows)
        routed = Routed(
            num_rows=len(rows), top_k=experts.shape[1], x=rows.data_ptr(), chosen=experts.data_ptr(),
            weights=shares.data_ptr(), y=y.data_ptr(),
        )  # fmt: skip
        if uses is not None and uses.adapters:
            slots = torch.tensor([slot for slot, _ in uses.adapters], dtype=torch.int32)
            slot_weights = torch.tensor([weight for _, weight in uses.adapters])
            routed.uses, routed.slots, routed.slot_weights = (
                tensor.data_ptr() for tensor in (uses.by_row, slots, slot_weights)
            )
            routed.num_uses, routed.max_rank = len(slots), self._show_factors(uses)
        self._kernels.run_experts(self._experts, routed)
        return y

    def _show_factors(self, uses: Uses) -> int:
        """Has the kernels find adapters' factors. Returns the largest rank of those used."""
        ranks = [0]
        for name, linear in zip(("up_table", "down_table"), self._linears, strict=True):
            table = linear.table
            assert table is not None
            setattr(self._experts, name, table_of(table))
            ranks += [found.rank for slot, _ in uses.adapters if (found := table.factors[slot]) is not None]
        return max(ranks)


def native_fused_experts(kernels: NativeKernels, form: WeightFormat | None = None) -> MakeFusedExperts:
    """A factory of experts in one call; none of weights or activations that the kernels do not know."""

    def make(linears: Sequence[ExpertLinear], weights: Sequence[Tensor], act: nn.Module) -> NativeFusedExperts | None:
        code = ACTIVATIONS.get(type(act).__name__)
        inner_size = weights[1].shape[2]
        if code is None or inner_size % (BAND // 2) or not all(kernels.can_pack(weight[0]) for weight in weights):
            return None
        return NativeFusedExperts(kernels, linears, weights, code, form)

    return make


class NativeTerms:
    """Implements AddTerms: to the kernels each group of pairs is a run of rows with an adapter of its own."""

    __slots__ = ("_kernels",)

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def __call__(self, y: Tensor, x: Tensor, linear: ExpertLinear, groups: Sequence[Group], uses: Uses) -> None:
        if y.dtype not in DTYPES:
            add_terms(y, x, linear, groups, uses)
            return
        terms = [None, *(linear.terms(slot) for slot, _ in uses.adapters)]
        live = [(group, one) for group in groups if (one := terms[group.use]) is not None]
        if not live:
            return
        places = range(len(live))
        a_ptrs, b_ptrs, none = (
            torch.tensor(values, dtype=torch.int64)
            for values in (
                [one.a[group.expert].data_ptr() for group, one in live],
                [one.b[group.expert].data_ptr() for group, one in live],
                [0] * len(live),
            )
        )
        starts, ends, first_uses, slots, ranks = (
            torch.tensor(values, dtype=torch.int32)
            for values in (
                [group.start for group, _ in live],
                [group.end for group, _ in live],
                range(len(live) + 1),
                places,
                [one.factors.rank for _, one in live],
            )
        )
        scales, weights = (
            torch.tensor(values, dtype=torch.float32)
            for values in (
                [one.factors.scale for _, one in live],
                [uses.adapters[group.use - 1][1] for group, _ in live],
            )
        )
        columns = a_ptrs, b_ptrs, ranks, scales, *[none] * 6
        table = Table(*(column.data_ptr() for column in columns))
        arrays = starts, ends, first_uses, slots, weights
        runs = RunsOfRows(Runs(len(live), 0, *(array.data_ptr() for array in arrays)), 1, arrays)
        self._kernels.add_lora(y, x.contiguous(), table, runs, max(one.factors.rank for _, one in live))
