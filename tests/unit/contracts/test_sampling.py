"""Sampling options from the wire's values."""

from __future__ import annotations

import pytest

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.sampling import TokenizerView, sampling_params

LETTERS = TokenizerView(lambda text: [ord(one) for one in text if one != "_"], frozenset({ord("!")}))


def test_bad_words_are_tokenized_with_and_without_a_space() -> None:
    words = sampling_params({"bad_words": ["ab", " c"]}, LETTERS).bad_words
    assert words == tuple(sorted([(97, 98), (32, 97, 98), (32, 99)]))


def test_an_end_of_sequence_token_alone_is_no_bad_word() -> None:
    assert sampling_params({"bad_words": ["!"]}, LETTERS).bad_words == ((32, 33),)


def test_a_bad_word_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        sampling_params({"bad_words": ["_"]}, LETTERS)
    assert caught.value.field == "sampling.bad_words"


def test_errors_of_the_tokenizer_name_the_option() -> None:
    def encode(text: str) -> list[int]:
        raise FailedPrecondition("the base model has no tokenizer", field="text")

    with pytest.raises(FailedPrecondition) as caught:
        sampling_params({"bad_words": ["a"]}, TokenizerView(encode))
    assert caught.value.field == "sampling.bad_words"


def test_a_seed_is_drawn_where_none_is_given() -> None:
    assert sampling_params({}, LETTERS).seed != sampling_params({}, LETTERS).seed
    assert max(sampling_params({}, LETTERS).seed for _ in range(20)) < 1 << 53, "JavaScript's whole numbers"
    assert sampling_params({"seed": 0}, LETTERS).seed == 0


def test_a_temperature_next_to_zero_is_greedy() -> None:
    for temperature, is_greedy in ((0.0, True), (1e-300, True), (1e-6, True), (1e-5, False), (1.0, False)):
        assert sampling_params({"temperature": temperature}, LETTERS).is_greedy == is_greedy, temperature
