"""Native decoder: all decoder layers of a model in one native call.

One call replaces a hundred small operations per layer. The module takes the place of the model's list of layers and
computes what they compute, adapters included.

It replaces decoder layers of attention over q/k/v/o, or Gated DeltaNet or Mamba 2 in its place, and a gated
feed-forward part, with norms before them, behind them or both, which most open models have: those of kinds.py, as far
as proof.py shows it. Attention of another kind, another recurrence in its place, and a feed-forward part of another
kind, as of a mixture of experts, stay the model's own modules: then there is a call from each of them to the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.attention import Plan, native_plan
from loraplex_server.backends.cpu.decoder.kinds import LayerNames
from loraplex_server.backends.cpu.decoder.mixers import Mixers
from loraplex_server.backends.cpu.decoder.weights import STATES, LayerWeights, StackShape, linears_of
from loraplex_server.backends.cpu.lora import table_of
from loraplex_server.backends.cpu.native.kernels import DTYPES, NO_RUNS, NativeKernels, PackedWeight, RunsOfRows
from loraplex_server.backends.cpu.native.library import Layer, Norm, Spans, Stack, Step
from loraplex_server.backends.cpu.step_parts import StepPart, split_step, take_rows
from loraplex_server.backends.fusion import NormForm
from loraplex_server.layers.adapter_slots import AdapterSlots, Beyond
from loraplex_server.layers.attention import HANDLE, AttentionBatch, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.lora import PreparedSegments, Segment

Rotation = tuple[Tensor, Tensor]  # cosines and sines [1, num_tokens, num_rotary]
_NO_ANGLES: Final = torch.empty(1, 0, 0)
COMPUTED: Final = frozenset(
    {Beyond.RESCALING, Beyond.NORM, Beyond.OWN_PRODUCT}
)  # of what adapters have beyond low-rank terms


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
        self._attending = [layer for layer, own in zip(self._layers, layers, strict=True) if own.attention is not None]
        self._whole = slice(0, len(layers))
        self._mixers = Mixers(layers, self._layers)
        q_sizes = [shape.num_heads * weights.shape.head_dim for weights in layers]
        q_outputs = [
            2 * size if weights.shape.gates_heads else size for size, weights in zip(q_sizes, layers, strict=True)
        ]
        kv_sizes = [weights.shape.num_kv_heads * weights.shape.head_dim for weights in layers]
        self._stack = Stack(
            dtype=DTYPES[shape.dtype], num_layers=len(layers), hidden=shape.hidden_size, num_heads=shape.num_heads,
            q_size=max(*q_sizes, self._mixers.size),
            qkv_size=max(q + 2 * kv for q, kv in zip(q_outputs, kv_sizes, strict=True)),
            gate_size=max(q - size for q, size in zip(q_outputs, q_sizes, strict=True)),
            projected_size=self._mixers.num_projected, convolved_size=self._mixers.channels,
            recurred_size=self._mixers.recurred_size,
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
        """Binds the layers to these pages; an empty sequence unbinds them. Attention of the model's own has its."""
        if not self._attending:
            return
        self._pages = tuple(pages)
        for layer, kv in zip(self._attending, self._pages, strict=bool(pages)):
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
            if layer.mixer:
                own = slots.norm_ptrs.get(f"{self._path}{idx}.{self.shape.names.mixer}.norm")
                assert own is None or self._mixers.has_whole_norm(idx), "adapters have a norm of single heads"
                layer.mixer.contents.norm.own_ptrs = None if own is None else own.data_ptr()

    def forward(
        self, hidden_states: Tensor, *others: Any, position_embeddings: Rotation | None = None, **named: Any
    ) -> Tensor | tuple[Tensor, None]:
        """hidden_states [1, num_tokens, hidden] -> the same shape."""
        hidden = self.run_layers(self._whole, hidden_states, others, position_embeddings, named)
        return self.shape.names.answer(hidden)

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
        assert self._pages or not self._attending, "no KV cache is bound to the model"
        if self.shape.names.keeps_states:
            return self._run_with_states(layers, hidden, others, position_embeddings, named, is_computed=is_computed)
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

    def _run_with_states(
        self,
        layers: slice,
        hidden: Tensor,
        others: tuple[Any, ...],
        position_embeddings: Any,
        named: dict[str, Any],
        *,
        is_computed: bool,
    ) -> Tensor:
        """Layers of which some keep states, by modules of the model's own or not. A step has one pass through these:
        where an adapter has more than the stack computes, which none has that PEFT saves, all of the step goes through
        the model's own layers."""
        if self.shape.names.own_parts or not is_computed:
            named["position_embeddings"] = position_embeddings
            if isinstance(position_embeddings, tuple):
                # Which may come in float32, but has no more bits than the layers' dtype.
                named["position_embeddings"] = tuple(rotary.to(hidden.dtype) for rotary in position_embeddings)
        if not is_computed:
            return self._run_own_layers(layers, hidden, others, named)
        runs = self._runs(self._context.token_segments)
        if not self._attending:
            self._run(layers, hidden, None, None, runs, of_layer=named)
            return hidden
        plan, scales = native_plan(self._context.attention), self._query_scales(named.get("position_ids"))
        outputs = self._outputs(hidden.shape[1], layers)
        self._run(layers, hidden, position_embeddings, plan, runs, outputs, scales, of_layer=named)
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
        mixers = None
        if self._mixers:
            assert self._context.states is not None, "a step of layers that keep states has some"
            mixers = self._mixers.begin(self._context.states, layers, num_tokens, hidden.dtype)
            step.pieces = mixers.pieces
        if self.shape.names.own_parts:
            self._run_around_parts(layers, step, hidden, of_layer or {})
        else:
            self._kernels.run_stack(self._part(layers.start, layers.stop), step)
        if mixers is not None:
            mixers.end()

    def _run_around_parts(self, layers: slice, step: Step, hidden: Tensor, of_layer: Mapping[str, Any]) -> None:
        """Computes layers in which modules of the model's own run."""
        feed, names = torch.empty_like(hidden), self.shape.names
        step.feed = feed.data_ptr()
        arguments = {**of_layer, STATES.name: feed}
        first, fed = layers.start, feed
        for idx in range(layers.start, layers.stop):
            for call, part in zip(self.weights[idx].own_parts, self._own_parts[idx], strict=True):
                if call.path == names.beside_feed_forward:
                    fed = fed + call(part, arguments)
                else:
                    self._kernels.run_stack(self._part(first, idx + 1), step)
                    fed = call(part, arguments)
                step.fed = fed.data_ptr()
                step.continues = call.path in names.own_mixers
                first = idx if step.continues else idx + 1
        self._kernels.run_stack(self._part(first, layers.stop), step)

    def _part(self, first: int, stop: int) -> Stack:
        """Some of the layers, as the kernels see them until the next call."""
        self._stack.num_layers = stop - first
        self._stack.layers = _from(self._layers, first)
        return self._stack

    def _run_own_layers(self, layers: slice, hidden: Tensor, others: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        for layer in self._own_layers[layers]:
            answer = layer(hidden, *others, **named)
            hidden = answer[0] if self.shape.names.answers_more else answer
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
    ) -> Tensor | tuple[Tensor, None]:
        stack = self._stack[0]
        hidden = stack.run_layers(self._layers, hidden_states, others, position_embeddings, named)
        return stack.shape.names.answer(hidden)


class ComputedLayer(nn.Module):
    """The place of a layer that the part before it has computed."""

    def __init__(self, names: LayerNames) -> None:
        super().__init__()
        self._names = names

    def forward(self, hidden_states: Tensor, *_others: Any, **_named: Any) -> Tensor | tuple[Tensor, None]:
        return self._names.answer(hidden_states)


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
    layer.shares_kv, layer.gates_heads = own.shares_kv, own.gates_heads
    return layer


def _adapted(module: nn.Module) -> AdaptedLinear | None:
    return module if isinstance(module, AdaptedLinear) else None
