"""Distribution of requests over adapters."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from random import Random

import pytest

from loraplex.bench.arrivals import Popularity, choices, parse_popularity, weights
from loraplex_contracts.errors import InvalidArgument

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
