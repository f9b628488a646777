"""Index of earlier outputs."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from random import Random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.plan import Candidate, Span, SpanResult, StepPlan, StepResult
from loraplex_contracts.request import Request, SamplingParams, SpeculationParams, StoppingParams
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation import history as module
from loraplex_server.speculation.history import (
    MAX_COMPARED,
    MAX_FULL,
    MAX_MATCH,
    MAX_NAMESPACES,
    MAX_PLACES,
    MAX_SKIP,
    NUM_CONTEXT,
    History,
    Outputs,
    Place,
    Reader,
)
from loraplex_server.speculation.prompt_lookup import Match, PromptLookupProposer
from loraplex_server.speculation.proposer import PROMPT_LOOKUP, Ask
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts

PARAMS = SpeculationParams("prompt_lookup")
# Few different tokens, so that everything has been here before: prompt, then output.
texts = st.lists(
    st.tuples(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=30)), max_size=6
)


def candidate(
    tokens: Sequence[int],
    num_prompt: int,
    sequence_id: str = "a",
    *,
    adapter_id: str = "",
    tenant: str = "t",
    cache_salt: str = "",
) -> Candidate:
    request = Request(
        sequence_id,
        tuple(tokens[:num_prompt]),
        StoppingParams(max_tokens=1000),
        adapter_id=adapter_id,
        tenant=tenant,
        cache_salt=cache_salt,
    )
    return Candidate(sequence_id, 0, tokens, num_prompt, 1000, request, SamplingParams(seed=0), None)


def plain_match(kept: Sequence[int | None], places: Sequence[int], tokens: Sequence[int]) -> tuple[int, int] | None:
    """The definition: of the latest places behind the last two tokens, the one where most agrees."""
    best: tuple[int, int] | None = None
    num_compared = 0
    for position in reversed(places):
        num_tokens = 0
        while num_tokens < min(position, len(tokens)) and kept[position - 1 - num_tokens] == tokens[-1 - num_tokens]:
            num_tokens += 1
        if num_tokens < 2:
            continue
        num_compared += 1
        if num_compared <= MAX_PLACES and (best is None or min(num_tokens, MAX_COMPARED) > min(best[1], MAX_COMPARED)):
            best = position, min(num_tokens, MAX_MATCH)
    return best


@given(texts, st.lists(st.integers(0, 2), max_size=20), st.integers(1, 60))
def test_finds_what_a_plain_search_finds(
    earlier: list[tuple[list[int], list[int]]], tokens: list[int], room: int
) -> None:
    outputs = Outputs(room)
    kept: list[int | None] = []
    places: list[int] = []  # in outputs, with something known to follow
    for prompt, output in earlier:
        outputs.add([*prompt, *output], len(prompt))
        context = prompt[-NUM_CONTEXT:]
        added = [*context, *output][-(room - 1) :] if room > 1 else []
        places += [
            len(kept) + idx for idx in range(len(added)) if idx >= max(2, len(added) - len(output)) and len(added) > 2
        ]
        kept += [*added, None]
        # The oldest go, and places whose run they were part of.
        num_dropped = max(0, len(kept) - room)
        first = num_dropped + 2
        places = [place for place in places if place >= first]
        kept[:num_dropped] = [None] * num_dropped
        kept_here = kept[num_dropped:]
        assert len(outputs) == len(kept_here) <= room
        places, kept = [place - num_dropped for place in places], kept_here
        found = outputs.find(tokens)
        expected = plain_match(kept, places, tokens)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        assert (found.position - outputs._base, found.num_tokens) == expected
        following = kept[expected[0] : expected[0] + 5]
        assert outputs.continuation(found.position, 5) == tuple(
            following[: following.index(None)] if None in following else following
        )


@given(texts, st.integers(1, 40))
def test_no_more_runs_are_known_than_tokens(earlier: list[tuple[list[int], list[int]]], room: int) -> None:
    outputs = Outputs(room)
    for prompt, output in earlier:
        outputs.add([*prompt, *output], len(prompt))
        assert len(outputs) <= room
        known = set(zip(outputs._tokens, outputs._tokens[1:], strict=False))
        assert {(key >> 32, key & 0xFFFFFFFF) for key in outputs._latest} <= known


def test_the_latest_place_wins_and_a_longer_run_before_it() -> None:
    outputs = Outputs(100)
    outputs.add([1, 2, 3, 10, 11], 0)
    outputs.add([9, 2, 3, 20, 21], 0)
    assert outputs.continuation(_found(outputs, [2, 3]).position, 8) == (20, 21)
    found = _found(outputs, [0, 1, 2, 3])
    assert outputs.continuation(found.position, 8) == (10, 11)
    assert found.num_tokens == 3
    outputs.add([1, 2, 3, 30], 0)
    assert outputs.continuation(_found(outputs, [1, 2, 3]).position, 8) == (30,)
    assert outputs.find([3]) is None  # one token alone is no match
    assert outputs.find([3, 9]) is None  # across the end of an output neither
    assert outputs.find([20, 21]) is None  # nothing followed


def _found(outputs: Outputs, tokens: Sequence[int]) -> Place:
    found = outputs.find(tokens)
    assert found is not None
    return found


def test_prompts_are_not_continued_but_tell_how_outputs_begin() -> None:
    outputs = Outputs(100)
    outputs.add([50, 51, 52, 53, 54, 55, 1, 2, 3], 6)
    assert outputs.find([51, 52]) is None
    assert outputs.find([52, 53]) is None
    assert outputs.continuation(_found(outputs, [54, 55]).position, 8) == (1, 2, 3)
    assert _found(outputs, [51, 52, 53, 54, 55, 1]).num_tokens == NUM_CONTEXT + 1


def test_where_the_text_left_an_earlier_output_it_comes_back_behind_the_value() -> None:
    """1 2 3 is structure, 4 stands behind every value: which 4 it is, only the place tells."""
    outputs = Outputs(100)
    outputs.add([1, 2, 3, 70, 71, 4, 5, 6, 80, 4, 7, 8], 0)
    tokens = [1, 2, 3]
    reader = Reader()
    found = reader.find(outputs, tokens)
    assert found == Place(3, 3, is_resumed=False)
    tokens += [60]  # another value
    assert reader.find(outputs, tokens) is None
    tokens += [61, 62, 4]
    assert reader.find(outputs, tokens) == Place(6, 1, is_resumed=True)  # behind the first 4, not the latest one
    assert outputs.continuation(6, 3) == (5, 6, 80)
    tokens += [5, 6, 81]  # two of three were right
    assert reader.find(outputs, tokens) is None
    tokens += [4]
    assert reader.find(outputs, tokens) == Place(10, 1, is_resumed=True)


def test_a_place_is_not_resumed_far_off_or_in_another_output() -> None:
    outputs = Outputs(1000)
    outputs.add([1, 2, 3, *range(100, 100 + MAX_SKIP), 4, 5], 0)
    outputs.add([9, 4, 6], 0)
    reader = Reader()
    assert reader.find(outputs, [1, 2]) is not None
    assert reader.find(outputs, [1, 2, 8, 4]) is None
    near = Outputs(1000)
    near.add([1, 2, 3, 5], 0)
    near.add([9, 4, 6], 0)
    reader = Reader()
    assert reader.find(near, [1, 2]) is not None
    assert reader.find(near, [1, 2, 8, 4]) is None


@given(texts, texts, st.integers(1, 12))
def test_a_reader_survives_whatever_is_forgotten_meanwhile(
    earlier: list[tuple[list[int], list[int]]], later: list[tuple[list[int], list[int]]], room: int
) -> None:
    outputs = Outputs(room)
    tokens = [0, 1]
    reader = Reader()
    for prompt, output in [*earlier, *later]:
        outputs.add([*prompt, *output], len(prompt))
        tokens += output[:3]
        found = reader.find(outputs, tokens)
        if found is not None:
            draft = outputs.continuation(found.position, 4)
            assert draft
            assert -1 not in draft
    assert reader.find(Outputs(room), [*tokens, 1]) is None  # the namespace was dropped, and is a new one


def test_namespaces_never_mix() -> None:
    proposer = PromptLookupProposer(history=History(1000))
    names = [{"adapter_id": "x"}, {"tenant": "u"}, {"cache_salt": "s"}, {"adapter_id": "s"}, {"tenant": "x"}, {}]
    for idx, name in enumerate(names):
        asked = candidate([1, 2, 3, 100 + idx], 1, f"first {idx}", **name)
        assert proposer.match(asked, PARAMS) is None  # of those before, whoever they are, nothing is seen
        proposer.end(asked.sequence_id)
    for idx, name in enumerate(names):
        ask = Ask(candidate([7, 2, 3], 1, f"second {idx}", **name), 4, PARAMS)
        assert proposer.propose([ask]) == [(100 + idx,)]


def test_the_own_text_wins_where_as_much_agrees() -> None:
    proposer = PromptLookupProposer(history=History(1000))
    first = candidate([1, 20, 21, 22, 23, 24], 1)
    assert proposer.match(first, PARAMS) is None
    proposer.end("a")
    own = candidate([21, 22, 30, 21, 22], 5, "b")
    assert proposer.match(own, PARAMS) == Match(2, 2)
    longer = candidate([21, 22, 30, 20, 21, 22], 6, "c")
    match = proposer.match(longer, PARAMS)
    assert match is not None
    assert (match.source, match.num_tokens) == ("history", 3)
    assert proposer.propose([Ask(longer, 8, PARAMS)]) == [(23, 24)]


def test_bounds_of_n_grams_hold_for_earlier_outputs_too() -> None:
    proposer = PromptLookupProposer(history=History(1000))
    proposer.match(candidate([1, 20, 21, 22, 23], 1), PARAMS)
    proposer.end("a")
    tokens = [9, 20, 21, 22]
    for shortest, longest, is_found in ((3, 0, True), (4, 0, False), (0, 1, False), (2, 2, True)):
        params = SpeculationParams("prompt_lookup", min_ngram=shortest, max_ngram=longest)
        asked = candidate(tokens, 1, f"{shortest} {longest}")
        assert (proposer.match(asked, params) is not None) == is_found


def test_what_came_last_is_remembered_and_prompts_alone_are_not() -> None:
    """The tokens of the last step are in the list that the scheduler goes on filling."""
    history = History(1000)
    proposer = PromptLookupProposer(history=history)
    tokens = [1, 2, 3]
    proposer.match(candidate(tokens, 3), PARAMS)
    proposer.end("a")
    assert history.num_namespaces == 0
    proposer.match(candidate(tokens, 3, "b"), PARAMS)
    tokens += [4, 5]
    proposer.end("b")
    assert proposer.propose([Ask(candidate([2, 3, 4], 3, "c"), 4, PARAMS)]) == [(5,)]
    proposer.close()
    assert (history.num_tokens, history.num_namespaces) == (0, 0)


def test_switched_off_it_remembers_nothing() -> None:
    history = History(0)
    history.add("a", [1, 2, 3], 0)
    assert history.outputs("a") is None
    assert (history.num_tokens, history.num_namespaces) == (0, 0)


def test_the_namespace_used_least_recently_goes_first() -> None:
    history = History(100)
    for name in range(MAX_NAMESPACES):
        history.add(name, [1, 2, 3], 0)
    assert history.outputs(0) is not None
    history.add("new", [1, 2, 3], 0)
    assert history.num_namespaces == MAX_NAMESPACES
    assert history.outputs(0) is not None
    assert history.outputs(1) is None
    assert history.num_tokens == 4 * MAX_NAMESPACES


def test_all_namespaces_together_are_bounded() -> None:
    history = History(10)
    for name in range(3 * MAX_FULL):
        history.add(name, range(1000), 0)
        assert history.num_tokens <= 10 * MAX_FULL
    assert history.num_namespaces == MAX_FULL
    assert history.num_tokens == 10 * MAX_FULL


@pytest.mark.parametrize("num_ids", [50, 1 << 30])
def test_a_token_takes_as_many_bytes_as_documented(num_ids: int) -> None:
    """A token takes as many bytes also after many times as much has gone through: what is forgotten leaves nothing."""
    dice = Random(0)
    tracemalloc.start()
    try:
        outputs = Outputs(4096)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            outputs.add([dice.randrange(num_ids) for _ in range(400)], 0)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(outputs) == 4096
    assert len(outputs._latest) <= 4096
    assert (after - before) / 4096 < 200
    assert module.MAX_FULL * 16_384 * 200 < 256 << 20


# --- through a speculator ---------------------------------------------------------------------------------------------

FREE_ROWS = StepCosts({1: 1.0, 256: 1.0001})
PROMPT = [40, 41, 42]
OUTPUT = list(range(1, 21))  # nothing in it repeats


def make_speculator(lookup_history: int = 1 << 14) -> Speculator:
    lookup = PromptLookupProposer(history=History(lookup_history))
    return Speculator(SpeculationConfig(), {PROMPT_LOOKUP: lookup}, FREE_ROWS)


def run(
    speculator: Speculator, name: str, output: Sequence[int], *, kind: Literal["prompt_lookup", "auto"], tenant: str
) -> int:
    """Decodes one request to its end; how many steps that takes behind the first token."""
    request = Request(
        name, tuple(PROMPT), StoppingParams(100), speculation=SpeculationParams(kind, max_draft_tokens=8), tenant=tenant
    )
    speculator.begin(request, None, None)
    tokens, num_steps = [*PROMPT, output[0]], 0
    while len(tokens) < len(PROMPT) + len(output):
        left = output[len(tokens) - len(PROMPT) :]
        seen = Candidate(name, 0, tokens, len(PROMPT), len(left) - 1, request, SamplingParams(), None)
        draft = speculator.propose([seen]).get(name)
        token_ids = draft.token_ids if draft is not None else ()
        num_right = 0
        while num_right < len(token_ids) and token_ids[num_right] == left[num_right]:
            num_right += 1
        span = Span(name, 0, 0, 1 + len(token_ids), 1 + len(token_ids), draft=token_ids, proposer=PROMPT_LOOKUP)
        result = SpanResult(tuple(left[: num_right + 1]))
        tokens += left[: num_right + 1]
        speculator.observe(StepPlan(num_steps, (span,)), StepResult(num_steps, {name: result}))
        num_steps += 1
    speculator.end(name)
    return num_steps


@pytest.mark.parametrize("kind", ["prompt_lookup", "auto"])
def test_an_equal_request_is_drafted_from_the_first_ones_output(kind: Literal["prompt_lookup", "auto"]) -> None:
    speculator = make_speculator()
    num_steps = len(OUTPUT) - 1
    assert run(speculator, "first", OUTPUT, kind=kind, tenant="t") == num_steps
    assert run(speculator, "elsewhere", OUTPUT, kind=kind, tenant="u") == num_steps
    assert run(speculator, "again", OUTPUT, kind=kind, tenant="t") <= 4


def test_the_speculators_history_can_be_switched_off() -> None:
    speculator = make_speculator(lookup_history=0)
    for name in ("first", "again"):
        assert run(speculator, name, OUTPUT, kind="prompt_lookup", tenant="t") == len(OUTPUT) - 1


def test_misses_in_earlier_outputs_say_nothing_about_the_own_text() -> None:
    speculator = make_speculator()
    for idx in range(40):  # each begins like the one before, and goes on differently
        run(speculator, f"{idx}", [1, 2, 3, 100 + idx, 200 + idx], kind="prompt_lookup", tenant="t")
    assert {source for _, source, _ in speculator._policy._rates} == {"history"}
    repeating = [5, 6, 7, 8, 9, 10] * 4
    assert run(speculator, "repeats", repeating, kind="prompt_lookup", tenant="u") <= 6 + 4
