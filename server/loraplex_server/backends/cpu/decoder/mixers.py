"""Mixers in a stack of layers, as the kernels read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.decoder.weights import LayerWeights, MixerWeights, projected_sizes
from loraplex_server.backends.cpu.native.library import Layer, Mixer, Norm
from loraplex_server.backends.cpu.recurrences import linear_of, pieces_of
from loraplex_server.layers.mixers import Layout
from loraplex_server.layers.recurrences import StatesOfStep


class Mixers:
    """The layers of a stack that have a mixer in attention's place."""

    def __init__(self, layers: Sequence[LayerWeights], structs: ctypes.Array[Layer]) -> None:
        """`structs`: of the layers, which get those of mixers."""
        self._layers = {idx: (layer.mixer, Mixer()) for idx, layer in enumerate(layers) if layer.mixer is not None}
        for idx, (weights, struct) in self._layers.items():
            _fill(struct, weights)
            structs[idx].mixer = ctypes.pointer(struct)
        specs = [weights.spec for weights, _ in self._layers.values()]
        # The most that any of them has: features of values, channels, features that recurrences give in floats, and
        # columns of what is projected.
        self.size = max((spec.size for spec in specs), default=0)
        self.channels = max((spec.channels for spec in specs), default=0)
        self.recurred_size = max(
            (one.spec.size for one, _ in self._layers.values() if not one.attention.rounds), default=0
        )
        self.num_projected = max((sum(projected_sizes(spec)) for spec in specs), default=0)

    def __len__(self) -> int:
        return len(self._layers)

    def has_whole_norm(self, layer: int) -> bool:
        """True if the norm's own weight has all heads' features."""
        return self._layers[layer][0].has_whole_norm

    def begin(self, states: StatesOfStep, layers: slice, num_tokens: int, dtype: torch.dtype) -> StepOfMixers:
        """Shows the kernels the states of a step, for layers of which each runs once. The caller keeps what it gets
        until its `end`."""
        own = [one for idx, one in self._layers.items() if layers.start <= idx < layers.stop]
        return StepOfMixers(own, states, num_tokens, dtype)


class StepOfMixers:
    """One step of some layers."""

    def __init__(
        self, layers: Sequence[tuple[MixerWeights, Mixer]], states: StatesOfStep, num_tokens: int, dtype: torch.dtype
    ) -> None:
        self.pieces = pieces_of(states.places)
        self._layers = layers
        self._states = states
        self._kept: list[tuple[Tensor, Tensor]] = []  # what the linears and the convolution of each layer gave
        for weights, struct in layers:
            spec = weights.spec
            struct.conv_states = states.tensor(spec.first_state).data_ptr()
            struct.recurrence.states = states.tensor(spec.first_state + 1).data_ptr()
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
            of_attention: tuple[Tensor, ...] = ()
            if self._kept:
                projected, convolved = self._kept[number]
                num_tokens, heads = len(projected), slice(0, spec.num_heads)
                channels, _, b, a = projected.split(projected_sizes(spec), dim=1)
                is_together = spec.layout is Layout.TOGETHER
                sizes = (spec.key_size, spec.key_size, spec.size)
                parts = convolved.split(sizes[::-1] if is_together else sizes, dim=1)
                q, k, v = parts[::-1] if is_together else parts
                q, k = (one.view(num_tokens, spec.num_keys, spec.k_dim) for one in (q, k))
                gates = (a[:, heads],) if is_together else (a[:, heads], b[:, heads])
                of_convolution = (channels,)
                of_attention = (q, k, v.view(num_tokens, -1, spec.v_dim), *gates)
            self._states.note(spec.first_state, weights.convolution, of_convolution)
            self._states.note(spec.first_state + 1, weights.attention, of_attention)


def _fill(struct: Mixer, weights: MixerWeights) -> None:
    spec = weights.spec
    struct.projection, struct.o = weights.projection.address, weights.o.address
    struct.conv_weight = weights.conv_weight.data_ptr()
    struct.conv_bias = None if weights.conv_bias is None else weights.conv_bias.data_ptr()
    struct.norm, struct.norm_eps = Norm(weight=weights.norm.data_ptr()), weights.norm_eps
    struct.norm_size, struct.gates_first = spec.norm_size, spec.gates_first
    struct.width, struct.layout = len(weights.conv_weight), spec.layout
    struct.recurrence = linear_of(weights.attention, spec.num_keys, spec.num_heads, spec.k_dim, spec.v_dim)
