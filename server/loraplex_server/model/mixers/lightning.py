"""Lightning attention: linear attention with a fixed decay for each head.

Transformers computes it inside the module's own forward, over the whole row, so that forward is replaced, not a
function that it calls. The module is known by its decay buffers; what replaces it is proven at load as all mixers are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loraplex_server.layers.recurrences import LinearAttention, RunRecurrence

BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
PARTS = ("qkv_proj", "act_fn", "norm", "output_gate", "out_proj")


def is_lightning(module: nn.Module) -> bool:
    """True if the module has the parts that `attend` uses."""
    buffers = dict(module.named_buffers(recurse=False))
    return all(name in buffers for name in BUFFERS) and all(
        isinstance(getattr(module, n, None), nn.Module) for n in PARTS
    )


def attend(module: Any, run: RunRecurrence, hidden_states: Tensor) -> tuple[Tensor, None]:
    """Lightning attention: hidden_states [1, num_tokens, hidden] -> the same. `run` runs a recurrence over the step's
    row, see `Mixer`."""
    num_tokens, dim = hidden_states.shape[1], module.head_dim
    qkv = module.act_fn(module.qkv_proj(hidden_states)).view(num_tokens, -1, 3 * dim)
    q, k, v = qkv.split(dim, dim=-1)
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    decay = -module.slope_rate.to(dtype).view(-1).expand(num_tokens, -1)
    out = run(LinearAttention(), (q, k, v, decay)).to(hidden_states.dtype).flatten(1).unsqueeze(0)
    return module.out_proj(module.output_gate(hidden_states).sigmoid() * module.norm(out)), None
