"""Search for lists of decoder layers that a native stack computes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_runtime.reports import Progress, counted, no_progress
from loraplex_server.backends.cpu.decoder.kinds import KINDS, LayerNames
from loraplex_server.backends.cpu.decoder.pack import NoMatch, drop_weights, dtype_name, give_back, model_code, pack
from loraplex_server.backends.cpu.decoder.proof import NUM_TOKENS, LayerProof
from loraplex_server.backends.cpu.decoder.stack import ComputedLayer, NativeNorm, NativeStack, StackPart
from loraplex_server.backends.cpu.decoder.weights import LayerWeights, QueryScale, StackShape
from loraplex_server.backends.cpu.fused import NativeFused
from loraplex_server.backends.cpu.native.kernels import ACTIVATIONS, DTYPES, NativeKernels
from loraplex_server.backends.equivalence import compare
from loraplex_server.backends.fusion import NormForm, find_norm, norm_eps
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.mixers import MixerSpec, spec_of
from loraplex_server.layers.quantization import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


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
                modules += [ComputedLayer(self.stack.shape.names) for _ in range(part.num_layers - 1)]
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


def find_stack(
    model: PreTrainedModel,
    attention: list[tuple[nn.Module, AttentionSpec]],
    kernels: NativeKernels,
    context: StepContext,
    *,
    first_states: Mapping[nn.Module, int] | None = None,
    far: Sequence[int] = (),
    form: WeightFormat | None = None,
    progress: Progress = no_progress,
) -> FoundStack | None:
    """The stack for this model's layers, packed, or None. `attention`: what the probe saw. `first_states`: of modules
    that keep states, the index of their first one. `far`: positions that it is proved at, besides the first ones.
    `form`: weights are packed in few bits, which changes none that have been rounded before."""
    reasons: list[str] = []  # not the errors themselves, which hold what was packed
    for path, layers, names in _lists_of_layers(model, len(attention)):
        try:
            specs = _specs(layers, names, attention, first_states or {})
            shape = replace(_shape(layers, names, specs, kernels), format=form)
            proof = LayerProof(model, shape, kernels, far, len(layers), dict(attention))
            weights = _take(layers, specs, proof.shape, kernels, proof, progress)
        except NoMatch as reason:
            reasons.append(str(reason))
            continue
        if names.own_parts:
            kinds = {
                type(layer.get_submodule(call.path)).__name__
                for layer, own in zip(layers, weights, strict=True)
                for call in own.own_parts
            }
            why = f": {'; '.join(dict.fromkeys(reasons))}" if reasons else ""
            log.info("%s are the model's own modules%s", ", ".join(sorted(kinds)), why)
        stack = NativeStack(kernels, proof.shape, weights, context)
        norm = _final_norm(model, path, shape, kernels)
        return FoundStack(path, layers, stack, norm, _parts(stack, proof.rotations))
    log.info("layers are run one operation at a time: %s", reasons[0] if reasons else "they are of another kind")
    return None


def _take(
    layers: list[nn.Module],
    specs: list[AttentionSpec | MixerSpec | None],
    shape: StackShape,
    kernels: NativeKernels,
    proof: LayerProof,
    progress: Progress,
) -> list[LayerWeights]:
    """Packs and proves layer by layer, and lets the plain weights go. Raises NoMatch, and all have theirs again."""
    taken: list[LayerWeights] = []
    tell = counted(progress, "packing weights", len(layers), "layers")
    try:
        for layer, spec in zip(layers, specs, strict=True):
            weights = proof.check(layer, pack(layer, spec, shape, kernels))
            drop_weights(layer, weights.shape)  # at once: the memory of all of them is never doubled
            taken.append(weights)
            tell(len(taken))
    except NoMatch:
        for layer, weights in zip(layers, taken, strict=False):
            give_back(layer, weights, shape, kernels)
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
            if not _fits(layers, names, num_layers):
                continue
            types: dict[str, type[nn.Module]] = {}
            for layer in layers:
                types |= _children(layer, names)
            if all(_is_of_kind(layer, names) and _children(layer, names).items() <= types.items() for layer in layers):
                yield path, layers, names


def _fits(layers: list[nn.Module], kind: LayerNames, num_attending: int) -> bool:
    """True if some layers have what sets the kind apart: a mixer of known parts, or one of the model's own."""
    if not kind.keeps_states:
        return len(layers) == num_attending
    names = (kind.mixer,) if kind.mixer else kind.own_mixers
    return any(isinstance(getattr(layer, name, None), nn.Module) for layer in layers for name in names)


def _children(layer: nn.Module, kind: LayerNames) -> dict[str, type[nn.Module]]:
    """Types of the layer's modules by path, but for those in parts that are the model's own."""
    return {
        name: type(module) for name, module in layer.named_modules() if name and not _is_within(name, kind.own_parts)
    }


def _is_within(path: str, modules: Sequence[str]) -> bool:
    return any(f"{path}.".startswith(f"{module}.") for module in modules)


