"""Linears and embeddings with an adapter term, and merged linears.

A module adds a segmented low-rank update to its base product, and owns its FactorTable. The base product is a strategy
(`BaseLinear`), so that prepacked weights can take its place. The weights are those of the module that was replaced.

A merged linear computes several that read one input (q, k and v, or gate and up) at once: fewer launches, and one wide
product keeps more of a GPU busy than three narrow ones. Members are linears that the probe saw called in turn with the
very same tensor; names are not used. The first member computes for all. Another member takes its output if it is given
the same tensor object, and computes alone otherwise.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_server.layers.context import MergedOutput, StepContext
from loraplex_server.layers.lora import FactorTable, PreparedSegments, SegmentedLora, rescale

# Terms of the sums that are made at once: on a GPU each piece is two launches.
_MAX_TERMS, _MAX_TERMS_ON_GPU = 1 << 22, 1 << 26
# Rows that an embedding is tried with, and how far rounding may take them apart.
_NUM_LOOKED_UP, _LOOKUP_ERROR = 8, 1e-2


class BaseLinear(Protocol):
    """The product with the base weight."""

    @property
    def is_copy(self) -> bool:
        """True if it holds a copy of the weight, so that the module's own can be freed."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> x @ W.T + bias [..., out], which the caller may write to; last dimension contiguous."""
        ...

    def matrix(self) -> Tensor:
        """W [out, in], perhaps a copy. For any thread."""
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

    def matrix(self) -> Tensor:
        return self.weight


BaseLinearFactory = Callable[[Tensor, Tensor | None], BaseLinear]


class AbsorbedLinear:
    """A linear whose weight a decoder in one call has taken (it is on the meta device). Nothing calls it before that
    decoder puts its own in its place."""

    __slots__ = ()
    is_copy = True

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("this linear is computed by the stack of layers that took its weight")

    def matrix(self) -> Tensor:
        raise AssertionError("this linear's weight is with the stack of layers that took it")


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
        self.base: BaseLinear = AbsorbedLinear() if weight.is_meta else make_base(matrix, bias)
        self.context = context
        # AdapterSlots fills these in; None while adapters are off or cannot be applied here.
        self.table: FactorTable | None = None
        self.ops: SegmentedLora | None = None
        self.num_installed = 0
        self.saved: dict[int, OwnRows] = {}  # by adapter slot
        self.merged: MergedLinear | None = None

    def drop_weight(self) -> None:
        """Frees the plain weight where the base product has a copy; its shape and dtype stay."""
        if self.base.is_copy:
            self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def segments(self) -> PreparedSegments | None:
        """The step's segments over the rows that this module is given."""
        return self.context.token_segments

    def forward(self, x: Tensor) -> Tensor:
        if self.merged is not None and (found := self.merged.output(self, x)) is not None:
            return found
        return self.alone(x)

    def alone(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out], whether it is merged or not."""
        segments = self.segments() if self.num_installed or self.saved else None
        if segments is None:
            return self.base(x)
        rows = x.reshape(-1, self.in_features)
        base = partial(self._product, x, rows, segments)
        if self.num_installed and self.ops is not None and self.table is not None:
            y = self.ops.apply_over(base, rows, (self.table,), segments)
            if self.table.rescaled:
                rescale(y, self.table, segments)
        else:
            y = base()
        return y.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor, rows: Tensor, segments: PreparedSegments) -> Tensor:
        """The base's product or, for rows of adapters that have one, their own. `rows`: x as [rows, in]; the result is
        [rows, out]."""
        if self.saved and self._has_own_weight(segments, len(rows)):
            y = x.new_empty(len(rows), self.out_features)
        else:
            y = self.base(x).view(-1, self.out_features)  # not reshape: a silent copy would take time
        if self.saved:
            self.replace(y, rows, segments)
        return y

    def _has_own_weight(self, prepared: PreparedSegments, num_rows: int) -> bool:
        """True if each row has an adapter's own weight, so that nothing of the base's product would be left."""
        found = 0
        for segment in prepared.segments:
            own = self.saved.get(segment.adapter_slot)
            if own is not None and own.values is not None and own.rows is None:
                found += segment.end - segment.start
        return found == num_rows

    def replace(self, y: Tensor, x: Tensor, prepared: PreparedSegments) -> None:
        """Puts products with adapters' own weights, or rows of them, in the place of the base's. x [rows, in], y [rows,
        out]."""
        assert self.ops is not None, "adapters are off"
        for segment in prepared.segments:
            own = self.saved.get(segment.adapter_slot)
            if own is None or segment.start == segment.end:
                continue
            if own.input_gain is not None:
                y[segment.start : segment.end] = self.base(x[segment.start : segment.end] * own.input_gain)
            if own.input_rotation is not None:
                y[segment.start : segment.end] = self.base(rotated(x[segment.start : segment.end], own.input_rotation))
            if own.values is None:
                continue
            weight = own.values.t() if self.is_conv1d else own.values
            bias = self.bias if self.bias is None or own.rows is None else self.bias[own.rows]
            rows = y[segment.start : segment.end]
            product = rows if own.rows is None else rows.new_empty(len(rows), len(own.rows))
            self.ops.dense(product, x[segment.start : segment.end], weight, bias)
            if own.rows is not None:
                rows.index_copy_(1, own.rows, product)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class AdaptedHead(AdaptedLinear):
    """The language model's head. Runs on the rows whose logits are wanted only, and hands its input on."""

    def segments(self) -> PreparedSegments | None:
        return self.context.head_segments

    def forward(self, x: Tensor) -> Tensor:
        if self.context.capture_head_input:
            self.context.head_input = x.reshape(-1, self.in_features)
            if self.context.num_logit_rows is not None:
                x = x[:, : self.context.num_logit_rows]
        return super().forward(x)


