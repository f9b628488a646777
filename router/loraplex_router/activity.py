"""Recent activity of a router: tokens, latencies, errors.

`Activity` keeps a minute by the second and forgets the rest; what is to be plotted over hours are metrics. Only what
this process relayed is in it. Time is an argument.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from loraplex_proto.v1 import status_pb2

WINDOW_S: Final = 60
# Errors kept of each status code: a flood of one kind hides no other.
ERRORS_BY_CODE: Final = 10
MAX_MESSAGE_CHARS: Final = 300
# Latencies are counted in buckets that grow by the eighth root of two: a percentile is right within 9 %.
_FIRST_BUCKET_S: Final = 1e-4
_BUCKETS_PER_DOUBLING: Final = 8


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that ended with an error, from the router's point of view."""

    ended_s: float
    method: str
    code: str
    reason: str
    message: str
    request_id: str = ""
    tenant: str = ""
    worker_id: str = ""


@dataclass(slots=True)
class _Second:
    number: int
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_requests: int = 0
    num_failed: int = 0
    first_messages: Counter[int] = field(default_factory=Counter[int])  # by bucket


class Tally:
    """The last minute of one worker."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()

    def at(self, now_s: float) -> _Second:
        """The second to count in."""
        number = math.floor(now_s)
        seconds = self._seconds
        if not seconds or seconds[-1].number != number:
            seconds.append(_Second(number))
            while seconds[0].number < number - WINDOW_S:
                seconds.popleft()
        return seconds[-1]

    def since(self, number: int) -> list[_Second]:
        """The seconds from `number` on in which there was anything."""
        return [second for second in self._seconds if second.number >= number]


class Activity:
    """Owns the counts of the last minute, by worker, and the last errors."""

    def __init__(self, started_s: float) -> None:
        self.started_s = started_s
        self._tallies: dict[str, Tally] = {}
        self._errors: dict[str, deque[FailedCall]] = {}

    # --- what happens ----------------------------------------------------------------------------------------------

    def of(self, worker_id: str, now_s: float) -> _Second:
        """The second to count in for that worker; "" for what no worker was asked for."""
        tally = self._tallies.get(worker_id)
        if tally is None:
            first = _first_second(now_s)
            self._tallies = {name: one for name, one in self._tallies.items() if one.since(first)}
            tally = self._tallies[worker_id] = Tally()
        return tally.at(now_s)

    def first_message(self, worker_id: str, took_s: float, now_s: float) -> None:
        """Counts the first message of a stream, `took_s` after its request arrived."""
        self.of(worker_id, now_s).first_messages[_bucket(took_s)] += 1

    def tokens(self, worker_id: str, num_tokens: int, num_drafted: int, num_accepted: int, now_s: float) -> None:
        """Counts tokens that went out, with those drafted and accepted."""
        second = self.of(worker_id, now_s)
        second.num_tokens += num_tokens
        second.num_drafted += num_drafted
        second.num_accepted += num_accepted

    def ended(self, worker_id: str, is_failed: bool, now_s: float) -> None:
        """Counts the end of a request, in whatever way it ended."""
        second = self.of(worker_id, now_s)
        second.num_requests += 1
        second.num_failed += is_failed

    def failed(self, call: FailedCall) -> None:
        self._errors.setdefault(call.code, deque(maxlen=ERRORS_BY_CODE)).append(call)

    # --- what is shown ---------------------------------------------------------------------------------------------

    def errors(self) -> list[FailedCall]:
        """The last errors, the newest first."""
        return sorted(chain.from_iterable(self._errors.values()), key=lambda call: call.ended_s, reverse=True)

    def summary(self, now_s: float, worker_id: str | None = None) -> status_pb2.Activity:
        """Activity of one worker, or of all where none is named."""
        seconds = self._seconds(_first_second(now_s), worker_id)
        first_messages: Counter[int] = Counter()
        for second in seconds:
            first_messages.update(second.first_messages)
        return status_pb2.Activity(
            window_s=min(float(WINDOW_S), max(now_s - self.started_s, 0.0)),
            tokens=sum(second.num_tokens for second in seconds),
            drafted_tokens=sum(second.num_drafted for second in seconds),
            accepted_tokens=sum(second.num_accepted for second in seconds),
            requests=sum(second.num_requests for second in seconds),
            failed_requests=sum(second.num_failed for second in seconds),
            time_to_first_p50_s=percentile(first_messages, 0.5),
            time_to_first_p99_s=percentile(first_messages, 0.99),
        )

    def tokens_by_second(self, now_s: float) -> list[int]:
        """Tokens of each second of the window that is over, the oldest first."""
        counts: Counter[int] = Counter()
        end = math.floor(now_s)
        for second in self._seconds(end - WINDOW_S, None):
            counts[second.number] += second.num_tokens
        return [counts[number] for number in range(end - WINDOW_S, end)]

    def _seconds(self, first: int, worker_id: str | None) -> list[_Second]:
        tallies: Iterable[Tally] = self._tallies.values()
        if worker_id is not None:
            tallies = [self._tallies[worker_id]] if worker_id in self._tallies else []
        return [second for tally in tallies for second in tally.since(first)]


def _first_second(now_s: float) -> int:
    return math.floor(now_s) - WINDOW_S + 1


def _bucket(seconds: float) -> int:
    return max(0, math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(seconds, _FIRST_BUCKET_S) / _FIRST_BUCKET_S)))


def percentile(buckets: Counter[int], share: float) -> float:
    """Seconds that this share of the counted latencies does not exceed; 0 where there are none."""
    left = math.ceil(share * buckets.total())
    for bucket in sorted(buckets):
        left -= buckets[bucket]
        if left <= 0 < buckets[bucket]:
            return _FIRST_BUCKET_S * 2.0 ** (bucket / _BUCKETS_PER_DOUBLING)
    return 0.0
