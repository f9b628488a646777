"""Gated DeltaNet in a stack of layers, as the kernels read it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.decoder.weights import DeltaWeights, LayerWeights, projected_sizes
from loraplex_server.backends.cpu.native.library import Delta, Layer, Pieces
from loraplex_server.layers.gated_delta import DeltaSpec
from loraplex_server.layers.recurrences import StatesOfStep


class Deltas:
    """The layers of a stack that have Gated DeltaNet in attention's place."""

    def __init__(self, layers: Sequence[LayerWeights], structs: ctypes.Array[Layer]) -> None:
        """`structs`: of the layers, which get those of Gated DeltaNet."""
        self._layers = [
            (idx, layer.shape.delta, layer.delta, Delta())
            for idx, layer in enumerate(layers)
            if layer.shape.delta is not None and layer.delta is not None
        ]
        for idx, spec, weights, struct in self._layers:
            _fill(struct, spec, weights)
            structs[idx].delta = ctypes.pointer(struct)

    def __len__(self) -> int:
        return len(self._layers)

    @property
    def size(self) -> int:
        """The most features that values of all heads have."""
        return max((spec.size for _, spec, _, _ in self._layers), default=0)

    @property
    def channels(self) -> int:
        """The most channels that a convolution has."""
        return max((spec.channels for _, spec, _, _ in self._layers), default=0)

    @property
    def num_projected(self) -> int:
        """The most outputs that linears before a convolution have."""
        return max((sum(projected_sizes(spec)) for _, spec, _, _ in self._layers), default=0)

    def begin(self, states: StatesOfStep, layers: slice, num_tokens: int, dtype: torch.dtype) -> StepOfDeltas:
        """Shows the kernels the states of a step, for layers of which each runs once. The caller keeps what it gets
        until its `end`."""
        own = [one for one in self._layers if layers.start <= one[0] < layers.stop]
        return StepOfDeltas(own, states, num_tokens, dtype)


class StepOfDeltas:
    """One step of some layers."""

    def __init__(
        self,
        layers: Sequence[tuple[int, DeltaSpec, DeltaWeights, Delta]],
        states: StatesOfStep,
        num_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        places = states.places
        self.pieces = Pieces(len(places.chains) - 1, places.chains.ctypes.data, places.pieces.ctypes.data)
        self._layers = layers
        self._states = states
        self._kept: list[tuple[Tensor, Tensor]] = []  # what the linears and the convolution of each layer gave
        for _, spec, _, struct in layers:
            struct.conv_states = states.tensor(spec.first_state).data_ptr()
            struct.states = states.tensor(spec.first_state + 1).data_ptr()
            struct.projected = struct.convolved = None
            if states.keeps_inputs:
                projected, convolved = (
                    torch.empty(num_tokens, size, dtype=dtype) for size in (sum(projected_sizes(spec)), spec.channels)
                )
                struct.projected, struct.convolved = projected.data_ptr(), convolved.data_ptr()
                self._kept.append((projected, convolved))

    def end(self) -> None:
        """Tells the states that the recurrences have run."""
        for number, (_, spec, weights, _) in enumerate(self._layers):
            of_convolution: tuple[Tensor, ...] = ()
            of_delta: tuple[Tensor, ...] = ()
            if self._kept:
                projected, convolved = self._kept[number]
                num_tokens, heads = len(projected), slice(0, spec.num_heads)
                qkv, _, b, a = projected.split(projected_sizes(spec), dim=1)
                q, k, v = convolved.split((spec.key_size, spec.key_size, spec.size), dim=1)
                q, k = (one.view(num_tokens, spec.num_keys, spec.k_dim) for one in (q, k))
                of_convolution, of_delta = (qkv,), (q, k, v.view(num_tokens, -1, spec.v_dim), a[:, heads], b[:, heads])
            self._states.note(spec.first_state, weights.convolution, of_convolution)
            self._states.note(spec.first_state + 1, weights.attention, of_delta)


def _fill(struct: Delta, spec: DeltaSpec, weights: DeltaWeights) -> None:
    struct.projection, struct.o = weights.projection.address, weights.o.address
    struct.conv_weight = weights.conv_weight.data_ptr()
    struct.conv_bias = None if weights.conv_bias is None else weights.conv_bias.data_ptr()
    struct.rates, struct.biases = weights.gates.rates.data_ptr(), weights.gates.biases.data_ptr()
    struct.norm, struct.norm_eps, struct.scale = weights.norm.data_ptr(), weights.norm_eps, weights.attention.scale
    struct.width, struct.by_key_heads = len(weights.conv_weight), spec.by_key_heads
    for name in ("num_keys", "num_heads", "k_dim", "v_dim"):
        setattr(struct, name, getattr(spec, name))
