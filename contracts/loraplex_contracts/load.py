"""Load of a worker, and its forecast of waiting times.

With a forecast, the front end or the router refuses a request that would wait too long, before any work on it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex_contracts.errors import Overloaded

Flow = tuple[str, str]  # tenant and adapter id

# Usable share of the time before a deadline: estimates are inexact, and a late refusal wastes the work done so far.
SLACK_USED = 0.8
# Least share of the time before a deadline that a request may wait, even if its own work is estimated at more: the
# estimate may be wrong, and part of a stream is useful too.
LEAST_SLACK = 0.25
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# A request shorter than another by this factor does not wait for it (Admission.preempt_for_shorter).
MUCH_SHORTER = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """Estimated waiting and running times, for a refusal before the engine."""

    prompt_token_s: float
    interval_s: float  # from one token of a sequence to its next
    end_probability: float  # of a text, at each token
    max_queue_wait_s: float
    waits_s: Mapping[Flow, float]  # of the next request of each flow with waiting requests; other flows do not wait
    longest_tokens: int  # among waiting requests; much shorter ones pass them

    def check(self, flow: Flow, num_prompt: int, num_outputs: int, left_s: float | None) -> None:
        """Raises Overloaded for a request of about this size (tokens) and remaining time that would wait too long. The
        engine decides about the others."""
        wait_s = self.waits_s.get(flow)
        if wait_s is None or MUCH_SHORTER * (num_prompt + num_outputs) <= self.longest_tokens:
            return
        allowed_s = self.max_queue_wait_s or math.inf
        if left_s is not None:
            own_s = (
                num_prompt * self.prompt_token_s + expected_tokens(num_outputs, self.end_probability) * self.interval_s
            )
            allowed_s = slack_s(left_s, own_s)
        if wait_s > allowed_s:
            raise overloaded(wait_s, allowed_s, has_deadline=left_s is not None)


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a worker. Running and queued count completions: a request of `n` counts n times."""

    num_running: int = 0
    num_queued: int = 0
    # Upper bound of the work ahead: prompt tokens not yet computed and output tokens still allowed.
    pending_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    block_tokens: int = 0
    # Slots for recurrent states, those that can be taken, and those of them that are snapshots; 0 where there are none.
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_state_snapshots: int = 0
    max_running: int = 0
    # Since the start.
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0  # of requests that have begun
    num_cached_tokens: int = 0  # of those, out of the prefix cache
    num_output_tokens: int = 0
    # Draft tokens and accepted draft tokens since the start, by proposer.
    drafted: Mapping[str, int] = field(default_factory=dict[str, int])
    accepted: Mapping[str, int] = field(default_factory=dict[str, int])
    forecast: Forecast | None = None  # while requests wait
    # Since the start: requests that found all their adapters on the device when it was their turn, and those that did
    # not.
    num_adapter_hits: int = 0
    num_adapter_misses: int = 0
    # In which the next request could not begin for want of KV blocks, or of a slot for its state.
    kv_wait_s: float = 0.0


def has_place(num_all: int, num_own: int, num_tenants: int, most: int) -> bool:
    """True where a queue of `most` places takes one more request of a tenant that has `num_own` of `num_all`: while a
    place is free, and beyond that while the tenant has less than an equal share. So a full queue is full for those that
    filled it."""
    return num_all < most or num_own * max(1, num_tenants) < most


def overloaded(wait_s: float, allowed_s: float, *, has_deadline: bool) -> Overloaded:
    retry_after_s = min(max(wait_s - allowed_s, MIN_RETRY_S), MAX_RETRY_S)
    why = "its deadline leaves" if has_deadline else "--max-queue-wait allows"
    return Overloaded(
        f"the server is overloaded: the request would wait for about {wait_s:.1f} s, and {why} {allowed_s:.1f} s; "
        f"try again in {retry_after_s:.1f} s or on another worker",
        resource="queue",
        retry_after_s=retry_after_s,
    )


def slack_s(left_s: float, own_s: float) -> float:
    return SLACK_USED * max(left_s - own_s, LEAST_SLACK * left_s)


def expected_tokens(num_allowed: int, end_probability: float) -> float:
    """Expected length of a text of at most `num_allowed` tokens that ends at each with this probability."""
    if not end_probability:
        return float(num_allowed)
    return (1.0 - (1.0 - end_probability) ** num_allowed) / end_probability
