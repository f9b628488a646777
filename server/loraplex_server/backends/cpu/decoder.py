"""Native decoder: all decoder layers of a model in one native call.

One call replaces a hundred small operations per layer. The module takes the place of the model's list of layers and
computes what they compute, adapters included.

It replaces one kind of decoder layer (norm, attention over q/k/v/o, norm, gated feed-forward), which most open models
have. Structure alone proves nothing: a model may scale its residuals or norms in another way. So every layer runs once
beside its native twin. Where one differs, the model's own code computes all of them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from loraplex_runtime.reports import Progress, counted, no_progress
from loraplex_server.backends.cpu.attention import Plan, native_plan, plan_spans, reason_against
from loraplex_server.backends.cpu.lora import NativeSegments, table_of
from loraplex_server.backends.cpu.native.kernels import BAND, DTYPES, NO_RUNS, NativeKernels, PackedWeight, RunsOfRows
from loraplex_server.backends.cpu.native.library import Layer, Stack, Step
from loraplex_server.backends.cpu.step_parts import StepPart, split_step, take_rows
from loraplex_server.backends.equivalence import compare
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.attention import HANDLE, AttentionBatch, AttentionSpec, LayerKv
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.lora import PreparedSegments
from loraplex_server.layers.quantization import WeightFormat

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

PARTS: Final = ("q", "k", "v", "o", "gate", "up", "down")
LINEARS: Final = (*(f"self_attn.{part}_proj" for part in PARTS[:4]), *(f"mlp.{part}_proj" for part in PARTS[4:]))
NORMS: Final = ("input_layernorm", "post_attention_layernorm")
HEAD_NORMS: Final = ("self_attn.q_norm", "self_attn.k_norm")
ACTIVATIONS: Final = {"SiLUActivation": 0, "SiLU": 0, "GELUTanh": 1, "PytorchGELUTanh": 1}
NUM_TOKENS: Final = 6
STATES_SCALE: Final = 0.02
ROTARY_MULTIPLE: Final = 32  # of the features that positions turn


@dataclass(frozen=True, slots=True)
class StackShape:
    """Sizes and dtype that all layers of a stack share."""

    dtype: torch.dtype
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    act: int  # 0: SiLU, 1: GELU by tanh
    format: WeightFormat | None = None  # of few bits


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's weights as the kernels read them. Norms and biases are the model's own tensors."""

    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    qkv_bias: Tensor | None
    o_bias: Tensor | None
    norm1: Tensor
    norm2: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    qk_eps: float
    attention: AttentionSpec


