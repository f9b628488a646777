"""Overload: who is refused at once, because it would wait for too long.

The expected wait of a request is the work that waits ahead of it, in the fair order, over the measured speed. It is
held against the time that the request's deadline leaves beside its own work, or against the server's bound where it has
no deadline. Nobody is refused while nothing is measured, or while nothing waits ahead of it; so a measurement that is
wrong is made again before it can do harm for long. Decisions only; owns nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from loraplex_contracts.load import MUCH_SHORTER, Forecast, overloaded, slack_s
from loraplex_contracts.request import Request
from loraplex_server.scheduler.fair_queue import FairClock, Flow
from loraplex_server.scheduler.sequence_table import Roster
from loraplex_server.scheduler.states import RequestState, SequenceState
from loraplex_server.scheduler.step_speed import Speed


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Refuses what would wait for too long."""

    max_queue_wait_s: float
    roster: Roster
    clock: FairClock
    speed: Speed

    def check(self, request: Request, num_outputs: int, now: float) -> None:
        """Raises Overloaded. `num_outputs`: output tokens that each completion may have at most."""
        if not len(self.roster.waiting) or not self.speed.is_work_known:
            return
        allowed_s = self._allowed_s(request, num_outputs, now)
        if allowed_s is None or self._whole_queue_s() <= allowed_s:
            return
        wait_s = self.wait_s(request, num_outputs)
        if wait_s <= allowed_s:
            return
        raise overloaded(wait_s, allowed_s, has_deadline=request.deadline_s is not None)

    def forecast(self) -> Forecast | None:
        """None while nobody has to wait, or nothing is known."""
        if not len(self.roster.waiting) or not self.speed.is_work_known:
            return None
        starts: list[float] = []
        waits_s: list[float] = []
        wait_s, longest, flows = 0.0, 0, set[Flow]()
        for seq in self.roster.waiting:
            if seq.request.request.priority:
                continue  # lower ones are behind all of these; higher ones the engine counts when it decides
            num_prompt, num_output = _work(seq)
            wait_s += self.speed.work_s(num_prompt, self.speed.num_outputs(num_output))
            longest = max(longest, num_prompt + num_output)
            starts.append(seq.order[1])
            waits_s.append(wait_s)
            flows.add(seq.request.flow)
        places = {flow: bisect_right(starts, self.clock.start_of(flow)) for flow in flows}
        return Forecast(
            prompt_token_s=self.speed.work_s(1, 0),
            interval_s=self.speed.interval_s(len(self.roster.running) + 1),
            end_probability=self.speed.end_probability,
            max_queue_wait_s=self.max_queue_wait_s,
            waits_s={flow: waits_s[place - 1] for flow, place in places.items() if place},
            longest_tokens=longest,
        )

    def wait_s(self, request: Request, num_outputs: int) -> float:
        """How long the request would wait to begin: for those ahead of it in the order, each for all of its work, but
        for those that it would pass for being much shorter."""
        order = (-request.priority, self.clock.start_of((request.tenant, request.adapter_id)))
        own = len(request.prompt_token_ids) + num_outputs * request.n
        prompt, output = 0, 0.0
        for seq in self.roster.waiting:
            if seq.order[:2] > order:
                break
            num_prompt, num_output = _work(seq)
            if num_prompt + num_output >= MUCH_SHORTER * own:
                num_prompt, num_output = 0, own
            prompt += num_prompt
            output += self.speed.num_outputs(num_output)
        return self.speed.work_s(prompt, output)

    def is_too_late(self, state: RequestState, now: float) -> bool:
        """Whether a request that has waited would end behind its deadline if it began now, even with half as many
        beside it, and would not have if it had begun when it came."""
        deadline_s = state.request.deadline_s
        if deadline_s is None or not self.speed.is_known:
            return False
        num_rows = (len(self.roster.running) + 1) // 2
        own_s = self._own_s(state.num_prompt_tokens, state.max_total_tokens - state.num_prompt_tokens, num_rows)
        return deadline_s - now < own_s <= deadline_s - state.queued_s

    def _whole_queue_s(self) -> float:
        """At most."""
        num_prompt = self.roster.num_waiting_prompt_tokens
        return self.speed.work_s(num_prompt, self.roster.num_waiting_tokens - num_prompt)

    def _allowed_s(self, request: Request, num_outputs: int, now: float) -> float | None:
        if request.deadline_s is None:
            return self.max_queue_wait_s or None
        left_s = request.deadline_s - now
        return slack_s(left_s, self._own_s(len(request.prompt_token_ids), num_outputs, len(self.roster.running) + 1))

    def _own_s(self, num_prompt: int, num_outputs: int, num_rows: int) -> float:
        """What one completion is likely to take among so many, once it has begun."""
        return self.speed.work_s(num_prompt, 0) + self.speed.num_outputs(num_outputs) * self.speed.interval_s(num_rows)


def _work(seq: SequenceState) -> tuple[int, int]:
    """Tokens to compute and tokens to make of a sequence that waits, with those of siblings that wait for it."""
    num_siblings = seq.request.num_open if seq.request.leader is seq else 1
    return len(seq.token_ids), seq.num_left * num_siblings
