"""Native decoder: all decoder layers of a model in one native call.

One call replaces a hundred small operations per layer. The module takes the place of the model's list of layers and
computes what they compute, adapters included.

It replaces decoder layers of attention over q/k/v/o and a gated feed-forward part, with norms before them, behind them
or both, which most open models have: those of KINDS, as far as find_decoder.py proves them. Attention of another kind,
a recurrence in its place, and a feed-forward part of another kind, as of a mixture of experts, stay the model's own
modules: then there is a call from each of them to the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.attention import Plan, native_plan
from loraplex_server.backends.cpu.lora import table_of
from loraplex_server.backends.cpu.native.kernels import BAND, DTYPES, NO_RUNS, NativeKernels, PackedWeight, RunsOfRows
from loraplex_server.backends.cpu.native.library import Layer, Norm, Spans, Stack, Step
from loraplex_server.backends.cpu.step_parts import StepPart, split_step, take_rows
from loraplex_server.backends.fusion import NormForm
from loraplex_server.layers.adapter_slots import AdapterSlots, Beyond
from loraplex_server.layers.attention import HANDLE, AttentionBatch, AttentionSpec, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.lora import PreparedSegments, Segment
from loraplex_server.layers.quantization import WeightFormat

HEAD_NORMS: Final = {part: f"self_attn.{part}" for part in ("q_norm", "k_norm", "v_norm")}
Rotation = tuple[Tensor, Tensor]  # cosines and sines [1, num_tokens, num_rotary]
_NO_ANGLES: Final = torch.empty(1, 0, 0)
COMPUTED: Final = frozenset(
    {Beyond.RESCALING, Beyond.NORM, Beyond.OWN_PRODUCT}
)  # of what adapters have beyond low-rank terms


@dataclass(frozen=True, slots=True)
class LayerNames:
    """Paths of a layer's parts, by the names that the kernels have for them."""

    # A layer that attends to keys and values of an earlier one has no k and v; one whose values are its keys has no v.
    linears: Mapping[str, str]
    norms: Mapping[str, str]  # of hidden states
    act: str = "mlp.act_fn"
    feed_forward: str = ""  # a module that is the model's own, in the place of gate, up, down and `act`
    is_parallel: bool = False  # the feed-forward part reads the states that attention reads
    # The rows of merged q, k and v lie by heads of keys: the queries of one, its key, its value.
    is_grouped: bool = False
    attention: str = "self_attn"
    input_act: str = ""  # the activation of what is computed of the layer's own input; "": it has none
    # Modules that are the model's own in the place of attention with its linears. A layer has one of them.
    mixers: tuple[str, ...] = ()

    @property
    def own_parts(self) -> tuple[str, ...]:
        """Paths of the parts that are the model's own."""
        return (*self.mixers, self.feed_forward) if self.feed_forward else self.mixers

    @property
    def head_norms(self) -> Mapping[str, str]:
        """Norms of queries, keys and values that a layer may have."""
        return {} if self.mixers else HEAD_NORMS

    @property
    def merges_qkv(self) -> bool:
        """True if q, k and v are one linear."""
        return "k" not in self.linears

    @property
    def merges_gate_up(self) -> bool:
        """True if gate and up are one linear."""
        return "gate" in self.linears and "up" not in self.linears


