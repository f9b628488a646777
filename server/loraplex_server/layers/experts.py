"""Experts and routers of a mixture of experts, with adapter terms.

Transformers' own module computes every step in which no row has terms of its experts; where a back end has products of
its own, these do, and have the only copy of the weights. In steps with terms the pairs of a row and one of its experts
are sorted by expert, and within it by adapter: a base product is one range of pairs for each expert, and a term
x @ A.T @ B.T one range for each expert and adapter. What was not chosen costs nothing.

A router may do anything with the product of its input and its weight. Its own code runs, and is given the product with
the adapters' terms in it.

Both are tried when the model is loaded, and are no targets of adapters where the model does not compute the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loraplex_adapters.weights import LoraFactors
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AdaptedEmbedding, AdaptedLinear, BaseLinear, Wrapper
from loraplex_server.layers.lora import FactorTable, PreparedSegments, Segment, SegmentedLora
from loraplex_server.layers.transfer import upload

UP, DOWN = "gate_up_proj", "down_proj"  # [experts, 2 * inner, hidden] and [experts, hidden, inner], or transposed
# Terms of one shape with factors up to this size are gathered into one product: of 64 groups of one pair it takes 0.26
# ms at 16 KiB and 0.36 ms at 48 KiB, where two calls for each take 0.7 and 1.7 ms; 3.2 ms at 224 KiB, where they take
# 2.8 ms (float32, one core of an AMD EPYC with AVX2).
MAX_GATHERED_BYTES = 128 << 10


class ExpertProducts(Protocol):
    """Products of a back end with a weight of each expert."""

    def __call__(self, x: Tensor, experts: Tensor) -> Tensor:
        """x [rows, in] times the weight of each of a row's experts [rows, experts of a row] -> [pairs, out]."""
        ...


# Makes products with a weight [experts, out, in]; None where there are no such products.
MakeExpertProducts = Callable[[Tensor], ExpertProducts | None]


class FusedExperts(Protocol):
    """All that experts compute, by a back end: down(act(gate(x)) * up(x)), with adapters' terms in both products."""

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, uses: Uses | None) -> Tensor:
        """x [rows, hidden], experts and their weights [rows, top_k] -> [rows, hidden]."""
        ...


# Makes them of linears and weights [experts, out, in] of gate and up together and of down, and of an activation; None
# where there are no such experts.
MakeFusedExperts = Callable[["Sequence[ExpertLinear]", Sequence[Tensor], nn.Module], FusedExperts | None]


# --- experts ----------------------------------------------------------------------------------------------------------


class ExpertLinear:
    """A fused parameter of experts as a target of adapters: one linear for each expert."""

    def __init__(self, weight: Tensor, *, swaps_features: bool = False) -> None:
        """`weight`: [experts, out, in]. `swaps_features`: adapters have its inputs for outputs."""
        self.num_experts, self.out_features, self.in_features = weight.shape
        self.swaps_features = swaps_features
        self.table: FactorTable | None = None  # AdapterSlots fills these in
        self.num_installed = 0

    def terms(self, slot: int) -> Terms | None:
        """The slot's factors by expert; None where it has none here."""
        factors = self.table.factors[slot] if self.table is not None else None
        if self.table is None or factors is None:
            return None
        if not isinstance(self.table.derived, TermsBySlot):
            self.table.derived = TermsBySlot({})
        found = self.table.derived.terms.get(slot)
        if found is None:
            found = Terms(factors, factors.a.unbind(), factors.b.unbind())
            self.table.derived.terms[slot] = found
        return found


@dataclass(frozen=True, slots=True)
class Terms:
    """One adapter's factors at a parameter of experts."""

    factors: LoraFactors
    a: Sequence[Tensor]  # of each expert [rank, in]
    b: Sequence[Tensor]  # of each expert [out, rank]


@dataclass(frozen=True, slots=True)
class TermsBySlot:
    """Implements lora.Derived."""

    terms: dict[int, Terms]

    def without(self, slot: int) -> TermsBySlot:
        """These factors without the terms of a slot."""
        return TermsBySlot({known: one for known, one in self.terms.items() if known != slot})


