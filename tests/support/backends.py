"""The plain back end with parts of others in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cuda.graphs import Capture, GraphShape, StepGraphs, capture_steps
from loraplex_server.backends.fusion import FusedOps, NormForm
from loraplex_server.layers.experts import MakeExpertProducts
from loraplex_server.layers.linear import BaseLinearFactory, JointLinear, Merge, PlainLinear
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.layers.step import StepResources


class PatchedBackend(Backend):
    """A back end on a CPU with merged linears, fused operations, graphs, or base linears or experts of another kind."""

    def __init__(
        self,
        *,
        merges: bool = False,
        fused: FusedOps | None = None,
        make_linear: BaseLinearFactory = PlainLinear,
        make_experts: MakeExpertProducts | None = None,
        capture: Capture | None = None,
    ) -> None:
        super().__init__("cpu")
        self._merges = merges
        self._fused = fused
        self._make_linear = make_linear
        self._make_experts = make_experts
        self._capture = capture

    def merge(self) -> Merge | None:
        return JointLinear.of if self._merges else None

    def fused_ops(self) -> FusedOps | None:
        return self._fused

    def linears(self, form: WeightFormat | None = None) -> BaseLinearFactory:
        return self._make_linear

    def expert_products(self, form: WeightFormat | None = None) -> MakeExpertProducts | None:
        return self._make_experts

    def capture_steps(
        self, steps: StepResources, shapes: Sequence[GraphShape], progress: Callable[[str], None]
    ) -> StepGraphs | None:
        return None if self._capture is None else capture_steps(steps, shapes, self._capture, progress)


class ReferenceFused:
    """FusedOps in plain torch, on any device and in any dtype."""

    name = "reference"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
        wide = x.float()  # as model families do it, in any dtype
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        if form.narrows:
            return normed.to(x.dtype) * (weight + form.offset)
        return (normed * (weight.float() + form.offset)).to(x.dtype)

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, gates_first: bool) -> Tensor:
        open_part = torch.nn.functional.silu(gate.float())
        wide = x.float() * open_part if gates_first else x.float()
        normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        return normed if gates_first else (normed * open_part).to(x.dtype)

    def rotate(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self._rotated(query, cos, sin), self._rotated(key, cos, sin)

    def silu_product(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
