"""Heads of chosen tokens alone, for models whose forward has no option for it."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

OPTION = "logits_to_keep"


def choose_head_rows(model: PreTrainedModel) -> None:
    """Gives a forward without `logits_to_keep` that option. What takes the head's place later is given those tokens,
    too."""
    own: Any = model.forward
    if OPTION in inspect.signature(own).parameters:
        return

    def forward(*args: Any, logits_to_keep: int | Tensor = 0, **options: Any) -> Any:
        rows = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep

        def choose(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return given[0][:, rows], *given[1:]

        # Before other hooks, which then see what the head is given.
        head: Any = model.get_output_embeddings()
        hook = head.register_forward_pre_hook(choose, prepend=True)
        try:
            return own(*args, **options)
        finally:
            hook.remove()

    model.forward = forward
