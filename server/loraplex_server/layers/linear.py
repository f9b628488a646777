"""Linear and embedding modules with an adapter term: base product + segmented low-rank update.

A module owns its FactorTable. The base product is a strategy (`BaseLinear`), so that prepacked or fused weights can
take its place. The weights are those of the module that was replaced, never copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_server.layers.context import StepContext
from loraplex_server.layers.lora import FactorTable, PreparedSegments, SegmentedLora


class BaseLinear(Protocol):
    """The product with the base weight."""

    @property
    def is_copy(self) -> bool:
        """Whether it has the weight in a form of its own, so that the module's is not needed any more."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> x @ W.T + bias [..., out], which the caller may write to; last dimension contiguous."""
        ...


class PlainLinear:
    """`F.linear` on the module's own weight."""

    __slots__ = ("bias", "weight")
    is_copy = False

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [out, in]
        self.bias = bias  # [out]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


BaseLinearFactory = Callable[[Tensor, Tensor | None], BaseLinear]


class JointProduct(Protocol):
    """Computes for several linears at once, see siblings.py."""

    @property
    def members(self) -> Sequence[AdaptedLinear]: ...

    def base(self, x: Tensor) -> Tensor:
        """x [..., in] -> the base products of all members, side by side [..., sum of outputs]."""
        ...

    def output(self, member: AdaptedLinear, x: Tensor) -> Tensor | None:
        """What `member` answers to x [..., in], adapters included: [..., out]. None: it computes alone this time."""
        ...


class AdaptedLinear(nn.Module):
    """Stands where an `nn.Linear` or a Transformers `Conv1D` stood.

    The low-rank term is added after the bias: the sum is the same, the base needs one fused call, and a row without an
    adapter keeps the very bits that it has in a step without adapters.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        context: StepContext,
        *,
        is_conv1d: bool = False,
        make_base: BaseLinearFactory = PlainLinear,
    ) -> None:
        super().__init__()
        self.weight = weight  # [out, in]; of a Conv1D [in, out]
        self.bias = bias
        matrix = weight.t() if is_conv1d else weight
        self.out_features, self.in_features = matrix.shape
        self.is_conv1d = is_conv1d
        self.base = make_base(matrix, bias)
        self.context = context
        # Filled in by adapt.AdapterSlots; None while adapters are off or cannot be applied here.
        self.table: FactorTable | None = None
        self.ops: SegmentedLora | None = None
        self.num_installed = 0
        self.joint: JointProduct | None = None

    def drop_weight(self) -> None:
        """Frees the plain weight where the base product has a copy; its shape and dtype stay for whoever asks."""
        if self.base.is_copy:
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def segments(self) -> PreparedSegments | None:
        """The step's segments over the rows that this module is given."""
        return self.context.token_segments

    def forward(self, x: Tensor) -> Tensor:
        if self.joint is not None and (found := self.joint.output(self, x)) is not None:
            return found
        y = self.base(x)
        if self.num_installed:
            segments = self.segments()
            if segments is not None and self.ops is not None and self.table is not None:
                # view, not reshape: a silent copy would lose the update
                self.ops.apply(y.view(-1, self.out_features), x.reshape(-1, self.in_features), self.table, segments)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class AdaptedHead(AdaptedLinear):
    """The language model's head. Runs on the rows whose logits are wanted only, and hands its input on."""

    def segments(self) -> PreparedSegments | None:
        return self.context.head_segments

    def forward(self, x: Tensor) -> Tensor:
        if self.context.capture_head_input:
            self.context.head_input = x.reshape(-1, self.in_features)
        return super().forward(x)


class AdaptedEmbedding(nn.Module):
    """Stands around an embedding, whose own class may scale or shift what it looks up.

    `a` of an embedding's factors is [rank, vocab]: its columns are looked up instead of multiplied, which no segmented
    kernel has to know about.
    """

    def __init__(self, base: nn.Embedding, context: StepContext) -> None:
        super().__init__()
        self.base = base
        self.context = context
        self.in_features = base.num_embeddings
        self.out_features = base.embedding_dim
        self.table: FactorTable | None = None
        self.num_installed = 0

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        """Models read `weight`, `embed_scale` and the like from their embedding."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.base(input_ids)
        segments = self.context.token_segments
        if self.num_installed and segments is not None and self.table is not None:
            scale = getattr(self.base, "embed_scale", None)  # Gemma-like embeddings scale the adapter's part too
            self._add(y.view(-1, self.out_features), input_ids.reshape(-1), segments, self.table, scale)
        return y

    def _add(
        self, y: Tensor, ids: Tensor, prepared: PreparedSegments, table: FactorTable, embed_scale: Tensor | None
    ) -> None:
        for segment in prepared.segments:
            factors = table.factors[segment.adapter_slot]
            if factors is None:
                continue
            down = factors.a.index_select(1, ids[segment.start : segment.end]).t()  # [rows, rank]
            update = (down @ factors.b.t()) * (factors.scale * segment.weight)  # [rows, out]
            if embed_scale is not None:
                update = update * embed_scale.to(update.dtype)
            y[segment.start : segment.end] += update


AdaptedModule = AdaptedLinear | AdaptedEmbedding