def _is_of_kind(layer: nn.Module, kind: LayerNames) -> bool:
    feed_forward = (kind.feed_forward, kind.beside_feed_forward)
    if not all(isinstance(getattr(layer, path, None), nn.Module) for path in feed_forward if path):
        return False
    absent = [path for path in kind.token_mixers if not isinstance(getattr(layer, path, None), nn.Module)]
    if len(absent) + 1 != len(kind.token_mixers):
        return False
    linears = {part: path for part, path in kind.linears.items() if not _is_within(path, absent)}
    found = {
        name
        for name, module in layer.named_modules()
        if name and next(module.children(), None) is None and not isinstance(module, nn.Dropout)
    }
    found = {name for name in found if not _is_within(name, kind.own_parts)}
    common = {*linears.values(), *kind.norms.values(), kind.act, kind.input_act} - {""}
    if kind.mixer and kind.mixer not in absent:
        common |= {f"{kind.mixer}.{part}" for part in ("conv1d", "norm")}
        found.discard(f"{kind.mixer}.act")  # silu, as the spec has it
    missing = common - found
    may_miss = {linears.get(part, "") for part in ("k", "v")}
    return (
        missing <= may_miss
        and found - common <= set(kind.head_norms.values())
        and all(type(layer.get_submodule(name)) is nn.Linear for name in set(linears.values()) - missing)
    )


def _specs(
    layers: list[nn.Module],
    names: LayerNames,
    attention: list[tuple[nn.Module, AttentionSpec]],
    first_states: Mapping[nn.Module, int],
) -> list[AttentionSpec | MixerSpec | None]:
    """Of each layer; None of those whose attention, or what is in its place, is the model's own module."""
    seen, found = iter(attention), list[AttentionSpec | MixerSpec | None]()
    for layer in layers:
        mixer: nn.Module | None = getattr(layer, names.mixer, None) if names.mixer else None
        own: nn.Module | None = getattr(layer, names.attention, None) if names.attends else None
        if mixer is not None:
            spec = spec_of(mixer, first_states[mixer]) if mixer in first_states else None
            if spec is None:
                raise NoMatch(f"a {type(mixer).__name__} of another kind")
            found.append(spec)
            continue
        module, spec = (None, None) if own is None else next(seen, (None, None))
        if module is not own:
            raise NoMatch("attention is not in its usual place, or in another order")
        found.append(spec)
    if names.attends and next(seen, None) is not None:
        raise NoMatch("some attention is outside of the layers")
    return found


def _shape(
    layers: list[nn.Module], names: LayerNames, specs: list[AttentionSpec | MixerSpec | None], kernels: NativeKernels
) -> StackShape:
    layer = layers[0]
    attending = [(one, spec) for one, spec in zip(layers, specs, strict=True) if isinstance(spec, AttentionSpec)]
    if len({spec.num_heads for _, spec in attending}) > 1:
        raise NoMatch("layers of several numbers of heads")
    act, input_size = 0, 0
    if names.act:
        acts = {type(layer.get_submodule(name)).__name__ for name in (names.act, names.input_act) if name}
        act_name = min(acts)
        if act_name not in ACTIVATIONS or len(acts) > 1:
            raise NoMatch(f"the activation {' and '.join(sorted(acts))}")
        act = ACTIVATIONS[act_name]
    if names.input_act:
        input_size = cast(nn.Linear, layer.get_submodule(names.linears["input_gate"])).out_features
    norm = layer.get_submodule(next(iter(names.norms.values())))
    of_norm = next(norm.parameters())
    if of_norm.dtype not in DTYPES or of_norm.device.type != "cpu":
        raise NoMatch(f"not in {dtype_name(of_norm.dtype)} on {of_norm.device.type}")
    with torch.no_grad():
        found = find_norm(norm, NativeFused(kernels))
        form = found.form if found is not None else _form_of_layer_norm(norm)
    # Adapters' own layer norms are the model's own layers to compute, which recurrences' states allow only once.
    if form is None or (found is None and names.keeps_states):
        raise NoMatch(f"the norm {type(norm).__name__}")
    added = getattr(layer, "residual_multiplier", 1.0)
    if names.is_parallel and added != 1.0:
        raise NoMatch("parts of what is computed side by side")
    shape = StackShape(
        of_norm.dtype, of_norm.shape[0], 0, act, names, form, float(added), is_layer_norm=found is None,
        input_size=input_size,
    )  # fmt: skip
    if not attending:
        return shape
    attention, spec = attending[0][0].get_submodule(names.attention), attending[0][1]
    q_norm = getattr(getattr(attention, "q_norm", None), "weight", None)
    all_heads = isinstance(q_norm, Tensor) and q_norm.numel() == spec.num_heads * spec.k_dim != spec.k_dim
    query_scale = _query_scale(attention)
    return replace(shape, num_heads=spec.num_heads, norms_all_heads=all_heads, query_scale=query_scale)


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
    with model_code():
        got = cast(Tensor, wide(x))
    for offset in (0.0, 1.0):
        if compare("operation", got, F.layer_norm(x, weight.shape, weight + offset, bias, eps)).is_equal:
            return NormForm(offset, False)
    return None


def _final_norm(
    model: PreTrainedModel, path: str, shape: StackShape, kernels: NativeKernels
) -> tuple[str, NativeNorm] | None:
    """The norm of hidden states beside the list of layers, where it is of the layers' own kind, which has been proven
    by then."""
    parent, dot, _ = path.rpartition(".")
    own = model.get_submodule(f"{path}.0").get_submodule(next(iter(shape.names.norms.values())))
    like = cast(Tensor, own.weight)
    for name, norm in model.get_submodule(parent).named_children():
        weight, eps = getattr(norm, "weight", None), norm_eps(norm)
        if type(norm) is not type(own) or not isinstance(weight, nn.Parameter) or eps is None or shape.is_layer_norm:
            continue
        if (weight.dtype, weight.shape) == (like.dtype, like.shape):
            return f"{parent}{dot}{name}", NativeNorm(kernels, weight, eps, shape.norm_form)
    return None