@dataclass(frozen=True, slots=True)
class Uses:
    """The adapters of a step's rows that have terms of experts."""

    adapters: tuple[tuple[int, float], ...]  # slot and weight
    by_row: Tensor  # [rows] int64: 1 + an index of `adapters`, or 0


@dataclass(frozen=True, slots=True)
class Group:
    """Sorted pairs `start` to `end` (exclusive): of one expert, and of one adapter or none."""

    start: int
    end: int
    expert: int
    use: int  # as in Uses.by_row


# Adds a step's terms to y [pairs, out], in place, of x [pairs, in]; both sorted as the groups say. See `add_terms`.
AddTerms = Callable[[Tensor, Tensor, ExpertLinear, Sequence[Group], Uses], None]


class _OnTrial(Wrapper):
    """A wrapper that the probe tries out while the model is loaded."""

    def __init__(self, base: nn.Module, context: StepContext) -> None:
        super().__init__(base, context)
        # While it is tried, it computes every step, and keeps how many rows each product had, -1 of another shape than
        # is expected.
        self.is_on_trial = False
        self.rows_seen: list[int] = []


class AdaptedExperts(_OnTrial):
    """Stands around fused experts of Transformers."""

    def __init__(self, base: nn.Module, context: StepContext) -> None:
        super().__init__(base, context)
        swaps_features = self._is_transposed and not getattr(base, "is_transposed", False)
        self.linears = {name: ExpertLinear(self.weight(name), swaps_features=swaps_features) for name in (UP, DOWN)}
        self.products: dict[str, ExpertProducts] = {}  # by parameter, in the place of the module's own code
        self.fused: FusedExperts | None = None  # in the place of all of it
        self.add_terms: AddTerms = add_terms
        self.num_chosen = self.linears[UP].num_experts  # experts of a row, as the last trial had it

    def drop_weights(self) -> None:
        """Frees the weights, of which a back end has copies; their shapes and dtypes stay."""
        for name in (UP, DOWN):
            weight = cast(Tensor, getattr(self.base, name))
            setattr(self.base, name, nn.Parameter(weight.to("meta"), requires_grad=False))

    @staticmethod
    def fits(module: nn.Module, dtype: torch.dtype, num_rows: int, num_tokens: int) -> bool:
        """True if these are experts of a form that Transformers' `use_experts_implementation` has. `num_rows`: what the
        module was given in a step of `num_tokens`."""
        if num_rows != num_tokens:
            return False
        weights = [getattr(module, name, None) for name in (UP, DOWN)]
        biases = [getattr(module, f"{name}_bias", None) for name in (UP, DOWN)] if _has_bias(module) else []
        is_known = getattr(module, "has_gate", False) and hasattr(module, "_apply_gate")
        others = ("has_post_expert_norm", "_is_expert_parallel")  # which older versions do not know
        return (
            is_known
            and not any(getattr(module, name, False) for name in others)
            and all(isinstance(one, Tensor) and one.dim() == 3 and one.dtype == dtype for one in weights)
            and all(isinstance(one, Tensor) and one.dim() == 2 for one in biases)
        )

    @property
    def _is_transposed(self) -> bool:
        return getattr(self.base, "is_transposed", False)

    def weight(self, name: str) -> Tensor:
        """The weight of a parameter, as [experts, out, in]."""
        weight = cast(Tensor, getattr(self.base, name))
        return weight.mT if self._is_transposed else weight

    def has_plain_gate(self) -> bool:
        """True if it computes act(gate) * up, of large values too, without biases."""
        act: Callable[[Tensor], Tensor] | None = getattr(self.base, "act_fn", None)
        if act is None or _has_bias(self.base):
            return False
        weight = self.weight(UP)
        values = 100 * torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(4))
        gate_up = values.to(weight)
        gate, up = gate_up.chunk(2, dim=-1)
        with torch.inference_mode():
            return torch.equal(self.base._apply_gate(gate_up), act(gate) * up)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, hidden], experts and their weights [rows, top_k] -> [rows, hidden]."""
        if self.is_on_trial:
            self.num_chosen = top_k_index.shape[1]
        uses = self._uses(hidden_states, hidden_states.shape[0])
        if self.fused is not None:
            return self.fused(hidden_states, top_k_index, top_k_weights, uses)
        if uses is None:
            compute = self._by_products if self.products else self.base
            return compute(hidden_states, top_k_index, top_k_weights)
        return self._compute(hidden_states, top_k_index, top_k_weights, uses)

    def _uses(self, hidden_states: Tensor, num_rows: int) -> Uses | None:
        """The uses of adapters by the rows of a step; None where no row has terms here."""
        prepared = self.context.token_segments
        if prepared is None and not self.is_on_trial:
            return None
        segments = prepared.segments if prepared is not None else ()
        slots = frozenset(slot for one in self.linears.values() for slot in slots_with_terms(one, segments))
        if self.is_on_trial:
            self.rows_seen.append(num_rows)
        elif not slots:
            return None
        known = self.context.expert_uses
        if slots not in known or len(known[slots].by_row) != num_rows:
            own = [segment for segment in segments if segment.adapter_slot in slots]
            known[slots] = uses_of_rows(own, num_rows, hidden_states.device)
        return known[slots]

    def _by_products(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The experts' output by the back end's products: what the module's own code computes, pairs in the order of
        the rows."""
        num_rows, top_k = top_k_index.shape
        each = top_k_index.reshape(-1, 1)
        gate_up = self._add_bias(UP, self.products[UP](hidden_states, top_k_index), each)
        inner = self.base._apply_gate(gate_up)
        y = self._add_bias(DOWN, self.products[DOWN](inner, each), each) * top_k_weights.reshape(-1, 1)
        return y.view(num_rows, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _add_bias(self, name: str, y: Tensor, experts: Tensor) -> Tensor:
        return y.add_(getattr(self.base, f"{name}_bias")[experts[:, 0]]) if _has_bias(self.base) else y

    def _compute(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, uses: Uses) -> Tensor:
        num_rows, top_k = top_k_index.shape
        experts, order, groups = sorted_pairs(top_k_index, uses)
        x = hidden_states.index_select(0, order // top_k)
        gate_up = self._linear(UP, x, experts, groups, uses)
        inner = self.base._apply_gate(gate_up)
        y = self._linear(DOWN, inner, experts, groups, uses)
        y = y * top_k_weights.reshape(-1).index_select(0, order)[:, None]
        pairs = torch.empty_like(y).index_copy_(0, order, y)  # in the order of the rows again
        return pairs.view(num_rows, top_k, -1).sum(dim=1).to(hidden_states.dtype)

    def _linear(self, name: str, x: Tensor, experts: Tensor, groups: Sequence[Group], uses: Uses) -> Tensor:
        """One parameter's product with the adapters' terms: x [pairs, in], sorted -> [pairs, out]."""
        products = self.products.get(name)
        y = grouped_product(x, self.weight(name), groups) if products is None else products(x, experts)
        y = self._add_bias(name, y, experts)
        if self.linears[name].num_installed:
            self.add_terms(y, x, self.linears[name], groups, uses)
        return y


class ScaledExperts(AdaptedExperts):
    """Stands around experts that are all given all rows, times what the router says before and not behind them
    (Llama 4): rows of other experts are zeros, and so is what comes of them."""

    @staticmethod
    def fits(module: nn.Module, dtype: torch.dtype, num_rows: int, num_tokens: int) -> bool:
        up, down = (getattr(module, name, None) for name in (UP, DOWN))
        return (
            isinstance(up, Tensor)
            and isinstance(down, Tensor)
            and up.dim() == down.dim() == 3
            and up.dtype == down.dtype == dtype
            and up.shape[::2] == (down.shape[0], 2 * down.shape[1])
            and num_rows == up.shape[0] * num_tokens
            and callable(getattr(module, "act_fn", None))
            and len([*module.parameters()]) == 2
        )

    @property
    def _is_transposed(self) -> bool:
        return True

    def forward(self, hidden_states: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """hidden_states [experts * rows, hidden], those of an expert in the order of the rows -> the same."""
        num_rows = hidden_states.shape[0] // self.linears[UP].num_experts
        uses = self._uses(hidden_states, num_rows)
        if uses is None:
            return self.base(hidden_states)
        num_uses = len(uses.adapters) + 1
        pairs = hidden_states.any(dim=1).nonzero().view(-1)  # waits for the device
        keys, order = (pairs // num_rows * num_uses + uses.by_row[pairs % num_rows]).sort(stable=True)
        pairs = pairs[order]
        groups = list(_groups(keys, num_uses))
        experts = keys.div(num_uses, rounding_mode="floor").unsqueeze(1)  # [pairs, 1]
        gate, up = self._linear(UP, hidden_states.index_select(0, pairs), experts, groups, uses).chunk(2, dim=-1)
        inner = up * self.base.act_fn(gate)
        y = self._linear(DOWN, inner, experts, groups, uses)
        return torch.zeros_like(hidden_states).index_copy_(0, pairs, y)


def _has_bias(module: nn.Module) -> bool:
    return bool(getattr(module, "has_bias", False))


def slots_with_terms(module: ExpertLinear | AdaptedRouter, segments: Sequence[Segment]) -> set[int]:
    """The slots of these segments whose adapters have terms there."""
    table = module.table
    if not module.num_installed or table is None:
        return set()
    return {one.adapter_slot for one in segments if table.factors[one.adapter_slot] is not None}


def uses_of_rows(segments: Sequence[Segment], num_rows: int, device: torch.device) -> Uses:
    """The uses of adapters by rows. Raises ValueError where a segment does not fit, or two have one row: adapters of
    experts are in no mixture."""
    by_row = [0] * num_rows
    adapters: dict[tuple[int, float], int] = {}
    for segment in segments:
        if segment.end > num_rows or any(by_row[segment.start : segment.end]):
            raise ValueError(f"Segment {segment} does not fit: experts take one adapter for each of {num_rows} rows.")
        use = adapters.setdefault((segment.adapter_slot, segment.weight), len(adapters) + 1)
        by_row[segment.start : segment.end] = [use] * (segment.end - segment.start)
    return Uses(tuple(adapters), upload(torch.tensor(by_row, dtype=torch.int64), device))


def sorted_pairs(chosen: Tensor, uses: Uses) -> tuple[Tensor, Tensor, list[Group]]:
    """Pairs of a row and one of its experts, sorted by expert and adapter: their experts [pairs, 1], their places in
    `chosen` [rows, experts of a row], and their groups. Waits for the device."""
    num_uses = len(uses.adapters) + 1
    keys, order = (chosen * num_uses + uses.by_row[:, None]).reshape(-1).sort(stable=True)
    return keys.div(num_uses, rounding_mode="floor").unsqueeze(1), order, list(_groups(keys, num_uses))


def _groups(keys: Tensor, num_uses: int) -> Iterator[Group]:
    """Groups of pairs with one expert and one use, from sorted keys [pairs] (expert * num_uses + use). Waits for the
    device."""
    values, counts = torch.unique_consecutive(keys, return_counts=True)
    start = 0
    for key, count in torch.stack((values, counts), dim=1).tolist():
        yield Group(start, start + count, *divmod(key, num_uses))
        start += count


def grouped_product(x: Tensor, weight: Tensor, groups: Sequence[Group]) -> Tensor:
    """x [pairs, in] times the weight of each pair's expert; weight [experts, out, in] -> [pairs, out]."""
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, found in groupby(groups, key=lambda group: group.expert):
        own = list(found)
        start, end = own[0].start, own[-1].end
        torch.mm(x[start:end], weight[expert].t(), out=y[start:end])
    return y


def add_terms(y: Tensor, x: Tensor, linear: ExpertLinear, groups: Sequence[Group], uses: Uses) -> None:
    """y [pairs, out] += weight * scale * x @ A.T @ B.T of each group, in place, at least in float32."""
    wide = torch.promote_types(y.dtype, torch.float32)
    terms = [None, *(linear.terms(slot) for slot, _ in uses.adapters)]
    by_shape: dict[tuple[int, int], list[Group]] = defaultdict(list)  # by number of pairs and rank
    for group in groups:
        if (one := terms[group.use]) is not None:
            by_shape[group.end - group.start, one.factors.rank].append(group)
    for (num_pairs, rank), alike in by_shape.items():
        num_bytes = rank * (linear.in_features + linear.out_features) * y.dtype.itemsize
        found = [(group, cast(Terms, terms[group.use]), uses.adapters[group.use - 1][1]) for group in alike]
        if len(alike) > 1 and num_bytes <= MAX_GATHERED_BYTES:
            a = torch.stack([one.a[group.expert] for group, one, _ in found]).to(wide)  # [groups, rank, in]
            b = torch.stack([one.b[group.expert] for group, one, _ in found]).to(wide)  # [groups, out, rank]
            factors = upload(
                torch.tensor([one.factors.scale * weight for _, one, weight in found], dtype=wide), y.device
            )
            starts = upload(torch.tensor([group.start for group in alike]), y.device)
            pairs = (starts[:, None] + torch.arange(num_pairs, device=y.device)).view(-1)
            own = x.index_select(0, pairs).to(wide).view(len(alike), num_pairs, -1)
            update = (own @ a.mT).mul_(factors[:, None, None]) @ b.mT  # [groups, pairs, out]
            y.index_add_(0, pairs, update.flatten(0, 1).to(y.dtype))
            continue
        for group, one, weight in found:
            own, rows = x[group.start : group.end].to(wide), y[group.start : group.end]
            down = torch.mm(own, one.a[group.expert].to(wide).t())
            b, scale = one.b[group.expert].to(wide).t(), one.factors.scale * weight
            if rows.dtype == wide:
                rows.addmm_(down, b, alpha=scale)
            else:
                rows.add_(torch.mm(down, b).mul_(scale).to(rows.dtype))


# --- routers ----------------------------------------------------------------------------------------------------------


class AdaptedRouter(_OnTrial):
    """Stands around a module that multiplies its input with its one weight by `F.linear`, as routers do, perhaps in
    another dtype than the model's."""

    def __init__(self, base: nn.Module, context: StepContext, dtype: torch.dtype) -> None:
        super().__init__(base, context)
        self.dtype = dtype  # of the factors
        self.out_features, self.in_features = cast(Tensor, base.weight).shape
        self.table: FactorTable | None = None  # AdapterSlots fills these in
        self.ops: SegmentedLora | None = None
        self.num_installed = 0
        self.product: BaseLinear | None = None  # of a back end, with its weight and bias

    @property
    def own_bias(self) -> Tensor | None:
        bias = getattr(self.base, "bias", None)
        return bias if isinstance(bias, Tensor) else None

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """True if the module may be a router. What it computes shows the rest."""
        weight = dict(module.named_parameters(recurse=False)).get("weight")
        is_other = isinstance(module, AdaptedLinear | AdaptedEmbedding | nn.Embedding)
        return weight is not None and weight.dim() == 2 and weight.is_floating_point() and not is_other

    def forward(self, *args: Any, **options: Any) -> Any:
        prepared = self.context.token_segments
        has_terms = prepared is not None and bool(slots_with_terms(self, prepared.segments))
        if not self.is_on_trial and not has_terms and self.product is None:
            return self.base(*args, **options)

        def multiply(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # as F.linear calls them
            x, is_own = input, weight is self.base.weight and input.dtype == weight.dtype and bias is self.own_bias
            y = self.product(x) if is_own and self.product is not None else F.linear(x, weight, bias)
            if has_terms or self.is_on_trial:
                self._add(y, x, prepared if has_terms else None)
            return y

        with _Products(multiply):
            return self.base(*args, **options)

    def _add(self, y: Tensor, x: Tensor, prepared: PreparedSegments | None) -> None:
        y, x = y.view(-1, y.shape[-1]), x.reshape(-1, x.shape[-1])
        if prepared is None:
            self.rows_seen.append(len(x) if y.shape[1:] == (self.out_features,) else -1)
            return
        assert self.ops is not None
        assert self.table is not None
        if y.dtype == self.dtype:
            self.ops.apply(y, x, self.table, prepared)
        else:
            update = torch.zeros(y.shape, dtype=self.dtype, device=y.device)
            self.ops.apply(update, x.to(self.dtype), self.table, prepared)
            y.add_(update)


class _Products(TorchFunctionMode):
    """Has `multiply` compute `F.linear` while it is on."""

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        super().__init__()
        self._multiply = multiply

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return (self._multiply if func is F.linear else func)(*args, **(kwargs or {}))


AdaptedModule = AdaptedLinear | AdaptedEmbedding | AdaptedRouter | ExpertLinear
