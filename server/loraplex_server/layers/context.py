"""Step context, which a model's modules read during one step.

One object per loaded model instead of a global or of keyword arguments through Transformers' forwards, which not every
architecture hands on.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from loraplex_server.layers.lora import PreparedSegments


class MergedOutput(NamedTuple):
    """Outputs of merged linears, computed by the first of them for the others."""

    owner: object  # what computes them
    next_idx: int  # of the member whose output is asked for next
    x: Tensor  # [..., in], as it was given
    outputs: tuple[Tensor, ...]  # of each member [..., out]


class StepContext:
    """The current step. The runner owns and writes it; modules write `head_input`, `expert_uses` and
    `merged` only."""

    __slots__ = (
        "attention",
        "capture_head_input",
        "expert_uses",
        "head_input",
        "head_rows",
        "head_segments",
        "merged",
        "num_logit_rows",
        "rope_lengths",
        "states",
        "token_segments",
    )

    def __init__(self) -> None:
        # Adapter segments of the step's token rows, and of the rows that reach the head. None: no row has an adapter.
        self.token_segments: PreparedSegments | None = None
        self.head_segments: PreparedSegments | None = None
        # On the host, the tokens that reach the head, in any order; None: all. Nobody reads others' output of the last
        # layer, but later steps read their keys and values.
        self.head_rows: npt.NDArray[np.int64] | None = None
        # The attention back end's own plan of the step.
        self.attention: Any = None
        # The states of the step's sequences, in models with mixers that keep one. None: mixers run as the model's own.
        self.states: Any = None
        # On the host, the length that scales each token's rotation [num_tokens], in models where it depends on one.
        self.rope_lengths: npt.NDArray[np.int64] | None = None
        # Post-norm hidden states of the head's rows [num_head_rows, hidden], for proposers that draft from them.
        self.capture_head_input = False
        self.head_input: Tensor | None = None
        # The first of the head's rows, those with logits; None: all of them. The others are only captured.
        self.num_logit_rows: int | None = None
        # The adapters of the step's rows as experts see them, by the slots that have terms of theirs.
        self.expert_uses: dict[frozenset[int], Any] = {}
        # Pending outputs of merged linears.
        self.merged: MergedOutput | None = None

    def clear(self) -> None:
        """Drops all references after a step, also after one that raised."""
        self.token_segments = None
        self.head_segments = None
        self.head_rows = None
        self.attention = None
        self.states = None
        self.rope_lengths = None
        self.capture_head_input = False
        self.head_input = None
        self.num_logit_rows = None
        self.expert_uses = {}
        self.merged = None
