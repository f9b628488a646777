"""Arrivals of a load: time, adapter and prompt of each request.

The same seed gives the same load.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, repeat
from random import Random
from typing import Final

from loraplex_contracts.errors import InvalidArgument
from loraplex_runtime.flags import option

KINDS: Final = ("identical", "distinct", "uniform", "skewed", "zipf")
SKEW: Final = 1.5  # "skewed": each adapter is this many times as popular as the next one
KINDS_HELP: Final = (
    f"identical (all ask for the first), distinct (in turns), uniform (drawn, equally likely), skewed (each {SKEW} "
    "times as likely as the next), or zipf:S (the k-th in proportion to k to the power of -S)."
)


@dataclass(frozen=True, slots=True)
class Popularity:
    """Distribution of requests over adapters."""

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


DEFAULT_DURATION_S: Final = 30.0

_arrivals = partial(option, panel="Arrivals")
_adapters = partial(option, panel="Adapters")
_requests = partial(option, panel="Requests")


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, or a range from which every request draws."""

    least: int
    most: int

    def draw(self, rng: Random) -> int:
        return rng.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


def parse_lengths(text: str, *, field: str) -> Lengths:
    """N or N-M. Raises InvalidArgument."""
    first, is_range, last = text.partition("-")
    if first.isdecimal() and (last.isdecimal() or not is_range):
        lengths = Lengths(int(first), int(last or first))
        if 1 <= lengths.least <= lengths.most:
            return lengths
    raise InvalidArgument(f"{field} takes a number of tokens, or two as in 32-128, not {text!a}", field=field)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """Flags of a load. Requests that arrive before its end are served completely."""

    rate: float = _arrivals(1.0, "Requests per second; inf sends all at once.", "--rate")
    cv: float = _arrivals(
        1.0,
        "How irregular arrivals are (coefficient of variation of the gaps, Gamma-distributed): 0 evenly spaced, 1 "
        "Poisson, more comes in bursts.",
        "--cv",
    )
    duration_s: float | None = _arrivals(
        None, f"Seconds of arrivals. Default: {DEFAULT_DURATION_S:g}, without --num-requests.", "--duration"
    )
    num_requests: int | None = _arrivals(None, "End after this many arrivals.", "--num-requests")
    max_in_flight: int = _arrivals(
        1024,
        "Requests under way at most; more wait on this side. Their wait counts as latency.",
        "--max-inflight",
    )
    popularity: Popularity = _adapters(Popularity(), KINDS_HELP, "--popularity", metavar="KIND", parse=parse_popularity)
    adapter_ids: tuple[str, ...] = ()  # the most popular first; none: the base model
    prompt_tokens: Lengths = _requests(
        Lengths(64, 64),
        "Random tokens of a prompt.",
        "--prompt-tokens",
        metavar="N[-M]",
        parse=partial(parse_lengths, field="--prompt-tokens"),
    )
    output_tokens: Lengths = _requests(
        Lengths(64, 64),
        "New tokens of a request, at most.",
        "--output-tokens",
        metavar="N[-M]",
        parse=partial(parse_lengths, field="--output-tokens"),
    )
    texts: tuple[str, ...] = field(default=(), repr=False)  # prompts to draw from, instead of random token ids
    vocab_size: int = 0  # of the random token ids
    excluded_ids: frozenset[int] = frozenset()  # not among them
    seed: int = option(0, "The same seed sends the same load again.", "--seed")

    def __post_init__(self) -> None:
        if self.duration_s is None and self.num_requests is None and self.rate < math.inf:
            object.__setattr__(self, "duration_s", DEFAULT_DURATION_S)
        checks = (
            (self.rate > 0, "--rate", "must be above 0"),
            (0 <= self.cv < math.inf, "--cv", "must be 0 or above"),
            (self.duration_s is None or 0 < self.duration_s < math.inf, "--duration", "must be above 0"),
            (self.num_requests is None or self.num_requests >= 1, "--num-requests", "must be at least 1"),
            (self.max_in_flight >= 1, "--max-inflight", "must be at least 1"),
            (
                self.num_requests is not None or (self.duration_s is not None and self.rate < math.inf),
                "--num-requests",
                "is needed where --duration does not limit the load",
            ),
        )
        for is_ok, flag, rule in checks:
            if not is_ok:
                raise InvalidArgument(f"{flag} {rule}", field=flag)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to be sent."""

    at_s: float  # after the start
    adapter_id: str  # "": the base model
    max_tokens: int
    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def gaps(rate: float, cv: float, rng: Random) -> Iterator[float]:
    """Seconds between arrivals, without end: Gamma-distributed with mean 1 / rate and deviation cv / rate."""
    if rate == math.inf:
        yield from repeat(0.0)
    if cv == 0:
        yield from repeat(1 / rate)
    shape = cv**-2
    scale = 1 / (rate * shape)
    while True:
        yield rng.gammavariate(shape, scale)


def plan(spec: LoadSpec) -> list[Arrival]:
    """The whole load. Times, adapters and prompts are drawn from generators of their own, so one can change alone."""
    times, names, prompts = (Random(f"{what} {spec.seed}") for what in ("times", "adapters", "prompts"))
    allowed = [i for i in range(spec.vocab_size) if i not in spec.excluded_ids]
    found: list[Arrival] = []
    at_s = 0.0
    pairs = zip(
        gaps(spec.rate, spec.cv, times), choices(spec.popularity, spec.adapter_ids or ("",), names), strict=False
    )
    for gap, adapter_id in pairs:
        at_s += gap
        if spec.duration_s is not None and at_s >= spec.duration_s:
            break
        max_tokens = spec.output_tokens.draw(prompts)
        if spec.texts:
            found.append(Arrival(at_s, adapter_id, max_tokens, text=prompts.choice(spec.texts)))
        else:
            token_ids = tuple(prompts.choices(allowed, k=spec.prompt_tokens.draw(prompts)))
            found.append(Arrival(at_s, adapter_id, max_tokens, token_ids=token_ids))
        if len(found) == spec.num_requests:
            break
    return found
