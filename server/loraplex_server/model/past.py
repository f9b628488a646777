"""A cache of Transformers' kind that holds no keys and values, and says how many tokens came before.

With one a model runs a few tokens as `generate()` would behind a long text, at the cost of those few tokens. And where
others read `position_ids`, a model may count by its cache: there it finds the position of every token of a step.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import Cache


class EmptyPast(Cache):
    """Every query sees the new tokens alone, wherever they are."""

    def __init__(self, num_past: int | Tensor) -> None:
        """`num_past`: tokens before the first one; or for each token [num_tokens] its position less its place."""
        super().__init__(layers=[])
        self._num_past = num_past

    def get_seq_length(self, layer_idx: int = 0, *_: Any, **__: Any) -> int:
        return cast(int, self._num_past)  # arithmetic is the same with one number and with one for each token

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0, *_: Any, **__: Any) -> tuple[int, int]:
        """Number of keys, and the position of the first."""
        return query_length, self.get_seq_length()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def count_by_cache(model: nn.Module) -> RemovableHandle:
    """Gives a model that runs with `position_ids` and without a cache one that says these positions."""

    def add(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions: Tensor | None = options.get("position_ids")  # [1, num_tokens]
        if positions is None or options.get("past_key_values") is not None:
            return args, options
        places = torch.arange(positions.shape[1], device=positions.device)
        return args, {**options, "past_key_values": EmptyPast(positions[0] - places)}

    return model.register_forward_pre_hook(add, with_kwargs=True)
