"""Gated DeltaNet: the delta rule between a convolution and a gated norm.

Its gates are computed from the mixer's input (arXiv 2412.06464). Transformers' families compute the same in the
module's own forward, and differ in the linears that it begins with. That forward is replaced: gates are then computed
with the recurrence, and for a row alike in any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from loraplex_server.layers.recurrences import Convolution, Gates, LinearAttention, RunRecurrence

Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # q, k and v side by side; z; a; b: [1, num_tokens, ...]


@dataclass(frozen=True, slots=True)
class Projection:
    """The linears of one family."""

    names: tuple[str, ...]  # of what `project` uses
    project: Callable[[Any, Tensor], Projected]


def _apart(module: Any, x: Tensor) -> Projected:
    qkv, z = module.in_proj_qkv(x), module.in_proj_z(x)
    b, a = module.in_proj_b(x), module.in_proj_a(x)
    return qkv, z, a, b


def _by_key_heads(module: Any, x: Tensor) -> Projected:
    qkvz, ba = module.in_proj_qkvz(x), module.in_proj_ba(x)
    q, k, v, z, b, a = module.fix_query_key_value_ordering(qkvz, ba)
    return torch.cat([one.flatten(2) for one in (q, k, v)], dim=-1), z, a, b


APART = Projection(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), _apart)  # Qwen 3.5
BY_KEY_HEADS = Projection(("in_proj_qkvz", "in_proj_ba", "fix_query_key_value_ordering"), _by_key_heads)  # Qwen3-Next
PARTS = ("conv1d", "A_log", "dt_bias", "norm", "out_proj", "head_k_dim", "head_v_dim", "key_dim")


def projection_of(module: nn.Module) -> Projection | None:
    """The projection whose parts the module has, with silu behind the convolution; None of another mixer."""
    if getattr(module, "activation", None) not in ("silu", "swish"):
        return None
    return next(
        (one for one in (APART, BY_KEY_HEADS) if all(hasattr(module, name) for name in (*PARTS, *one.names))), None
    )


def recurrences_of(module: Any) -> tuple[Convolution, LinearAttention]:
    """The recurrences of a module whose weights are in their place and dtype."""
    weight, bias = module.conv1d.weight, module.conv1d.bias
    convolution = Convolution(weight.squeeze(1), bias, is_activated=True)
    dtype = torch.promote_types(module.dt_bias.dtype, torch.float32)
    gates = Gates(-module.A_log.float().exp().to(dtype), module.dt_bias.to(dtype))
    return convolution, LinearAttention(
        module.head_k_dim**-0.5, normalizes=True, is_delta=True, gates=gates, rounds=True
    )


class GatedDelta:
    """The forward of one module."""

    def __init__(self, module: nn.Module, projection: Projection) -> None:
        self._module: Any = module
        self._projection = projection
        self._recurrences: tuple[Convolution, LinearAttention] | None = None

    def __call__(self, run: RunRecurrence, hidden_states: Tensor) -> Tensor:
        """hidden_states [1, num_tokens, hidden] -> the same. `run` runs a recurrence over the step's row, see
        `Mixer`."""
        module = self._module
        if self._recurrences is None:
            self._recurrences = recurrences_of(module)
        convolution, delta = self._recurrences
        qkv, z, a, b = self._projection.project(module, hidden_states)
        k_dim, v_dim = module.head_k_dim, module.head_v_dim
        rows = run(convolution, (qkv[0],))
        num_tokens, key_dim = rows.shape[0], module.key_dim
        q, k, v = rows.split((key_dim, key_dim, rows.shape[1] - 2 * key_dim), dim=1)
        q, k, v = q.view(num_tokens, -1, k_dim), k.view(num_tokens, -1, k_dim), v.view(num_tokens, -1, v_dim)
        mixed = run(delta, (q, k, v, a[0], b[0]))
        normed = module.norm(mixed.reshape(-1, v_dim), z.reshape(-1, v_dim))
        return module.out_proj(normed.view(1, num_tokens, -1))
