"""Training loop of the demo's models: optimizers, schedule and smoothed loss.

Knows no records, formats or files: base, adapters and draft models share this loop. Medusa heads read hidden states
instead of tokens and are fitted by `loraplex_training.fitting`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from loraplex_demo.datasets import Batch

_WARMUP_STEPS = 30
_DECAY_SHARE = 0.4  # the last part of the steps lowers the rate to a thirtieth
_FINAL_RATE = 0.03
_LOSS_MEMORY = 0.95


def base_optimizers(model: nn.Module, *, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the rest: half the steps of AdamW alone at this size."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and "embed" not in name else others).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=lr, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def adapter_optimizers(model: nn.Module, *, lr: float) -> list[torch.optim.Optimizer]:
    """AdamW on the parameters that require a gradient, the usual choice for adapters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def fit(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    batches: Iterator[Batch],
    *,
    num_steps: int,
    on_step: Callable[[float], None],
    loss_of: Callable[[Any, Batch], torch.Tensor] | None = None,
) -> float:
    """Trains in place. `on_step` gets the smoothed loss, whose last value is returned. `loss_of` defaults to the
    cross entropy of the next token."""
    loss_of = loss_of or next_token_loss
    schedules = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: _rate(step, num_steps)) for each in optimizers]
    model.train()
    smoothed: float | None = None
    for batch in islice(batches, num_steps):
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        value = loss.item()
        smoothed = value if smoothed is None else _LOSS_MEMORY * smoothed + (1 - _LOSS_MEMORY) * value
        on_step(smoothed)
    model.eval()
    assert smoothed is not None, "no step was asked for"
    return smoothed


def next_token_loss(model: Any, batch: Batch) -> torch.Tensor:
    # Padding is on the right and the model is causal, so no counted position attends to it.
    logits = model(input_ids=batch.token_ids, use_cache=False).logits  # [num_rows, length, vocab]
    counts = batch.counts[:, 1:]
    return F.cross_entropy(logits[:, :-1][counts].float(), batch.token_ids[:, 1:][counts])


def _rate(step: int, num_steps: int) -> float:
    warmup = min(1.0, (step + 1) / _WARMUP_STEPS)
    decay = min(1.0, _FINAL_RATE + (num_steps - step) / (_DECAY_SHARE * num_steps))
    return warmup * decay
