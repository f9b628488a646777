"""Gated DeltaNet in a stack of layers, as the kernels read it."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.decoder.weights import DeltaWeights, LayerWeights, projected_sizes
from loraplex_server.backends.cpu.native.library import Delta, Layer
from loraplex_server.backends.cpu.recurrences import pieces_of
from loraplex_server.layers.recurrences import Gates, StatesOfStep


class Deltas:
    """The layers of a stack that have Gated DeltaNet in attention's place."""

    def __init__(self, layers: Sequence[LayerWeights], structs: ctypes.Array[Layer]) -> None:
        """`structs`: of the layers, which get those of Gated DeltaNet."""
        self._layers = {idx: (layer.delta, Delta()) for idx, layer in enumerate(layers) if layer.delta is not None}
        for idx, (weights, struct) in self._layers.items():
            _fill(struct, weights)
            structs[idx].delta = ctypes.pointer(struct)
        specs = [weights.spec for weights, _ in self._layers.values()]
        # The most that any of them has: features of values, channels, and columns of what is projected.
        self.size = max((spec.size for spec in specs), default=0)
        self.channels = max((spec.channels for spec in specs), default=0)
        self.num_projected = max((sum(projected_sizes(spec)) for spec in specs), default=0)

    def __len__(self) -> int:
        return len(self._layers)

    def begin(self, states: StatesOfStep, layers: slice, num_tokens: int, dtype: torch.dtype) -> StepOfDeltas:
        """Shows the kernels the states of a step, for layers of which each runs once. The caller keeps what it gets
        until its `end`."""
        own = [one for idx, one in self._layers.items() if layers.start <= idx < layers.stop]
        return StepOfDeltas(own, states, num_tokens, dtype)


class StepOfDeltas:
    """One step of some layers."""

    def __init__(
        self, layers: Sequence[tuple[DeltaWeights, Delta]], states: StatesOfStep, num_tokens: int, dtype: torch.dtype
    ) -> None:
        self.pieces = pieces_of(states.places)
        self._layers = layers
        self._states = states
        self._kept: list[tuple[Tensor, Tensor]] = []  # what the linears and the convolution of each layer gave
        for weights, struct in layers:
            spec = weights.spec
            struct.conv_states = states.tensor(spec.first_state).data_ptr()
            struct.states = states.tensor(spec.first_state + 1).data_ptr()
            struct.projected = struct.convolved = None
            if states.keeps_inputs:
                sizes = sum(projected_sizes(spec)), spec.channels
                projected, convolved = (torch.empty(num_tokens, size, dtype=dtype) for size in sizes)
                struct.projected, struct.convolved = projected.data_ptr(), convolved.data_ptr()
                self._kept.append((projected, convolved))

    def end(self) -> None:
        """Tells the states that the recurrences have run."""
        for number, (weights, _) in enumerate(self._layers):
            spec = weights.spec
            of_convolution: tuple[Tensor, ...] = ()
            of_delta: tuple[Tensor, ...] = ()
            if self._kept:
                projected, convolved = self._kept[number]
                num_tokens, heads = len(projected), slice(0, spec.num_heads)
                qkv, _, b, a = projected.split(projected_sizes(spec), dim=1)
                q, k, v = convolved.split((spec.key_size, spec.key_size, spec.size), dim=1)
                q, k = (one.view(num_tokens, spec.num_keys, spec.k_dim) for one in (q, k))
                of_convolution = (qkv,)
                of_delta = q, k, v.view(num_tokens, -1, spec.v_dim), a[:, heads], b[:, heads]
            self._states.note(spec.first_state, weights.convolution, of_convolution)
            self._states.note(spec.first_state + 1, weights.attention, of_delta)


def _fill(struct: Delta, weights: DeltaWeights) -> None:
    spec, gates = weights.spec, weights.attention.gates
    assert isinstance(gates, Gates), "Gated DeltaNet has gates of its own"
    struct.projection, struct.o = weights.projection.address, weights.o.address
    struct.conv_weight = weights.conv_weight.data_ptr()
    struct.conv_bias = None if weights.conv_bias is None else weights.conv_bias.data_ptr()
    struct.rates, struct.biases = gates.rates.data_ptr(), gates.biases.data_ptr()
    struct.norm, struct.norm_eps, struct.scale = weights.norm.data_ptr(), weights.norm_eps, weights.attention.scale
    struct.width, struct.by_key_heads = len(weights.conv_weight), spec.by_key_heads
    for name in ("num_keys", "num_heads", "k_dim", "v_dim"):
        setattr(struct, name, getattr(spec, name))
