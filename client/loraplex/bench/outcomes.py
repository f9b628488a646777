"""Outcomes of requests, and the summary of a load.

Latencies count from the time at which a request was due, not from when it was sent: a server (or a client) that falls
behind shows as latency instead of as a lower rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from loraplex.bench.arrivals import Arrival
from loraplex.types import Usage


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed."""

    code: str  # of gRPC
    reason: str
    message: str


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
    failure: Failure | None = None

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
    """None where there are no values."""
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
    """`outcomes` has the requests that became due; the others of the schedule are unfinished too."""
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


def _count(failures: Sequence[Failure]) -> tuple[ErrorCount, ...]:
    """By code and reason, the most frequent first."""
    groups: dict[tuple[str, str], list[Failure]] = {}
    for one in failures:
        groups.setdefault((one.code, one.reason), []).append(one)
    counts = [ErrorCount(code, reason, len(group), group[0].message) for (code, reason), group in groups.items()]
    return tuple(sorted(counts, key=lambda one: -one.count))
