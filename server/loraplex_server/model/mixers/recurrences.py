"""Recurrences of mixers: convolution, gated linear attention, delta rule, selective scan.

Each runs equally long pieces of several texts, [pieces, tokens, ...], from a state per piece, and returns outputs and
the states behind the pieces. Short pieces go token by token, longer ones in chunks, whose products of matrices give
the same but for rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Tokens up to which one after the other is the faster way.
SEQUENTIAL_TOKENS = 4
CHUNK_TOKENS = 64
# With a decay for each channel a chunk takes tokens x tokens x channels elements for each head.
CHANNEL_CHUNK_TOKENS = 16


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
    """One chunk, tensors [pieces, heads, tokens, ...]."""
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
    """[.., tokens, tokens]: products of rows of a and b [.., tokens, K] under the decay between them."""
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
