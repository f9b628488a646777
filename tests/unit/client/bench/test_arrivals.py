"""Arrivals of a load: times, lengths, and how requests spread over adapters."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from random import Random

import pytest

from loraplex.bench.arrivals import (
    DEFAULT_DURATION_S,
    Lengths,
    LoadSpec,
    Popularity,
    choices,
    gaps,
    parse_lengths,
    parse_popularity,
    plan,
    weights,
)
from loraplex_contracts.errors import InvalidArgument

SPEC = LoadSpec(rate=10, duration_s=20, adapter_ids=("a", "b", "c"), vocab_size=50, excluded_ids=frozenset({2}))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    found = list(islice(gaps(4.0, cv, Random(1)), 40_000))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.05)


def test_even_gaps_and_none() -> None:
    assert list(islice(gaps(4.0, 0.0, Random(1)), 3)) == [0.25] * 3
    assert list(islice(gaps(float("inf"), 1.0, Random(1)), 3)) == [0.0] * 3


def test_a_plan_ends_with_its_duration() -> None:
    found = plan(SPEC)
    assert 150 < len(found) < 250
    assert all(0 < one.at_s < 20 for one in found)
    assert all(first.at_s <= second.at_s for first, second in pairwise(found))


def test_a_plan_ends_with_its_number() -> None:
    assert len(plan(replace(SPEC, num_requests=7))) == 7
    at_once = plan(replace(SPEC, rate=float("inf"), duration_s=None, num_requests=7))
    assert [one.at_s for one in at_once] == [0.0] * 7


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan(SPEC) == plan(SPEC)
    assert plan(SPEC) != plan(replace(SPEC, seed=1))


def test_times_and_prompts_do_not_depend_on_the_adapters() -> None:
    ours, theirs = plan(SPEC), plan(replace(SPEC, adapter_ids=()))
    assert [(one.at_s, one.token_ids) for one in ours] == [(one.at_s, one.token_ids) for one in theirs]
    assert {one.adapter_id for one in ours} == {"a", "b", "c"}
    assert {one.adapter_id for one in theirs} == {""}


def test_lengths_are_drawn_from_their_ranges() -> None:
    found = plan(replace(SPEC, prompt_tokens=Lengths(3, 5), output_tokens=Lengths(7, 8)))
    assert {len(one.token_ids or ()) for one in found} == {3, 4, 5}
    assert {one.max_tokens for one in found} == {7, 8}
    used = {token for one in found for token in one.token_ids or ()}
    assert used == set(range(50)) - {2}


def test_prompts_from_texts() -> None:
    found = plan(replace(SPEC, texts=("x", "y")))
    assert {one.text for one in found} == {"x", "y"}
    assert {one.token_ids for one in found} == {None}


@pytest.mark.parametrize(("text", "lengths"), [("7", Lengths(7, 7)), ("32-128", Lengths(32, 128))])
def test_lengths_as_text(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, field="--x") == lengths
    assert str(lengths) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "5-", "9-5", "a", "1-2-3", "1.5"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--x takes a number of tokens"):
        parse_lengths(text, field="--x")


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"rate": 0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"cv": -1}, "--cv"),
        ({"duration_s": 0}, "--duration"),
        ({"num_requests": 0}, "--num-requests"),
        ({"rate": float("inf")}, "--num-requests"),
    ],
)
def test_loads_that_there_are_not(change: dict[str, float], flag: str) -> None:
    with pytest.raises(InvalidArgument, match=flag):
        replace(SPEC, **change)


def test_a_load_that_nothing_else_limits_has_a_duration() -> None:
    assert LoadSpec(rate=5).duration_s == DEFAULT_DURATION_S
    assert LoadSpec(rate=5, num_requests=3).duration_s is None
    assert LoadSpec(rate=5, duration_s=2).duration_s == 2


# --- popularity of adapters -----------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


def counts(text: str, num_draws: int = 20_000) -> Counter[str]:
    return Counter(islice(choices(parse_popularity(text), NAMES, Random(1)), num_draws))


def test_identical_takes_the_first() -> None:
    assert counts("identical") == {"a": 20_000}


def test_distinct_takes_turns() -> None:
    assert list(islice(choices(Popularity("distinct"), NAMES, Random(1)), 6)) == ["a", "b", "c", "d", "a", "b"]


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("uniform", [1, 1, 1, 1]),
        ("skewed", [1, 1 / 1.5, 1 / 1.5**2, 1 / 1.5**3]),
        ("zipf", [1, 1 / 2, 1 / 3, 1 / 4]),
        ("zipf:2", [1, 1 / 4, 1 / 9, 1 / 16]),
    ],
)
def test_shares(text: str, raw: list[float]) -> None:
    shares = [share / sum(raw) for share in raw]
    assert weights(parse_popularity(text), 4) == pytest.approx(shares)
    drawn = counts(text)
    assert [drawn[name] / 20_000 for name in NAMES] == pytest.approx(shares, abs=0.015)


def test_one_adapter_is_asked_for_always() -> None:
    for kind in ("identical", "distinct", "uniform", "skewed", "zipf:3"):
        assert set(islice(choices(parse_popularity(kind), ("x",), Random(1)), 300)) == {"x"}


@pytest.mark.parametrize("text", ["", "even", "zipf:", "zipf:-1", "zipf:x", "zipf:inf", "uniform:2"])
def test_what_there_is_not(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--popularity takes identical"):
        parse_popularity(text)


def test_as_it_was_said() -> None:
    for text in ("uniform", "zipf:0.5"):
        assert str(parse_popularity(text)) == text
