"""Shapes and packed weights of decoder layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.decoder.kinds import MIXER_INPUTS, LayerNames
from loraplex_server.backends.cpu.native.kernels import BAND, NativeKernels, PackedWeight
from loraplex_server.backends.fusion import NormForm
from loraplex_server.layers.attention import AttentionSpec
from loraplex_server.layers.mixers import Layout, MixerSpec
from loraplex_server.layers.quantization import WeightFormat
from loraplex_server.layers.recurrences import Convolution, LinearAttention


@dataclass(frozen=True, slots=True)
class ArgumentOfLayer:
    """An argument of a layer that it hands on to one of its parts; of STATES, what it has made of them."""

    name: str


STATES: Final = ArgumentOfLayer("hidden_states")


@dataclass(frozen=True, slots=True)
class PartCall:
    """How a layer calls one of its parts: an ArgumentOfLayer or a constant for each argument."""

    path: str
    arguments: tuple[Any, ...] = (STATES,)
    named: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, part: nn.Module, of_layer: Mapping[str, Any]) -> Tensor:
        """The part's output [1, num_tokens, hidden], contiguous. `of_layer`: the layer's arguments by name."""

        def value(source: Any) -> Any:
            return of_layer.get(source.name) if isinstance(source, ArgumentOfLayer) else source

        arguments = (value(source) for source in self.arguments)
        answer = part(*arguments, **{name: value(source) for name, source in self.named.items()})
        y: Tensor = answer if isinstance(answer, Tensor) else answer[0]
        return y.contiguous()


class Angles(Enum):
    """How cosines and sines of a rotary embedding lie."""

    TWICE = 1  # all, and all again
    REPEATED = 2  # each two times in a row
    ONCE = 3

    @staticmethod
    def of(cos: Tensor) -> Angles:
        """cos [..., features] of some positions."""
        if torch.equal(*cos.chunk(2, dim=-1)):
            return Angles.TWICE
        return Angles.REPEATED if torch.equal(cos[..., ::2], cos[..., 1::2]) else Angles.ONCE

    def twice(self, values: Tensor) -> Tensor:
        """Cosines or sines [..., features] as the kernels read them."""
        if self is Angles.TWICE:
            return values
        once = values[..., ::2] if self is Angles.REPEATED else values
        return torch.cat((once, once), dim=-1)


class Turns(IntEnum):
    """How a layer turns queries and keys by their positions."""

    NOT = 0
    HALVES = 1  # a feature with that in the other half
    PAIRS = 2  # a feature with its neighbour


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Growth of queries with their positions, which keeps attention sharp over long contexts (Ministral 3)."""

    beta: float
    period: int  # positions

    def __call__(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """position_ids [..., num_tokens] -> factors of the same shape in float32, rounded to `dtype` as models do
        (`get_llama_4_attn_scale` in Transformers)."""
        scales = 1 + self.beta * torch.log(1 + torch.floor(position_ids / self.period))
        return scales.to(dtype).to(torch.float32).contiguous()


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes, dtype and form that all layers of a stack share."""

    dtype: torch.dtype
    hidden_size: int
    num_heads: int
    act: int  # 0: SiLU, 1: GELU by tanh
    names: LayerNames
    norm_form: NormForm
    added: float  # the part of attention and feed-forward that is added to the hidden states
    norms_all_heads: bool = False  # queries and keys have norms of all heads together
    format: WeightFormat | None = None  # of few bits
    is_layer_norm: bool = False  # norms take the mean away
    query_scale: QueryScale | None = None
    angles: Angles = Angles.TWICE
    input_size: int = 0  # features of layers' own inputs


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes and parts of one layer."""

    attention: AttentionSpec | None  # None: something else is in its place
    ffn_size: int
    linears: Mapping[str, str]  # paths of those that it has, as in LayerNames
    mixer: MixerSpec | None = None  # in attention's place, where the stack computes it
    gates_heads: bool = False  # behind each head's queries q has a gate, whose sigmoid scales attention's output

    @property
    def token_mixer(self) -> AttentionSpec | MixerSpec | None:
        """Attention, or what stands in its place; None: a module of the model's own does."""
        return self.attention if self.mixer is None else self.mixer

    @property
    def num_kv_heads(self) -> int:
        return self.attention.num_kv_heads if self.attention is not None else 0

    @property
    def head_dim(self) -> int:
        return self.attention.k_dim if self.attention is not None else 0

    @property
    def shares_kv(self) -> bool:
        """True if keys and values are those of an earlier layer."""
        return self.attention is not None and self.attention.source is not None


@dataclass(frozen=True, slots=True)
class MixerWeights:
    """The weights of a mixer in attention's place."""

    spec: MixerSpec
    projection: PackedWeight  # of the linears of its layout, in their order; see `packed_sizes`
    o: PackedWeight
    convolution: Convolution
    attention: LinearAttention
    conv_weight: Tensor  # [width, channels] in float32
    conv_bias: Tensor | None  # likewise
    norm: Tensor  # [num_heads * v_dim]
    norm_eps: float
    has_whole_norm: bool  # the module's own weight has as many features; else they are repeated


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights as the kernels read them. Norms and biases are the model's own tensors."""

    shape: LayerShape
    qkv: PackedWeight | None  # None: something else is in attention's place
    o: PackedWeight | None
    gate_up: PackedWeight | None  # None: the feed-forward part is the model's own
    down: PackedWeight | None
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    norms: Mapping[str, Tensor]  # by the names in LayerNames.norms and HEAD_NORMS
    eps: float
    qk_eps: float
    turns: Turns = Turns.HALVES
    norm_biases: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])  # of layer norms, by the same names
    input_gate: PackedWeight | None = None  # of the layer's own input
    input_projection: PackedWeight | None = None
    scale: float = 1.0  # of the layer's output
    mixer: MixerWeights | None = None
    own_parts: Sequence[PartCall] = ()  # those that are the model's own, in the order in which they run

    @property
    def attention(self) -> AttentionSpec | None:
        return self.shape.attention


