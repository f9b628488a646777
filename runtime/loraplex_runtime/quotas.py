"""Quotas of tenants: concurrent requests and tokens per minute.

The server to which a client shows its own credential counts, and is the one owner of the counts; calls that a router
makes for a tenant were counted by the router. Every call takes a `Ticket` before any work on it and gives it back at
its end, in whatever way it ends.

A request takes its prompt and the `max_tokens` that it names from the tenant's bucket, and gives back at the end what
it did not use. Tokens that it did not announce, because it names no `max_tokens`, are taken as they come: the bucket
may go below zero then, and new requests wait until it is full enough again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from loraplex_contracts.errors import (
    CONCURRENT_REQUESTS,
    TOKENS_PER_MINUTE,
    Code,
    InvalidArgument,
    LoraplexError,
    quota_exceeded,
)
from loraplex_runtime.auth import ROUTER, UNLIMITED, Identity, TenantLimits

POOLING_AT_ONCE: Final = 32  # inputs of one call that a worker has under way
RETRY_S: Final = 1.0  # when another request may have ended; nobody knows
# Tokens of a text that was cancelled before they were counted are estimated: by the fastest text that was counted, and
# before there is one by the fastest in benchmarks/LOG.md (the demo's model with its heads, 1.4 times 1,025 tokens/s).
FASTEST_TOKENS_PER_S: Final = 1500.0
MIN_SPEED_TOKENS: Final = 64  # of a text whose speed counts: a shorter one is mostly wait for its start


class TokenBucket:
    """A token bucket that holds a minute's tokens and may go below zero. Pure: `now` is an argument, in seconds."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self.level = per_minute
        self._filled_s = now

    def refill(self, per_minute: float, now: float) -> None:
        """Adds what has come since the last call, at the rate until now; `per_minute` holds from here on."""
        self.level += self.per_minute * max(0.0, now - self._filled_s) / 60.0
        self._filled_s = max(now, self._filled_s)
        self.per_minute = per_minute
        self.level = min(self.level, per_minute)

    def wait_s(self, num_tokens: float) -> float:
        """Seconds after which it has so many, or is full; 0 where that is so now."""
        missing = min(num_tokens, self.per_minute) - self.level
        return 60.0 * missing / self.per_minute if missing > 1e-6 else 0.0  # rounded off

    def take(self, num_tokens: float) -> None:
        self.level -= num_tokens

    def give_back(self, num_tokens: float) -> None:
        self.level = min(self.per_minute, self.level + num_tokens)


@dataclass(slots=True)
class _Usage:
    """One tenant's use of its quotas at one server."""

    num_running: int = 0
    bucket: TokenBucket | None = None  # None: its rate is not limited


