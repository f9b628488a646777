"""The plain back end with parts of others in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from loraplex_server.backends.backend import Backend
from loraplex_server.backends.cuda.capture import Capture
from loraplex_server.backends.cuda.graphs import Shape, StepGraphs, capture_steps
from loraplex_server.layers.fused import FusedOps
from loraplex_server.layers.linear import BaseLinearFactory, PlainLinear
from loraplex_server.layers.step import StepResources


class PatchedBackend(Backend):
    """On a CPU, with merged linears, fused operations, graphs or base linears of another kind."""

    def __init__(
        self,
        *,
        merges: bool = False,
        fused: FusedOps | None = None,
        make_linear: BaseLinearFactory = PlainLinear,
        capture: Capture | None = None,
    ) -> None:
        super().__init__("cpu")
        self.merges_linears = merges
        self._fused = fused
        self._make_linear = make_linear
        self._capture = capture

    def fused_ops(self) -> FusedOps | None:
        return self._fused

    def linears(self, *, int8: bool = False) -> BaseLinearFactory:
        return self._make_linear

    def capture_steps(
        self, steps: StepResources, shapes: Sequence[Shape], progress: Callable[[str], None]
    ) -> StepGraphs | None:
        return None if self._capture is None else capture_steps(steps, shapes, self._capture, progress)
