"""State machines of requests and sequences, as tables of transitions.

A request is what a client sent; each of its `n` completions is a sequence. The scheduler owns both; the runner has a
mirror of the running ones' tokens and block tables, fed by plans alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.load import Flow
from loraplex_contracts.plan import Span, StepPlan
from loraplex_contracts.request import PositionLogprobs, Request, SamplingParams
from loraplex_server.kv.keys import KeyChain


class IllegalTransition(RuntimeError):
    """A state machine was asked for a step that its table does not have. Nothing was changed."""


class SequenceStatus(Enum):
    HELD = "held"  # its sibling computes the prompt that both share
    WAITING = "waiting"  # for a row, blocks, its adapter
    RUNNING = "running"  # has all three
    PREEMPTED = "preempted"  # waits again, after giving its blocks to others
    FINISHED = "finished"


_S = SequenceStatus
SEQUENCE_TRANSITIONS: Mapping[SequenceStatus, frozenset[SequenceStatus]] = {
    _S.HELD: frozenset({_S.WAITING, _S.FINISHED}),
    # Back to HELD when the prompt that it was to share had to go and another sibling computes it again.
    _S.WAITING: frozenset({_S.RUNNING, _S.HELD, _S.FINISHED}),
    _S.RUNNING: frozenset({_S.PREEMPTED, _S.FINISHED}),
    _S.PREEMPTED: frozenset({_S.RUNNING, _S.FINISHED}),
    _S.FINISHED: frozenset(),
}


class RequestPhase(Enum):
    QUEUED = "queued"  # nothing of it has run
    ACTIVE = "active"
    ENDED = "ended"  # its terminal event is out


_P = RequestPhase
REQUEST_TRANSITIONS: Mapping[RequestPhase, frozenset[RequestPhase]] = {
    _P.QUEUED: frozenset({_P.ACTIVE, _P.ENDED}),
    _P.ACTIVE: frozenset({_P.ENDED}),
    _P.ENDED: frozenset(),
}


@dataclass(slots=True)
class StepSize:
    """What a step did."""

    num_rows: int  # that decode
    num_prompt_tokens: int
    is_full: bool  # somebody had to wait for a row, for blocks or for the step's budget


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan whose result has not come yet. Owned by the scheduler, filled when the plan is made."""

    plan: StepPlan
    # Each span with its sequence: a result finds the object that it is for, not whoever has its name by then.
    spans: list[tuple[SequenceState, Span]]
    # Adapter leases that end when the plan has run: until then the device reads the slot.
    ended_leases: list[AdapterKey] = field(default_factory=list[AdapterKey])
    size: StepSize = field(default_factory=lambda: StepSize(0, 0, False))


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from `add` to its terminal event."""

    request: Request
    adapter_key: AdapterKey | None
    # Tokens that a completion may have in all: the least of max_tokens, the context and the whole KV cache.
    max_total_tokens: int
    num_prompt_tokens: int
    # Not to be sampled while below min_tokens; ends a completion from then on.
    stop_ids: frozenset[int]
    keeps_hidden: bool = False
    queued_s: float = 0.0  # since when it waits or has waited
    start_tag: float = 0.0  # its place in the fair order (FairClock)
    phase: RequestPhase = RequestPhase.QUEUED
    sequences: list[SequenceState] = field(default_factory=list["SequenceState"])
    num_open: int = 0  # sequences that have not finished
    # The sequence that is to compute the prompt for all; None once it is computed.
    leader: SequenceState | None = None
    # Blocks of the computed prompt, kept until all siblings have entered. One reference on each.
    shared_prompt: list[int] | None = None
    # Positions 1, 2, ... so far; only where the request wants them.
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list[PositionLogprobs])
    prompt_logprobs_sent: bool = False
    num_cached_tokens: int = 0
    # Since when its adapter has had no slot while it was its turn, and how many had been admitted by then.
    blocked_since_s: float | None = None
    num_admitted_when_blocked: int = 0

    def move(self, to: RequestPhase) -> None:
        """Raises IllegalTransition, and changes nothing, when the table does not have it."""
        if to not in REQUEST_TRANSITIONS[self.phase]:
            raise IllegalTransition(f"request {self.request.request_id}: {self.phase.value} -> {to.value}")
        self.phase = to

    @property
    def lora_key(self) -> AdapterKey | None:
        """The adapter that its sequences need in a slot to run; None for heads alone, which only draft."""
        return None if self.adapter_key is None or self.adapter_key.kind == "medusa" else self.adapter_key

    @property
    def flow(self) -> Flow:
        return self.request.tenant, self.request.adapter_id

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some are still to be computed."""
        return self.request.output.prompt_logprobs and len(self.prompt_logprobs) < self.num_prompt_tokens - 1


@dataclass(slots=True, eq=False)
class SequenceState:
    """One completion. Fields under "running" mean something in that status only."""

    sequence_id: str
    request: RequestState
    index: int
    # Least first: priority, start tag, serial of the request, index.
    order: tuple[int, float, int, int]
    sampling: SamplingParams
    num_prompt_tokens: int
    max_total_tokens: int
    token_ids: list[int]  # prompt and the output known so far
    chain: KeyChain | None  # None: no prefix caching
    status: SequenceStatus = SequenceStatus.WAITING
    has_entered: bool = False  # at least once

    # Running. `num_computed` is the scheduler's view: it runs ahead of the device, and is taken back where drafts miss.
    row: int = -1
    adapter_slot: int | None = None
    entered_s: float = 0.0
    block_ids: list[int] = field(default_factory=list[int])
    num_sent_blocks: int = 0  # that the runner has in the row's table
    num_computed: int = 0
    num_published: int = 0  # blocks looked at for the prefix cache

    # In flight: survives a preemption, because the result still counts.
    num_coming: int = 0  # tokens that a plan under way will sample, where that number is certain
    is_draft_coming: bool = False  # a draft is being verified: nothing can be planned before its result
    last_plan: InFlight | None = None  # the latest plan that it is in, while that is under way

    def move(self, to: SequenceStatus) -> None:
        """Raises IllegalTransition, and changes nothing, when the table does not have it."""
        if to not in SEQUENCE_TRANSITIONS[self.status]:
            raise IllegalTransition(f"sequence {self.sequence_id}: {self.status.value} -> {to.value}")
        self.status = to

    @property
    def num_tokens(self) -> int:
        """Known and certainly coming ones."""
        return len(self.token_ids) + self.num_coming

    @property
    def num_left(self) -> int:
        """Output tokens that it may still have."""
        return self.max_total_tokens - len(self.token_ids)

    @property
    def is_waiting(self) -> bool:
        """Whether it stands in the queue."""
        return self.status is SequenceStatus.WAITING or self.status is SequenceStatus.PREEMPTED
