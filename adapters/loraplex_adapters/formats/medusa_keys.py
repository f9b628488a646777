"""The names of Medusa's tensors, as files have them.

Two families: `{head}.{layer}.linear.weight` with the projection as the layer behind the last block (the reference
code, TGI, LoRAX, ModelOpt), and `blocks.{head}.layers.{layer}.weight` with `lm_heads.{head}.weight` (vLLM). Both are
found under several prefixes. Knows names only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from loraplex_adapters.io.safetensors_header import TensorInfo

Part = Literal["weight", "bias", "projection", "projection_bias", "shared_projection", "token_map"]
Family = Literal["sequential", "vllm", "either"]

# What module the training code had kept the heads in.
PREFIXES = ("medusa_heads.", "medusa_head.", "heads.")
# Of those, the ones that a whole model's base part cannot have.
MODEL_PREFIXES = ("medusa_heads.", "medusa_head.")
_N = r"(0|[1-9]\d{0,3})"
_PATTERNS: tuple[tuple[re.Pattern[str], Part, Family], ...] = (
    (re.compile(rf"{_N}\.{_N}\.linear\.weight"), "weight", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.linear\.bias"), "bias", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.weight"), "projection", "sequential"),
    (re.compile(rf"{_N}\.{_N}\.bias"), "projection_bias", "sequential"),
    (re.compile(rf"blocks\.{_N}\.layers\.{_N}\.weight"), "weight", "vllm"),
    (re.compile(rf"blocks\.{_N}\.layers\.{_N}\.bias"), "bias", "vllm"),
    (re.compile(rf"lm_heads\.{_N}\.weight"), "projection", "vllm"),
    (re.compile(rf"lm_heads\.{_N}\.bias"), "projection_bias", "vllm"),
    (re.compile(r"lm_head\.weight"), "shared_projection", "vllm"),
    (re.compile(r"token_map"), "token_map", "either"),
)


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """One tensor of a set of heads. `layer` of a sequential projection is its place behind the blocks."""

    info: TensorInfo
    part: Part
    family: Family
    head: int = -1
    layer: int = -1


def head_tensor(info: TensorInfo) -> HeadTensor | None:
    """What the name says, or None when it is not a head's."""
    prefix = next((prefix for prefix in PREFIXES if info.name.startswith(prefix)), "")
    name = info.name[len(prefix) :]
    for pattern, part, family in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            numbers = [int(group) for group in match.groups()]
            return HeadTensor(info, part, family, *numbers)
    return None


def split_heads(tensors: Iterable[TensorInfo]) -> tuple[list[HeadTensor], list[TensorInfo]]:
    """(the heads' tensors, the others). Names that others use too (`lm_head.weight`) are heads' only among heads."""
    heads: list[HeadTensor] = []
    others: list[TensorInfo] = []
    for info in tensors:
        found = head_tensor(info)
        if found is None:
            others.append(info)
        else:
            heads.append(found)
    if not any(tensor.head >= 0 for tensor in heads):
        return [], [*others, *(tensor.info for tensor in heads)]
    return heads, others
