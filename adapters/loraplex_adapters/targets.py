"""Target modules of the base model, which adapters may change, as plain data.

The model's loader fills it from the loaded model; formats check an adapter against it from the file's header, before
any memory is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TargetModule:
    """One module of the base model. `path` is its name in `named_modules()` of the causal language model."""

    path: str
    kind: Literal["linear", "embedding"]
    in_features: int  # of an embedding: the vocabulary
    out_features: int
    is_conv1d: bool = False  # GPT-2's Conv1D keeps its weight transposed (fan_in_fan_out)
    # SHA-256 of the weight's bytes in BaseTargets.dtype, row-major as the module keeps it; '' when it is not known. For
    # embeddings and lm_head: PEFT saves copies of those weights, which are dropped when they are the base's own.
    weight_sha256: str = ""


@dataclass(frozen=True, slots=True)
class BaseTargets:
    """The facts about the base model that formats need."""

    modules: Mapping[str, TargetModule]
    model_id: str
    dtype: str  # of the kernel-ready weights: "float64", "float32", "bfloat16", "float16"
    max_rank: int
    hidden_size: int  # at the language modelling head's input, where Medusa heads read
    vocab_size: int  # the head's rows: token ids that may come out
