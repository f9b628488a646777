"""Recurrences of mixers: convolution, gated linear attention, delta rule, selective scan.

Each runs equally long pieces of several texts, [pieces, tokens, ...], from a state per piece, and returns outputs and
the states behind the pieces. Short pieces go token by token, longer ones in chunks, whose products of matrices give
the same except for rounding. A back end may compute them over the slots of a step in place of that (`StateOps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens up to which one after the other is the faster way.
SEQUENTIAL_TOKENS = 4
CHUNK_TOKENS = 64
# With a decay for each channel a chunk takes tokens x tokens x channels elements for each head.
CHANNEL_CHUNK_TOKENS = 16
NORM_EPS = 1e-6  # of queries and keys, as Transformers has it
NO_PLACE = -1


class Recurrence(Protocol):
    """Runs pieces of texts, inputs [pieces, tokens, ...], from a state for each [pieces, ...] (None: the beginning).
    Returns outputs [pieces, tokens, ...] and the states behind the pieces."""

    def __call__(self, parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]: ...


# Runs one over a step's row: inputs [num_tokens, ...] each -> outputs [num_tokens, ...].
RunRecurrence = Callable[[Recurrence, Sequence[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Places:
    """The pieces of a step for back ends: where each begins in the row, how long it is, and the places of the states
    before and behind it (NO_PLACE: it is not kept). Pieces of one text are a chain: each begins with the state behind
    the one before it."""

    pieces: npt.NDArray[np.int64]  # [num_pieces, 4]: start, length, source, target
    chains: npt.NDArray[np.int32]  # [num_chains + 1]: the first piece of each


class StateOps(Protocol):
    """Recurrences of a back end, straight from places to places."""

    def run(self, run: Recurrence, inputs: Sequence[Tensor], states: Tensor, places: Places) -> Tensor | None:
        """Runs a recurrence: inputs [num_tokens, ...] each, states [places, ...] -> outputs [num_tokens, ...]. None: it
        does not know this recurrence, and nothing was written."""
        ...


class StatesOfStep(Protocol):
    """The states of a step, for back ends that run several recurrences in one call."""

    @property
    def places(self) -> Places: ...

    @property
    def keeps_inputs(self) -> bool:
        """True if recurrences run again over some of their inputs, which is so behind drafts."""
        ...

    def tensor(self, idx: int) -> Tensor:
        """States [places, ...]."""
        ...

    def note(self, idx: int, run: Recurrence, inputs: Sequence[Tensor]) -> None:
        """Takes note that the recurrence with this state has run over `places`. `inputs`: empty, unless they are
        kept."""
        ...


@dataclass(frozen=True, slots=True)
class Convolution:
    """Causal convolution of each channel, and silu behind it where `is_activated`. Input: x [.., channels]."""

    weight: Tensor  # [channels, width]
    bias: Tensor | None
    is_activated: bool = False

    def __call__(self, parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, state = convolve(parts[0], state, self.weight, self.bias)
        return (F.silu(out) if self.is_activated else out), state


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates of Gated DeltaNet: decay and beta from a and b [.., heads], which a mixer computes of its input."""

    rates: Tensor  # [heads] in float32 at least
    biases: Tensor

    def __call__(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.rates * F.softplus(a.to(self.rates.dtype) + self.biases), b.sigmoid()


@dataclass(frozen=True, slots=True)
class TimeSteps:
    """Gates of Mamba 2: decay and beta from dt [.., heads], of which it makes time steps."""

    rates: Tensor  # [heads] in float32 at least
    biases: Tensor  # of numbers that dt's dtype has
    limits: tuple[float, float] = (0.0, math.inf)  # of a step

    def __call__(self, dt: Tensor) -> tuple[Tensor, Tensor]:
        step = F.softplus(dt + self.biases.to(dt.dtype)).to(self.rates.dtype).clamp(*self.limits)
        return step * self.rates, step


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated linear attention over q, k [.., key heads, K], v [.., heads, V], decay [.., heads] or [.., heads, K], and
    beta [.., heads] or none: values times beta, or, with `is_delta`, the delta rule. With `gates` a and b stand for
    decay and beta, or dt alone. Computes in float32 at least."""

    scale: float = 1.0  # of queries
    normalizes: bool = False  # queries and keys, first
    is_delta: bool = False
    gates: Gates | TimeSteps | None = None
    skips: Tensor | None = None  # [heads] in float32 at least: the part of v that is added to the output
    rounds: bool = False  # outputs are in the dtype of v

    def __call__(self, parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        own_dtype = parts[2].dtype
        if self.gates is not None:
            parts = (*parts[:3], *self.gates(*parts[3:]))
        dtype = torch.promote_types(parts[0].dtype, torch.float32)
        q, k, v, decay = (one.to(dtype) for one in parts[:4])
        beta = parts[4].to(dtype) if len(parts) > 4 else None
        if self.normalizes:
            q, k = (one * torch.rsqrt((one * one).sum(-1, keepdim=True) + NORM_EPS) for one in (q, k))
        num_groups = v.shape[-2] // k.shape[-2]
        if num_groups > 1:
            q, k = (one.repeat_interleave(num_groups, dim=-2) for one in (q, k))
        added = v if beta is None or self.is_delta else v * beta.unsqueeze(-1)
        out, state = attend_linearly(q * self.scale, k, added, decay, beta if self.is_delta else None, state)
        if self.skips is not None:
            out = torch.addcmul(out, v, self.skips.unsqueeze(-1))
        return out.to(own_dtype) if self.rounds else out, state


@dataclass(frozen=True, slots=True)
class SelectiveScan:
    """Selective scan over x, step [.., channels], b, c [.., N]."""

    a: Tensor  # [channels, N]

    def __call__(self, parts: Sequence[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, step, b, c = parts
        return scan(x, step, self.a, b, c, state)


def convolve(x: Tensor, state: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Causal convolution of each channel. x [pieces, tokens, channels], state [pieces, width - 1, channels]: the inputs
    before these; weight [channels, width]. Returns outputs like x, and the last inputs."""
    width = weight.shape[1]
    x = x.to(weight.dtype)
    if state is None:
        state = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    seen = torch.cat([state, x], dim=1)
    if x.shape[1] <= SEQUENTIAL_TOKENS:
        wide = torch.promote_types(x.dtype, torch.float32)
        out = (seen.unfold(1, width, 1).to(wide) * weight.to(wide)).sum(-1)
        out = (out if bias is None else out + bias).to(x.dtype)
    else:
        out = F.conv1d(seen.transpose(1, 2), weight.unsqueeze(1), bias, groups=x.shape[2]).transpose(1, 2)
    return out, seen[:, x.shape[1] :]


def attend_linearly(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gated linear attention: S = e^decay S + k v', o = S' q, where with `beta` the delta rule puts beta (v - S' k) in
    the place of v. query, key [pieces, tokens, heads, K], value [.., V], decay [pieces, tokens, heads] or [.., K], beta
    [pieces, tokens, heads], state [pieces, heads, K, V]. Returns o [pieces, tokens, heads, V] and the last S."""
    num_pieces, num_tokens, num_heads, k_dim = key.shape
    if state is None:
        state = value.new_zeros(num_pieces, num_heads, k_dim, value.shape[-1])
    query, key, value, decay = (one.transpose(1, 2) for one in (query, key, value, decay))
    beta = None if beta is None else beta.transpose(1, 2)
    outs: list[Tensor] = []
    if num_tokens <= SEQUENTIAL_TOKENS:
        for i in range(num_tokens):
            at = slice(i, i + 1)
            step = decay[:, :, i].exp()
            state = state * (step[..., None, None] if step.dim() == 2 else step[..., None])
            added = value[:, :, at]
            if beta is not None:
                added = (added - key[:, :, at] @ state) * beta[:, :, at, None]
            state = torch.addcmul(state, key[:, :, i, :, None], added)
            outs.append(query[:, :, at] @ state)
    else:
        size = CHANNEL_CHUNK_TOKENS if decay.dim() == 4 else CHUNK_TOKENS
        for start in range(0, num_tokens, size):
            at = slice(start, start + size)
            of_beta = None if beta is None else beta[:, :, at]
            out, state = _chunk(query[:, :, at], key[:, :, at], value[:, :, at], decay[:, :, at], of_beta, state)
            outs.append(out)
    return torch.cat(outs, dim=2).transpose(1, 2), state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk of gated linear attention, tensors [pieces, heads, tokens, ...]."""
    total = decay.cumsum(dim=2)
    past = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool, device=key.device).triu(1)
    if decay.dim() == 4:
        pairs = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(past[..., None], float("-inf")).exp()
        since = total.exp()
        left = (total[:, :, -1:] - total).exp()
        last = total[:, :, -1].exp().unsqueeze(-1)
    else:
        pairs = (total.unsqueeze(3) - total.unsqueeze(2)).masked_fill(past, float("-inf")).exp()
        since = total.exp().unsqueeze(-1)
        left = (total[:, :, -1:] - total).exp().unsqueeze(-1)
        last = total[:, :, -1].exp()[..., None, None]
    if beta is not None:
        weighted = key * beta.unsqueeze(-1)
        # Each token's value, less what the state and the tokens before it in the chunk already answer to its key.
        rest = value * beta.unsqueeze(-1) - (weighted * since) @ state
        value = torch.linalg.solve_triangular(_products(weighted, key, pairs), rest, upper=False, unitriangular=True)
    out = (query * since) @ state + _products(query, key, pairs) @ value
    return out, state * last + (key * left).transpose(-1, -2) @ value


def _products(a: Tensor, b: Tensor, pairs: Tensor) -> Tensor:
    """Products [.., tokens, tokens] of rows of a and b [.., tokens, K] under the decay between them."""
    if pairs.dim() == 5:
        return torch.einsum("phik,phjk,phijk->phij", a, b, pairs)
    return (a @ b.transpose(-1, -2)) * pairs


def scan(x: Tensor, step: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Selective scan: S = e^(a step) S + step x b', y = S c. x, step [pieces, tokens, channels], a [channels, N], b and
    c [pieces, tokens, N], state [pieces, channels, N]. Returns y like x, and the last S."""
    if state is None:
        state = x.new_zeros(x.shape[0], x.shape[2], a.shape[1])
    outs: list[Tensor] = []
    for start in range(0, x.shape[1], CHUNK_TOKENS):  # [tokens, channels, N] at a time
        at = slice(start, start + CHUNK_TOKENS)
        decays = (step[:, at].unsqueeze(-1) * a).exp()
        states = (step[:, at] * x[:, at]).unsqueeze(-1) * b[:, at].unsqueeze(2)
        for i in range(states.shape[1]):
            state = states[:, i].addcmul_(decays[:, i], state)
        outs.append(torch.einsum("ptdn,ptn->ptd", states, c[:, at]))
    return torch.cat(outs, dim=1), state.clone()