_ATTENTION: Final = {part: f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")}
_GATED: Final = {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_SPLIT: Final = {**_ATTENTION, **_GATED}
_GATE_UP: Final = {"gate": "mlp.gate_up_proj", "down": "mlp.down_proj"}
_MERGED: Final = {"q": "self_attn.qkv_proj", "o": "self_attn.o_proj", **_GATE_UP}
_GROUPED: Final = {"q": "attention.query_key_value", "o": "attention.dense"}
_NORMS_BEFORE: Final = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_NORMS_OF_HYBRIDS: Final = {"norm1": "input_layernorm", "norm2": "pre_ff_layernorm"}
_NORM_OF_BOTH: Final = {"norm1": "input_layernorm"}
_NORMS_BEHIND: Final = {"attention_norm": "post_attention_layernorm", "ffn_norm": "post_feedforward_layernorm"}
_NORMS_AROUND: Final = {"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm", **_NORMS_BEHIND}
_OF_INPUT: Final = {"input_gate": "per_layer_input_gate", "input_projection": "per_layer_projection"}
_NORMS_OF_GLM: Final = {
    **_NORMS_BEFORE,
    "attention_norm": "post_self_attn_layernorm",
    "ffn_norm": "post_mlp_layernorm",
}
KINDS: Final = (
    LayerNames(_SPLIT, _NORMS_BEFORE),  # Llama, Qwen, Gemma, Granite
    LayerNames(_SPLIT, _NORMS_AROUND),  # Gemma 2 and 3
    LayerNames(
        {**_SPLIT, **_OF_INPUT}, {**_NORMS_AROUND, "input_norm": "post_per_layer_input_norm"}, input_act="act_fn"
    ),  # Gemma 4
    LayerNames(_SPLIT, _NORMS_BEHIND),  # EXAONE 4, OLMo 2 and 3
    LayerNames(_MERGED, _NORMS_BEFORE, "mlp.activation_fn"),  # Phi-3
    LayerNames({**_ATTENTION, **_GATE_UP}, _NORMS_BEFORE, "mlp.activation_fn"),  # GLM
    LayerNames({**_ATTENTION, **_GATE_UP}, _NORMS_OF_GLM, "mlp.activation_fn"),  # GLM 4
    LayerNames(_SPLIT, _NORM_OF_BOTH, is_parallel=True),  # Cohere
    LayerNames(_ATTENTION, _NORMS_BEFORE, "", "mlp"),  # Mixtral, Qwen MoE, OLMoE, gpt-oss
    LayerNames(_ATTENTION, _NORMS_BEFORE, "", "block_sparse_moe"),  # Granite MoE
    LayerNames(_ATTENTION, _NORMS_BEHIND, "", "mlp"),  # FlexOlmo
    LayerNames({**_ATTENTION, "o": "self_attn.dense"}, _NORM_OF_BOTH, "", "mlp", is_parallel=True),  # Phi 1.5
    *(
        LayerNames(_GROUPED, _NORMS_BEFORE, "", "mlp", is_parallel, is_grouped=True, attention="attention")
        for is_parallel in (True, False)
    ),  # GPT-NeoX
    # Attention of other kinds, as gated or latent one, and recurrences.
    LayerNames(_GATED, _NORMS_BEFORE, mixers=("self_attn", "linear_attn")),  # Qwen 3.5
    LayerNames(
        {part: f"feed_forward.{part}_proj" for part in _GATED},
        _NORMS_OF_HYBRIDS,
        "feed_forward.act_fn",
        mixers=("self_attn", "mamba"),
    ),  # Jamba without experts
    LayerNames(
        {"gate": "shared_mlp.input_linear", "down": "shared_mlp.output_linear"},
        _NORMS_BEFORE,
        "shared_mlp.activation",
        mixers=("self_attn", "mamba"),
    ),  # Granite 4
    LayerNames(
        {"gate": "feed_forward.w1", "up": "feed_forward.w3", "down": "feed_forward.w2"},
        {"norm1": "operator_norm", "norm2": "ffn_norm"},
        "",
        mixers=("self_attn", "conv"),
    ),  # LFM2
    LayerNames({}, _NORMS_BEFORE, "", "mlp", mixers=("self_attn", "linear_attn")),  # Qwen3-Next, DeepSeek
)


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

    attention: AttentionSpec | None  # None: a module of the model's own is in its place
    ffn_size: int
    linears: Mapping[str, str]  # paths of those that it has, as in LayerNames

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
class LayerWeights:
    """One layer's weights as the kernels read them. Norms and biases are the model's own tensors."""

    shape: LayerShape
    qkv: PackedWeight | None  # None: what is in attention's place is the model's own
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


class NativeStack(nn.Module):
    """Implements a decoder layer's call for all layers at once, or for runs of them (see `StackPart`). Overwrites the
    hidden states that it is given.

    Rows whose adapter has more there than low-rank terms and what COMPUTED names go through the model's own layers, and
    the others through the stack: a row has the same bits whatever adapters are beside it.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        shape: StackShape,
        layers: list[LayerWeights],
        context: StepContext,
        own_parts: Sequence[Sequence[nn.Module]] = (),
    ) -> None:
        """`own_parts`: of each layer those that are the model's own, in the order of `LayerWeights.own_parts`."""
        super().__init__()
        self.shape = shape
        self._kernels = kernels
        self.weights = layers
        self._context = context
        self._layers = (Layer * len(layers))(*(_layer(weights) for weights in layers))
        self._whole = slice(0, len(layers))
        q_sizes = [shape.num_heads * weights.shape.head_dim for weights in layers]
        kv_sizes = [weights.shape.num_kv_heads * weights.shape.head_dim for weights in layers]
        self._stack = Stack(
            dtype=DTYPES[shape.dtype], num_layers=len(layers), hidden=shape.hidden_size, num_heads=shape.num_heads,
            q_size=max(q_sizes), qkv_size=max(q + 2 * kv for q, kv in zip(q_sizes, kv_sizes, strict=True)),
            ffn=max(weights.shape.ffn_size for weights in layers), input=shape.input_size, act=shape.act,
            format=shape.format.code if shape.format is not None else 0, merges_qkv=shape.names.merges_qkv,
            merges_gate_up=shape.names.merges_gate_up, norms_all_heads=shape.norms_all_heads,
            narrows=shape.norm_form.narrows, norm_offset=shape.norm_form.offset, added=shape.added,
            is_layer_norm=shape.is_layer_norm, is_parallel=shape.names.is_parallel,
            is_grouped=shape.names.is_grouped, layers=self._layers,
        )  # fmt: skip
        self._linears: list[list[AdaptedLinear | None]] = []
        self._path = ""
        self._own_layers: tuple[nn.Module, ...] = ()  # a tuple: they are not this module's children
        self._own_parts = tuple(own_parts)
        self._pages: tuple[LayerKv, ...] = ()
        self._slots: AdapterSlots | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def connect(self, path: str, layers: Sequence[nn.Module]) -> None:
        """Takes the layers that it stands for, whose linears may be adapted by now and get their weights back. `path`:
        of the list of layers."""
        self._path = f"{path}."
        self._own_layers = tuple(layers)
        self._own_parts = tuple(
            [layer.get_submodule(call.path) for call in weights.own_parts]
            for layer, weights in zip(layers, self.weights, strict=True)
        )
        self._linears = [
            [_adapted(layer.get_submodule(name)) for name in weights.shape.linears.values()]
            for layer, weights in zip(layers, self.weights, strict=True)
        ]
        for weights, linears in zip(self.weights, self._linears, strict=True):
            for linear, base in zip(linears, linears_of(weights, self.shape, self._kernels), strict=True):
                if linear is not None:
                    linear.base = base

    def own_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The modules of the layers that it stands for, by path."""
        for idx, layer in enumerate(self._own_layers):
            yield from layer.named_modules(prefix=f"{self._path}{idx}")

    def bind(self, pages: Sequence[LayerKv]) -> None:
        """Binds the layers to these pages; an empty sequence unbinds them. Mixers of the model's own have theirs."""
        if self.shape.names.mixers:
            return
        self._pages = tuple(pages)
        for layer, kv in zip(self._layers, self._pages, strict=bool(pages)):
            layer.k_pages, layer.v_pages = kv.k.data_ptr(), kv.v.data_ptr()

    def use(self, slots: AdapterSlots) -> None:
        """Connects the layers to the linears' factor tables and to adapters' norms, which `slots` fills."""
        self._slots = slots
        for idx, (layer, linears) in enumerate(zip(self._layers, self._linears, strict=True)):
            for part, linear in zip(self.weights[idx].shape.linears, linears, strict=True):
                if linear is not None and linear.table is not None:
                    setattr(layer, f"{part}_table", table_of(linear.table))
            for name, path in {**self.shape.names.norms, **self.shape.names.head_norms}.items():
                if (own := slots.norm_ptrs.get(f"{self._path}{idx}.{path}")) is not None:
                    getattr(layer, name).own_ptrs = own.data_ptr()

    def forward(
        self, hidden_states: Tensor, *others: Any, position_embeddings: Rotation | None = None, **named: Any
    ) -> Tensor:
        """hidden_states [1, num_tokens, hidden] -> the same shape."""
        return self.run_layers(self._whole, hidden_states, others, position_embeddings, named)

    def run_layers(
        self,
        layers: slice,
        hidden_states: Tensor,
        others: tuple[Any, ...],
        position_embeddings: Rotation | None,
        named: dict[str, Any],
    ) -> Tensor:
        """The same by some of the layers, which follow each other."""
        hidden = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
        prepared, slots = self._context.token_segments, self._slots
        is_computed = slots is None or prepared is None or self._computes(slots, prepared.segments)
        if self.shape.names.mixers:
            return self._run_around_mixers(layers, hidden, others, position_embeddings, named, is_computed=is_computed)
        assert self._pages, "no KV cache is bound to the model"
        assert position_embeddings is not None, "layers that turn queries and keys are given no rotation"
        if slots is None or prepared is None or is_computed:
            plan, outputs = native_plan(self._context.attention), self._outputs(hidden.shape[1], layers)
            scales, inputs = self._query_scales(named.get("position_ids")), self._inputs(others)
            self._run(layers, hidden, position_embeddings, plan, self._runs(prepared), outputs, scales, inputs)
            return hidden
        stacked, apart = split_step(
            self._context.attention.batch,
            prepared.segments,
            lambda segment: not self._computes(slots, (segment,)),
        )
        # Which may come in float32, but has no more bits than the layers' dtype.
        named["position_embeddings"] = tuple(rotary.to(hidden.dtype) for rotary in position_embeddings)
        if stacked is None or apart is None:
            return self._run_own_layers(layers, hidden, others, named)
        num_rows = hidden.shape[1]
        own = hidden.index_select(1, apart.rows)
        part = hidden.index_select(1, stacked.rows)
        segments = self._prepare(slots, stacked)
        with self._as_step(segments, stacked.attention, hidden):
            rotary = take_rows(position_embeddings, stacked.rows, num_rows)
            scales = self._query_scales(take_rows(named.get("position_ids"), stacked.rows, num_rows))
            inputs = self._inputs(take_rows(others, stacked.rows, num_rows))
            plan = native_plan(self._context.attention)
            self._run(layers, part, rotary, plan, self._runs(segments), query_scales=scales, inputs=inputs)
        hidden.index_copy_(1, stacked.rows, part)
        own_others = take_rows(others, apart.rows, num_rows)
        own_named = {name: take_rows(value, apart.rows, num_rows) for name, value in named.items()}
        with self._as_step(self._prepare(slots, apart), apart.attention, hidden):
            own = self._run_own_layers(layers, own, own_others, own_named)
        return hidden.index_copy_(1, apart.rows, own)

    def _run_around_mixers(
        self,
        layers: slice,
        hidden: Tensor,
        others: tuple[Any, ...],
        position_embeddings: Any,
        named: dict[str, Any],
        *,
        is_computed: bool,
    ) -> Tensor:
        """Layers whose mixers are the model's own. A step has one pass through these, as they keep states: where an
        adapter has more than the stack computes, which none has that PEFT saves, all of the step goes through the
        model's own layers."""
        if isinstance(position_embeddings, tuple):
            # Which may come in float32, but has no more bits than the layers' dtype.
            position_embeddings = tuple(rotary.to(hidden.dtype) for rotary in position_embeddings)
        if position_embeddings is not None:
            named["position_embeddings"] = position_embeddings
        if not is_computed:
            return self._run_own_layers(layers, hidden, others, named)
        self._run(layers, hidden, None, None, self._runs(self._context.token_segments), of_layer=named)
        return hidden

    def _computes(self, slots: AdapterSlots, segments: Sequence[Segment]) -> bool:
        """True if the stack computes all that the adapters of these segments have in its layers."""
        computed = COMPUTED - {Beyond.NORM} if self.shape.is_layer_norm else COMPUTED
        return slots.are_plain(segments, self._path, computed, self.shape.names.own_parts)

    def _query_scales(self, position_ids: Any) -> Tensor | None:
        """Factors of the queries at these positions; None: they stay as they are."""
        scale = self.shape.query_scale
        return None if scale is None else scale(position_ids, self.shape.dtype)

    def _inputs(self, others: tuple[Any, ...]) -> Tensor | None:
        """The layer's own input [1, num_tokens, features], which models give behind the hidden states; None: it has
        none."""
        return others[0].to(self.shape.dtype).contiguous() if self.shape.input_size else None

    def _outputs(self, num_tokens: int, layers: slice) -> npt.NDArray[np.int32] | None:
        """The rows whose output is read, sorted; None: all."""
        rows = None if self.shape.names.own_parts else self._context.head_rows
        is_last = layers.stop == self._whole.stop
        return None if rows is None or len(rows) >= num_tokens or not is_last else np.unique(rows).astype(np.int32)

    def _run(
        self,
        layers: slice,
        hidden: Tensor,
        position_embeddings: Rotation | None,
        plan: Plan | None,
        runs: RunsOfRows,
        outputs: npt.NDArray[np.int32] | None = None,
        query_scales: Tensor | None = None,
        inputs: Tensor | None = None,
        of_layer: Mapping[str, Any] | None = None,
    ) -> None:
        """Computes hidden [1, num_tokens, hidden], contiguous, in place: it becomes the last layer's output, in the
        rows `outputs`, in all for None. `of_layer`: layers' arguments, which mixers of the model's own read."""
        num_tokens = hidden.shape[1]
        rotary = (_NO_ANGLES, _NO_ANGLES) if position_embeddings is None else position_embeddings
        cos, sin = (self.shape.angles.twice(one).to(torch.float32).contiguous() for one in rotary)
        max_rank = self._slots.max_rank * runs.max_uses if self._slots is not None else 0
        runs.struct.max_rank = max_rank
        num_outputs = num_tokens if outputs is None else len(outputs)
        needed = self._kernels.stack_scratch_bytes(self._stack, num_tokens, num_outputs, max_rank)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        step = Step(
            num_tokens=num_tokens, num_rotary=cos.shape[-1], hidden=hidden.data_ptr(), cos=cos.data_ptr(),
            sin=sin.data_ptr(), query_scales=None if query_scales is None else query_scales.data_ptr(),
            inputs=None if inputs is None else inputs.data_ptr(),
            spans=Spans() if plan is None else plan.spans, runs=runs.struct, scratch=self._scratch.data_ptr(),
            outputs=None if outputs is None else outputs.ctypes.data, num_outputs=num_outputs,
        )  # fmt: skip
        if self.shape.names.own_parts:
            self._run_around_parts(layers, step, hidden, of_layer or {})
        else:
            self._kernels.run_stack(self._part(layers.start, layers.stop), step)

    def _run_around_parts(self, layers: slice, step: Step, hidden: Tensor, of_layer: Mapping[str, Any]) -> None:
        """Computes layers in which modules of the model's own run."""
        feed = torch.empty_like(hidden)
        step.feed = feed.data_ptr()
        arguments = {**of_layer, STATES.name: feed}
        first = layers.start
        for idx in range(layers.start, layers.stop):
            for call, part in zip(self.weights[idx].own_parts, self._own_parts[idx], strict=True):
                self._kernels.run_stack(self._part(first, idx + 1), step)
                fed = call(part, arguments)
                step.fed = fed.data_ptr()
                step.continues = call.path in self.shape.names.mixers
                first = idx if step.continues else idx + 1
        self._kernels.run_stack(self._part(first, layers.stop), step)

    def _part(self, first: int, stop: int) -> Stack:
        """Some of the layers, as the kernels see them until the next call."""
        self._stack.num_layers = stop - first
        self._stack.layers = _from(self._layers, first)
        return self._stack

    def _run_own_layers(self, layers: slice, hidden: Tensor, others: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        for layer in self._own_layers[layers]:
            hidden = layer(hidden, *others, **named)
        return hidden

    @contextmanager
    def _as_step(self, segments: PreparedSegments, batch: AttentionBatch, like: Tensor) -> Generator[None]:
        """Shows modules the segments and the attention of a part of the step meanwhile."""
        context = self._context
        attention = getattr(self._own_layers[0].get_submodule(self.shape.names.attention), HANDLE)
        whole = context.token_segments, context.attention
        context.token_segments = segments
        context.attention = attention.backend.plan(batch, like.dtype, like.device)
        try:
            yield
        finally:
            context.token_segments, context.attention = whole

    def _prepare(self, slots: AdapterSlots, part: StepPart) -> PreparedSegments:
        return slots.ops.prepare(part.segments, len(part.rows), slots.num_slots, part.rows.device)

    def _runs(self, prepared: PreparedSegments | None) -> RunsOfRows:
        if prepared is None:
            return NO_RUNS
        assert isinstance(prepared.data, RunsOfRows), "a native stack needs native segments"
        return prepared.data


class StackPart(nn.Module):
    """Layers of a stack that follow each other, in the place of the first of them.

    Models whose layers turn queries and keys in different ways give each layer its own rotations. So each run of layers
    that have the same ones is a call of the stack.
    """

    def __init__(self, stack: NativeStack, layers: slice) -> None:
        super().__init__()
        self._stack = (stack,)  # a tuple: it is no child of this module
        self._layers = layers
        self.num_layers = layers.stop - layers.start

    def forward(
        self, hidden_states: Tensor, *others: Any, position_embeddings: Rotation | None = None, **named: Any
    ) -> Tensor:
        return self._stack[0].run_layers(self._layers, hidden_states, others, position_embeddings, named)


class ComputedLayer(nn.Module):
    """The place of a layer that the part before it has computed."""

    def forward(self, hidden_states: Tensor, *_others: Any, **_named: Any) -> Tensor:
        return hidden_states


class NativeNorm(nn.Module):
    """RMS norm in one call, instead of seven operations."""

    def __init__(self, kernels: NativeKernels, weight: nn.Parameter, eps: float, form: NormForm) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight
        self._eps = eps
        self._form = form

    def forward(self, hidden_states: Tensor) -> Tensor:
        offset, narrows = self._form
        return self._kernels.rms_norm(hidden_states, self.weight, self._eps, offset=offset, narrows=narrows)


def linears_of(weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> list[StackLinear | StackPair]:
    """Each linear of a layer by itself, in the order of the shape's names."""
    own = weights.shape
    rows, kv_rows = shape.num_heads * own.head_dim, own.num_kv_heads * own.head_dim
    qkv = ((0, rows), (rows, kv_rows), (rows + kv_rows, kv_rows))
    if shape.names.merges_qkv:
        qkv = ((0, rows + 2 * kv_rows),)
    pair = ((0, 1),) if shape.names.merges_gate_up else ((0,), (1,))
    found: list[StackLinear | StackPair] = []
    if weights.qkv is not None and weights.o is not None:
        for one in qkv[:1] if own.shares_kv else qkv:
            found.append(StackLinear(kernels, weights.qkv, weights.qkv_bias, *one))
        found.append(StackLinear(kernels, weights.o, weights.o_bias, 0, shape.hidden_size))
    if weights.gate_up is not None and weights.down is not None:
        found += [StackPair(kernels, weights.gate_up, own.ffn_size, which) for which in pair]
        found.append(StackLinear(kernels, weights.down, None, 0, shape.hidden_size))
    if weights.input_gate is not None and weights.input_projection is not None:
        found.append(StackLinear(kernels, weights.input_gate, None, 0, shape.input_size))
        found.append(StackLinear(kernels, weights.input_projection, None, 0, shape.hidden_size))
    return found


def _from(layers: ctypes.Array[Layer], first: int) -> Any:
    return ctypes.cast(ctypes.byref(layers, first * ctypes.sizeof(Layer)), ctypes.POINTER(Layer))


def _layer(weights: LayerWeights) -> Layer:
    spec = weights.attention
    layer = Layer()
    for name in ("qkv", "o", "gate_up", "down", "input_gate", "input_projection"):
        packed: PackedWeight | None = getattr(weights, name)
        setattr(layer, name, packed.address if packed is not None else None)
    for name in ("qkv_bias", "o_bias"):
        tensor: Tensor | None = getattr(weights, name)
        setattr(layer, name, tensor.data_ptr() if tensor is not None else None)
    for name, weight in weights.norms.items():
        bias = weights.norm_biases.get(name)
        setattr(layer, name, Norm(weight=weight.data_ptr(), bias=None if bias is None else bias.data_ptr()))
    layer.eps, layer.qk_eps = weights.eps, weights.qk_eps
    if spec is not None:
        layer.scaling, layer.softcap, layer.window = spec.scaling, spec.softcap or 0.0, spec.window or 0
        layer.sinks = spec.sinks.data_ptr() if spec.sinks is not None else None
    layer.turns, layer.scale = weights.turns, weights.scale
    own = weights.shape
    layer.num_kv_heads, layer.head_dim, layer.ffn = own.num_kv_heads, own.head_dim, own.ffn_size
    layer.shares_kv = own.shares_kv
    return layer


def _adapted(module: nn.Module) -> AdaptedLinear | None:
    return module if isinstance(module, AdaptedLinear) else None