class OwnRows(NamedTuple):
    """An adapter's own product in the place of the base's: a weight of its own, some rows of one, or a scaled or
    rotated input."""

    values: Tensor | None = None  # as the base's weight, or [num_rows, in]
    rows: Tensor | None = None  # [num_rows] int64; None: all
    input_gain: Tensor | None = None  # [in], which the base's product takes the input times
    input_rotation: Tensor | None = None  # [blocks, size, size], of OFT; one of size 2 or more stands for all that fit

    def addresses(self) -> tuple[int, int, int, int]:
        """A slot's column of FactorTable.own: addresses and sizes. Not for weights of some rows only."""
        weight = self.values.data_ptr() if self.values is not None else 0
        if self.input_gain is not None:
            return weight, self.input_gain.data_ptr(), 1, 1
        if self.input_rotation is not None:
            num_blocks, size, _ = self.input_rotation.shape
            return weight, self.input_rotation.data_ptr(), size, size * size if num_blocks > 1 else 0
        return weight, 0, 0, 0


def rotated(x: Tensor, blocks: Tensor) -> Tensor:
    """x [rows, in] times the matrix with these blocks on its diagonal."""
    parts = x.reshape(len(x), -1, blocks.shape[-1]).transpose(0, 1)  # [blocks, rows, size]
    return torch.matmul(parts, blocks).transpose(0, 1).reshape(x.shape)


