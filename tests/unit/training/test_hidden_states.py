"""Cache of hidden states: positions that are learned from, their labels, pieces on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from loraplex_training.hidden_states import NOTHING, StateCache, labels_of, piece_of
from loraplex_training.target import Example


def test_head_i_foresees_the_token_two_and_i_further() -> None:
    # The state of the last given token (position 1) gives token 2; what is foreseen from there starts at token 3.
    labels = labels_of(Example([10, 11, 12, 13, 14, 15], num_given=2), num_heads=3)
    assert labels.tolist() == [[13, 14, 15], [14, 15, NOTHING], [15, NOTHING, NOTHING]]


def test_a_text_is_learned_from_its_beginning() -> None:
    labels = labels_of(Example([10, 11, 12, 13], num_given=0), num_heads=1)
    assert labels.tolist() == [[12], [13]]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_too_short_for_anything(num_tokens: int) -> None:
    assert labels_of(Example(list(range(num_tokens)), 0), num_heads=4).shape == (0, 4)
    assert labels_of(Example([1, 2, 3, 4], num_given=3), num_heads=4).shape == (0, 4)


def example(num_tokens: int, num_given: int) -> tuple[Example, torch.Tensor]:
    ids = list(range(num_tokens))
    return Example(ids, num_given), torch.tensor(ids, dtype=torch.bfloat16).unsqueeze(1).expand(-1, 8)


def test_pieces_are_bounded_and_hold_whole_examples(tmp_path: Path) -> None:
    cache = StateCache(tmp_path, num_heads=2, piece_bytes=200)
    given = [example(9, 3), example(4, 4), example(12, 1), example(5, 0)]  # 5, 0, 10 and 3 rows
    for one, hidden in given:
        cache.add(one, hidden)
    cache.flush()
    cache.flush()
    assert list(cache.piece_rows) == [15, 3]
    assert cache.num_rows == 18
    pieces = list(cache.pieces())
    assert [piece.lengths for piece in pieces] == [(5, 10), (3,)]
    for piece in pieces:
        assert piece.hidden.dtype == torch.bfloat16
        # The state at position t is made of t here, and the first label is the token at t + 2, which is t + 2.
        assert torch.equal(piece.hidden[:, 0].long() + 2, piece.labels[:, 0])
    assert len(list(tmp_path.iterdir())) == 2


def test_a_piece_needs_no_file(tmp_path: Path) -> None:
    given = [example(9, 3), example(12, 1)]
    cache = StateCache(tmp_path, num_heads=2)
    for one, hidden in given:
        cache.add(one, hidden)
    cache.flush()
    (wanted,) = cache.pieces()
    made = piece_of([one for one, _ in given], [hidden for _, hidden in given], 2)
    assert torch.equal(made.hidden, wanted.hidden)
    assert torch.equal(made.labels, wanted.labels)
    assert made.lengths == wanted.lengths
