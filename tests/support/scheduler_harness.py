"""Scheduler harness: drives steps and checks every event against the rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import Draft, GrammarMatcher, StepPlan
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    OutputParams,
    PositionLogprobs,
    PromptLogprobs,
    Request,
    RequestFailed,
    SamplingParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.kv.states import StatePool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler
from support.scheduler_fakes import EOS, Drafts, Expected, FakeResidency, FakeRunner, Owner, expect


def make_request(
    request_id: str,
    prompt: Sequence[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    min_tokens: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    ignore_eos: bool = True,
    seed: int = 7,
    prompt_logprobs: bool = False,
    **fields: object,
) -> Request:
    request = Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        stopping=StoppingParams(max_tokens, min_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        output=OutputParams(prompt_logprobs=prompt_logprobs),
    )
    return replace(request, **fields)  # type: ignore[arg-type]


class RequestLog:
    """The events of one request. Raises AssertionError at the first that breaks a rule."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.admitted: Admitted | None = None
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.logprobs: dict[int, list[PositionLogprobs]] = defaultdict(list)
        self.ends: dict[int, CompletionEnd] = {}
        self.error: LoraplexError | None = None
        self.waits_s: tuple[float | None, float] | None = None  # queue and adapter, of one that failed
        self.prompt_logprobs: tuple[PositionLogprobs, ...] = ()
        self.num_drafted = 0
        self.num_accepted = 0

    @property
    def is_over(self) -> bool:
        return self.error is not None or len(self.ends) == self.request.n

    def push(self, event: Event) -> None:
        assert not self.is_over, f"{event} after the terminal event"
        match event:
            case Admitted():
                assert self.admitted is None
                assert not self.tokens
                self.admitted = event
            case PromptLogprobs():
                assert self.request.output.prompt_logprobs
                assert not self.tokens
                self.prompt_logprobs += event.logprobs
            case Tokens():
                assert self.admitted is not None
                assert event.index not in self.ends
                assert event.token_ids
                is_first = not self.tokens[event.index]
                assert event.can_wait == (not is_first and not self.request.stopping.stop)
                assert len(event.logprobs) == len(event.token_ids)
                if self.request.output.prompt_logprobs:
                    assert len(self.prompt_logprobs) == len(self.request.prompt_token_ids) - 1
                self.tokens[event.index] += event.token_ids
                self.logprobs[event.index] += event.logprobs
                self.num_drafted += event.num_drafted
                self.num_accepted += event.num_accepted
            case CompletionEnd():
                assert event.index not in self.ends
                self.ends[event.index] = event
            case RequestFailed():
                self.error, self.waits_s = event.error, (event.queue_s, event.adapter_wait_s)


def has_work(scheduler: Scheduler) -> bool:
    """True if a request still waits or runs."""
    load = scheduler.load()
    return load.num_running + load.num_queued > 0


def num_cached_blocks(pool: BlockPool) -> int:
    """Blocks in the prefix cache, held or idle."""
    return len(pool._block_of)  # pyright: ignore[reportPrivateUsage]


