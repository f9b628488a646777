"""Search for a native decoder: common layers, packed and compared with native ones.

Structure alone proves nothing: a model may scale its residuals or norms in another way. So every layer runs once beside
a native one, with the packed weights that will be served. Where one differs, the model's own code computes all of them.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from loraplex_runtime.reports import Progress, counted, no_progress
from loraplex_server.backends.cpu.attention import plan_spans, reason_against
from loraplex_server.backends.cpu.decoder import (
    HEAD_NORMS,
    KINDS,
    STATES,
    Angles,
    ArgumentOfLayer,
    ComputedLayer,
    LayerNames,
    LayerShape,
    LayerWeights,
    NativeNorm,
    NativeStack,
    PartCall,
    QueryScale,
    StackPart,
    StackShape,
    Turns,
    linears_of,
)
from loraplex_server.backends.cpu.fused import NativeFused
from loraplex_server.backends.cpu.native.kernels import ACTIVATIONS, BAND, DTYPES, NativeKernels, PackedWeight
from loraplex_server.backends.equivalence import compare
from loraplex_server.backends.fusion import NormForm, find_norm, norm_eps
from loraplex_server.layers.attention import HANDLE, AttentionBatch, AttentionSpec, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.quantization import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

NUM_TOKENS: Final = 6
SCALE: Final = "layer_scalar"  # of a layer's output
SHARED_KV: Final = "shared_kv_states"  # the argument of layers with keys and values that others share
STATES_SCALE: Final = 0.02


@dataclass(frozen=True, slots=True)
class FoundStack:
    """A model's layers, whose linears have no weights any more, and the stack that computes the same."""

    path: str  # of the list of layers
    layers: list[nn.Module]
    stack: NativeStack
    norm: tuple[str, NativeNorm] | None  # what follows the layers
    parts: Sequence[tuple[NativeStack | StackPart, str]]  # modules that compute the layers, and kinds of rotation

    def connect(self) -> None:
        """Gives the layers, in which linears have been replaced by adapted ones by now, the weights of the stack."""
        self.stack.connect(self.path, self.layers)

    def install(self, model: PreTrainedModel) -> None:
        """Puts the stack in the place of the layers."""
        modules: list[nn.Module] = []
        for part, _ in self.parts:
            modules.append(part)
            if isinstance(part, StackPart):  # a model looks for as many layers as have kinds
                modules += [ComputedLayer() for _ in range(part.num_layers - 1)]
        model.set_submodule(self.path, nn.ModuleList(modules))
        if self.norm is not None:
            model.set_submodule(*self.norm)


def _parts(stack: NativeStack, rotations: Sequence[str]) -> list[tuple[NativeStack | StackPart, str]]:
    """The stack, or its runs of layers with the same kind of rotation. Of layers with inputs of their own each is a
    run: models give them these one by one."""
    if stack.shape.input_size:
        return [(StackPart(stack, slice(idx, idx + 1)), kind) for idx, kind in enumerate(rotations)]
    if len(set(rotations)) == 1:
        return [(stack, rotations[0])]
    parts: list[tuple[NativeStack | StackPart, str]] = []
    first = 0
    for kind, run in groupby(rotations):
        end = first + len(list(run))
        parts.append((StackPart(stack, slice(first, end)), kind))
        first = end
    return parts


class _NoMatch(Exception):
    """A reason to leave a model's layers as they are."""


def find_stack(
    model: PreTrainedModel,
    attention: list[tuple[nn.Module, AttentionSpec]],
    kernels: NativeKernels,
    context: StepContext,
    *,
    far: Sequence[int] = (),
    form: WeightFormat | None = None,
    progress: Progress = no_progress,
) -> FoundStack | None:
    """The stack for this model's layers, packed, or None. `attention`: what the probe saw. `far`: positions that it is
    proved at, besides the first ones. `form`: weights are packed in few bits, which changes none that have been
    rounded before."""
    reasons: list[str] = []  # not the errors themselves, which hold what was packed
    for path, layers, names in _lists_of_layers(model, len(attention)):
        try:
            specs = _specs(layers, names, attention)
            shape = replace(_shape(layers, names, specs, kernels), format=form)
            proof = LayerProof(model, shape, kernels, far, len(layers), dict(attention))
            weights = _take(layers, specs, proof.shape, kernels, proof, progress)
        except _NoMatch as reason:
            reasons.append(str(reason))
            continue
        if names.own_parts:
            kinds = {
                type(layer.get_submodule(call.path)).__name__
                for layer, own in zip(layers, weights, strict=True)
                for call in own.own_parts
            }
            log.info("%s are the model's own modules%s", ", ".join(sorted(kinds)), f": {reasons[0]}" if reasons else "")
        stack = NativeStack(kernels, proof.shape, weights, context)
        norm = _final_norm(model, path, shape, kernels)
        return FoundStack(path, layers, stack, norm, _parts(stack, proof.rotations))
    log.info("layers are run one operation at a time: %s", reasons[0] if reasons else "they are of another kind")
    return None


