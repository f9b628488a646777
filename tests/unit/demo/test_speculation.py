"""The simulation behind the report: what a draft model would have agreeing_tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from loraplex_demo.speculation import agreeing_tokens, runs_of
from loraplex_demo.tokenizer import BOS_ID, EOS_ID, train_tokenizer
from loraplex_training.target import Example

TEXT = "name=Ada; age=34. =>"


@pytest.fixture(scope="module")
def coarse() -> PreTrainedTokenizerBase:
    return train_tokenizer([TEXT, '{"name": "Ada", "age": 34}'], 300)


@pytest.fixture(scope="module")
def fine() -> PreTrainedTokenizerBase:
    """No merges: every byte is a piece."""
    return train_tokenizer([TEXT], 259)


class Knowing:
    """A draft model that knows the text, but for the places in `wrong`."""

    def __init__(self, wrong: set[int], vocab_size: int) -> None:
        self.wrong = wrong
        self.vocab_size = vocab_size
        self.asked: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        assert not use_cache
        (tokens,) = input_ids.tolist()
        self.asked.append(tokens)
        following = torch.tensor([*tokens[1:], 0])
        for place in self.wrong:
            following[place - 1] = (following[place - 1] + 1) % self.vocab_size
        return type("Output", (), {"logits": torch.eye(self.vocab_size)[following].unsqueeze(0)})


def example(tokenizer: PreTrainedTokenizerBase, answer: str) -> Example:
    prompt = tokenizer.encode(TEXT)
    assert prompt[0] == BOS_ID
    return Example([*prompt, *tokenizer.encode(answer, add_special_tokens=False), EOS_ID], len(prompt))


def test_a_draft_of_the_same_tokenizer_is_judged_token_by_token(coarse: PreTrainedTokenizerBase) -> None:
    given = example(coarse, '{"name": "Ada"}')
    num_new = len(given.token_ids) - given.num_given
    model = Knowing({given.num_given + 1, len(given.token_ids) - 1}, len(coarse))
    right = agreeing_tokens(model, coarse, coarse, given)
    assert model.asked == [given.token_ids]
    assert right == [place not in (1, num_new - 1) for place in range(num_new)]


def test_a_draft_of_another_tokenizer_must_have_all_pieces_of_a_token_right(
    coarse: PreTrainedTokenizerBase, fine: PreTrainedTokenizerBase
) -> None:
    answer = '{"name": "Adé"}'
    given = example(coarse, answer)
    num_given = 1 + len(TEXT)
    ends = [len(coarse.decode(given.token_ids[given.num_given : end]).encode()) for end in
            range(given.num_given + 1, len(given.token_ids))]  # fmt: skip
    assert any(end - begin > 1 for begin, end in pairwise(ends))  # else there is nothing to test
    model = Knowing({num_given + 3}, len(fine))  # in the middle of the word
    right = agreeing_tokens(model, fine, coarse, given)
    assert len(model.asked[0]) == num_given + len(answer.encode()) + 1
    assert model.asked[0][-1] == EOS_ID
    place = next(idx for idx, end in enumerate(ends) if end > 3)
    assert right == [idx != place for idx in range(len(given.token_ids) - given.num_given)]


def test_runs_end_at_what_is_wrong_and_at_the_limit() -> None:
    assert runs_of([True, True, True, False, True], 2) == [2, 2, 1, 0, 1]
    assert runs_of([False, False], 4) == [0, 0]
    assert runs_of([], 4) == []
