"""Prompt lookup against a plain search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.plan import Candidate
from loraplex_contracts.request import Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.speculation.prompt_lookup.lookup import (
    DEFAULT_MAX_NGRAM,
    MAX_INDEXED_NGRAM,
    MAX_MATCH,
    Match,
    PromptLookupProposer,
)
from loraplex_server.speculation.prompt_lookup.separators import continuation
from loraplex_server.speculation.proposer import Ask, Proposer

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
