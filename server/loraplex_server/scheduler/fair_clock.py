"""Start-time fair queueing: the clock that orders requests of tenants and adapters."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from loraplex_contracts.load import Flow


class Place(NamedTuple):
    """A request's place on the clock."""

    start: float  # its tag: the lowest go first
    num_flows: int  # of its tenant that waited then, its own included: each of its tokens counts so often
    opens_flow: bool


class FairClock:
    """Start-time fair queueing. Owns the clock and the point on it where each flow's last request ends.

    A flow is what one tenant asks of one adapter. Each request gets a start tag when it comes: the end of its flow's
    last one on a clock that counts tokens, or the clock's present if the flow has asked for less than its share. The
    lowest tags go first, so a flow that floods waits for itself, and one that asks for little goes next. A tenant's
    share is divided among its adapters: the more of them wait, the later each one's next tag. Requests that open a flow
    wait for each other, as if they were one flow of their tenant's: else a tenant with another adapter for each request
    would always be in the present, which then never goes on.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Flow, float] = {}
        self._openings: dict[str, float] = {}  # where each tenant's last request ends that opened a flow
        self._num_queued: Counter[Flow] = Counter()
        self._num_of_tenant: Counter[str] = Counter()  # requests that wait
        self._num_flows: Counter[str] = Counter()  # of a tenant, that have something queued
        self._prune_at = 64

    def start_of(self, flow: Flow) -> float:
        """The tag that the flow's next request would get."""
        end = self._openings.get(flow[0], 0.0) if self._is_idle(flow) else self._ends.get(flow, 0.0)
        return max(self._now, end)

    def num_tenants_with(self, tenant: str) -> int:
        """Number of tenants that have something waiting, `tenant` counted in any case."""
        return len(self._num_flows) + (tenant not in self._num_flows)

    def num_queued_of(self, tenant: str) -> int:
        return self._num_of_tenant[tenant]

    def enqueue(self, flow: Flow, num_tokens: int) -> Place:
        """Queues a request that has come, and returns its place. Every one is dequeued once."""
        start, opens_flow = self.start_of(flow), self._is_idle(flow)
        if opens_flow:
            self._openings[flow[0]] = start + num_tokens
        self._num_queued[flow] += 1
        self._num_of_tenant[flow[0]] += 1
        if self._num_queued[flow] == 1:
            self._num_flows[flow[0]] += 1
        num_flows = self._num_flows[flow[0]]
        self._ends[flow] = start + num_tokens * num_flows
        return Place(start, num_flows, opens_flow)

    def dequeue(self, flow: Flow) -> None:
        """Takes one of the flow's requests out of the queue: it begins or has ended."""
        self._num_queued[flow] -= 1
        self._num_of_tenant[flow[0]] -= 1
        if not self._num_queued[flow]:
            del self._num_queued[flow]
            self._num_flows[flow[0]] -= 1
            if not self._num_flows[flow[0]]:
                del self._num_flows[flow[0]]
                del self._num_of_tenant[flow[0]]

    def begin(self, start: float) -> None:
        """Moves the clock on to the tag of a request that begins to run."""
        self._now = max(self._now, start)
        if len(self._ends) > self._prune_at:
            # A flow whose last request ends in the past is like one that never was.
            self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}
            self._openings = {tenant: end for tenant, end in self._openings.items() if end > self._now}
            self._prune_at = 2 * len(self._ends) + 64

    def charge(self, flow: Flow, place: Place, num_tokens: int) -> None:
        """Charges the flow for so many more tokens of a request, or gives them back where they are below 0. `place`: of
        the request. Those that wait are moved by `moved`."""
        # A flow whose end has passed may be forgotten while its texts run.
        self._ends[flow] = max(self._now, self._ends.get(flow, place.start) + num_tokens * place.num_flows)
        if place.opens_flow:
            self._openings[flow[0]] = max(self._now, self._openings.get(flow[0], place.start) + num_tokens)

    def moved(self, place: Place, num_tokens: int) -> Place:
        """The place of a request that waits, so many tokens later, or earlier where they are below 0."""
        return Place(max(self._now, place.start + num_tokens), place.num_flows, place.opens_flow)

    def _is_idle(self, flow: Flow) -> bool:
        """True if nothing of the flow waits and it has asked for no more than its share: its next request opens it
        again."""
        return flow not in self._num_queued and self._ends.get(flow, 0.0) <= self._now