def with_parameters(module: nn.Module, own: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the module with these parameters. It shares the others, and has its class's forward."""
    found = copy.copy(module)
    found.__dict__.pop("forward", None)  # a fused one has the base's parameters
    if isinstance(found, nn.Embedding):
        found.padding_idx = None  # for training only, and not among some rows of the weight
    found.__dict__["_parameters"] = {
        name: nn.Parameter(own[name], requires_grad=False) if name in own else parameter
        for name, parameter in vars(module)["_parameters"].items()
    }
    return found


class Wrapper(nn.Module):
    """A module around one of Transformers. It has that one's attributes, too: models read `weight`, `embed_scale`, a
    configuration and the like from their parts."""

    def __init__(self, base: nn.Module, context: StepContext) -> None:
        super().__init__()
        self.base: Any = base
        self.context = context

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base"), name)


class AdaptedNorm(Wrapper):
    """Stands around a norm once an adapter brings its own parameters for it."""

    def __init__(self, base: nn.Module, context: StepContext, token_dim: int) -> None:
        """`token_dim`: of its input, whose other dimensions may be heads."""
        super().__init__(base, context)
        self.token_dim = token_dim
        self.saved: dict[int, nn.Module] = {}  # by adapter slot

    def forward(self, x: Tensor, *others: Tensor | None, **named: Tensor | None) -> Tensor:
        """`others` and `named`: what else the norm reads, such as the gate of a recurrent layer's."""
        y: Tensor = self.base(x, *others, **named)
        prepared = self.context.token_segments
        if self.saved and prepared is not None:
            dim = self.token_dim
            assert x.shape[dim] == prepared.num_rows, "the probe saw this norm with all tokens of a step"
            for segment in prepared.segments:
                own = self.saved.get(segment.adapter_slot)
                if own is None:
                    continue
                part = partial(_narrowed, dim=dim, start=segment.start, end=segment.end, num_rows=prepared.num_rows)
                values = own(part(x), *map(part, others), **{name: part(one) for name, one in named.items()})
                y.narrow(dim, segment.start, segment.end - segment.start).copy_(values)
        return y


def _narrowed(x: Tensor | None, *, dim: int, start: int, end: int, num_rows: int) -> Tensor | None:
    """The rows of a segment, of what has rows."""
    has_rows = x is not None and x.dim() > dim and x.shape[dim] == num_rows
    return x.narrow(dim, start, end - start) if x is not None and has_rows else x


class AdaptedEmbedding(Wrapper):
    """Stands around an embedding, whose own class may scale or shift what it looks up.

    `a` of an embedding's factors is [rank, vocab]: its columns are looked up, not multiplied, so no segmented kernel
    is involved.
    """

    def __init__(self, base: nn.Embedding, context: StepContext) -> None:
        super().__init__(base, context)
        self.in_features = base.num_embeddings
        self.out_features = base.embedding_dim
        self.table: FactorTable | None = None
        self.num_installed = 0
        self.saved: dict[int, tuple[nn.Module, Tensor | None]] = {}  # by adapter slot: a copy, and the rows that it has

    def forward(self, input_ids: Tensor) -> Tensor:
        y: Tensor = self.base(input_ids)
        segments = self.context.token_segments
        if self.saved and segments is not None:
            self._replace(y.view(-1, self.out_features), input_ids.reshape(-1), segments)
        if self.num_installed and segments is not None and self.table is not None:
            scale = getattr(self.base, "embed_scale", None)  # Gemma-like embeddings scale the adapter's part too
            self._add(y.view(-1, self.out_features), input_ids.reshape(-1), segments, self.table, scale)
        return y

    def is_lookup(self) -> bool:
        """True if the base gives rows of its weight, perhaps scaled, and does no more with them."""
        weight, scale = self.base.weight, getattr(self.base, "embed_scale", None)
        ids = torch.linspace(0, len(weight) - 1, _NUM_LOOKED_UP, device=weight.device).long()
        rows, found = F.embedding(ids, weight), self.base(ids)
        rows = rows if scale is None else rows * _in_dtype(scale, rows.dtype)
        return found.shape == rows.shape and torch.allclose(found.to(rows), rows, rtol=_LOOKUP_ERROR)

    def _replace(self, y: Tensor, ids: Tensor, prepared: PreparedSegments) -> None:
        for segment in prepared.segments:
            found = self.saved.get(segment.adapter_slot)
            if found is None:
                continue
            (own, rows), own_ids = found, ids[segment.start : segment.end]
            if rows is None:
                y[segment.start : segment.end] = own(own_ids)
                continue
            is_own = own_ids[:, None] == rows[None, :]  # [tokens, num_rows]
            values = own(is_own.int().argmax(dim=1))
            y[segment.start : segment.end] = torch.where(
                is_own.any(dim=1)[:, None], values, y[segment.start : segment.end]
            )

    def _add(
        self, y: Tensor, ids: Tensor, prepared: PreparedSegments, table: FactorTable, embed_scale: Tensor | float | None
    ) -> None:
        for segment in prepared.segments:
            factors = table.factors[segment.adapter_slot]
            if factors is None:
                continue
            down = factors.a.index_select(1, ids[segment.start : segment.end]).t()  # [rows, rank]
            update = product_by_row(down, factors.b) * (factors.scale * segment.weight)  # [rows, out]
            if embed_scale is not None:
                update = update * _in_dtype(embed_scale, update.dtype)
            y[segment.start : segment.end] += update
        rescale(y, table, prepared)


def _in_dtype(scale: Tensor | float, dtype: torch.dtype) -> Tensor | float:
    """An embedding's scale, which some models keep as a number, rounded to the dtype as PEFT does."""
    return scale.to(dtype) if isinstance(scale, Tensor) else torch.tensor(scale, dtype=dtype).item()


def product_by_row(down: Tensor, b: Tensor) -> Tensor:
    """down [rows, rank] @ b [out, rank].T -> [rows, out], with the same bits for a row whatever the others are: a
    library's product may choose the order of its sums by the number of rows."""
    wide = torch.promote_types(down.dtype, torch.float32)
    # The order of torch's sums depends on where the terms lie: side by side, also those of a single row, whose strides
    # may be any.
    rows = down.to(wide).contiguous().view(-1).view(len(down), 1, down.shape[1])
    outputs = b.to(wide).contiguous()
    num_rows = max(1, (_MAX_TERMS_ON_GPU if down.is_cuda else _MAX_TERMS) // b.numel())
    sums = [(part * outputs).sum(-1) for part in rows.split(num_rows)]  # terms [rows, out, rank]
    return torch.cat(sums).to(down.dtype)


class MergedLinear(ABC):
    """Linears of one parent that read one input, in the order in which they are called. The first computes for all."""

    def __init__(self, members: Sequence[AdaptedLinear], context: StepContext) -> None:
        self.members = tuple(members)
        self._context = context
        for member in members:
            member.merged = self

    def separate(self) -> None:
        """Lets every member compute alone from here on. Their weights stay where they are."""
        for member in self.members:
            member.merged = None

    def output(self, member: AdaptedLinear, x: Tensor) -> Tensor | None:
        """x [..., in] -> the member's [..., out], adapters included. None where the member comes out of turn or with
        another x than the first."""
        if member is self.members[0]:
            found = MergedOutput(self, 0, x, self._compute(x, self._segments()))
        else:
            left = self._context.merged
            if left is None or left.x is not x or left.owner is not self:
                return None
            found = left
            if self.members[found.next_idx] is not member:
                return None
        idx = found.next_idx
        self._context.merged = found._replace(next_idx=idx + 1) if idx + 1 < len(self.members) else None
        return found.outputs[idx]

    def _segments(self) -> PreparedSegments | None:
        """The step's segments; None where no member has anything of an adapter."""
        uses_any = self.members[0].ops is not None and any(m.num_installed or m.saved for m in self.members)
        return self._context.token_segments if uses_any else None

    @abstractmethod
    def _compute(self, x: Tensor, segments: PreparedSegments | None) -> tuple[Tensor, ...]:
        """x [..., in] -> [..., out] of each member, with what adapters add in these segments."""


Merge = Callable[[Sequence[AdaptedLinear], StepContext], MergedLinear | None]


class JointLinear(MergedLinear):
    """Merged linears with one weight, which it owns, and of which theirs are rows."""

    def __init__(self, members: Sequence[AdaptedLinear], context: StepContext) -> None:
        super().__init__(members, context)
        self._sizes = [member.out_features for member in members]
        self._ends = tuple(accumulate(self._sizes))
        with torch.no_grad():
            self.weight = torch.cat(tuple(member.weight for member in members))  # [sum of outputs, in]
            biases = tuple(member.bias for member in members if member.bias is not None)
            self.bias = torch.cat(biases) if biases else None
        for member, start, end in zip(members, (0, *self._ends), self._ends, strict=False):
            member.weight.data = self.weight[start:end]
            if member.bias is not None and self.bias is not None:
                member.bias.data = self.bias[start:end]

    @classmethod
    def of(cls, members: Sequence[AdaptedLinear], context: StepContext) -> JointLinear | None:
        """Implements `Merge`."""
        first = members[0]
        fits = len(members) > 1 and all(
            type(member.base) is PlainLinear
            and not member.is_conv1d
            and (member.bias is None) == (first.bias is None)
            and member.weight.dtype == first.weight.dtype
            for member in members
        )
        return cls(members, context) if fits else None

    def base(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def _compute(self, x: Tensor, segments: PreparedSegments | None) -> tuple[Tensor, ...]:
        first = self.members[0]
        if segments is None or first.ops is None:
            return self.base(x).split(self._sizes, dim=-1)
        tables = [member.table for member in self.members if member.table is not None]
        rows = x.reshape(-1, first.in_features)
        y = first.ops.apply_over(partial(self._product, x, rows, segments), rows, tables, segments)
        for table, end in zip(tables, self._ends, strict=False):
            if table.rescaled:
                rescale(y[:, end - table.out_features : end], table, segments)
        return y.view(*x.shape[:-1], self._ends[-1]).split(self._sizes, dim=-1)

    def _product(self, x: Tensor, rows: Tensor, segments: PreparedSegments) -> Tensor:
        """The product of the merged linear [rows, sum of outputs], with the weights of its own that an adapter has
        saved."""
        y = self.base(x).view(-1, self._ends[-1])
        for member, end in zip(self.members, self._ends, strict=True):
            if member.saved:
                member.replace(y[:, end - member.out_features : end], rows, segments)
        return y


def merge_linears(
    model: nn.Module,
    runs: Sequence[Sequence[str]],
    targets: Mapping[str, nn.Module],
    context: StepContext,
    merge: Merge = JointLinear.of,
) -> list[MergedLinear]:
    """Merges linears within `runs` (paths of linears that were called in turn with one input) where they fit."""
    found: list[MergedLinear] = []
    for run in runs:
        for paths in _of_one_parent(run):
            modules = [targets.get(path) for path in paths]
            members = [m for m in modules if isinstance(m, AdaptedLinear) and not isinstance(m, AdaptedHead)]
            if 0 < len(members) == len(paths) and (merged := merge(members, context)) is not None:
                found.append(merged)
    device = next(model.parameters()).device
    if found and device.type == "cuda":
        torch.cuda.empty_cache()  # gives the memory of the members' own weights to the KV cache
    return found


def _of_one_parent(run: Sequence[str]) -> list[list[str]]:
    """The run cut where the parent changes."""
    groups: list[list[str]] = []
    for path in run:
        if groups and groups[-1][0].rpartition(".")[0] == path.rpartition(".")[0]:
            groups[-1].append(path)
        else:
            groups.append([path])
    return groups
