"""Prompt lookup against a plain search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.speculation.history import MAX_SEPARATORS, History, Outputs, Separators
from loraplex_server.speculation.prompt_lookup import (
    DEFAULT_MAX_NGRAM,
    MAX_INDEXED_NGRAM,
    MAX_MATCH,
    Known,
    Match,
    PromptLookupProposer,
    compose,
    continuation,
)
from loraplex_server.speculation.proposer import Ask, Piece, Proposer

# Few different tokens, so that everything has been here before.
token_ids = st.lists(st.integers(0, 3), max_size=40)


def candidate(tokens: Sequence[int], num_prompt: int, sequence_id: str = "a") -> Candidate:
    request = Request("r", tuple(tokens[:num_prompt]), StoppingParams(max_tokens=1000))
    return Candidate(sequence_id, 0, tokens, num_prompt, 1000, request, SamplingParams(seed=0), None)


def match_len(proposer: PromptLookupProposer, asked: Candidate, bounds: SpeculationParams) -> int:
    match = proposer.match(asked, bounds)
    return match.num_tokens if match is not None else 0


def params(min_ngram: int = 0, max_ngram: int = 0) -> SpeculationParams:
    return SpeculationParams(kind="prompt_lookup", min_ngram=min_ngram, max_ngram=max_ngram)


def plain_match(tokens: Sequence[int], num_prompt: int, shortest: int, longest: int) -> Match | None:
    """The definition: the longest run, the latest place of it, and then how much more agrees."""
    end = len(tokens)
    for length in range(min(longest, MAX_INDEXED_NGRAM, end - 1), min(shortest, MAX_INDEXED_NGRAM) - 1, -1):
        for position in range(end - 1, length - 1, -1):
            if list(tokens[position - length : position]) != list(tokens[end - length :]):
                continue
            if length == 1 and (position > num_prompt or list(tokens[:num_prompt]).count(tokens[-1]) != 1):
                continue
            agreeing = length
            while agreeing < min(MAX_MATCH, position) and tokens[position - 1 - agreeing] == tokens[end - 1 - agreeing]:
                agreeing += 1
            return Match(position, agreeing) if agreeing >= shortest else None
    return None


@given(token_ids, token_ids, st.lists(st.integers(1, 5), max_size=20), st.integers(1, 10), st.integers(0, 10))
def test_finds_what_a_plain_search_finds(
    prompt: list[int], output: list[int], growth: list[int], shortest: int, more: int
) -> None:
    proposer = PromptLookupProposer()
    bounds = params(shortest, shortest + more)
    tokens = [7, *prompt]  # a prompt has a token
    num_prompt = len(tokens)
    for num_new in [0, *growth, 40]:
        tokens += output[:num_new]
        del output[:num_new]
        match = proposer.match(candidate(tokens, num_prompt), bounds)
        assert match == plain_match(tokens, num_prompt, shortest, shortest + more)


@given(token_ids, st.integers(1, 12))
def test_a_draft_is_what_followed_and_goes_round_at_the_end(tokens: list[int], num_tokens: int) -> None:
    proposer = PromptLookupProposer()
    tokens = [*tokens, 1]
    ask = Ask(candidate(tokens, len(tokens)), num_tokens, params())
    (draft,) = proposer.propose([ask])
    match = plain_match(tokens, len(tokens), 1, DEFAULT_MAX_NGRAM)
    if match is None:
        assert draft == ()
        return
    grown = list(tokens)
    for token in draft:
        assert token == grown[match.position + len(grown) - len(tokens)]
        grown.append(token)
    assert len(draft) == num_tokens


def test_a_text_that_repeats_itself_is_continued() -> None:
    assert continuation([1, 2, 3, 1, 2, 3], 3, 7) == (1, 2, 3, 1, 2, 3, 1)
    assert continuation([9, 9], 1, 3) == (9, 9, 9)
    assert continuation([1, 2, 3, 4], 1, 2) == (2, 3)


def test_the_latest_place_wins_and_the_longest_run_before_it() -> None:
    proposer = PromptLookupProposer()
    tokens = [1, 2, 5, 1, 2, 6, 3, 2, 7, 1, 2]
    assert proposer.match(candidate(tokens, 9), params()) == Match(5, 2)  # not behind `3 2`, not behind the first `1 2`


def test_one_token_alone_counts_where_it_is_a_name() -> None:
    proposer = PromptLookupProposer()
    prompt = [1, 50, 51, 1, 2, 1]
    assert proposer.match(candidate([*prompt, 9, 50], 6), params()) == Match(2, 1)
    assert proposer.match(candidate([*prompt, 9, 1], 6, "b"), params()) is None  # stands everywhere
    assert proposer.match(candidate([*prompt, 9, 8, 9], 6, "c"), params()) is None  # only in the output
    assert proposer.match(candidate([*prompt, 9, 50], 6, "d"), params(min_ngram=2)) is None


def test_no_match_no_draft_and_one_for_each_ask_in_order() -> None:
    proposer: Proposer = PromptLookupProposer()
    assert proposer.name == "prompt_lookup"
    none = Ask(candidate([1, 2, 3], 3, "a"), 4, params())
    some = Ask(candidate([1, 2, 3, 1, 2], 5, "b"), 2, params())
    assert list(proposer.propose([none, some, none])) == [(), (3, 1), ()]
    assert list(proposer.propose([])) == []


def test_bounds_give_way_to_each_other() -> None:
    proposer = PromptLookupProposer()
    tokens = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5, 6]
    assert match_len(proposer, candidate(tokens, 7), params(min_ngram=6)) == 6
    assert match_len(proposer, candidate(tokens, 7), params(min_ngram=7)) == 0
    assert match_len(proposer, candidate(tokens, 7), params(max_ngram=1)) == 6  # the name `6`, and what stands before


def test_forgotten_sequences_and_reused_ids_begin_anew() -> None:
    proposer = PromptLookupProposer()
    asked = candidate([1, 2, 3, 1, 2], 5)
    before = proposer.match(asked, params())
    proposer.end("a")
    proposer.end("never seen")
    assert proposer.match(asked, params()) == before
    assert proposer.match(candidate([1, 2], 1), params()) is None  # shorter than what was known: another text
    proposer.close()


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(1, 9), max_size=12))
def test_a_window_forgets_what_is_old_and_nothing_that_is_young(tokens: list[int], cuts: list[int]) -> None:
    window = 8
    proposer = PromptLookupProposer(window)
    bounds = params(2, 3)
    end = 1
    for cut in [*cuts, len(tokens)]:
        end = min(len(tokens), end + cut)
        known = tokens[:end]
        match = proposer.match(candidate(known, 1), bounds)
        expected = plain_match(known, 1, 2, 3)
        if expected is not None and expected.position >= end - window:
            assert match == expected
        if match is not None:
            assert match.position >= end - 2 * window - 1


@pytest.mark.parametrize("window", [16, 64])
def test_memory_is_bounded(window: int) -> None:
    proposer = PromptLookupProposer(window)
    tokens = list(range(1000))
    proposer.match(candidate(tokens, 1), params(1, 4))
    for token in range(1000, 1100):
        tokens.append(token)
        proposer.match(candidate(tokens, 1), params(1, 4))
    index = proposer._texts["a"].index  # pyright: ignore[reportPrivateUsage]
    num_entries = sum(len(runs) for generation in (index._young, index._old) for runs in generation)  # pyright: ignore[reportPrivateUsage]
    assert num_entries <= 2 * window * 3


PARAMS = SpeculationParams("prompt_lookup")
EQUALS, SEMICOLON, DONE = 1, 2, 3  # of prompts
COLON, COMMA, OPEN, CLOSE = 11, 12, 13, 14  # of answers
NAME, AGE, CITY = 21, 22, 23


def prompt_of(*fields: tuple[int, Sequence[int]]) -> list[int]:
    tokens: list[int] = []
    for key, value in fields:
        tokens += [key, EQUALS, *value, SEMICOLON]
    return [*tokens[:-1], DONE]


def answer_of(*fields: tuple[int, Sequence[int]]) -> list[int]:
    tokens = [OPEN]
    for key, value in fields:
        tokens += [key, COLON, *value, COMMA]
    return [*tokens[:-1], CLOSE]


def known(prompt: Sequence[int], output: Sequence[int], outputs: Outputs | None = None) -> Known:
    separators = outputs.separators if outputs is not None else Separators()
    separators.learn(EQUALS, COLON)
    separators.learn(SEMICOLON, COMMA)
    names = {token_id: idx + 1 for idx, token_id in enumerate(prompt) if list(prompt).count(token_id) == 1}
    return Known([*prompt, *output], len(prompt), names, separators, outputs)


def test_a_copy_writes_what_came_instead_of_marks() -> None:
    prompt = prompt_of((NAME, (50, 51)), (AGE, (60,)))
    drafted, pieces = compose(known(prompt, [OPEN, NAME]), "own", 1, 1, None, 6)
    assert drafted == (COLON, 50, 51, COMMA, AGE, COLON)
    assert pieces == (
        *(Piece("separator", 1, 0, 1), Piece("value", 2, 0, 2), Piece("separator", 1, 0, 4)),
        *(Piece("value", 1, 0, 5), Piece("separator", 1, 0, 6)),
    )
    assert compose(known(prompt, [OPEN, NAME]), "own", 1, 1, None, 1) == ((COLON,), (Piece("separator", 1, 0, 1),))


def test_behind_a_value_an_earlier_output_goes_on_and_behind_a_key_the_prompt() -> None:
    earlier = answer_of((NAME, (70, 71, 72)), (CITY, (73,)), (AGE, (74,)))
    outputs = Outputs(100)
    outputs.add([9, *earlier], 1)
    prompt = prompt_of((AGE, (60,)), (CITY, (80, 81)), (NAME, (50, 51)))
    here = known(prompt, [OPEN, NAME, COLON, 50], outputs)
    place = 4  # of 70, where the sequence left it: [9, OPEN, NAME, COLON, 70, ...
    drafted, pieces = compose(here, "own", 1, prompt.index(50) + 1, place, 12)
    assert drafted[0] == 51
    assert drafted[1:] != ()
    # `DONE` was not known as a mark yet, so that this copy ran on into it.
    here.separators.learn(DONE, CLOSE)
    drafted, pieces = compose(here, "own", 1, prompt.index(50) + 1, place, 12)
    assert drafted == (51, COMMA, CITY, COLON, 80, 81, COMMA, AGE, COLON, 60, CLOSE)
    assert [piece.source for piece in pieces] == ["own", "behind", "value", "behind", "value", "behind"]
    assert sum(piece.num_tokens for piece in pieces) == len(drafted)


def test_the_second_record_of_a_kind_is_guessed_nearly_whole() -> None:
    """End to end: what separators are is learned from the first one."""
    proposer = PromptLookupProposer(history=History(1000))
    records = [
        [(NAME, (50, 51)), (AGE, (60,)), (CITY, (80, 81))],
        [(NAME, (52, 53)), (AGE, (61,)), (CITY, (82, 83))],
        [(NAME, (54, 55)), (AGE, (62,)), (CITY, (84, 85))],
    ]
    steps: list[int] = []
    for number, fields in enumerate(records):
        prompt, answer = prompt_of(*reversed(fields)), answer_of(*fields)
        steps.append(run(proposer, prompt, answer, f"r{number}"))
    assert steps[2] <= 3 < steps[0]


def run(proposer: PromptLookupProposer, prompt: Sequence[int], answer: Sequence[int], sequence_id: str) -> int:
    """The steps that a target takes which answers like that."""
    tokens, end = [*prompt, answer[0]], len(prompt) + len(answer)
    num_steps = 0
    while len(tokens) < end:
        (draft,) = proposer.propose([Ask(candidate(tokens, len(prompt), sequence_id), 8, PARAMS)])
        rest = answer[len(tokens) - len(prompt) :]
        num_right = 0
        while num_right < min(len(draft), len(rest) - 1) and draft[num_right] == rest[num_right]:
            num_right += 1
        tokens += rest[: num_right + 1]
        num_steps += 1
    proposer.end(sequence_id)
    return num_steps


texts = st.lists(st.integers(0, 4), min_size=1, max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=5), st.integers(1, 9))
def test_pieces_say_where_each_token_comes_from(records: list[tuple[list[int], list[int]]], num_tokens: int) -> None:
    proposer = PromptLookupProposer(history=History(200))
    for number, (prompt, output) in enumerate(records):
        for end in range(len(prompt), len(prompt) + len(output) + 1):
            asked = candidate([*prompt, *output][:end], len(prompt), f"s{number}")
            ask = Ask(asked, num_tokens, PARAMS)
            pieces = proposer.pieces(ask)
            (draft,) = proposer.propose([ask])
            assert sum(piece.num_tokens for piece in pieces) == len(draft) <= num_tokens
            assert all(piece.num_tokens > 0 for piece in pieces)
            assert bool(pieces) == bool(draft)
            done = 0
            for piece in pieces:
                token_ids = draft[done : done + piece.num_tokens]
                if piece.source in ("own", "value"):
                    assert token_ids == continuation(asked.token_ids, piece.position, piece.num_tokens)
                done += piece.num_tokens
        proposer.end(f"s{number}")


# --- what is known of separators -----------------------------------------------------------------------------------


def test_what_came_last_counts() -> None:
    separators = Separators()
    assert not separators.is_separator(EQUALS)
    separators.learn(EQUALS, COMMA)
    separators.learn(EQUALS, COLON)
    assert separators.is_separator(EQUALS)
    assert separators.instead(EQUALS) == COLON
    assert separators.ends == {COMMA, COLON}
    assert separators.first([50, 51, EQUALS, 52]) == 2
    assert separators.first([50, 51]) == 2
    assert separators.first([]) == 0


def test_what_an_output_has_written_is_copied_from_then_on() -> None:
    separators = Separators()
    separators.learn(EQUALS, COLON)
    separators.write([50, EQUALS])
    assert not separators.is_separator(EQUALS)
    assert separators.ends == set()
    separators.learn(EQUALS, COLON)
    assert not separators.is_separator(EQUALS)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 9)), max_size=40))
def test_a_mark_was_learned_and_never_written(events: list[tuple[bool, int, int]]) -> None:
    separators = Separators()
    came: dict[int, int] = {}
    written: set[int] = set()
    for is_written, token_id, other in events:
        if is_written:
            separators.write([token_id])
            written.add(token_id)
        else:
            separators.learn(token_id, other)
            came[token_id] = other
    for token_id in range(10):
        assert separators.is_separator(token_id) == (token_id in came and token_id not in written)
        if separators.is_separator(token_id):
            assert separators.instead(token_id) == came[token_id]


def test_memory_of_separators_is_bounded() -> None:
    separators = Separators()
    for token_id in range(5 * MAX_SEPARATORS):
        separators.write([token_id])
    assert len(separators._instead) <= MAX_SEPARATORS + 1  # pyright: ignore[reportPrivateUsage]
