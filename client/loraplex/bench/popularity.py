"""Popularity of adapters in an open-loop load.

Pure: draws come from the generator that is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import Final

from loraplex_contracts.errors import InvalidArgument

KINDS: Final = ("identical", "distinct", "uniform", "skewed", "zipf")
SKEW: Final = 1.5  # "skewed": each adapter is this many times as popular as the next one
KINDS_HELP: Final = (
    f"identical (all ask for the first), distinct (in turns), uniform (drawn, equally likely), skewed (each {SKEW} "
    "times as likely as the next), or zipf:S (the k-th in proportion to k to the power of -S)."
)


@dataclass(frozen=True, slots=True)
class Popularity:
    """How requests spread over adapters: all to the first, in turns, all equally likely, or some more than others."""

    kind: str = "uniform"  # one of KINDS
    exponent: float = 1.0  # of zipf: the k-th adapter is asked for k**-exponent as often as the first

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind


def parse_popularity(text: str, *, field: str = "--popularity") -> Popularity:
    """One of KINDS, zipf with its exponent behind a colon. Raises InvalidArgument."""
    kind, has_exponent, exponent = text.partition(":")
    if kind in KINDS and not has_exponent:
        return Popularity(kind)
    if kind == "zipf":
        try:
            value = float(exponent)
        except ValueError:
            value = math.nan
        if 0 <= value < math.inf:
            return Popularity(kind, value)
    raise InvalidArgument(
        f"{field} takes identical, distinct, uniform, skewed or zipf:S with S at least 0 (zipf:1), not {text!a}",
        field=field,
    )


def weights(popularity: Popularity, num_adapters: int) -> list[float]:
    """Shares of the requests, the most popular adapter first. They add up to 1."""
    match popularity.kind:
        case "identical":
            raw = [1.0] + [0.0] * (num_adapters - 1)
        case "skewed":
            raw = [SKEW**-k for k in range(num_adapters)]
        case "zipf":
            raw = [(k + 1) ** -popularity.exponent for k in range(num_adapters)]
        case _:
            raw = [1.0] * num_adapters
    total = sum(raw)
    return [share / total for share in raw]


def choices(popularity: Popularity, adapter_ids: Sequence[str], rng: Random) -> Iterator[str]:
    """The adapter of each request, without end. "distinct" takes turns; everything else is drawn."""
    if popularity.kind == "distinct":
        yield from cycle(adapter_ids)
    shares = weights(popularity, len(adapter_ids))
    while True:
        yield from rng.choices(adapter_ids, shares, k=256)
