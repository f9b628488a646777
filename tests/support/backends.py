"""The plain back end with parts of others in it."""

from __future__ import annotations

from loraplex_server.backends.backend import Backend
from loraplex_server.layers.fused import FusedOps
from loraplex_server.layers.linear import BaseLinearFactory, PlainLinear


class PatchedBackend(Backend):
    """On a CPU, with merged linears, fused operations or base linears of another kind."""

    def __init__(
        self, *, merges: bool = False, fused: FusedOps | None = None, make_linear: BaseLinearFactory = PlainLinear
    ) -> None:
        super().__init__("cpu")
        self.merges_linears = merges
        self._fused = fused
        self._make_linear = make_linear

    def fused_ops(self) -> FusedOps | None:
        return self._fused

    def linears(self, *, int8: bool = False) -> BaseLinearFactory:
        return self._make_linear
