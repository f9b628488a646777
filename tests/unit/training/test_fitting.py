"""Heads learn what can be learned, and the measures are those that they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from loraplex_training import fitting
from loraplex_training.fitting import FitRecipe, count_steps, fit_heads, measure, num_steps
from loraplex_training.heads import MedusaHeads
from loraplex_training.hidden_states import Piece, StateCache
from loraplex_training.target import Example, FrozenHead

VOCAB, HIDDEN = 13, 16


def frozen_head(dtype: torch.dtype = torch.float32) -> FrozenHead:
    """A head whose rows are as far apart as can be, so every token has states that it alone fits."""
    head = nn.Linear(HIDDEN, VOCAB, bias=False).to(dtype).requires_grad_(False)
    head.weight.copy_(torch.eye(VOCAB, HIDDEN) * 4)
    return FrozenHead(head, 1.0, VOCAB, HIDDEN, dtype, torch.device("cpu"))


def circle(num_tokens: int, first: int, num_given: int = 1) -> Example:
    """Tokens that count up and begin again: the state of each says all that follows."""
    return Example([(first + t) % VOCAB for t in range(num_tokens)], num_given)


def states_of(example: Example) -> torch.Tensor:
    """Hidden states as a model would leave them: the head makes the next token of them."""
    return torch.eye(VOCAB, HIDDEN)[[(token + 1) % VOCAB for token in example.token_ids]]


def circle_cache(folder: Path, num_heads: int, piece_bytes: int = 1 << 20) -> StateCache:
    cache = StateCache(folder, num_heads, piece_bytes)
    for first in range(VOCAB):
        cache.add(circle(20, first), states_of(circle(20, first)))
    cache.flush()
    return cache


def test_what_can_be_foreseen_is_learned(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cache = circle_cache(tmp_path, 3, piece_bytes=3000)
    assert len(cache.piece_rows) > 3
    heads, recipe, losses = MedusaHeads(3, 1, HIDDEN), FitRecipe(epochs=60, lr=0.03, batch_rows=64), list[str]()
    before = measure(heads, frozen_head(), cache.pieces())
    assert before.top1 == (0.0, 0.0, 0.0)  # the identity says the next token once more
    assert before.tokens_per_step == 1.0
    fit_heads(heads, frozen_head(), cache, recipe, lambda detail="", steps=1: losses.append(detail))
    assert len(losses) == num_steps(cache, recipe)
    after = measure(heads, frozen_head(), cache.pieces())
    assert after.top1 == (1.0, 1.0, 1.0)
    assert after.num_positions == 13 * 18
    assert after.tokens_per_step == pytest.approx(18 / 5)  # steps of 4, 4, 4, 4 and 2 tokens


def test_the_batch_may_be_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = circle_cache(tmp_path, 2)
    made: list[torch.Tensor] = []
    for logits_bytes in (1 << 20, 4 * 2 * VOCAB * 7):  # all rows at once, or seven
        monkeypatch.setattr(fitting, "_LOGITS_BYTES", logits_bytes)
        heads = MedusaHeads(2, 1, HIDDEN).double()
        fit_heads(
            heads,
            frozen_head(torch.float64),
            cache,
            FitRecipe(epochs=2, batch_rows=100),
            lambda detail="", steps=1: None,
        )
        made.append(heads.weight.detach())
        assert measure(heads, frozen_head(torch.float64), cache.pieces()).num_positions == cache.num_rows
    torch.testing.assert_close(made[0], made[1], rtol=1e-4, atol=1e-6)
    assert made[0].abs().sum() > 0


def test_few_positions_are_learned_more_often(tmp_path: Path) -> None:
    cache = circle_cache(tmp_path, 2)  # 234 positions
    assert num_steps(cache, FitRecipe(epochs=3, batch_rows=100)) == 9
    assert num_steps(cache, FitRecipe(batch_rows=1000)) == 20  # as often as is allowed
    assert num_steps(cache, FitRecipe(batch_rows=2)) == 13 * 117  # as often as needed for 1,500 steps
    assert num_steps(cache, FitRecipe(batch_rows=1)) == 7 * 234
    for _ in range(11):
        cache.add(circle(202, 0), states_of(circle(202, 0)))
    cache.flush()
    assert num_steps(cache, FitRecipe(batch_rows=1)) == 2 * (234 + 2200)  # twice at least


def test_the_same_seed_gives_the_same_heads(tmp_path: Path) -> None:
    cache = circle_cache(tmp_path, 2)
    made: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for seed in (0, 0, 1):
        heads = MedusaHeads(2, 1, HIDDEN)
        recipe = FitRecipe(epochs=2, batch_rows=16, seed=seed)
        fit_heads(heads, frozen_head(), cache, recipe, lambda detail="", steps=1: None)
        made[seed].append(heads.weight.detach())
    assert torch.equal(made[0][0], made[0][1])
    assert not torch.equal(made[0][0], made[1][0])


def test_top5_counts_more_than_top1_and_labels_that_are_not_there_count_nothing() -> None:
    states = torch.eye(VOCAB, HIDDEN)[torch.tensor([2, 3])] + 0.5 * torch.eye(VOCAB, HIDDEN)[torch.tensor([5, 6])]
    piece = Piece(states, torch.tensor([[5, 3], [3, -100]]), (2,))
    found = measure(MedusaHeads(2, 1, HIDDEN), frozen_head(), [piece])
    assert found.top1 == (0.5, 0.0)
    assert found.top5[0] == 1.0
    assert found.tokens_per_step == 1.0  # wrong at the first place, right at the second: two steps for two tokens


@pytest.mark.parametrize(
    ("runs", "steps"),
    [([], 0), ([0, 0, 0], 3), ([2, 0, 0], 1), ([1, 0, 0], 2), ([0, 1, 0], 2), ([4, 4, 4, 4, 4, 4], 2)],
)
def test_steps_are_counted_as_a_target_takes_them(runs: list[int], steps: int) -> None:
    assert count_steps(runs) == steps
