"""Mixers: a convolution, gated linear attention and a gated norm (Gated DeltaNet, Mamba 2).

A back end that knows their parts computes a whole module in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from loraplex_server.layers import gated_delta
from loraplex_server.layers.recurrences import Convolution, LinearAttention, TimeSteps

MAMBA2_PARTS = (
    *("in_proj", "conv1d", "dt_bias", "A_log", "D", "norm", "out_proj"),
    *("num_heads", "head_dim", "n_groups", "ssm_state_size", "time_step_limit"),
)


class Layout(IntEnum):
    """Linears that give q, k and v, a gate z, and what decay and beta are made of, a and b. The kernels' numbers."""

    APART = 0  # q, k and v; z; b; a: a linear each
    BY_KEY_HEADS = 1  # q, k, v and z of each head of keys; b and a of each
    TOGETHER = 2  # z, v, k, q and a are one linear; there is no b


@dataclass(frozen=True, slots=True)
class MixerSpec:
    """Sizes of one module, how its linears' outputs lie, and where its states are."""

    num_keys: int  # heads of queries and keys
    num_heads: int  # of values
    k_dim: int
    v_dim: int
    norm_size: int  # features of one norm of the output
    gates_first: bool  # the norm is of what the gate has scaled
    first_state: int  # index of its convolution's state; that of linear attention follows
    layout: Layout

    @property
    def key_size(self) -> int:
        """Features of all heads' queries, or keys."""
        return self.num_keys * self.k_dim

    @property
    def size(self) -> int:
        """Features of all heads' values."""
        return self.num_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_size + self.size


def spec_of(module: Any, first_state: int) -> MixerSpec | None:
    """The spec of a module in which silu is the activation; None of another mixer."""
    projection = gated_delta.projection_of(module)
    if projection is not None and hasattr(module, "num_k_heads") and hasattr(module, "num_v_heads"):
        return MixerSpec(
            module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim,
            norm_size=module.head_v_dim, gates_first=False, first_state=first_state,
            layout=Layout.BY_KEY_HEADS if projection is gated_delta.BY_KEY_HEADS else Layout.APART,
        )  # fmt: skip
    if not _is_mamba2(module):
        return None
    size: int = module.num_heads * module.head_dim
    return MixerSpec(
        module.n_groups, module.num_heads, module.ssm_state_size, module.head_dim,
        norm_size=getattr(module.norm, "group_size", size), gates_first=True, first_state=first_state,
        layout=Layout.TOGETHER,
    )  # fmt: skip


def _is_mamba2(module: nn.Module) -> bool:
    is_silu = getattr(module, "activation", None) in ("silu", "swish")
    return is_silu and all(hasattr(module, name) for name in MAMBA2_PARTS)


def recurrences_of(module: Any) -> tuple[Convolution, LinearAttention]:
    """The recurrences of a module that has a spec, whose weights are in their place and dtype."""
    if not _is_mamba2(module):
        return gated_delta.recurrences_of(module)
    convolution = Convolution(module.conv1d.weight.squeeze(1), module.conv1d.bias, is_activated=True)
    rates, dtype = -module.A_log.float().exp(), module.in_proj.weight.dtype
    return convolution, mamba2(rates, module.D, module.dt_bias, module.time_step_limit, dtype)


def mamba2(
    rates: Tensor, skips: Tensor | None, biases: Tensor | None, limits: tuple[float, float], dtype: torch.dtype
) -> LinearAttention:
    """The recurrence of Mamba 2 over C, B, x and dt in this dtype (arXiv 2405.21060). rates, skips and biases [heads]:
    A, D and what is added to dt; limits: of time steps."""
    wide = torch.promote_types(dtype, torch.float32)
    biases = rates.new_zeros(rates.shape) if biases is None else biases
    gates = TimeSteps(rates.to(wide), biases.to(dtype).to(wide), limits)
    return LinearAttention(gates=gates, skips=None if skips is None else skips.to(wide))