def _take(
    layers: list[nn.Module],
    specs: list[AttentionSpec | None],
    shape: StackShape,
    kernels: NativeKernels,
    proof: LayerProof,
    progress: Progress,
) -> list[LayerWeights]:
    """Packs and proves layer by layer, and lets the plain weights go. Raises _NoMatch, and all have theirs again."""
    taken: list[LayerWeights] = []
    tell = counted(progress, "packing weights", len(layers), "layers")
    try:
        for layer, spec in zip(layers, specs, strict=True):
            weights = proof.check(layer, _pack(layer, spec, shape, kernels))
            _drop_weights(layer, weights.shape)  # at once: the memory of all of them is never doubled
            taken.append(weights)
            tell(len(taken))
    except _NoMatch:
        for layer, weights in zip(layers, taken, strict=False):
            _give_back(layer, weights, shape, kernels)
        raise
    return taken


# --- structure --------------------------------------------------------------------------------------------------------


def _lists_of_layers(model: PreTrainedModel, num_layers: int) -> Iterator[tuple[str, list[nn.Module], LayerNames]]:
    """Lists of layers that may be stacks, and the kinds that they may be of, the fastest first. `num_layers`: of those
    that attend."""
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < num_layers:
            continue
        layers = list(module)
        for names in KINDS:
            if len(layers) > num_layers and not names.mixers:
                continue
            types: dict[str, type[nn.Module]] = {}
            for layer in layers:
                types |= _children(layer, names)
            if all(_is_of_kind(layer, names) and _children(layer, names).items() <= types.items() for layer in layers):
                yield path, layers, names


def _children(layer: nn.Module, kind: LayerNames) -> dict[str, type[nn.Module]]:
    """Types of the layer's modules by path, but for those in parts that are the model's own."""
    return {
        name: type(module) for name, module in layer.named_modules() if name and not _is_within(name, kind.own_parts)
    }


