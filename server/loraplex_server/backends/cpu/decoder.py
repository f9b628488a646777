"""Native decoder: all decoder layers of a model in one native call.

One call replaces a hundred small operations per layer. The module takes the place of the model's list of layers and
computes what they compute, adapters included. decoder_match.py decides which layers it may replace, and proves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loraplex_server.backends.cpu.attention import spans_of
from loraplex_server.backends.cpu.lora import NativeSegments, table_of
from loraplex_server.backends.cpu.native.kernels import DTYPES, NO_RUNS, NativeKernels, PackedWeight, RunsOfRows
from loraplex_server.backends.cpu.native.prototypes import Layer, Stack, Step
from loraplex_server.layers.adapter_slots import AdapterSlots
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.kv_memory import LayerKv
from loraplex_server.layers.linear import AdaptedLinear
from loraplex_server.layers.spec import AttentionSpec

PARTS = ("q", "k", "v", "o", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class StackShape:
    """What all layers of a stack share."""

    dtype: torch.dtype
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    act: int  # 0: SiLU, 1: GELU by tanh
    is_int8: bool = False  # the weights are in eight bits


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


class NativeStack(nn.Module):
    """Implements a decoder layer's call for all layers at once. Overwrites the hidden states that it is given."""

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
            dtype=DTYPES[shape.dtype],
            num_layers=len(layers),
            hidden=shape.hidden_size,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            ffn=shape.ffn_size,
            act=shape.act,
            is_int8=shape.is_int8,
            layers=self._layers,
        )
        self._linears: list[list[AdaptedLinear | None]] = []
        self._pages: tuple[LayerKv, ...] = ()
        self._slots: AdapterSlots | None = None
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def connect(self, linears: list[list[AdaptedLinear | None]]) -> None:
        """By layer the linears of PARTS that may be adapted."""
        self._linears = linears

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

    def forward(self, hidden_states: Tensor, *_: Any, position_embeddings: tuple[Tensor, Tensor], **__: Any) -> Tensor:
        """hidden_states [1, num_tokens, hidden] -> the same shape."""
        assert self._pages, "no KV cache is bound to the model"
        hidden = hidden_states if hidden_states.is_contiguous() else hidden_states.contiguous()
        num_tokens = hidden.shape[1]
        cos, sin = (rotary.to(torch.float32).contiguous() for rotary in position_embeddings)
        spans = spans_of(self._context.attention)
        runs = self._runs()
        max_rank = self._slots.max_rank * runs.max_uses if self._slots is not None else 0
        runs.struct.max_rank = max_rank
        needed = self._kernels.stack_scratch_bytes(self._stack, num_tokens, max_rank)
        if self._scratch.numel() < needed:
            self._scratch = torch.empty(needed, dtype=torch.uint8)
        step = Step(
            num_tokens=num_tokens,
            num_rotary=cos.shape[-1],
            hidden=hidden.data_ptr(),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            spans=spans.struct,
            runs=runs.struct,
            scratch=self._scratch.data_ptr(),
        )
        self._kernels.run_stack(self._stack, step)
        return hidden

    def _runs(self) -> RunsOfRows:
        prepared = self._context.token_segments
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
