"""Recurrences of a step by the native CPU kernels, from places to places.

A state is read once and written once in a decode step. Tokens of a piece go one after the other, so that a text's bits
do not depend on where it is cut, nor on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from loraplex_server.backends.cpu.native.kernels import DTYPES, NativeKernels
from loraplex_server.backends.cpu.native.library import Linear, Pieces
from loraplex_server.layers.recurrences import (
    Convolution,
    LinearAttention,
    Places,
    Recurrence,
    SelectiveScan,
    TimeSteps,
)

MAX_DIM = 512  # kMaxStateDim in src/kernels.h
DIM_MULTIPLE = 16  # of a state's columns
MAX_WIDTH = 8  # kMaxConvWidth


class NativeRecurrences:
    """Implements StateOps."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        # Weights of convolutions as the kernels read them, by the address of the model's own, which is kept with them.
        self._weights: dict[int, tuple[Tensor, Tensor, Tensor | None]] = {}
        self._recent: tuple[Places, Pieces] | None = None  # those of a step are the same for all its layers

    def run(self, run: Recurrence, inputs: Sequence[Tensor], states: Tensor, places: Places) -> Tensor | None:
        if isinstance(run, LinearAttention):
            return self._attend(run, inputs, states, places)
        if isinstance(run, Convolution):
            return self._convolve(run, inputs[0], states, places)
        if isinstance(run, SelectiveScan) and all(x.dtype == torch.float32 for x in (*inputs, states)):
            x, step, b, c = (one.contiguous() for one in inputs)
            return self._kernels.scan(x, step, run.a.contiguous(), b, c, states, self._pieces(places))
        return None

    def _attend(self, run: LinearAttention, inputs: Sequence[Tensor], states: Tensor, places: Places) -> Tensor | None:
        q, k, v = (_rows(x) for x in inputs[:3])
        (num_tokens, num_heads, v_dim), (_, num_keys, k_dim) = v.shape, k.shape
        is_known = states.dtype == torch.float32 and v_dim % DIM_MULTIPLE == 0 and max(k_dim, v_dim) <= MAX_DIM
        is_known &= has_floats(run) and (run.gates is None or inputs[3].dtype == v.dtype)
        if not is_known or v.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
            return None
        gate_dtype = torch.float32 if run.gates is None else v.dtype
        decay, *rest = (one.to(gate_dtype).contiguous() for one in inputs[3:])
        beta = rest[0].data_ptr() if rest else None
        out = torch.empty(num_tokens, num_heads, v_dim, dtype=v.dtype if run.rounds else torch.float32)
        linear = linear_of(run, num_keys, num_heads, k_dim, v_dim)
        linear.q, linear.k, linear.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        linear.q_stride, linear.k_stride, linear.v_stride = q.stride(0), k.stride(0), v.stride(0)
        linear.gate_stride, linear.decay_by_channel = num_heads, decay.dim() == 3
        linear.out, linear.out_stride, linear.states = out.data_ptr(), num_heads * v_dim, states.data_ptr()
        if run.gates is None:
            linear.decay, linear.beta = decay.data_ptr(), beta
        else:
            linear.a, linear.b = decay.data_ptr(), beta
        self._kernels.attend_linearly(v.dtype, linear, self._pieces(places))
        return out

    def _convolve(self, run: Convolution, x: Tensor, states: Tensor, places: Places) -> Tensor | None:
        if not x.dtype == states.dtype == run.weight.dtype or x.dtype not in DTYPES or run.weight.shape[1] > MAX_WIDTH:
            return None
        weight, bias = self._weight(run)
        x = x if x.stride(1) == 1 else x.contiguous()
        return self._kernels.convolve(x, weight, bias, states, self._pieces(places), is_activated=run.is_activated)

    def _pieces(self, places: Places) -> Pieces:
        if self._recent is None or self._recent[0] is not places:
            self._recent = places, pieces_of(places)
        return self._recent[1]

    def _weight(self, run: Convolution) -> tuple[Tensor, Tensor | None]:
        found = self._weights.get(run.weight.data_ptr())
        if found is None:
            wide = run.weight.detach().to(torch.float32).t().contiguous()
            bias = None if run.bias is None else run.bias.detach().to(torch.float32).contiguous()
            found = self._weights[run.weight.data_ptr()] = (run.weight, wide, bias)
        return found[1:]


def has_floats(run: LinearAttention) -> bool:
    """True if a recurrence's own tensors are in the dtype that the kernels read."""
    own = [] if run.gates is None else [run.gates.rates, run.gates.biases]
    return all(one.dtype == torch.float32 for one in (*own, *([] if run.skips is None else [run.skips])))


def linear_of(run: LinearAttention, num_keys: int, num_heads: int, k_dim: int, v_dim: int) -> Linear:
    """Sizes, form and own tensors of a recurrence as the kernels read them; the caller keeps the tensors meanwhile."""
    linear = Linear(
        num_keys=num_keys, num_heads=num_heads, k_dim=k_dim, v_dim=v_dim,
        is_delta=run.is_delta, normalizes=run.normalizes, scale=run.scale, rounds=run.rounds,
    )  # fmt: skip
    if run.gates is not None:
        linear.rates, linear.biases = run.gates.rates.data_ptr(), run.gates.biases.data_ptr()
    if isinstance(run.gates, TimeSteps):
        linear.least, linear.most = run.gates.limits
    if run.skips is not None:
        linear.skips = run.skips.data_ptr()
    return linear


def pieces_of(places: Places) -> Pieces:
    """Places as the kernels read them, which the caller keeps meanwhile."""
    return Pieces(len(places.chains) - 1, places.chains.ctypes.data, places.pieces.ctypes.data)


def _rows(x: Tensor) -> Tensor:
    """x [tokens, heads, dim] with each token's heads in one piece."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
