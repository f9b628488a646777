"""Open-loop load generator: arrivals, sending, outcomes, figures.

Every request is sent when it is due. Latencies count from then, not from when it was sent: a server (or a client) that
falls behind shows as latency instead of as a lower rate. The same seed gives the same load.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, repeat
from random import Random
from typing import Any, Final

from loraplex.aio import AsyncClient
from loraplex.types import Adapter, GenerateOptions, ServerInfo, Usage
from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.flags import option

# --- arrivals ---------------------------------------------------------------------------------------------------------

DEFAULT_DURATION_S: Final = 30.0
KINDS: Final = ("identical", "distinct", "uniform", "skewed", "zipf")
SKEW: Final = 1.5  # "skewed": each adapter is this many times as popular as the next one
KINDS_HELP: Final = (
    f"identical (all ask for the first), distinct (in turns), uniform (drawn, equally likely), skewed (each {SKEW} "
    "times as likely as the next), or zipf:S (the k-th in proportion to k to the power of -S)."
)

_arrivals = partial(option, panel="Arrivals")
_adapters = partial(option, panel="Adapters")
_requests = partial(option, panel="Requests")


@dataclass(frozen=True, slots=True)
class Popularity:
    """Distribution of requests over adapters."""

    kind: str = "uniform"  # one of KINDS
    exponent: float = 1.0  # of zipf: the k-th adapter is asked for k**-exponent as often as the first

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind


def parse_popularity(text: str) -> Popularity:
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
        f"--popularity takes identical, distinct, uniform, skewed or zipf:S with S at least 0 (zipf:1), not {text!a}",
        field="--popularity",
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
            (self.rate > 0, "--rate", "must be a number above 0"),
            (0 <= self.cv < math.inf, "--cv", "must be a finite number from 0 on"),
            (
                self.duration_s is None or 0 < self.duration_s < math.inf,
                "--duration",
                "must be a finite number above 0",
            ),
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


# --- outcomes ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds after the start of the load; None has not happened."""

    arrival: Arrival
    sent_s: float | None = None
    was_held: bool = False  # by max_in_flight
    is_cold: bool = False  # its adapter was not ready to run when it was sent
    first_token_s: float | None = None
    num_first_tokens: int = 0  # in the first chunk
    last_token_s: float | None = None
    num_tokens: int = 0
    ended_s: float | None = None  # without a failure
    usage: Usage | None = None
    failure: LoraplexError | None = None

    def take(self, num_tokens: int, now_s: float) -> None:
        """Records new tokens."""
        if not num_tokens:
            return
        if self.first_token_s is None:
            self.first_token_s, self.num_first_tokens = now_s, num_tokens
        self.last_token_s = now_s
        self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first chunk; None where there were no more."""
        num_more = self.num_tokens - self.num_first_tokens
        if self.first_token_s is None or self.last_token_s is None or num_more == 0:
            return None
        return (self.last_token_s - self.first_token_s) / num_more

    @property
    def total_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.arrival.at_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """Distribution of one latency, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values; None where there are none."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    p50, p90, p99 = (percentile(found, share) for share in (0.5, 0.9, 0.99))
    return Distribution(len(found), sum(found) / len(found), p50, p90, p99, found[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that at least this share of the values does not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class ErrorCount:
    code: str
    reason: str
    count: int
    example: str  # one of the messages


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a load. Latencies are those of completed requests; None where there are none."""

    scheduled: int
    sent: int
    completed: int
    failed: int
    unfinished: int  # under way or not yet sent when the load was interrupted
    held: int  # sent later than due because of max_in_flight
    elapsed_s: float
    requests_per_s: float
    output_tokens_per_s: float
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    total_s: Distribution | None
    cold_ttft_s: Distribution | None  # of requests whose adapter had to be loaded
    warm_ttft_s: Distribution | None  # of the others that name an adapter
    late_s: Distribution | None  # delay in sending of the requests that were not held
    errors: tuple[ErrorCount, ...] = field(default=())


def summarize(outcomes: Sequence[Outcome], num_scheduled: int, elapsed_s: float) -> Summary:
    """Figures of a load. `outcomes` are the requests that became due; the schedule's others are unfinished too."""
    done = [one for one in outcomes if one.ended_s is not None]
    failed = [one.failure for one in outcomes if one.failure is not None]
    usages = [one.usage for one in done if one.usage is not None]
    with_adapter = [one for one in done if one.arrival.adapter_id]
    num_tokens = sum(one.num_tokens for one in outcomes)
    return Summary(
        scheduled=num_scheduled,
        sent=sum(one.sent_s is not None for one in outcomes),
        completed=len(done),
        failed=len(failed),
        unfinished=num_scheduled - len(done) - len(failed),
        held=sum(one.was_held for one in outcomes),
        elapsed_s=elapsed_s,
        requests_per_s=len(done) / elapsed_s if elapsed_s else 0.0,
        output_tokens_per_s=num_tokens / elapsed_s if elapsed_s else 0.0,
        output_tokens=num_tokens,
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        accepted_tokens=sum(usage.accepted_tokens for usage in usages),
        ttft_s=distribution(one.ttft_s for one in done),
        tpot_s=distribution(one.tpot_s for one in done),
        total_s=distribution(one.total_s for one in done),
        cold_ttft_s=distribution(one.ttft_s for one in with_adapter if one.is_cold),
        warm_ttft_s=distribution(one.ttft_s for one in with_adapter if not one.is_cold),
        late_s=distribution(
            one.sent_s - one.arrival.at_s for one in outcomes if one.sent_s is not None and not one.was_held
        ),
        errors=_count(failed),
    )


def _count(failures: Sequence[LoraplexError]) -> tuple[ErrorCount, ...]:
    """Counts of errors by code and reason, the most frequent first."""
    groups: dict[tuple[str, str], list[LoraplexError]] = {}
    for one in failures:
        groups.setdefault((one.code.name, one.reason), []).append(one)
    counts = [ErrorCount(code, reason, len(group), group[0].message) for (code, reason), group in groups.items()]
    return tuple(sorted(counts, key=lambda one: -one.count))


# --- sending ----------------------------------------------------------------------------------------------------------

LISTING_INTERVAL_S: Final = 1.0  # between listings of the adapters that are loaded

# The first listing of a server may still be empty: it is repeated this often, at this interval.
_NUM_LISTINGS: Final = 5
_EMPTY_INTERVAL_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Selection:
    """Adapters of a load: those that are named, else those that the server lists."""

    named: tuple[str, ...] = _adapters(
        (),
        "Adapter to ask for, the most popular first; may be given several times. Default: all that the server lists.",
        "--adapter",
        "-a",
    )
    prefix: str = _adapters("", "Of what the server lists, only names that begin so.", "--adapters-prefix")
    num_adapters: int | None = _adapters(None, "Only the first so many of them.", "--num-adapters")
    base_only: bool = _adapters(False, "Ask for no adapter at all.", "--base")

    def __post_init__(self) -> None:
        if self.num_adapters is not None and self.num_adapters < 1:
            raise InvalidArgument("--num-adapters must be at least 1; --base asks for none", field="--num-adapters")
        if self.base_only and (self.named or self.prefix or self.num_adapters):
            raise InvalidArgument(
                "--base asks for no adapter; leave out --adapter, --adapters-prefix and --num-adapters", field="--base"
            )
        if self.named and self.prefix:
            raise InvalidArgument("give --adapter or --adapters-prefix, not both", field="--adapters-prefix")

    async def find(self, client: AsyncClient) -> tuple[str, ...]:
        """Adapter ids, the most popular first. Raises InvalidArgument where the server lists too few."""
        if self.base_only:
            return ()
        names = self.named or tuple(await _list(client, self.prefix))
        if self.prefix and not names:
            raise InvalidArgument(
                f"the server lists no adapter that begins with {self.prefix!a}", field="--adapters-prefix"
            )
        if self.num_adapters is not None and self.num_adapters > len(names):
            raise InvalidArgument(
                f"--num-adapters asks for {self.num_adapters} adapters, and there are {len(names)}",
                field="--num-adapters",
            )
        return names[: self.num_adapters]


async def _list(client: AsyncClient, prefix: str) -> list[str]:
    """Adapters that a request can name; heads that only speculate are not among them."""
    for attempt in range(_NUM_LISTINGS):
        if attempt:
            await asyncio.sleep(_EMPTY_INTERVAL_S)
        if rows := await client.adapters.list(include_unloaded=True, prefix=prefix):
            return sorted({row.adapter_id for row in rows if row.kind != "medusa" and row.state != "failed"})
    return []


@dataclass(slots=True)
class Recording:
    """Outcomes so far."""

    num_scheduled: int = 0
    outcomes: list[Outcome] = field(default_factory=list[Outcome])
    elapsed_s: float = 0.0

    def summary(self) -> Summary:
        return summarize(self.outcomes, self.num_scheduled, self.elapsed_s)


class Residency:
    """Adapters that were ready to run at the last listing, and those that have answered since."""

    def __init__(self) -> None:
        self._ready: set[str] = set()

    def update(self, rows: Iterable[Adapter]) -> None:
        """Takes a listing. Behind a router any worker's row counts: requests go where their adapter is."""
        self._ready = {row.adapter_id for row in rows if row.state == "on_device"}

    def answered(self, adapter_id: str) -> None:
        """Takes the first token of an answer."""
        self._ready.add(adapter_id)

    def is_cold(self, adapter_id: str) -> bool:
        return bool(adapter_id) and adapter_id not in self._ready


class Driver:
    """Sends the requests of one load, all with `options`.

    While `max_in_flight` are under way, due requests wait; the wait counts as latency.
    """

    def __init__(self, client: AsyncClient, options: GenerateOptions, recording: Recording, max_in_flight: int) -> None:
        self._client = client
        self._options = options
        self._recording = recording
        self._in_flight = asyncio.Semaphore(max_in_flight)
        self._residency = Residency()
        self._start = 0.0

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, arrivals: Sequence[Arrival]) -> None:
        """Sends the requests. Returns when every one has ended; a cancellation ends those under way."""
        self._recording.num_scheduled = len(arrivals)
        has_adapters = any(arrival.adapter_id for arrival in arrivals)
        if has_adapters:
            await self._list()
        listing = asyncio.create_task(self._keep_listing()) if has_adapters else None
        self._start = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in arrivals:
                    if (wait_s := arrival.at_s - self._now()) > 0:
                        await asyncio.sleep(wait_s)
                    outcome = Outcome(arrival, was_held=self._in_flight.locked())
                    self._recording.outcomes.append(outcome)
                    await self._in_flight.acquire()
                    group.create_task(self._send(outcome))
        finally:
            self._recording.elapsed_s = self._now()
            if listing is not None:
                listing.cancel()

    async def _send(self, outcome: Outcome) -> None:
        arrival = outcome.arrival
        outcome.is_cold = self._residency.is_cold(arrival.adapter_id)
        options: GenerateOptions = {
            **self._options,
            "adapter_id": arrival.adapter_id or None,
            "max_tokens": arrival.max_tokens,
            "token_ids": arrival.token_ids,
        }
        try:
            outcome.sent_s = self._now()
            async with self._client.stream(arrival.text, **options) as chunks:
                async for chunk in chunks:
                    if outcome.first_token_s is None:
                        self._residency.answered(arrival.adapter_id)
                    outcome.take(len(chunk.token_ids), self._now())
                    outcome.usage = chunk.usage or outcome.usage
            outcome.ended_s = self._now()
        except LoraplexError as error:
            outcome.failure = error
        finally:
            self._in_flight.release()

    async def _keep_listing(self) -> None:
        while True:
            await asyncio.sleep(LISTING_INTERVAL_S)
            await self._list()

    async def _list(self) -> None:
        """Asks which adapters are on the device. Without permission to list, only answers tell which are ready."""
        with contextlib.suppress(LoraplexError):
            self._residency.update(await self._client.adapters.list(state="on_device"))


class Session:
    """One load: plans, sends and records it. `run` once."""

    def __init__(self, spec: LoadSpec, selection: Selection, options: GenerateOptions) -> None:
        self.recording = Recording()
        self._spec = spec  # completed by `run`
        self._selection = selection
        self._options = options
        self._info: ServerInfo | None = None

    async def run(self, client: AsyncClient) -> None:
        """Runs the load. Raises the server's error to `info` and listings, and InvalidArgument for an empty load.
        Errors of single requests are in the recording."""
        self._info = await client.info()
        self._spec = replace(
            self._spec,
            adapter_ids=await self._selection.find(client),
            vocab_size=self._info.vocab_size,
            excluded_ids=frozenset(self._info.eos_token_ids),
        )
        arrivals = plan(self._spec)
        if not arrivals:
            raise InvalidArgument("no request arrives within --duration; raise it, or --rate", field="--duration")
        await Driver(client, self._options, self.recording, self._spec.max_in_flight).run(arrivals)

    def described(self) -> dict[str, Any]:
        """Server and load, as plain data."""
        spec, info = self._spec, self._info
        return {
            "server": None if info is None else {"role": info.role, "model": info.model_id, "version": info.version},
            "load": {
                "rate": spec.rate if math.isfinite(spec.rate) else "inf",
                "cv": spec.cv,
                "duration_s": spec.duration_s,
                "num_requests": spec.num_requests,
                "popularity": str(spec.popularity),
                "num_adapters": len(spec.adapter_ids),
                "prompt_tokens": None if spec.texts else str(spec.prompt_tokens),
                "num_texts": len(spec.texts),
                "output_tokens": str(spec.output_tokens),
                "seed": spec.seed,
                "max_inflight": spec.max_in_flight,
            },
        }
