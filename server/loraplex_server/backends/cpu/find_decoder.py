"""Search for a native decoder: common layers, packed and compared with native ones.

Structure alone proves nothing: a model may scale its residuals or norms in another way. So every layer runs once beside
a native one, with the packed weights that will be served. Where one differs, the model's own code computes all of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
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
    LINEARS,
    NORMS,
    LayerWeights,
    NativeNorm,
    NativeStack,
    StackShape,
    linears_of,
)
from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.equivalence import compare
from loraplex_server.layers.attention import HANDLE, AttentionBatch, AttentionSpec, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.quantization import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

ACTIVATIONS: Final = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
NUM_TOKENS: Final = 6
STATES_SCALE: Final = 0.02
ROTARY_MULTIPLE: Final = 32  # of the features that positions turn


@dataclass(frozen=True, slots=True)
class FoundStack:
    """A model's layers, whose linears have no weights any more, and the stack that computes the same."""

    path: str  # of the list of layers
    layers: list[nn.Module]
    stack: NativeStack
    norm: tuple[str, NativeNorm] | None  # what follows the layers

    def install(self, model: PreTrainedModel) -> None:
        """Puts the stack in the place of the layers, in which linears have been replaced by adapted ones by now."""
        self.stack.connect(self.path, self.layers)
        model.set_submodule(self.path, nn.ModuleList([self.stack]))
        if self.norm is not None:
            model.set_submodule(*self.norm)


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
    try:
        path, layers = _list_of_layers(model, len(attention))
        specs = _specs(layers, attention)
        shape = replace(_shape(layers[0], specs[0]), format=form)
        weights = _take(layers, specs, shape, kernels, LayerProof(model, shape, kernels, far), progress)
    except _NoMatch as reason:
        log.info("layers are run one operation at a time: %s", reason)
        return None
    return FoundStack(path, layers, NativeStack(kernels, shape, weights, context), _final_norm(model, path, kernels))


