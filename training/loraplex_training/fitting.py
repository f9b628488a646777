"""Fitting of Medusa heads to cached hidden states, and their accuracy.

Owns the optimizer, the schedule and two measures: how often each head is right, and how many tokens a step of the
target gives when it verifies the heads' drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from loraplex_training.heads import MedusaHeads
from loraplex_training.hidden_states import NOTHING, Piece, StateCache
from loraplex_training.progress import Advance
from loraplex_training.target import FrozenHead

_TOP = 5
_LOGITS_BYTES = 256 << 20  # of float32 logits at a time; their gradient takes as much again
_WARMUP_SHARE = 0.05
_FINAL_RATE = 0.03
_LOSS_MEMORY = 0.95
_ENOUGH_STEPS = 1500
_MIN_EPOCHS, _MAX_EPOCHS = 2, 20  # with more epochs the heads memorise a small set of examples


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """The recipe of fitting heads. `batch_rows` positions make one step.

    `epochs` None: at least two epochs, and as many as `_ENOUGH_STEPS` steps need. A few thousand short answers would
    otherwise end training too early, and further epochs over cached states are cheap.
    """

    epochs: int | None = None
    lr: float = 1e-3
    batch_rows: int = 1024
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy on held-out positions."""

    top1: tuple[float, ...]  # by head: how often its first guess is right
    top5: tuple[float, ...]
    tokens_per_step: float  # tokens that one step of the target gives, greedily, once the prompt is read
    num_positions: int


def num_steps(cache: StateCache, recipe: FitRecipe) -> int:
    return num_epochs(cache, recipe) * _steps_per_epoch(cache, recipe)


def num_epochs(cache: StateCache, recipe: FitRecipe) -> int:
    """Number of times that each position is learned."""
    if recipe.epochs is not None:
        return recipe.epochs
    wanted = math.ceil(_ENOUGH_STEPS / max(1, _steps_per_epoch(cache, recipe)))
    return min(max(wanted, _MIN_EPOCHS), _MAX_EPOCHS)


def _steps_per_epoch(cache: StateCache, recipe: FitRecipe) -> int:
    return sum(math.ceil(rows / recipe.batch_rows) for rows in cache.piece_rows)


def fit_heads(heads: MedusaHeads, frozen: FrozenHead, cache: StateCache, recipe: FitRecipe, on_step: Advance) -> None:
    """Trains in place: AdamW on the heads only, with a short warm-up and a linear decay of the learning rate."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=recipe.lr, betas=(0.9, 0.98), weight_decay=0.0)
    total = num_steps(cache, recipe)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, total))
    smoothed: float | None = None
    for hidden, labels in _batches(cache, recipe):
        device = frozen.device
        loss = _backward(heads, frozen, hidden.to(device), labels.to(device))
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        smoothed = loss if smoothed is None else _LOSS_MEMORY * smoothed + (1 - _LOSS_MEMORY) * loss
        on_step(f"loss {smoothed:.3f}")


def _batches(cache: StateCache, recipe: FitRecipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches, epoch after epoch: the pieces in a new order, and the rows of each in a new order."""
    generator = torch.Generator().manual_seed(recipe.seed)
    num_pieces = len(cache.piece_rows)
    for _ in range(num_epochs(cache, recipe)):
        for piece_idx in torch.randperm(num_pieces, generator=generator).tolist():
            piece = cache.read(piece_idx)
            order = torch.randperm(piece.labels.shape[0], generator=generator)
            for rows in order.split(recipe.batch_rows):
                yield piece.hidden[rows], piece.labels[rows]


def _backward(heads: MedusaHeads, frozen: FrozenHead, hidden: Tensor, labels: Tensor) -> float:
    """Accumulates the gradients of one batch, some rows at a time. Returns the mean loss of a head."""
    counts = labels.ne(NOTHING).sum(dim=0).clamp(min=1)  # [heads]
    total = 0.0
    rows_at_once = _rows_at_once(heads, frozen)
    for states, wanted in zip(hidden.split(rows_at_once), labels.split(rows_at_once), strict=True):
        logits = frozen.logits(heads(states))  # [heads, num_rows, vocab]
        each = F.cross_entropy(logits.flatten(0, 1), wanted.T.flatten(), ignore_index=NOTHING, reduction="none")
        loss = (each.view(heads.num_heads, -1).sum(dim=1) / counts).mean()
        loss.backward()
        total += loss.item()
    return total


@torch.inference_mode()
def measure(heads: MedusaHeads, frozen: FrozenHead, pieces: Iterable[Piece]) -> Accuracy:
    """Accuracy of `heads`, which must have the dtype that they are saved and served in."""
    right1 = torch.zeros(heads.num_heads, dtype=torch.int64)
    right5, counts = torch.zeros_like(right1), torch.zeros_like(right1)
    num_tokens = num_target_steps = 0
    rows_at_once = _rows_at_once(heads, frozen)
    for piece in pieces:
        firsts: list[Tensor] = []
        for states, wanted in zip(piece.hidden.split(rows_at_once), piece.labels.split(rows_at_once), strict=True):
            guesses = frozen.logits(heads(states.to(frozen.device))).topk(_TOP, dim=-1).indices
            hits = (guesses.cpu() == wanted.T.unsqueeze(-1)).transpose(0, 1)  # [num_rows, heads, 5]
            firsts.append(hits[..., 0])
            right1 += hits[..., 0].sum(dim=0)
            right5 += hits.any(dim=-1).sum(dim=0)
        counts += piece.labels.ne(NOTHING).sum(dim=0)
        runs = torch.cat(firsts).long().cumprod(dim=1).sum(dim=1).tolist()
        num_tokens += len(runs)
        start = 0
        for length in piece.lengths:
            num_target_steps += count_steps(runs[start : start + length])
            start += length
    return Accuracy(_shares(right1, counts), _shares(right5, counts), num_tokens / max(1, num_target_steps), num_tokens)


def count_steps(runs: Sequence[int]) -> int:
    """Steps that the target needs for `len(runs)` tokens if a draft at position p has `runs[p]` right tokens.

    A step yields the draft's right tokens and one token of the target.
    """
    steps = place = 0
    while place < len(runs):
        place += runs[place] + 1
        steps += 1
    return steps


def _rows_at_once(heads: MedusaHeads, frozen: FrozenHead) -> int:
    return max(1, _LOGITS_BYTES // (4 * heads.num_heads * frozen.num_logits))


def _shares(right: Tensor, counts: Tensor) -> tuple[float, ...]:
    return tuple(round(share, 4) for share in (right / counts.clamp(min=1)).tolist())


def _rate(step: int, total: int) -> float:
    warmup = min(1.0, (step + 1) / max(1, round(_WARMUP_SHARE * total)))
    return warmup * max(_FINAL_RATE, 1.0 - step / max(1, total))
