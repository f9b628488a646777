"""Weights of one adapter on one device: a flat allocation and views.

A single allocation makes a move between tiers one copy, and its size the number that budgets count. An adapter has LoRA
factors, Medusa heads, or both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from loraplex_contracts.adapters import AdapterKey


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """The low-rank term of one adapter at one module.

    Both tensors are contiguous, of one dtype and on one device. For an embedding, `in` is the vocabulary.
    """

    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float  # alpha / rank, or alpha / sqrt(rank)

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ResBlock:
    """x -> x + silu(x @ weight.T + bias), of Medusa (arXiv 2401.10774)."""

    weight: Tensor  # [hidden, hidden]
    bias: Tensor | None  # [hidden]


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """Head i guesses token t + 2 + i from the post-norm hidden state of position t."""

    blocks: tuple[ResBlock, ...]  # one after the other; without any, the hidden state itself
    projection: Tensor | None = None  # [num_rows, hidden]; None: the base model's own head
    token_ids: Tensor | None = None  # [num_rows] int64: the token of each row; None: row i is token i


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """All tensors are views into `storage`, of the base model's dtype (token ids apart)."""

    key: AdapterKey
    storage: Tensor  # uint8 [num_bytes]
    factors: Mapping[str, LoraFactors]  # by module path (see targets.TargetModule.path); empty of heads alone
    heads: tuple[MedusaHead, ...] = ()  # empty of a LoRA alone

    @property
    def num_bytes(self) -> int:
        return self.storage.numel()

    @property
    def max_rank(self) -> int:
        return max((f.rank for f in self.factors.values()), default=0)
