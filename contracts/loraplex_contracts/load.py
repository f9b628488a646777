"""Load of a worker, and its forecast of waiting times.

With a forecast a request is refused where it is met first: before it is tokenized, or sent on. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from loraplex_contracts.errors import Overloaded

Flow = tuple[str, str]  # tenant and adapter id

# Of the time that a deadline leaves: estimates are not exact, and who is refused too late has cost a row for nothing.
SLACK_USED = 0.8
# A request whose own work is estimated at more than its deadline may wait all the same for this part of it: the
# estimate may be wrong, and a stream is good for something before its end.
LEAST_SLACK = 0.25
MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0
# A request this much shorter than another does not wait for it (Admission.preempt_for_shorter).
MUCH_SHORTER = 2


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long requests would wait and take, as plain numbers: for whoever is to refuse them before the engine does."""

    prompt_token_s: float
    interval_s: float  # from one token of a sequence to its next
    end_probability: float  # of a text, at each token
    max_queue_wait_s: float
    waits_s: Mapping[Flow, float]  # of the next request of each flow that has some waiting; others wait for nobody
    longest_tokens: int  # of those that wait; who is much shorter passes

    def check(self, flow: Flow, num_prompt: int, num_outputs: int, left_s: float | None) -> None:
        """Raises Overloaded for a request of about that size, with so much time left. The engine decides about those
        that this lets pass."""
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
    """How busy a worker is. Running and queued ones are completions: a request of `n` counts n times."""

    num_running: int = 0
    num_queued: int = 0
    # Work ahead at most: prompt tokens not yet computed and output tokens still allowed.
    pending_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    max_running: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    # Draft tokens since the start, by proposer, and how many of them the target accepted.
    drafted: Mapping[str, int] = field(default_factory=dict[str, int])
    accepted: Mapping[str, int] = field(default_factory=dict[str, int])
    forecast: Forecast | None = None  # while requests wait


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
    """Of a text that may have so many and ends at each with that probability."""
    if not end_probability:
        return float(num_allowed)
    return (1.0 - (1.0 - end_probability) ** num_allowed) / end_probability