class TenantQuotas:
    """The counts of all tenants of one server."""

    def __init__(self, share: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        """`share`: the part of each tenant's quotas that this server may give; 1 where no other server gives any.
        Raises InvalidArgument."""
        if not 0 < share <= 1:
            raise InvalidArgument("--quota-share must be above 0 and at most 1", field="--quota-share")
        self._share = share
        self._clock = clock
        self._usage: dict[str, _Usage] = {}
        self._fastest_per_s: float | None = None  # of one completion

    def take(
        self,
        identity: Identity,
        *,
        num_requests: int = 1,
        num_prompt_tokens: int = 0,
        max_tokens: int | None = None,
        room: int = 0,
        shrinks: bool = False,
    ) -> Ticket:
        """Takes from a tenant's quotas for a call that counts as so many requests, one for each completion.

        `num_prompt_tokens` is an estimate, `max_tokens` what the request names of each completion, `room` what one may
        have at most. With `shrinks` the call counts as no more requests than the tenant may have at all. Raises
        QuotaExceeded; nothing is taken then.
        """
        now = self._clock()
        is_counted_before = ROUTER in identity.roles
        tenant, limits = ("", UNLIMITED) if is_counted_before else (identity.tenant, identity.limits)
        usage = self._usage.get(tenant) or _Usage()
        num_requests = self._check_requests(tenant, limits, usage.num_running, num_requests, shrinks=shrinks)
        bucket = self._bucket(limits, usage.bucket, now)
        max_generated = num_requests * min(room if max_tokens is None else max_tokens, room)
        num_reserved = num_prompt_tokens + (0 if max_tokens is None else max_generated)
        if bucket is not None and num_reserved:
            _check_tokens(tenant, bucket, num_prompt_tokens, num_reserved)
            bucket.take(num_reserved)
        usage.bucket = bucket
        usage.num_running += num_requests
        self._usage[tenant] = usage
        return Ticket(self, tenant, bucket, num_requests, num_prompt_tokens, max_generated, num_reserved, now)

    def check_together(self, identity: Identity, calls: Sequence[tuple[int, int]]) -> None:
        """Checks calls that come at once, each with the requests that it counts as and the tokens that it reserves.
        Raises QuotaExceeded where they are more than the tenant may have at any time; nothing is taken."""
        if ROUTER in identity.roles:
            return
        tenant, limits = identity.tenant, identity.limits
        self._check_requests(tenant, limits, 0, sum(num_requests for num_requests, _ in calls), shrinks=False)
        if limits.tokens_per_minute is None:
            return
        per_minute = left = limits.tokens_per_minute * self._share
        for _, num_reserved in calls:
            if min(num_reserved, per_minute) > left:
                raise quota_exceeded(
                    TOKENS_PER_MINUTE,
                    f"this asks for about {sum(num for _, num in calls)} tokens at once in {len(calls)} prompts, and "
                    f"tenant {tenant!a} may have {per_minute:g} a minute here; ask for fewer",
                )
            left -= num_reserved

    def take_pooling(self, identity: Identity, num_inputs: int, num_prompt_tokens: int) -> Ticket:
        """Does what `take` does, for a call of PoolingService. It counts one for each input, as far as inputs are
        worked on at the same time, and never more than the tenant may have: large calls are not refused for their
        size."""
        num_requests = max(1, min(num_inputs, POOLING_AT_ONCE))
        return self.take(identity, num_requests=num_requests, num_prompt_tokens=num_prompt_tokens, shrinks=True)

    def _check_requests(self, tenant: str, limits: TenantLimits, num_running: int, asked: int, *, shrinks: bool) -> int:
        if limits.max_concurrent_requests is None:
            return asked
        most = max(1, math.floor(limits.max_concurrent_requests * self._share + 1e-9))  # rounded off
        asked = min(asked, most) if shrinks else asked
        if asked > most:
            raise quota_exceeded(
                CONCURRENT_REQUESTS,
                f"this counts as {asked} requests at once, one for each completion, and tenant {tenant!a} may have "
                f"{most} here; ask for fewer",
            )
        if (num_too_many := num_running + asked - most) > 0:
            counted = f"this counts as {asked} requests at once, and " if asked > 1 else ""
            wait = "one has" if num_too_many == 1 else f"{num_too_many} have"
            raise quota_exceeded(
                CONCURRENT_REQUESTS,
                f"{counted}tenant {tenant!a} has {num_running} requests under way here and may have {most}; try again "
                f"when {wait} ended",
                RETRY_S,
            )
        return asked

    def _bucket(self, limits: TenantLimits, bucket: TokenBucket | None, now: float) -> TokenBucket | None:
        if limits.tokens_per_minute is None:
            return None
        per_minute = limits.tokens_per_minute * self._share
        if bucket is None:
            return TokenBucket(per_minute, now)
        bucket.refill(per_minute, now)
        return bucket

    # --- of tickets ---------------------------------------------------------------------------------------------------

    def ended(self, tenant: str, num_requests: int) -> None:
        """Gives a ticket's requests back. Each ticket calls it once."""
        usage = self._usage[tenant]
        usage.num_running -= num_requests
        if not usage.num_running and usage.bucket is None:
            del self._usage[tenant]

    def elapsed_s(self, since_s: float) -> float:
        return self._clock() - since_s

    def note_speed(self, tokens_per_s: float) -> None:
        """Notes the speed of one completion that has ended."""
        self._fastest_per_s = max(tokens_per_s, self._fastest_per_s or 0.0)

    @property
    def fastest_per_s(self) -> float:
        return self._fastest_per_s or FASTEST_TOKENS_PER_S


@dataclass(eq=False, slots=True)
class Ticket:
    """Quotas that one call holds, from its admission to its end."""

    _quotas: TenantQuotas
    _tenant: str
    _bucket: TokenBucket | None
    _num_requests: int
    _num_prompt_tokens: int
    _max_generated: int
    _num_taken: float
    _started_s: float
    _num_generated: int = field(default=0, init=False)
    _num_completions: int = field(default=0, init=False)
    _is_counted: bool = field(default=False, init=False)  # every token was
    _is_closed: bool = field(default=False, init=False)

    @property
    def counts_tokens(self) -> bool:
        return self._bucket is not None

    def add_tokens(self, num_tokens: int) -> None:
        """Counts tokens as they are generated. From the first call on the caller counts all of them."""
        self._is_counted = True
        self._num_generated += num_tokens
        self._take_more()

    def add_completion(self, num_tokens: int) -> None:
        """Counts the tokens of a completion at its end, where they could not be counted as they were generated."""
        self._num_generated += num_tokens
        self._num_completions += 1
        self._is_counted = self._num_completions >= self._num_requests
        self._take_more()

    def set_prompt(self, num_tokens: int) -> None:
        """Sets the number of the prompt's tokens, which was estimated until now."""
        self._num_prompt_tokens = num_tokens
        self._take_more()

    def close(self, error: LoraplexError | None = None) -> None:
        """Gives back what was not used; what was generated and not counted is estimated. `error`: what ended the call.
        More calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        elapsed_s = self._quotas.elapsed_s(self._started_s)
        if error is not None and not self._num_generated and _is_servers_fault(error):
            self._num_prompt_tokens = 0
        elif not self._is_counted and (error is None or error.code not in _REFUSED):
            fastest = math.ceil(elapsed_s * self._quotas.fastest_per_s) * self._num_requests
            self._num_generated = max(self._num_generated, min(self._max_generated, fastest))
            self._take_more()
        elif self._num_generated >= MIN_SPEED_TOKENS * self._num_requests and elapsed_s > 0:
            self._quotas.note_speed(self._num_generated / self._num_requests / elapsed_s)
        if self._bucket is not None:
            self._bucket.give_back(self._num_taken - self._num_prompt_tokens - self._num_generated)
        self._quotas.ended(self._tenant, self._num_requests)

    def _take_more(self) -> None:
        num_missing = self._num_prompt_tokens + self._num_generated - self._num_taken
        if self._bucket is not None and num_missing > 0:
            self._bucket.take(num_missing)
            self._num_taken += num_missing


# Before anything was generated.
_REFUSED: Final = frozenset(
    {Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.UNIMPLEMENTED, Code.PERMISSION_DENIED}
)


def _is_servers_fault(error: LoraplexError) -> bool:
    """True where the server could not do the call for now. An answer that is too large was computed."""
    return error.retry_after_s is not None or error.code in (Code.UNAVAILABLE, Code.INTERNAL)


def _check_tokens(tenant: str, bucket: TokenBucket, num_prompt_tokens: int, num_reserved: int) -> None:
    if num_prompt_tokens > bucket.per_minute:
        raise quota_exceeded(
            TOKENS_PER_MINUTE,
            f"the prompt has about {num_prompt_tokens} tokens, and tenant {tenant!a} may have {bucket.per_minute:g} a "
            "minute here; shorten it",
        )
    wait_s = bucket.wait_s(num_reserved)
    if wait_s > 0:
        raise quota_exceeded(
            TOKENS_PER_MINUTE,
            f"tenant {tenant!a} may have {bucket.per_minute:g} tokens a minute here, and too few are left for this "
            f"request's prompt and `stopping.max_tokens`; try again in {wait_s:.1f} s",
            wait_s,
        )
