"""Proof that native decoder layers compute what a model's own layers do.

Structure alone proves nothing: a model may scale its residuals or norms in another way. So every layer runs once beside
a native one, with the packed weights that will be served. Where one differs, the model's own code computes all of them.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from loraplex_server.backends.cpu.attention import plan_spans
from loraplex_server.backends.cpu.decoder.kinds import LayerNames
from loraplex_server.backends.cpu.decoder.pack import SCALE, NoMatch, dtype_name, model_code, norms_of, pack
from loraplex_server.backends.cpu.decoder.stack import NativeStack
from loraplex_server.backends.cpu.decoder.weights import (
    STATES,
    Angles,
    ArgumentOfLayer,
    LayerShape,
    LayerWeights,
    PartCall,
    StackShape,
    Turns,
)
from loraplex_server.backends.cpu.native.kernels import NativeKernels
from loraplex_server.backends.equivalence import compare
from loraplex_server.layers.attention import HANDLE, AttentionBatch, AttentionSpec, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.mixers import MixerSpec
from loraplex_server.layers.recurrences import NO_PLACE, Places, Recurrence, TimeSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TOKENS: Final = 6
SHARED_KV: Final = "shared_kv_states"  # the argument of layers with keys and values that others share
STATES_SCALE: Final = 0.02


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
        if rotary is None and not shape.names.keeps_states:  # hybrids may need none
            raise NoMatch("its positions are not rotary")
        self.rotations = _rotations(model, rotary, num_layers)
        self._own, self._wide = (
            {kind: _inputs(rotary, kind, shape, dtype, far) for kind in set(self.rotations)}
            for dtype in (shape.dtype, torch.float32)
        )
        first = self._wide[self.rotations[0]].rotary if shape.names.attends else None
        self.shape = shape if first is None else replace(shape, angles=Angles.of(first[0]))
        self._first: dict[tuple[object, ...], _Proven] = {}

    def check(self, layer: nn.Module, weights: LayerWeights) -> LayerWeights:
        """The next layer's weights, with the way in which it turns queries and keys. Raises NoMatch where it computes
        something else than a native layer in any way."""
        reasons: list[NoMatch] = []
        inputs = self._own[self.rotations[self._idx]]
        with _stand_ins(layer, self.shape.names, self._attention, inputs) as own_parts:
            for turns in (Turns.HALVES, Turns.PAIRS, Turns.NOT) if weights.attention is not None else (Turns.NOT,):
                tried = replace(weights, turns=turns, own_parts=own_parts)
                try:
                    self._check(layer, tried)
                except NoMatch as reason:
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
            pack(wide, weights.shape.token_mixer, shape, self._kernels),
            turns=weights.turns,
            own_parts=weights.own_parts,
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
        if _constants(weights) != _constants(first.weights):
            return False
        names, inputs = self.shape.names, self._wide[kind]
        computed = _computed(layer, names, _attending(layer, names, weights), inputs, first.values)
        return torch.equal(first.computed, computed)

    def _compare(self, layer: nn.Module, weights: LayerWeights, shape: StackShape, inputs: _Inputs) -> Tensor:
        """The layer's output. Raises NoMatch where a native one adds something else to the states."""
        expected = _computed(layer, shape.names, _attending(layer, shape.names, weights), inputs)
        found = compare("decoder", expected, _native_output(weights, shape, inputs, self._kernels), base=inputs.states)
        if not found.is_equal:
            raise NoMatch(
                f"layer {self._idx} computes something else ({found.error:.1%} apart in {dtype_name(shape.dtype)})"
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
    order of `LayerNames.own_parts`. `attention`: modules that attend, in them or not."""
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
        raise NoMatch(f"{path} runs {len(watched.calls)} times")
    answer = watched.answer[0] if isinstance(watched.answer, tuple) else watched.answer
    if not isinstance(answer, Tensor) or (answer.shape, answer.dtype) != (inputs.states.shape, inputs.states.dtype):
        raise NoMatch(f"{path} answers in another form")

    def source(value: Any) -> Any:
        for name, one in inputs.named().items():
            if one is not None and value is one:
                return ArgumentOfLayer(name)
        if isinstance(value, Tensor) and value.shape == inputs.states.shape:
            return STATES
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise NoMatch(f"{path} is given a {type(value).__name__} of the layer's own")

    arguments, named = watched.calls[0]
    call = PartCall(path, tuple(map(source, arguments)), {name: source(value) for name, value in named.items()})
    if [*call.arguments, *call.named.values()].count(STATES) != 1:
        raise NoMatch(f"{path} is not given the layer's states")
    return call


def _values(layer: nn.Module) -> dict[str, Tensor]:
    """All tensors of a layer by name."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _known_values(layer: nn.Module, shape: StackShape, own: LayerShape) -> set[str]:
    """Names of the values that a native layer has too."""
    modules = (*own.linears.values(), *norms_of(layer, shape).values())
    known = {f"{module}.{name}" for module in modules for name, _ in layer.get_submodule(module).named_parameters()}
    if own.mixer is not None:
        parts = ("A_log", "D", "dt_bias", "conv1d.weight", "conv1d.bias", "norm.weight")
        known |= {f"{shape.names.mixer}.{part}" for part in parts} & _values(layer).keys()
    return known | ({SCALE} if hasattr(layer, SCALE) else set())


def _constants(weights: LayerWeights) -> tuple[Any, ...]:
    """Numbers and forms of a native layer beside its values."""
    constants = weights.eps, weights.qk_eps, weights.attention, tuple(weights.own_parts)
    if weights.mixer is None:
        return constants
    mixer = weights.mixer
    limits = mixer.attention.gates.limits if isinstance(mixer.attention.gates, TimeSteps) else ()
    return *constants, replace(mixer.spec, first_state=0), mixer.norm_eps, mixer.attention.scale, limits


def _rotary_of(model: PreTrainedModel) -> nn.Module | None:
    return next((module for name, module in model.named_modules() if name.endswith(("rotary_emb", "pos_emb"))), None)


def _rotations(model: PreTrainedModel, rotary: nn.Module | None, num_layers: int) -> Sequence[str]:
    """The kind of each layer's rotation, as Transformers names it where a model has several; else all are ""."""
    if rotary is None or "layer_type" not in inspect.signature(rotary.forward).parameters:
        return [""] * num_layers
    found: list[str] = getattr(model.config.get_text_config(), "layer_types", None) or []
    if len(found) != num_layers:
        raise NoMatch(f"they are {num_layers}, and the configuration has types of {len(found)}")
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
        with model_code():
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
        with model_code():
            output = functional_call(layer, values or {}, given, named)
    finally:
        for module in attention:
            delattr(module, HANDLE)
    if names.answers_more and isinstance(output, tuple) and output[1:] == (None,):
        output = output[0]
    if not isinstance(output, Tensor):
        raise NoMatch("they answer with more than their states")
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
    if weights.mixer is not None:
        context.states = _NoPast(weights.mixer.spec, weights.mixer.conv_weight.shape, shape.dtype)
    with torch.inference_mode():
        return stack.run_layers(
            slice(0, 1), inputs.states.clone(), (inputs.of_layer,), inputs.rotary, {"position_ids": inputs.positions}
        )


class _NoPast:
    """States of one text that begins: implements `StatesOfStep`."""

    keeps_inputs = False

    def __init__(self, spec: MixerSpec, weight_shape: Sequence[int], dtype: torch.dtype) -> None:
        """`weight_shape`: of the convolution, [width, channels]."""
        width, channels = weight_shape
        self.places = Places(np.array([[0, NUM_TOKENS, 0, NO_PLACE]]), np.array([0, 1], dtype=np.int32))
        self._states = {
            spec.first_state: torch.zeros(1, width - 1, channels, dtype=dtype),
            spec.first_state + 1: torch.zeros(1, spec.num_heads, spec.k_dim, spec.v_dim),
        }

    def tensor(self, idx: int) -> Tensor:
        return self._states[idx]

    def note(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> None:
        pass


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


def _one_span() -> AttentionBatch:
    """One sequence of all tokens, in one block."""
    length = np.array([NUM_TOKENS], dtype=np.int64)
    return AttentionBatch(length, length, np.zeros((1, 1), np.int64), NUM_TOKENS, torch.arange(NUM_TOKENS))