class StackLinear:
    """One of the linears of a stack of layers, by itself, from the weight that it shares there."""

    __slots__ = ("_bias", "_first", "_kernels", "_num_outputs", "_packed", "_pair_part")
    is_copy = True

    def __init__(
        self, kernels: NativeKernels, packed: PackedWeight, bias: Tensor | None, first: int, num_outputs: int,
        pair_part: int | None = None,
    ) -> None:  # fmt: skip
        """`first`: of its outputs among all. `pair_part`: which one of a pair it is."""
        self._kernels = kernels
        self._packed = packed
        self._bias = bias
        self._first = first
        self._num_outputs = num_outputs
        self._pair_part = pair_part

    def __call__(self, x: Tensor) -> Tensor:
        y = self._kernels.linear(x, self._packed, self._bias)
        if self._pair_part is not None:
            y = y.view(*y.shape[:-1], -1, 2, BAND // 2)[..., self._pair_part, :].flatten(-2)
        return y[..., self._first : self._first + self._num_outputs].contiguous()

    def matrix(self) -> Tensor:
        if self._pair_part is not None:
            return self._packed.of_pair(self._pair_part, self._num_outputs)
        return self._packed.matrix()[self._first : self._first + self._num_outputs]


class NativeStack(nn.Module):
    """Implements a decoder layer's call for all layers at once. Overwrites the hidden states that it is given.

    Rows whose adapter has more than low-rank terms there (DoRA, biases, saved norms) go through the model's own layers,
    and the others through the stack: a row has the same bits whatever adapters are beside it.
    """

    def __init__(
        self, kernels: NativeKernels, shape: StackShape, layers: list[LayerWeights], context: StepContext
    ) -> None:
        super().__init__()
        self.shape = shape
        self._kernels = kernels
        self._weights = layers
        self._context = context
        self._layers = (Layer * len(layers))(*(_layer(weights) for weights in layers))
        self._stack = Stack(
            dtype=DTYPES[shape.dtype], num_layers=len(layers), hidden=shape.hidden_size, num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, ffn=shape.ffn_size, act=shape.act,
            format=shape.format.code if shape.format is not None else 0, layers=self._layers,
        )  # fmt: skip
        self._linears: list[list[AdaptedLinear | None]] = []
        self._path = ""
        self._own_layers: tuple[nn.Module, ...] = ()  # a tuple: they are not this module's children
        self._pages: tuple[LayerKv, ...] = ()
        self._slots: AdapterSlots | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def connect(self, path: str, layers: Sequence[nn.Module]) -> None:
        """The layers that it stands for, whose linears may be adapted by now and get their weights back. `path`: of
        the list of layers."""
        self._path = f"{path}."
        self._own_layers = tuple(layers)
        self._linears = [[_adapted(layer.get_submodule(name)) for name in LINEARS] for layer in layers]
        for weights, linears in zip(self._weights, self._linears, strict=True):
            for linear, base in zip(linears, _linears_of(weights, self.shape, self._kernels), strict=True):
                if linear is not None:
                    linear.base = base

    def bind(self, pages: Sequence[LayerKv]) -> None:
        """The layers' pages from here on; none unbinds."""
        self._pages = tuple(pages)
        for layer, kv in zip(self._layers, self._pages, strict=bool(pages)):
            layer.k_pages, layer.v_pages = kv.k.data_ptr(), kv.v.data_ptr()

    def use(self, slots: AdapterSlots) -> None:
        """The linears have their factor tables now, which `slots` fills."""
        self._slots = slots
        for layer, linears in zip(self._layers, self._linears, strict=True):
            for part, linear in zip(PARTS, linears, strict=True):
                if linear is not None and linear.table is not None:
                    setattr(layer, f"{part}_table", table_of(linear.table))

    def forward(
        self, hidden_states: Tensor, *others: Any, position_embeddings: tuple[Tensor, Tensor], **named: Any
    ) -> Tensor:
        """hidden_states [1, num_tokens, hidden] -> the same shape."""
        assert self._pages, "no KV cache is bound to the model"
        hidden = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
        prepared, slots = self._context.token_segments, self._slots
        if slots is None or prepared is None or slots.are_plain(prepared.segments, self._path):
            self._run(hidden, position_embeddings, native_plan(self._context.attention), self._runs(prepared))
            return hidden
        stacked, apart = split_step(
            self._context.attention.batch,
            prepared.segments,
            lambda segment: not slots.are_plain((segment,), self._path),
        )
        # Which may come in float32, but has no more bits than the layers' dtype.
        named["position_embeddings"] = tuple(rotary.to(hidden.dtype) for rotary in position_embeddings)
        if stacked is None or apart is None:
            return self._run_own_layers(hidden, others, named)
        num_rows = hidden.shape[1]
        own = hidden.index_select(1, apart.rows)
        part = hidden.index_select(1, stacked.rows)
        self._run(
            part,
            take_rows(position_embeddings, stacked.rows, num_rows),
            plan_spans(stacked.attention),
            self._runs(self._prepare(slots, stacked)),
        )
        hidden.index_copy_(1, stacked.rows, part)
        own_others = take_rows(others, apart.rows, num_rows)
        own_named = {name: take_rows(value, apart.rows, num_rows) for name, value in named.items()}
        with self._as_step(self._prepare(slots, apart), apart.attention, hidden):
            own = self._run_own_layers(own, own_others, own_named)
        return hidden.index_copy_(1, apart.rows, own)

    def _run(self, hidden: Tensor, position_embeddings: tuple[Tensor, Tensor], plan: Plan, runs: RunsOfRows) -> None:
        """hidden [1, num_tokens, hidden], contiguous, becomes the last layer's output."""
        num_tokens = hidden.shape[1]
        cos, sin = (rotary.to(torch.float32).contiguous() for rotary in position_embeddings)
        max_rank = self._slots.max_rank * runs.max_uses if self._slots is not None else 0
        runs.struct.max_rank = max_rank
        needed = self._kernels.stack_scratch_bytes(self._stack, num_tokens, max_rank)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        step = Step(
            num_tokens=num_tokens, num_rotary=cos.shape[-1], hidden=hidden.data_ptr(), cos=cos.data_ptr(),
            sin=sin.data_ptr(), spans=plan.spans, runs=runs.struct, scratch=self._scratch.data_ptr(),
        )  # fmt: skip
        self._kernels.run_stack(self._stack, step)

    def _run_own_layers(self, hidden: Tensor, others: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        for layer in self._own_layers:
            hidden = layer(hidden, *others, **named)
        return hidden

    @contextmanager
    def _as_step(self, segments: PreparedSegments, batch: AttentionBatch, like: Tensor) -> Generator[None]:
        """Modules see the segments and the attention of a part of the step meanwhile."""
        context = self._context
        attention = getattr(self._own_layers[0].get_submodule("self_attn"), HANDLE)
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
        assert isinstance(prepared.data, NativeSegments), "a native stack needs native segments"
        return prepared.data.runs


class NativeNorm(nn.Module):
    """RMS norm in one call, instead of seven operations."""

    def __init__(self, kernels: NativeKernels, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self._kernels = kernels
        self.weight = weight
        self._eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self._kernels.rms_norm(hidden_states, self.weight, self._eps)


def _linears_of(weights: LayerWeights, shape: StackShape, kernels: NativeKernels) -> list[StackLinear]:
    """Each linear of a layer by itself, in the order of LINEARS."""
    rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = ((0, rows), (rows, kv_rows), (rows + kv_rows, kv_rows))
    return [
        *(StackLinear(kernels, weights.qkv, weights.qkv_bias, first, size) for first, size in qkv),
        StackLinear(kernels, weights.o, weights.o_bias, 0, shape.hidden_size),
        *(StackLinear(kernels, weights.gate_up, None, 0, shape.ffn_size, part) for part in range(2)),
        StackLinear(kernels, weights.down, None, 0, shape.hidden_size),
    ]


def _layer(weights: LayerWeights) -> Layer:
    spec = weights.attention
    layer = Layer()
    for name in ("qkv", "o", "gate_up", "down"):
        setattr(layer, name, getattr(weights, name).address)
    for name in ("qkv_bias", "o_bias", "norm1", "norm2", "q_norm", "k_norm"):
        tensor: Tensor | None = getattr(weights, name)
        setattr(layer, name, tensor.data_ptr() if tensor is not None else None)
    layer.eps, layer.qk_eps = weights.eps, weights.qk_eps
    layer.scaling, layer.softcap, layer.window = spec.scaling, spec.softcap or 0.0, spec.window or 0
    return layer


# --- layers that it replaces ------------------------------------------------------------------------------------------


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
        shape = _shape(layers[0], specs[0])
        tell = counted(progress, "comparing native layers with the model's", len(layers), "layers")
        for idx, (layer, spec) in enumerate(zip(layers, specs, strict=True)):
            tell(idx)
            _prove(idx, model, layer, _pack(layer, spec, shape, kernels), shape, kernels, far)
            if shape.dtype != torch.float32:
                wide, wide_shape = copy.deepcopy(layer).float(), replace(shape, dtype=torch.float32)
                _prove(idx, model, wide, _pack(wide, spec, wide_shape, kernels), wide_shape, kernels, far)
    except _NoMatch as reason:
        log.info("layers are run one operation at a time: %s", reason)
        return None
    shape = replace(shape, format=form)
    # Only now, and one by one: until all are proven the model may have to stay as it is, and its memory is not doubled.
    tell = counted(progress, "packing weights", len(layers), "layers")
    weights: list[LayerWeights] = []
    for layer, spec in zip(layers, specs, strict=True):
        weights.append(_take(layer, spec, shape, kernels))
        tell(len(weights))
    return FoundStack(path, layers, NativeStack(kernels, shape, weights, context), _final_norm(model, path, kernels))


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
    common = {*LINEARS, *NORMS, "mlp.act_fn"}
    return names in (common, common | set(HEAD_NORMS)) and all(
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
    norms = {name: layer.get_submodule(name) for name in (*NORMS, *_head_norms(layer))}
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
        norm1=cast(Tensor, norms[NORMS[0]].weight),
        norm2=cast(Tensor, norms[NORMS[1]].weight),
        q_norm=cast(Tensor, norms[HEAD_NORMS[0]].weight) if HEAD_NORMS[0] in norms else None,
        k_norm=cast(Tensor, norms[HEAD_NORMS[1]].weight) if HEAD_NORMS[1] in norms else None,
        eps=_one_eps([norms[name] for name in NORMS]),
        qk_eps=_one_eps([norms[name] for name in HEAD_NORMS if name in norms]),
        attention=spec,
    )


def _take(layer: nn.Module, spec: AttentionSpec, shape: StackShape, kernels: NativeKernels) -> LayerWeights:
    """Packs a layer's weights and lets the plain ones go; their shapes stay."""
    weights = _pack(layer, spec, shape, kernels)
    for name in LINEARS:
        linear = cast(nn.Linear, layer.get_submodule(name))
        linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)
    return weights


def _head_norms(layer: nn.Module) -> tuple[str, ...]:
    return HEAD_NORMS if hasattr(layer.get_submodule("self_attn"), "q_norm") else ()


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


def _adapted(module: nn.Module) -> AdaptedLinear | None:
    return module if isinstance(module, AdaptedLinear) else None


def _final_norm(model: PreTrainedModel, path: str, kernels: NativeKernels) -> tuple[str, NativeNorm] | None:
    """The norm beside the list of layers, where it is of the layers' own kind, which has been proven by then."""
    parent, _, _ = path.rpartition(".")
    norm_path = f"{parent}.norm" if parent else "norm"
    layer = model.get_submodule(f"{path}.0")
    try:
        norm = model.get_submodule(norm_path)
    except AttributeError:
        return None
    own = layer.get_submodule(NORMS[0])
    weight, eps = getattr(norm, "weight", None), _eps(norm)
    if type(norm) is not type(own) or not isinstance(weight, Tensor) or eps is None:
        return None
    if weight.dtype != cast(Tensor, own.weight).dtype:
        return None
    return norm_path, NativeNorm(kernels, cast(nn.Parameter, weight), eps)


# --- proof ------------------------------------------------------------------------------------------------------------


def _prove(
    idx: int,
    model: PreTrainedModel,
    layer: nn.Module,
    weights: LayerWeights,
    shape: StackShape,
    kernels: NativeKernels,
    far: Sequence[int],
) -> None:
    """Runs the native twin beside the layer on random states. Raises _NoMatch where what they add to these differs."""
    generator = torch.Generator().manual_seed(5)
    # Small, because what a layer adds does not grow with its input, but rounding the sum does.
    states = (STATES_SCALE * torch.randn(1, NUM_TOKENS, shape.hidden_size, generator=generator)).to(shape.dtype)
    # What a layer does with positions besides rotation may begin far out.
    positions = torch.tensor([[*range(3, 3 + NUM_TOKENS), *far][-NUM_TOKENS:]])
    rotary = next((module for name, module in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise _NoMatch("its positions are not rotary")
    context = StepContext()
    spec = weights.attention
    try:
        with torch.inference_mode():
            embeddings = rotary(states, position_ids=positions)
            if embeddings[0].shape[-1] % ROTARY_MULTIPLE:
                raise _NoMatch(f"positions turn {embeddings[0].shape[-1]} features of a head")
            attention = layer.get_submodule("self_attn")
            setattr(attention, HANDLE, partial(_attend_plainly, spec))
            expected = layer(
                states.clone(), attention_mask=None, position_ids=positions, position_embeddings=embeddings
            )
            if not isinstance(expected, Tensor):
                raise _NoMatch("they answer with more than their states")
            twin = NativeStack(kernels, shape, [weights], context)
            pages = torch.zeros(1, NUM_TOKENS, spec.num_kv_heads, spec.k_dim, dtype=shape.dtype)
            twin.bind([LayerKv(pages, pages.clone())])
            context.attention = plan_spans(_one_span())
            got = twin(states.clone(), position_embeddings=embeddings)
    except (TypeError, ValueError, KeyError, RuntimeError, AttributeError) as error:  # model-specific code
        raise _NoMatch(f"they are called in another way ({error})") from error
    finally:
        context.clear()
        if hasattr(layer.get_submodule("self_attn"), HANDLE):
            delattr(layer.get_submodule("self_attn"), HANDLE)
    found = compare("decoder", expected, got, base=states)
    if not found.is_equal:
        raise _NoMatch(f"layer {idx} computes something else ({found.error:.1%} apart in {_name(shape.dtype)})")


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