def _is_within(path: str, modules: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _is_of_kind(layer: nn.Module, kind: LayerNames) -> bool:
    if kind.feed_forward and not hasattr(layer, kind.feed_forward):
        return False
    if kind.mixers and sum(isinstance(getattr(layer, name, None), nn.Module) for name in kind.mixers) != 1:
        return False
    found = {
        name
        for name, module in layer.named_modules()
        if name and next(module.children(), None) is None and not isinstance(module, nn.Dropout)
    }
    found = {name for name in found if not _is_within(name, kind.own_parts)}
    common = {*kind.linears.values(), *kind.norms.values(), kind.act, kind.input_act} - {""}
    missing = common - found
    may_miss = {kind.linears.get(part, "") for part in ("k", "v")}
    return (
        missing <= may_miss
        and found - common <= set(HEAD_NORMS.values())
        and all(type(layer.get_submodule(name)) is nn.Linear for name in set(kind.linears.values()) - missing)
    )


def _specs(
    layers: list[nn.Module], names: LayerNames, attention: list[tuple[nn.Module, AttentionSpec]]
) -> list[AttentionSpec | None]:
    if names.mixers:
        return [None] * len(layers)
    own = [layer.get_submodule(names.attention) for layer in layers]
    if any(module is not seen for module, (seen, _) in zip(own, attention, strict=True)):
        raise _NoMatch("attention is not in its usual place, or in another order")
    return [spec for _, spec in attention]


def _shape(
    layers: list[nn.Module], names: LayerNames, specs: list[AttentionSpec | None], kernels: NativeKernels
) -> StackShape:
    layer, spec = layers[0], specs[0]
    if len({one.num_heads for one in specs if one is not None}) > 1:
        raise _NoMatch("layers of several numbers of heads")
    act, input_size = 0, 0
    if names.act:
        acts = {type(layer.get_submodule(name)).__name__ for name in (names.act, names.input_act) if name}
        act_name = min(acts)
        if act_name not in ACTIVATIONS or len(acts) > 1:
            raise _NoMatch(f"the activation {' and '.join(sorted(acts))}")
        act = ACTIVATIONS[act_name]
    if names.input_act:
        input_size = cast(nn.Linear, layer.get_submodule(names.linears["input_gate"])).out_features
    norm = layer.get_submodule(next(iter(names.norms.values())))
    of_norm = next(norm.parameters())
    if of_norm.dtype not in DTYPES or of_norm.device.type != "cpu":
        raise _NoMatch(f"not in {_name(of_norm.dtype)} on {of_norm.device.type}")
    with torch.no_grad():
        found = find_norm(norm, NativeFused(kernels))
        form = found.form if found is not None else _form_of_layer_norm(norm)
    # Adapters' own layer norms are the model's own layers to compute, which the states of mixers allow only once.
    if form is None or (found is None and names.mixers):
        raise _NoMatch(f"the norm {type(norm).__name__}")
    added = getattr(layer, "residual_multiplier", 1.0)
    if names.is_parallel and added != 1.0:
        raise _NoMatch("parts of what is computed side by side")
    shape = StackShape(
        of_norm.dtype, of_norm.shape[0], 0, act, names, form, float(added), is_layer_norm=found is None,
        input_size=input_size,
    )  # fmt: skip
    if spec is None:
        return shape
    attention = layer.get_submodule(names.attention)
    q_norm = getattr(getattr(attention, "q_norm", None), "weight", None)
    all_heads = isinstance(q_norm, Tensor) and q_norm.numel() == spec.num_heads * spec.k_dim != spec.k_dim
    query_scale = _query_scale(attention)
    return replace(shape, num_heads=spec.num_heads, norms_all_heads=all_heads, query_scale=query_scale)


def _layer_shape(layer: nn.Module, names: LayerNames, spec: AttentionSpec | None) -> LayerShape:
    linears = {part: path for part, path in names.linears.items() if _has(layer, path)}
    if "k" in linears and "v" not in linears:  # values are keys before their norm
        linears = {part: linears.get(part, linears["k"]) for part in names.linears}
    ffn_size = cast(nn.Linear, layer.get_submodule(linears["down"])).in_features if "down" in linears else 0
    if names.merges_gate_up and ffn_size % (BAND // 2):
        raise _NoMatch("linears of gate and up together, of unusual shapes")
    own = LayerShape(spec, ffn_size, linears)
    if ("k" in names.linears and "k" not in linears) != own.shares_kv:
        raise _NoMatch("keys and values of earlier layers, of an unusual kind")
    return own


def _has(layer: nn.Module, path: str) -> bool:
    """True if the layer has this module."""
    return any(name == path for name, _ in layer.named_modules())


def _query_scale(attention: nn.Module) -> QueryScale | None:
    """The scale of queries in a layer's configuration; the comparison shows whether the layer has it."""
    rope: Mapping[str, Any] = getattr(getattr(attention, "config", None), "rope_parameters", None) or {}
    beta, period = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryScale(float(beta), int(period)) if beta and period else None


def _form_of_layer_norm(norm: nn.Module) -> NormForm | None:
    """The form of a norm that takes the mean away; None of another one."""
    wide = copy.deepcopy(norm).float()
    parameters = dict(wide.named_parameters())
    eps, weight, bias = norm_eps(norm), parameters.get("weight"), parameters.get("bias")
    if weight is None or weight.dim() != 1 or eps is None:
        return None
    x = torch.randn(NUM_TOKENS, len(weight), generator=torch.Generator().manual_seed(5))
    with _model_code():
        got = cast(Tensor, wide(x))
    for offset in (0.0, 1.0):
        if compare("operation", got, F.layer_norm(x, weight.shape, weight + offset, bias, eps)).is_equal:
            return NormForm(offset, False)
    return None


def _check_attention(spec: AttentionSpec, shape: StackShape) -> None:
    """Raises _NoMatch where the stack does not attend in this way."""
    if reason := reason_against(spec, shape.dtype):
        raise _NoMatch(reason)
    if spec.chunk is not None or spec.key_bias is not None or spec.v_dim != spec.k_dim:
        raise _NoMatch("chunks, biases or values of another size in attention")
    panel = BAND // 2
    if not shape.names.merges_qkv and (spec.k_dim * spec.num_heads % panel or spec.k_dim * spec.num_kv_heads % panel):
        raise _NoMatch(f"{spec.num_heads} and {spec.num_kv_heads} heads of {spec.k_dim}, in all no multiple of {panel}")


def _pack(layer: nn.Module, spec: AttentionSpec | None, shape: StackShape, kernels: NativeKernels) -> LayerWeights:
    own = _layer_shape(layer, shape.names, spec)
    linears = {part: cast(nn.Linear, layer.get_submodule(path)) for part, path in own.linears.items()}
    if spec is not None:
        _check_attention(spec, shape)
    if {part: tuple(linear.weight.shape) for part, linear in linears.items()} != _shapes_of_linears(shape, own):
        raise _NoMatch("linears of unusual shapes")
    if not all(kernels.can_pack(one.weight) and one.weight.dtype == shape.dtype for one in linears.values()):
        raise _NoMatch("a number of features that the kernels do not know")
    if any(_bias(linears[part]) is not None for part in linears if part not in ("q", "k", "v", "o")):
        raise _NoMatch("biases in the feed-forward part")
    norms = {name: layer.get_submodule(path) for name, path in _norms(layer, shape).items()}
    widths = _widths_of_norms(shape, own)
    for name, norm in norms.items():
        found = {part: (one.dtype, tuple(one.shape)) for part, one in norm.named_parameters()}
        may_miss = shape.is_layer_norm or (name in HEAD_NORMS and not found)
        wanted = dict.fromkeys(found if may_miss else ("weight",), (shape.dtype, (widths[name],)))
        if found != wanted or norm_eps(norm) is None or (shape.is_layer_norm and name in HEAD_NORMS):
            raise _NoMatch(f"the norm {type(norm).__name__}")
    qkv = [linears[part] for part in ("q", "k", "v") if part in linears]
    gate_up, down = _pack_feed_forward(linears, shape, kernels)
    return LayerWeights(
        shape=own,
        qkv=kernels.pack([linear.weight for linear in qkv], shape.format) if qkv else None,
        o=kernels.pack([linears["o"].weight], shape.format) if qkv else None,
        gate_up=gate_up,
        down=down,
        qkv_bias=_joined_bias(qkv),
        o_bias=_bias(linears["o"]) if qkv else None,
        norms={name: _weight_of(norm, widths[name], shape) for name, norm in norms.items()},
        eps=_one_eps([norms[name] for name in shape.names.norms]),
        qk_eps=_one_eps([norms[name] for name in HEAD_NORMS if name in norms]),
        norm_biases={
            name: bias for name, norm in norms.items() if isinstance(bias := getattr(norm, "bias", None), Tensor)
        },
        input_gate=kernels.pack([linears["input_gate"].weight], shape.format) if shape.input_size else None,
        input_projection=kernels.pack([linears["input_projection"].weight], shape.format) if shape.input_size else None,
        scale=_scale(layer),
    )


def _scale(layer: nn.Module) -> float:
    """The factor of a layer's output, by the name that Gemma 4 has for it."""
    scale: Tensor | None = getattr(layer, SCALE, None)
    if scale is not None and scale.numel() != 1:
        raise _NoMatch("factors of a layer's features")
    return 1.0 if scale is None else scale.item()


def _weight_of(norm: nn.Module, num_features: int, shape: StackShape) -> Tensor:
    """A norm's weight; of one without a weight that which leaves values as they are."""
    weight: Tensor | None = getattr(norm, "weight", None)
    if weight is not None:
        return weight
    return torch.full((num_features,), 1.0 - shape.norm_form.offset, dtype=shape.dtype)


def _pack_feed_forward(
    linears: Mapping[str, nn.Linear], shape: StackShape, kernels: NativeKernels
) -> tuple[PackedWeight | None, PackedWeight | None]:
    if shape.names.feed_forward:
        return None, None
    gate, up = [linears[part].weight for part in ("gate", "up")] if "up" in linears else linears["gate"].weight.chunk(2)
    return kernels.pack_pair(gate, up, shape.format), kernels.pack([linears["down"].weight], shape.format)


def _shapes_of_linears(shape: StackShape, own: LayerShape) -> dict[str, tuple[int, int]]:
    rows, kv_rows = shape.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    outputs = {"q": rows} if own.shares_kv else {"q": rows, "k": kv_rows, "v": kv_rows}
    common = {"o": (shape.hidden_size, rows)}
    if shape.names.mixers:
        outputs, common = {}, {}
    elif shape.names.merges_qkv:
        outputs = {"q": rows + 2 * kv_rows}
    if not shape.names.feed_forward:
        common["down"] = shape.hidden_size, own.ffn_size
        both = {"gate": 2 * own.ffn_size}
        outputs |= both if shape.names.merges_gate_up else {"gate": own.ffn_size, "up": own.ffn_size}
    if shape.input_size:
        outputs["input_gate"] = shape.input_size
        common["input_projection"] = shape.hidden_size, shape.input_size
    return common | {part: (num_outputs, shape.hidden_size) for part, num_outputs in outputs.items()}


def _widths_of_norms(shape: StackShape, own: LayerShape) -> dict[str, int]:
    heads = (shape.num_heads, own.num_kv_heads, 1) if shape.norms_all_heads else (1, 1, 1)
    of_heads = {name: num * own.head_dim for name, num in zip(HEAD_NORMS, heads, strict=True)}
    return of_heads | dict.fromkeys(shape.names.norms, shape.hidden_size)


def _drop_weights(layer: nn.Module, own: LayerShape) -> None:
    """Frees a layer's plain weights; their shapes stay."""
    for name in own.linears.values():
        linear = cast(nn.Linear, layer.get_submodule(name))
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)


def _give_back(layer: nn.Module, weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> None:
    """Gives a layer its plain weights again."""
    for name, linear in zip(weights.shape.linears.values(), linears_of(weights, shape, kernels), strict=True):
        plain = linear.matrix().contiguous()
        cast(nn.Linear, layer.get_submodule(name)).weight = nn.Parameter(plain, requires_grad=False)


def _norms(layer: nn.Module, shape: StackShape) -> Mapping[str, str]:
    """Paths of the norms that it has."""
    return {**shape.names.norms, **{name: path for name, path in shape.names.head_norms.items() if _has(layer, path)}}


def _one_eps(norms: list[nn.Module]) -> float:
    found = {norm_eps(norm) for norm in norms}
    if len(found) > 1:
        raise _NoMatch("norms of different epsilon")
    return next(iter(found), None) or 0.0


def _bias(linear: nn.Linear) -> Tensor | None:
    return cast(Tensor | None, linear.bias)


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    biases = [_bias(linear) for linear in linears]
    if all(bias is None for bias in biases):
        return None
    rows = [
        bias.detach() if bias is not None else linear.weight.new_zeros(linear.out_features)
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(rows)


def _final_norm(
    model: PreTrainedModel, path: str, shape: StackShape, kernels: NativeKernels
) -> tuple[str, NativeNorm] | None:
    """The norm beside the list of layers, where it is of the layers' own kind, which has been proven by then."""
    parent, _, _ = path.rpartition(".")
    norm_path = f"{parent}.norm" if parent else "norm"
    layer = model.get_submodule(f"{path}.0")
    try:
        norm = model.get_submodule(norm_path)
    except AttributeError:
        return None
    own = layer.get_submodule(next(iter(shape.names.norms.values())))
    weight, eps = getattr(norm, "weight", None), norm_eps(norm)
    if type(norm) is not type(own) or not isinstance(weight, Tensor) or eps is None or shape.is_layer_norm:
        return None
    if weight.dtype != cast(Tensor, own.weight).dtype:
        return None
    return norm_path, NativeNorm(kernels, cast(nn.Parameter, weight), eps, shape.norm_form)


# --- proof ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A layer's arguments [1, NUM_TOKENS, ...] in one dtype."""

    states: Tensor
    positions: Tensor
    rotary: tuple[Tensor, Tensor] | None
    of_layer: Tensor  # an input of the layer's own

    def named(self) -> dict[str, Any]:
        """The arguments that layers are given by name."""
        return {"attention_mask": None, "position_ids": self.positions, "position_embeddings": self.rotary}


@dataclass(frozen=True, slots=True)
class _Proven:
    """A layer that was proven in float32: its values and what it computed with them."""

    values: dict[str, Tensor]
    weights: LayerWeights
    computed: Tensor


class LayerProof:
    """Comparison of layers with native ones on random states.

    Each layer is compared in the model's dtype, with the packed weights that will be served. Rounding hides small
    differences there. So the first one is compared in float32 too, and the others have to compute its very bits when
    they are given its values in float32; what does not is compared in float32 by itself. There is a first one of each
    kind of rotation, and of those without one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shape: StackShape,
        kernels: NativeKernels,
        far: Sequence[int],
        num_layers: int,
        attention: Mapping[nn.Module, AttentionSpec],
    ) -> None:
        """`far`: positions beside the first ones. `attention`: all of the model's modules that attend."""
        self._kernels = kernels
        self._idx = 0
        self._attention = attention
        rotary = _rotary_of(model)
        if rotary is None and not shape.names.mixers:
            raise _NoMatch("its positions are not rotary")
        self.rotations = _rotations(model, rotary, num_layers)
        self._own, self._wide = (
            {kind: _inputs(rotary, kind, shape, dtype, far) for kind in set(self.rotations)}
            for dtype in (shape.dtype, torch.float32)
        )
        first = None if shape.names.mixers else self._wide[self.rotations[0]].rotary
        self.shape = shape if first is None else replace(shape, angles=Angles.of(first[0]))
        self._first: dict[tuple[object, ...], _Proven] = {}

    def check(self, layer: nn.Module, weights: LayerWeights) -> LayerWeights:
        """The next layer's weights, with the way in which it turns queries and keys. Raises _NoMatch where it computes
        something else than a native layer in any way."""
        reasons: list[_NoMatch] = []
        inputs = self._own[self.rotations[self._idx]]
        with _stand_ins(layer, self.shape.names, self._attention, inputs) as own_parts:
            for turns in (Turns.HALVES, Turns.PAIRS, Turns.NOT) if weights.attention is not None else (Turns.NOT,):
                tried = replace(weights, turns=turns, own_parts=own_parts)
                try:
                    self._check(layer, tried)
                except _NoMatch as reason:
                    reasons.append(reason)
                    continue
                self._idx += 1
                return tried
        raise reasons[0]

    def _check(self, layer: nn.Module, weights: LayerWeights) -> None:
        kind = self.rotations[self._idx]
        self._compare(layer, weights, self.shape, self._own[kind])
        if self.shape.dtype == torch.float32 or self._is_like_first(layer, weights, kind):
            return
        wide, shape = copy.deepcopy(layer).float(), replace(self.shape, dtype=torch.float32, format=None)
        packed = replace(
            _pack(wide, weights.attention, shape, self._kernels), turns=weights.turns, own_parts=weights.own_parts
        )
        computed = self._compare(wide, packed, shape, self._wide[kind])
        if _values(wide).keys() == _known_values(wide, shape, weights.shape):
            self._first.setdefault(self._form(layer, weights, kind), _Proven(_values(wide), weights, computed))

    def _form(self, layer: nn.Module, weights: LayerWeights, kind: str) -> tuple[object, ...]:
        """Kinds of a layer's parts, and shapes of its values."""
        shapes = [(name, tuple(value.shape)) for name, value in _values(layer).items()]
        return kind, weights.turns, *shapes

    def _is_like_first(self, layer: nn.Module, weights: LayerWeights, kind: str) -> bool:
        """True if a layer equals the first one except for its values."""
        first = self._first.get(self._form(layer, weights, kind))
        if first is None:
            return False
        known = ("eps", "qk_eps", "attention", "own_parts")
        if any(getattr(weights, name) != getattr(first.weights, name) for name in known):
            return False
        names, inputs = self.shape.names, self._wide[kind]
        computed = _computed(layer, names, _attending(layer, names, weights), inputs, first.values)
        return torch.equal(first.computed, computed)

    def _compare(self, layer: nn.Module, weights: LayerWeights, shape: StackShape, inputs: _Inputs) -> Tensor:
        """The layer's output. Raises _NoMatch where a native one adds something else to the states."""
        expected = _computed(layer, shape.names, _attending(layer, shape.names, weights), inputs)
        found = compare("decoder", expected, _native_output(weights, shape, inputs, self._kernels), base=inputs.states)
        if not found.is_equal:
            raise _NoMatch(
                f"layer {self._idx} computes something else ({found.error:.1%} apart in {_name(shape.dtype)})"
            )
        return expected


class _StandIn(nn.Module):
    """Stands for a part of the model's own, which may be large and slow, and is the same in both of the layers
    compared."""

    def __init__(self, answer: type = Tensor) -> None:
        """`answer`: of the part; a tuple where it answers with more than its output, as routers' probabilities."""
        super().__init__()
        self._has_more = issubclass(answer, tuple)

    def forward(self, *arguments: Any, **named: Any) -> Tensor | tuple[Tensor, None]:
        states = next(one for one in (*arguments, *named.values()) if isinstance(one, Tensor) and one.dim() == 3)
        y = states.flip(-1).tanh()
        return (y, None) if self._has_more else y


class _Watched(nn.Module):
    """A part of a layer, and how the layer has called it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.answer: Any = None

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.calls.append((arguments, named))
        self.answer = self.part(*arguments, **named)
        return self.answer


@contextmanager
def _stand_ins(
    layer: nn.Module, names: LayerNames, attention: Mapping[nn.Module, AttentionSpec], inputs: _Inputs
) -> Generator[tuple[PartCall, ...]]:
    """Has a layer compute with stand-ins for its parts of the model's own meanwhile. Gives how it calls these, in the
    order in which they run. `attention`: modules that attend, in them or not."""
    own = {path: part for path in names.own_parts if isinstance(part := getattr(layer, path, None), nn.Module)}
    if not own:
        yield ()
        return
    watched = {path: _Watched(part) for path, part in own.items()}
    try:
        for path, one in watched.items():
            layer.set_submodule(path, one)
        _computed(
            layer, names, {module: attention[module] for module in layer.modules() if module in attention}, inputs
        )
        calls = tuple(_call_of(path, one, inputs) for path, one in watched.items())
        for path, one in watched.items():
            layer.set_submodule(path, _StandIn(type(one.answer)))
        yield calls
    finally:
        for path, part in own.items():
            layer.set_submodule(path, part)


def _call_of(path: str, watched: _Watched, inputs: _Inputs) -> PartCall:
    """The call of a part, which was called once with its layer's inputs."""
    if len(watched.calls) != 1:
        raise _NoMatch(f"{path} runs {len(watched.calls)} times")
    answer = watched.answer[0] if isinstance(watched.answer, tuple) else watched.answer
    if not isinstance(answer, Tensor) or (answer.shape, answer.dtype) != (inputs.states.shape, inputs.states.dtype):
        raise _NoMatch(f"{path} answers in another form")

    def source(value: Any) -> Any:
        for name, one in inputs.named().items():
            if one is not None and value is one:
                return ArgumentOfLayer(name)
        if isinstance(value, Tensor) and value.shape == inputs.states.shape:
            return STATES
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise _NoMatch(f"{path} is given a {type(value).__name__} of the layer's own")

    arguments, named = watched.calls[0]
    call = PartCall(path, tuple(map(source, arguments)), {name: source(value) for name, value in named.items()})
    if [*call.arguments, *call.named.values()].count(STATES) != 1:
        raise _NoMatch(f"{path} is not given the layer's states")
    return call


def _values(layer: nn.Module) -> dict[str, Tensor]:
    """All tensors of a layer by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _known_values(layer: nn.Module, shape: StackShape, own: LayerShape) -> set[str]:
    """Names of the values that a native layer has too."""
    modules = (*own.linears.values(), *_norms(layer, shape).values())
    known = {f"{module}.{name}" for module in modules for name, _ in layer.get_submodule(module).named_parameters()}
    return known | ({SCALE} if hasattr(layer, SCALE) else set())


@contextmanager
def _model_code() -> Generator[None]:
    """Turns errors of a model's own code, called in a way that it does not know, into _NoMatch."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:  # whatever a model's code raises
        raise _NoMatch(f"they are called in another way ({error})") from error


def _rotary_of(model: PreTrainedModel) -> nn.Module | None:
    return next((module for name, module in model.named_modules() if name.endswith(("rotary_emb", "pos_emb"))), None)


def _rotations(model: PreTrainedModel, rotary: nn.Module | None, num_layers: int) -> Sequence[str]:
    """The kind of each layer's rotation, as Transformers names it where a model has several; else all are ""."""
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [""] * num_layers
    found: list[str] = getattr(model.config.get_text_config(), "layer_types", None) or []
    if len(found) != num_layers:
        raise _NoMatch(f"they are {num_layers}, and the configuration has types of {len(found)}")
    return found


def _inputs(rotary: nn.Module | None, kind: str, shape: StackShape, dtype: torch.dtype, far: Sequence[int]) -> _Inputs:
    generator = torch.Generator().manual_seed(5)
    # Small, because what a layer adds does not grow with its input, but rounding the sum does.
    states = (STATES_SCALE * torch.randn(1, NUM_TOKENS, shape.hidden_size, generator=generator)).to(dtype)
    of_layer = torch.randn(1, NUM_TOKENS, shape.input_size, generator=generator).to(dtype)
    # What a layer does with positions besides rotation may begin far out.
    positions = torch.tensor([[*range(3, 3 + NUM_TOKENS), *far][-NUM_TOKENS:]])
    embeddings: tuple[Tensor, Tensor] | None = None
    if rotary is not None:
        with _model_code():
            embeddings = rotary(states, position_ids=positions, **({"layer_type": kind} if kind else {}))
    return _Inputs(states, positions, embeddings, of_layer)


def _computed(
    layer: nn.Module,
    names: LayerNames,
    attention: Mapping[nn.Module, AttentionSpec],
    inputs: _Inputs,
    values: dict[str, Tensor] | None = None,
) -> Tensor:
    """A layer's output. `attention`: its modules that attend. `values`: in the place of its own."""
    given = (inputs.states.clone(), inputs.of_layer) if names.input_act else (inputs.states.clone(),)
    named = inputs.named()
    for module, spec in attention.items():
        setattr(module, HANDLE, partial(_attend_plainly, spec))
        if SHARED_KV in inspect.signature(layer.forward).parameters:
            named[SHARED_KV] = _SharedKv(spec, inputs.states.dtype)
    try:
        with _model_code():
            output = functional_call(layer, values or {}, given, named)
    finally:
        for module in attention:
            delattr(module, HANDLE)
    if not isinstance(output, Tensor):
        raise _NoMatch("they answer with more than their states")
    return output


def _attending(layer: nn.Module, names: LayerNames, weights: LayerWeights) -> dict[nn.Module, AttentionSpec]:
    """The layer's module that attends and that a native layer stands for."""
    return {} if weights.attention is None else {layer.get_submodule(names.attention): weights.attention}


def _native_output(weights: LayerWeights, shape: StackShape, inputs: _Inputs, kernels: NativeKernels) -> Tensor:
    """A native layer's output."""
    context, spec = StepContext(), weights.attention
    stack = NativeStack(kernels, shape, [weights], context, [[_StandIn() for _ in weights.own_parts]])
    if spec is not None:
        # What an earlier layer has left; others write their own.
        shared = _SharedKv(spec, shape.dtype)[""]
        stack.bind([LayerKv(*(one.transpose(1, 2).contiguous() for one in shared))])
    context.attention = plan_spans(_one_span())
    with torch.inference_mode():
        return stack(
            inputs.states.clone(), inputs.of_layer, position_ids=inputs.positions, position_embeddings=inputs.rotary
        )


class _SharedKv(dict[str, tuple[Tensor, Tensor]]):
    """Keys and values [1, heads, tokens, dim] of an earlier layer, the same of any kind."""

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(6)
        shape = 1, spec.num_kv_heads, NUM_TOKENS, spec.k_dim
        key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        self._kv = key, value

    def __missing__(self, _: str) -> tuple[Tensor, Tensor]:
        return self._kv


def _attend_plainly(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Attention of the compared layer: all tokens are one sequence.

    query, key, value [1, heads, tokens, dim] -> [1, tokens, heads, dim]
    """
    idx = torch.arange(NUM_TOKENS)
    visible = idx[None, :] <= idx[:, None]
    if spec.window is not None:
        visible &= idx[None, :] > idx[:, None] - spec.window
    if spec.softcap is None and spec.sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=spec.scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, dim=1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * spec.scaling
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if spec.sinks is not None:
        sinks = spec.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(-1, dtype=torch.float32)[..., :NUM_TOKENS].to(query.dtype)
    return (shares @ value).transpose(1, 2).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_span() -> AttentionBatch:
    """One sequence of all tokens, in one block."""
    length = np.array([NUM_TOKENS], dtype=np.int64)
    return AttentionBatch(length, length, np.zeros((1, 1), np.int64), NUM_TOKENS, torch.arange(NUM_TOKENS))
