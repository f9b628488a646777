"""Rotary embeddings that depend on a text's length, token by token.

Transformers scales all tokens of a call by the longest text in it, and keeps the scale for later calls. Here each token
has the frequencies that `generate()` for its request alone gives it. They are Transformers' own, as is the code that
makes sines and cosines of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from loraplex_contracts.errors import UnsupportedModel
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.layers.context import StepContext
from loraplex_server.layers.linear import Wrapper
from loraplex_server.layers.step import Ints
from loraplex_server.layers.transfer import upload

KINDS = ("dynamic", "longrope")
# Sets of frequencies that are kept, the latest ones.
MAX_SETS = 4096
ORIGINAL = "original_max_position_embeddings"

Rotation = tuple[Tensor, Tensor]  # cos and sin [..., num_tokens, dim]


class ScaledRotary(Wrapper):
    """Stands around a rotary embedding of Transformers. Without lengths in the context it computes what that one does
    for a text of its own."""

    def __init__(self, base: nn.Module, context: StepContext, scaling: RopeScaling) -> None:
        super().__init__(base, context)
        self.scaling = scaling
        # Transformers' code that makes a rotation of the frequencies, without that which changes these.
        self._rotate: Callable[[Any, Tensor, Tensor], Rotation] = inspect.unwrap(type(base).forward)
        self._sets: dict[int, Tensor] = {}

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """The rotation of tokens at position_ids [1, num_tokens], or [3, 1, num_tokens] of M-RoPE; of x only dtype and
        device count."""
        base = self.base
        lengths: Ints | None = self.context.rope_lengths
        if lengths is None:
            base.inv_freq = self._frequencies(0, position_ids.device).clone()  # it may be overwritten in place
            base.max_seq_len_cached = base.original_max_seq_len
            return base(x, position_ids)
        sets = np.where(lengths <= self.scaling.limit, 0, 1 if self.scaling.has_one_set else lengths)  # set_of
        found: list[int] = np.unique(sets).tolist()
        if len(found) == 1:
            return self._rotation(found[0], x, position_ids)
        cos, sin = torch.empty(0), torch.empty(0)
        for one in found:
            at = upload(torch.from_numpy(np.flatnonzero(sets == one)), position_ids.device)
            own = self._rotation(one, x, position_ids.index_select(-1, at))
            if one == found[0]:
                cos, sin = (part.new_empty(*part.shape[:-2], len(sets), part.shape[-1]) for part in own)
            cos.index_copy_(-2, at, own[0])
            sin.index_copy_(-2, at, own[1])
        return cos, sin

    def _rotation(self, number: int, x: Tensor, position_ids: Tensor) -> Rotation:
        """The rotation of tokens that all have the set of frequencies with this number."""
        base = self.base
        base.inv_freq = self._frequencies(number, position_ids.device)
        if number == 0:
            return self._rotate(base, x, position_ids)
        # Some families look at the largest position once more: one that belongs to such a text.
        last = torch.full_like(position_ids[..., :1], self.scaling.limit if self.scaling.has_one_set else number - 1)
        cos, sin = self._rotate(base, x, torch.cat((position_ids, last), dim=-1))
        return cos[..., :-1, :], sin[..., :-1, :]

    def is_right(self) -> bool:
        """True if texts of some lengths, beginning and end computed apart, equal what Transformers computes."""
        device = self.base.original_inv_freq.device
        x = torch.zeros(1, device=device)
        for length in (self.scaling.limit, self.scaling.limit + 1, 2 * self.scaling.limit + 1):
            parts = [torch.tensor([positions], device=device) for positions in ([0, 1], [length - 1])]
            whole = self(x, torch.cat(parts, dim=1))
            try:
                for part, place in zip(parts, (slice(0, 2), slice(2, 3)), strict=True):
                    self.context.rope_lengths = np.full(part.shape[1], length)
                    if not all(torch.equal(own, of[:, place]) for own, of in zip(self(x, part), whole, strict=True)):
                        return False
            finally:
                self.context.rope_lengths = None
        return True

    def _frequencies(self, number: int, device: torch.device) -> Tensor:
        found = self._sets.get(number)
        if found is None or found.device != device:
            if len(self._sets) >= MAX_SETS:
                del self._sets[next(iter(self._sets))]
            found = self._sets[number] = self._make(number, device)
        return found

    def _make(self, number: int, device: torch.device) -> Tensor:
        base = self.base
        if number == 0:
            return base.original_inv_freq.to(device)
        length: Any = self.scaling.limit + 1 if self.scaling.has_one_set else torch.tensor(number, device=device)
        return ROPE_INIT_FUNCTIONS[base.rope_type](base.config, device, seq_len=length)[0]


def scale_by_token(model: PreTrainedModel, context: StepContext) -> RopeScaling | None:
    """Puts a ScaledRotary in the place of each rotary embedding that depends on a text's length. None: there is none.
    Raises UnsupportedModel for one of another kind."""
    scaling: RopeScaling | None = None
    for path, module in list(model.named_modules()):
        kind: Any = getattr(module, "rope_type", None)
        if not _is_scaled(kind) or not hasattr(module, "original_inv_freq"):
            continue
        unknown = UnsupportedModel(
            f"{model.config.model_type} cannot be served: its rotary embeddings depend on a text's length in a way "
            "that is not known"
        )
        if kind not in KINDS or list(inspect.signature(module.forward).parameters) != ["x", "position_ids"]:
            raise unknown
        own = _scaling(model, cast(Any, module))
        if scaling not in (None, own):
            raise UnsupportedModel(
                f"{model.config.model_type} cannot be served: its rotary embeddings depend on a text's length in "
                "several ways"
            )
        scaling, scaled = own, ScaledRotary(module, context, own)
        if not scaled.is_right():
            raise unknown
        model.set_submodule(path, scaled)
    return scaling


@contextmanager
def lengths_given(model: nn.Module, lengths: Ints) -> Generator[None]:
    """Runs `model` as a step whose tokens are scaled by these lengths [num_tokens]."""
    contexts = [module.context for module in model.modules() if isinstance(module, ScaledRotary)]
    for context in contexts:
        context.rope_lengths = lengths
    try:
        yield
    finally:
        for context in contexts:
            context.rope_lengths = None


def _is_scaled(kind: Any) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else (kind,)
    return any(isinstance(one, str) and ("dynamic" in one or one == "longrope") for one in cast(Any, kinds))


def _scaling(model: PreTrainedModel, rotary: Any) -> RopeScaling:
    if rotary.rope_type == "dynamic":
        return RopeScaling(int(rotary.original_max_seq_len), has_one_set=False)
    limit = int(rotary.config.rope_parameters[ORIGINAL])
    # Some families' `generate()` drops its cache there, and computes the text again.
    prepare: Any = inspect.unwrap(cast(Any, type(model)).prepare_inputs_for_generation)
    restarts = ORIGINAL in prepare.__code__.co_names
    at = getattr(model.config, ORIGINAL, limit)
    if restarts and at != limit:
        raise UnsupportedModel(
            f"{model.config.model_type} cannot be served: its configuration has two numbers of tokens at which "
            f"rotations change ({at} and {limit}, as {ORIGINAL})"
        )
    return RopeScaling(limit, has_one_set=True, restarts=restarts)
