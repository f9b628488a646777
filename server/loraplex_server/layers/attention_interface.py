"""Hook into Transformers: attention functions and a mask function.

Transformers looks attention up by name in a table of the process, so this is the one thing here that is process-wide;
what the function does is decided by the handle that the loader put on the module. Under the serving name no mask
function is registered: models then build no mask at all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

SERVING = "loraplex"
PROBING = "loraplex_probe"
HANDLE = "loraplex_attention"  # the attribute of an attention module
WINDOW = "loraplex_window"  # the attribute of a mask: int, None for full causal, or a str saying what is wrong


def register() -> None:
    """Makes the names known. Harmless to repeat."""
    AttentionInterface.register(SERVING, attend)
    AttentionInterface.register(PROBING, attend)
    AttentionMaskInterface.register(PROBING, probing_mask)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function: hands over to the module's handle."""
    handle = getattr(module, HANDLE)
    return handle(query, key, value, attention_mask, options), None


def probing_mask(*_: Any, mask_function: Any = None, **__: Any) -> Tensor:
    """A mask as small as it can be that carries what kind of mask it is: the truth about a layer's sliding window."""
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    setattr(mask, WINDOW, describe_mask(mask_function) if mask_function is not None else "a mask without a function")
    return mask


def describe_mask(mask_function: Any, far: int = 1 << 20) -> int | str | None:
    """What a mask function of Transformers allows: None for causal, a sliding window's size, or what else it is.

    Evaluated at positions further out than windows reach; a window that depends on the position is none.
    """
    windows: list[int | None] = []
    for position in (far, far - 1, far // 2 + 3):
        kv = torch.arange(position + 2)
        zero = torch.zeros((), dtype=torch.int64)
        try:
            allowed = mask_function(zero, zero, torch.tensor(position), kv)
        except Exception as error:  # model-specific code
            return f"a mask that cannot be evaluated ({type(error).__name__})"
        allowed = torch.as_tensor(allowed).expand(kv.shape)
        seen = allowed.nonzero().flatten()
        if allowed[position + 1]:
            return "attention to later tokens"
        if not allowed[position] or int(seen[-1] - seen[0]) + 1 != seen.numel():
            return "a mask with holes"
        windows.append(None if int(seen[0]) == 0 else position - int(seen[0]) + 1)
    if len(set(windows)) != 1:
        return "chunked attention"
    return windows[0]