class Harness:
    """Scheduler, fakes and a clock. `depth` 2 makes the next plan before the last one has run."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_running: int = 8,
        max_step_tokens: int = 32,
        max_context_tokens: int = 128,
        prefix_caching: bool = True,
        num_slots: int = 2,
        num_states: int = 0,
        load_polls: int = 0,
        offer_polls: int = 8,
        depth: int = 1,
        proposer: Callable[[Harness], Drafts] | None = None,
        residency: FakeResidency | None = None,
        rope: RopeScaling | None = None,
        **config: int | float,
    ) -> None:
        self.config = SchedulerConfig(
            max_running=max_running,
            max_step_tokens=max_step_tokens,
            max_context_tokens=max_context_tokens,
            rope=rope,
            **config,  # type: ignore[arg-type]
        )
        self.depth = depth
        self.blocks = BlockPool(num_blocks, block_size, prefix_caching=prefix_caching)
        self.residency = residency or FakeResidency(num_slots, load_polls, offer_polls)
        self.states = StatePool(num_states) if num_states else None
        self.scheduler = Scheduler(self.config, self.blocks, self.residency, EOS, self.states)
        self.runner = FakeRunner(
            num_blocks, block_size, max_running, max_step_tokens, self.residency, self._owner_of, num_states, rope
        )
        self.now = 0.0
        self.logs: dict[str, RequestLog] = {}
        self.plans: list[StepPlan] = []
        self._keys: dict[str, Owner] = {}
        self._waiting_plan: StepPlan | None = None  # made, not executed
        self._proposer = proposer

    def _owner_of(self, sequence_id: str) -> tuple[Request, Owner]:
        request_id = sequence_id.rsplit("#", 1)[0]
        return self.logs[request_id].request, self._keys[request_id]

    def add(self, request: Request, key: AdapterKey | None = None, matcher: GrammarMatcher | None = None) -> RequestLog:
        self.scheduler.add(request, key, self.now, matcher=matcher)
        self.logs[request.request_id] = RequestLog(request)
        self._keys[request.request_id] = key
        return self.logs[request.request_id]

    def add_mixture(self, request: Request, keys: tuple[AdapterKey, ...]) -> None:
        self.scheduler.add(request, None, self.now, mixture=tuple((key, 0.5) for key in keys))
        self.logs[request.request_id] = RequestLog(request)
        self._keys[request.request_id] = keys

    def cancel(self, request_id: str, error: LoraplexError) -> None:
        self.take(self.scheduler.cancel(request_id, error, self.now))

    def take(self, events: list[Event]) -> None:
        for event in events:
            self.logs[event.request_id].push(event)

    def turn(self, seconds: float = 0.01) -> StepPlan | None:
        """One turn of the loop; returns the plan that it made."""
        self.now += seconds
        self.residency.poll()
        proposed = self._proposer(self) if self._proposer is not None else {}
        drafts = {sequence_id: Draft(tokens, "test") for sequence_id, tokens in proposed.items()}
        plan = self.scheduler.schedule(self.now, drafts)
        if plan is not None:
            self.plans.append(plan)
        if self.depth == 1:
            self._finish(plan)
        else:
            # The older plan runs only now: whatever the newer one has changed must not matter to it.
            self._finish(self._waiting_plan)
            self._waiting_plan = plan
        self.take(self.scheduler.take_events())
        self.scheduler.check_integrity()
        return plan

    def _finish(self, plan: StepPlan | None) -> None:
        if plan is not None:
            self.take(self.scheduler.apply(plan, self.runner.execute(plan), self.now))

    def run(self, max_turns: int = 2000) -> None:
        """Takes turns until nothing is left to do; then everything must be accounted for."""
        for _ in range(max_turns):
            if not self.has_work:
                break
            self.turn()
        assert not self.has_work, f"not done after {max_turns} turns: {self.scheduler.load()}"
        self.check_idle()

    @property
    def has_work(self) -> bool:
        return self._waiting_plan is not None or has_work(self.scheduler)

    def check_idle(self) -> None:
        assert all(log.is_over for log in self.logs.values()), "a request without a terminal event"
        self.scheduler.check_integrity()
        assert self.residency.refs == {}, "an adapter reference leaked"
        assert self.blocks.num_free == self.blocks.num_blocks, "a block leaked"
        assert self.states is None or self.states.num_free == self.states.num_slots, "a state slot leaked"
        load = self.scheduler.load()
        assert (load.num_running, load.num_queued, load.pending_tokens) == (0, 0, 0)

    def expected(self, request_id: str, index: int = 0) -> Expected:
        request = self.logs[request_id].request
        num_kv_tokens = self.blocks.num_blocks * self.blocks.block_size
        max_total_tokens = min(self.config.max_context_tokens, num_kv_tokens + 1)
        return expect(request, self._keys[request_id], index, max_total_tokens, self.config.rope)

    def check_output(self, request_id: str) -> None:
        """The request ended well and every completion is what it would be alone."""
        log = self.logs[request_id]
        assert log.error is None, log.error
        for index in range(log.request.n):
            expected = self.expected(request_id, index)
            assert tuple(log.tokens[index]) == expected.token_ids
            assert tuple(log.logprobs[index]) == expected.logprobs
            assert log.ends[index].reason.value == expected.reason
            if log.request.output.prompt_logprobs:
                assert log.prompt_logprobs == expected.prompt_logprobs

    def check_outputs(self) -> None:
        for request_id in self.logs:
            self.check_output(request_id)
