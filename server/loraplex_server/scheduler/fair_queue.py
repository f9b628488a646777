"""Start-time fair queueing: whose turn it is when more is asked for than can run.

A flow is what one tenant asks of one adapter. Each request gets a start tag when it comes: where its flow's last one
ends on a clock that counts tokens, or the clock's present if the flow has asked for less than its share. Those with the
lowest tags go first, so a flow that floods waits for itself, and one that asks for little goes next. A tenant's share
is divided among its adapters. Pure.
"""

from __future__ import annotations

from collections import Counter

from loraplex_contracts.load import Flow


class FairClock:
    """Owner of the clock and of where each flow's last request ends on it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Flow, float] = {}
        self._num_queued: Counter[Flow] = Counter()
        self._num_flows: Counter[str] = Counter()  # of a tenant, that have something queued
        self._prune_at = 64

    @property
    def num_flows(self) -> int:
        """That it remembers."""
        return len(self._ends)

    def start_of(self, flow: Flow) -> float:
        """The tag that the flow's next request would get."""
        return max(self._now, self._ends.get(flow, 0.0))

    def enqueue(self, flow: Flow, num_tokens: int) -> float:
        """The start tag of a request that has come. Every one is dequeued once."""
        start = self.start_of(flow)
        self._num_queued[flow] += 1
        if self._num_queued[flow] == 1:
            self._num_flows[flow[0]] += 1
        self._ends[flow] = start + num_tokens * self._num_flows[flow[0]]
        return start

    def dequeue(self, flow: Flow) -> None:
        """One of the flow's requests waits no longer, whatever became of it."""
        self._num_queued[flow] -= 1
        if not self._num_queued[flow]:
            del self._num_queued[flow]
            self._num_flows[flow[0]] -= 1
            if not self._num_flows[flow[0]]:
                del self._num_flows[flow[0]]

    def begin(self, start: float) -> None:
        """A request with this tag begins to run: the clock goes on to it."""
        self._now = max(self._now, start)
        if len(self._ends) > self._prune_at:
            # A flow whose last request ends in the past is like one that never was.
            self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}
            self._prune_at = 2 * len(self._ends) + 64

    def refund(self, flow: Flow, num_tokens: int) -> None:
        """A completion of the flow ended with so many tokens less than it might have had."""
        if flow in self._ends:
            self._ends[flow] = max(self._now, self._ends[flow] - num_tokens)
