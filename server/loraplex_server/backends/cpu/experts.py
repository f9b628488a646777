"""Experts on the CPU: products from packed weights, and adapters' terms.

A row's result does not depend on how many rows there are, nor on where they go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels, RunsOfRows
from loraplex_server.backends.cpu.native.library import Runs, Table
from loraplex_server.layers.experts import ExpertLinear, Group, MakeExpertProducts, Uses, add_terms
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