def _take(
    layers: list[nn.Module],
    specs: list[AttentionSpec],
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
            weights = _pack(layer, spec, shape, kernels)
            proof.check(layer, weights)
            _drop_weights(layer)  # at once: the memory of all of them is never doubled
            taken.append(weights)
            tell(len(taken))
    except _NoMatch:
        for layer, weights in zip(layers, taken, strict=False):
            _give_back(layer, weights, shape, kernels)
        raise
    return taken


# --- structure --------------------------------------------------------------------------------------------------------


def _list_of_layers(model: PreTrainedModel, num_layers: int) -> tuple[str, list[nn.Module]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            layers = list(module)
            if all(_children(layer) == _children(layers[0]) for layer in layers) and _is_common(layers[0]):
                return path, layers
    raise _NoMatch("they are of another kind")


def _children(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    return tuple((name, type(module).__name__) for name, module in layer.named_modules())


def _is_common(layer: nn.Module) -> bool:
    names = {name for name, module in layer.named_modules() if name and next(module.children(), None) is None}
    common = {*LINEARS, *NORMS.values(), "mlp.act_fn"}
    return names in (common, common | set(HEAD_NORMS.values())) and all(
        type(layer.get_submodule(name)) is nn.Linear for name in LINEARS
    )


def _specs(layers: list[nn.Module], attention: list[tuple[nn.Module, AttentionSpec]]) -> list[AttentionSpec]:
    own = [layer.get_submodule("self_attn") for layer in layers]
    if any(module is not seen for module, (seen, _) in zip(own, attention, strict=True)):
        raise _NoMatch("attention is not in its usual place, or in another order")
    return [spec for _, spec in attention]


def _shape(layer: nn.Module, spec: AttentionSpec) -> StackShape:
    gate = cast(Tensor, layer.get_submodule("mlp.gate_proj").weight)
    act = ACTIVATIONS.get(type(layer.get_submodule("mlp.act_fn")).__name__)
    if act is None:
        raise _NoMatch(f"the activation {type(layer.get_submodule('mlp.act_fn')).__name__}")
    if gate.dtype not in DTYPES or gate.device.type != "cpu":
        raise _NoMatch(f"not in {_name(gate.dtype)} on {gate.device.type}")
    return StackShape(gate.dtype, gate.shape[1], spec.num_heads, spec.num_kv_heads, spec.k_dim, gate.shape[0], act)


def _pack(layer: nn.Module, spec: AttentionSpec, shape: StackShape, kernels: NativeKernels) -> LayerWeights:
    linears = [cast(nn.Linear, layer.get_submodule(name)) for name in LINEARS]
    q, k, v, o, gate, up, down = (linear.weight for linear in linears)
    if reason := reason_against(spec, shape.dtype):
        raise _NoMatch(reason)
    if spec.chunk is not None or spec.sinks is not None or spec.key_bias is not None:
        raise _NoMatch("chunks, sinks or biases in attention")
    rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    expected = [
        *((rows, shape.hidden_size), (kv_rows, shape.hidden_size), (kv_rows, shape.hidden_size)),
        *((shape.hidden_size, rows), (shape.ffn_size, shape.hidden_size), (shape.ffn_size, shape.hidden_size)),
        (shape.hidden_size, shape.ffn_size),
    ]
    if [tuple(linear.weight.shape) for linear in linears] != expected:
        raise _NoMatch("linears of unusual shapes")
    if not all(kernels.can_pack(linear.weight) and linear.weight.dtype == shape.dtype for linear in linears):
        raise _NoMatch("a number of features that the kernels do not know")
    if any(_bias(linear) is not None for linear in linears[4:]):
        raise _NoMatch("biases in the feed-forward part")
    norms = {name: layer.get_submodule(path) for name, path in _norms(layer).items()}
    for norm in norms.values():
        weights = [cast(Tensor, p) for p in norm.parameters()]
        if len(weights) != 1 or weights[0].dtype != shape.dtype or _eps(norm) is None:
            raise _NoMatch(f"the norm {type(norm).__name__}")
    return LayerWeights(
        qkv=kernels.pack([q, k, v], shape.format),
        o=kernels.pack([o], shape.format),
        gate_up=kernels.pack_pair(gate, up, shape.format),
        down=kernels.pack([down], shape.format),
        qkv_bias=_joined_bias(linears[:3]),
        o_bias=_bias(linears[3]),
        norms={name: cast(Tensor, norm.weight) for name, norm in norms.items()},
        eps=_one_eps([norms[name] for name in NORMS]),
        qk_eps=_one_eps([norms[name] for name in HEAD_NORMS if name in norms]),
        attention=spec,
    )


def _drop_weights(layer: nn.Module) -> None:
    """Frees a layer's plain weights; their shapes stay."""
    for name in LINEARS:
        linear = cast(nn.Linear, layer.get_submodule(name))
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)


def _give_back(layer: nn.Module, weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> None:
    """Gives a layer its plain weights again."""
    for name, linear in zip(LINEARS, linears_of(weights, shape, kernels), strict=True):
        plain = linear.matrix().contiguous()
        cast(nn.Linear, layer.get_submodule(name)).weight = nn.Parameter(plain, requires_grad=False)


def _norms(layer: nn.Module) -> Mapping[str, str]:
    """Paths of the norms that it has."""
    return {**NORMS, **HEAD_NORMS} if hasattr(layer.get_submodule("self_attn"), "q_norm") else NORMS


def _eps(norm: nn.Module) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return float(found) if isinstance(found, float) else None


def _one_eps(norms: list[nn.Module]) -> float:
    found = {_eps(norm) for norm in norms}
    if len(found) > 1:
        raise _NoMatch("norms of different epsilon")
    return next(iter(found), None) or 0.0


def _bias(linear: nn.Linear) -> Tensor | None:
    return cast(Tensor | None, linear.bias)


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    biases = [_bias(linear) for linear in linears]
    if all(bias is None for bias in biases):
        return None
    rows = [
        bias.detach() if bias is not None else linear.weight.new_zeros(linear.out_features)
        for linear, bias in zip(linears, biases, strict=True)
    ]
    return torch.cat(rows)


def _final_norm(model: PreTrainedModel, path: str, kernels: NativeKernels) -> tuple[str, NativeNorm] | None:
    """The norm beside the list of layers, where it is of the layers' own kind, which has been proven by then."""
    parent, _, _ = path.rpartition(".")
    norm_path = f"{parent}.norm" if parent else "norm"
    layer = model.get_submodule(f"{path}.0")
    try:
        norm = model.get_submodule(norm_path)
    except AttributeError:
        return None
    own = layer.get_submodule(NORMS["norm1"])
    weight, eps = getattr(norm, "weight", None), _eps(norm)
    if type(norm) is not type(own) or not isinstance(weight, Tensor) or eps is None:
        return None
    if weight.dtype != cast(Tensor, own.weight).dtype:
        return None
    return norm_path, NativeNorm(kernels, cast(nn.Parameter, weight), eps)


# --- proof ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A layer's arguments [1, NUM_TOKENS, ...] in one dtype."""

    states: Tensor
    positions: Tensor
    rotary: tuple[Tensor, Tensor]


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
    they are given its values in float32; what does not is compared in float32 by itself.
    """

    def __init__(self, model: PreTrainedModel, shape: StackShape, kernels: NativeKernels, far: Sequence[int]) -> None:
        """`far`: positions beside the first ones."""
        self._shape = shape
        self._kernels = kernels
        self._idx = 0
        self._own = _inputs(model, shape.hidden_size, shape.dtype, far)
        self._wide = (
            self._own if shape.dtype == torch.float32 else _inputs(model, shape.hidden_size, torch.float32, far)
        )
        self._first: _Proven | None = None

    def check(self, layer: nn.Module, weights: LayerWeights) -> None:
        """Raises _NoMatch where the next layer computes something else than a native one with these weights."""
        self._compare(layer, weights, self._shape, self._own)
        if self._shape.dtype != torch.float32 and not self._is_like_first(layer, weights):
            wide, shape = copy.deepcopy(layer).float(), replace(self._shape, dtype=torch.float32, format=None)
            packed = _pack(wide, weights.attention, shape, self._kernels)
            computed = self._compare(wide, packed, shape, self._wide)
            if self._first is None and _values(wide).keys() == _known_values(wide):
                self._first = _Proven(_values(wide), weights, computed)
        self._idx += 1

    def _is_like_first(self, layer: nn.Module, weights: LayerWeights) -> bool:
        """True if a layer equals the first one except for its values."""
        first = self._first
        if first is None or _values(layer).keys() != first.values.keys():
            return False
        if any(getattr(weights, name) != getattr(first.weights, name) for name in ("eps", "qk_eps", "attention")):
            return False
        spec = weights.attention
        return torch.equal(first.computed, _computed(layer, spec, self._wide, first.values))

    def _compare(self, layer: nn.Module, weights: LayerWeights, shape: StackShape, inputs: _Inputs) -> Tensor:
        """The layer's output. Raises _NoMatch where a native one adds something else to the states."""
        expected = _computed(layer, weights.attention, inputs)
        found = compare("decoder", expected, _native_output(weights, shape, inputs, self._kernels), base=inputs.states)
        if not found.is_equal:
            raise _NoMatch(
                f"layer {self._idx} computes something else ({found.error:.1%} apart in {_name(shape.dtype)})"
            )
        return expected


def _values(layer: nn.Module) -> dict[str, Tensor]:
    """All tensors of a layer by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _known_values(layer: nn.Module) -> set[str]:
    """Names of the values that a native layer has too."""
    modules = (*LINEARS, *_norms(layer).values())
    return {f"{module}.{name}" for module in modules for name, _ in layer.get_submodule(module).named_parameters()}


@contextmanager
def _model_code() -> Generator[None]:
    """Turns errors of a model's own code, called in a way that it does not know, into _NoMatch."""
    try:
        with torch.inference_mode():
            yield
    except Exception as error:  # whatever a model's code raises
        raise _NoMatch(f"they are called in another way ({error})") from error


def _inputs(model: PreTrainedModel, hidden_size: int, dtype: torch.dtype, far: Sequence[int]) -> _Inputs:
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise _NoMatch("its positions are not rotary")
    generator = torch.Generator().manual_seed(5)
    # Small, because what a layer adds does not grow with its input, but rounding the sum does.
    states = (STATES_SCALE * torch.randn(1, NUM_TOKENS, hidden_size, generator=generator)).to(dtype)
    # What a layer does with positions besides rotation may begin far out.
    positions = torch.tensor([[*range(3, 3 + NUM_TOKENS), *far][-NUM_TOKENS:]])
    with _model_code():
        embeddings: tuple[Tensor, Tensor] = rotary(states, position_ids=positions)
    if embeddings[0].shape[-1] % ROTARY_MULTIPLE:
        raise _NoMatch(f"positions turn {embeddings[0].shape[-1]} features of a head")
    return _Inputs(states, positions, embeddings)


def _computed(
    layer: nn.Module, spec: AttentionSpec, inputs: _Inputs, values: dict[str, Tensor] | None = None
) -> Tensor:
    """A layer's output. `values`: in the place of its own."""
    attention = layer.get_submodule("self_attn")
    setattr(attention, HANDLE, partial(_attend_plainly, spec))
    named = {"attention_mask": None, "position_ids": inputs.positions, "position_embeddings": inputs.rotary}
    try:
        with _model_code():
            output = functional_call(layer, values or {}, (inputs.states.clone(),), named)
    finally:
        delattr(attention, HANDLE)
    if not isinstance(output, Tensor):
        raise _NoMatch("they answer with more than their states")
    return output


def _native_output(weights: LayerWeights, shape: StackShape, inputs: _Inputs, kernels: NativeKernels) -> Tensor:
    """A native layer's output."""
    context, spec = StepContext(), weights.attention
    stack = NativeStack(kernels, shape, [weights], context)
    pages = torch.zeros(1, NUM_TOKENS, spec.num_kv_heads, spec.k_dim, dtype=shape.dtype)
    stack.bind([LayerKv(pages, pages.clone())])
    context.attention = plan_spans(_one_span())
    with torch.inference_mode():
        return stack(inputs.states.clone(), position_embeddings=inputs.rotary)


def _attend_plainly(spec: AttentionSpec, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    """Attention of the compared layer: all tokens are one sequence.

    query, key, value [1, heads, tokens, dim] -> [1, tokens, heads, dim]
    """
    idx = torch.arange(NUM_TOKENS)
    visible = idx[None, :] <= idx[:, None]
    if spec.window is not None:
        visible &= idx[None, :] > idx[:, None] - spec.window
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=spec.scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _one_span() -> AttentionBatch:
    """One sequence of all tokens, in one block."""
    length = np.array([NUM_TOKENS], dtype=np.int64)
    return AttentionBatch(length, length, np.zeros((1, 1), np.int64), NUM_TOKENS, torch.arange(NUM_TOKENS))