class StackLinear:
    """One of the linears of a stack of layers, by itself, from the weight that it shares there."""

    __slots__ = ("_bias", "_first", "_kernels", "_num_outputs", "_packed")
    is_copy = True

    def __init__(
        self, kernels: NativeKernels, packed: PackedWeight, bias: Tensor | None, first: int, num_outputs: int
    ) -> None:
        """`first`: of its outputs among all."""
        self._kernels = kernels
        self._packed = packed
        self._bias = bias
        self._first = first
        self._num_outputs = num_outputs

    def __call__(self, x: Tensor) -> Tensor:
        y = self._kernels.linear(x, self._packed, self._bias)
        return y[..., self._first : self._first + self._num_outputs].contiguous()

    def matrix(self) -> Tensor:
        return self._packed.matrix()[self._first : self._first + self._num_outputs]


class StackPair:
    """Gate, up, or both one behind the other, by themselves, from the weight in which their outputs take turns."""

    __slots__ = ("_kernels", "_num_outputs", "_packed", "_which")
    is_copy = True

    def __init__(self, kernels: NativeKernels, packed: PackedWeight, num_outputs: int, which: tuple[int, ...]) -> None:
        """`num_outputs`: of one. `which`: 0 is gate, 1 is up."""
        self._kernels = kernels
        self._packed = packed
        self._num_outputs = num_outputs
        self._which = which

    def __call__(self, x: Tensor) -> Tensor:
        y = self._kernels.linear(x, self._packed, None)
        pair = y.view(*y.shape[:-1], -1, 2, BAND // 2)
        return torch.cat([pair[..., one, :].flatten(-2)[..., : self._num_outputs] for one in self._which], dim=-1)

    def matrix(self) -> Tensor:
        return torch.cat([self._packed.of_pair(one, self._num_outputs) for one in self._which])


def projected_sizes(spec: MixerSpec) -> tuple[int, int, int, int]:
    """Columns of q, k and v together, of z, of b and of a in what the kernels keep of a projection. Those of b and a
    are filled up to whole panels; with all in one linear there is no b."""
    panel = BAND // 2
    gate_size = -(-spec.num_heads // panel) * panel
    return spec.channels, spec.size, 0 if spec.layout is Layout.TOGETHER else gate_size, gate_size


def projection_outputs(spec: MixerSpec) -> dict[str, int]:
    """Outputs of the linears of a projection, by their names in LayerNames."""
    outputs = {
        Layout.APART: (spec.channels, spec.size, spec.num_heads, spec.num_heads),
        Layout.BY_KEY_HEADS: (spec.channels + spec.size, 2 * spec.num_heads),
        Layout.TOGETHER: (spec.channels + spec.size + spec.num_heads,),
    }
    return dict(zip(MIXER_INPUTS, outputs[spec.layout], strict=False))


def packed_sizes(spec: MixerSpec) -> tuple[int, ...]:
    """The same outputs filled up to as many as are packed: each linear begins with a panel, as low-rank terms come in
    so many."""
    qkv, z, b, a = projected_sizes(spec)
    sizes = {Layout.APART: (qkv, z, b, a), Layout.BY_KEY_HEADS: (qkv + z, b + a), Layout.TOGETHER: (qkv + z + a,)}
    return sizes[spec.layout]


def linears_of(weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> list[StackLinear | StackPair]:
    """Each linear of a layer by itself, in the order of the shape's names."""
    own = weights.shape
    rows, kv_rows = shape.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    q_rows = 2 * rows if own.gates_heads else rows
    qkv = ((0, q_rows), (q_rows, kv_rows), (q_rows + kv_rows, kv_rows))
    if shape.names.merges_qkv:
        qkv = ((0, rows + 2 * kv_rows),)
    pair = ((0, 1),) if shape.names.merges_gate_up else ((0,), (1,))
    found: list[StackLinear | StackPair] = []
    if weights.qkv is not None and weights.o is not None:
        for one in qkv[:1] if own.shares_kv else qkv:
            found.append(StackLinear(kernels, weights.qkv, weights.qkv_bias, *one))
        found.append(StackLinear(kernels, weights.o, weights.o_bias, 0, shape.hidden_size))
    if weights.mixer is not None:
        first, spec = 0, weights.mixer.spec
        for num_outputs, size in zip(projection_outputs(spec).values(), packed_sizes(spec), strict=True):
            found.append(StackLinear(kernels, weights.mixer.projection, None, first, num_outputs))
            first += size
        found.append(StackLinear(kernels, weights.mixer.o, None, 0, shape.hidden_size))
    if weights.gate_up is not None and weights.down is not None:
        found += [StackPair(kernels, weights.gate_up, own.ffn_size, which) for which in pair]
        found.append(StackLinear(kernels, weights.down, None, 0, shape.hidden_size))
    if weights.input_gate is not None and weights.input_projection is not None:
        found.append(StackLinear(kernels, weights.input_gate, None, 0, shape.input_size))
        found.append(StackLinear(kernels, weights.input_projection, None, 0, shape.hidden_size))
    return found
