"""Requests and sequences, and the table that owns their rows, blocks and adapter leases.

A request is what a client sent; each of its `n` completions is a sequence. The scheduler owns both; the runner has a
mirror of the running ones' tokens and block tables, fed by plans alone. The table is mechanism only: what to admit,
what to preempt and when a completion ends is decided elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Protocol

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.load import Flow
from loraplex_contracts.plan import AdapterUse, BlockCopy, GrammarMatcher, NewSequence, Span, StepPlan
from loraplex_contracts.request import PositionLogprobs, Request, SamplingParams
from loraplex_server.kv.blocks import BlockPool, KeyChain


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
    matcher: GrammarMatcher | None = None  # of its grammar; behind the last of `token_ids`
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


class FairClock:
    """Start-time fair queueing. Owns the clock and the point on it where each flow's last request ends.

    A flow is what one tenant asks of one adapter. Each request gets a start tag when it comes: the end of its flow's
    last one on a clock that counts tokens, or the clock's present if the flow has asked for less than its share. The
    lowest tags go first, so a flow that floods waits for itself, and one that asks for little goes next. A tenant's
    share is divided among its adapters.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Flow, float] = {}
        self._num_queued: Counter[Flow] = Counter()
        self._num_flows: Counter[str] = Counter()  # of a tenant, that have something queued
        self._prune_at = 64

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
        """One of the flow's requests waits no longer: it begins or has ended."""
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


class AdapterLeases(Protocol):
    """What the scheduler needs of the adapter cache, and all that it may touch."""

    def acquire(self, key: AdapterKey) -> int | None:
        """Takes a reference for one running sequence and returns the device slot.

        None when the weights are not on the device now: no reference is taken, and a load is wanted from here on.
        """
        ...

    def release(self, key: AdapterKey) -> None:
        """Gives one reference back."""
        ...

    def failure(self, key: AdapterKey) -> Exception | None:
        """Why this key cannot come to the device at all (source gone, does not fit), or None."""
        ...


class OrderedSequences(list[SequenceState]):
    """Sequences, the most entitled first: by priority, then in the fair order (FairClock)."""

    def add(self, seq: SequenceState) -> None:
        insort(self, seq, key=attrgetter("order"))

    def remove(self, seq: SequenceState) -> None:
        at = bisect_left(self, seq.order, key=attrgetter("order"))
        assert self[at] is seq, f"{seq.sequence_id} is not in this list"
        del self[at]


@dataclass(frozen=True, slots=True)
class Prefix:
    """The tokens of an entering sequence that are computed already."""

    num_computed: int
    shared: list[int]  # blocks to take a reference on
    copied: int | None  # the block behind them, to be copied: only its first part is shared
    num_new_blocks: int  # that the rest of the known tokens needs


class SequenceTable:
    """Every method leaves lists, rows and references consistent."""

    def __init__(self, max_running: int, blocks: BlockPool, adapters: AdapterLeases) -> None:
        self.blocks = blocks
        self.max_running = max_running
        self.requests: dict[str, RequestState] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self.released_rows: list[int] = []  # since the last plan, which tells the runner
        self.shared_prompts: dict[RequestState, None] = {}  # requests with one, in the order of their making
        self.num_queued_requests = 0
        self.num_waiting_tokens = 0  # of work ahead, for all sequences that do not run
        self.num_waiting_prompt_tokens = 0  # among them
        self.clock = FairClock()
        self.num_preemptions = 0
        self._adapters = adapters
        self._free_rows = list(range(max_running))  # a heap: low rows first keeps the batch dense
        self._adapter_refs: Counter[AdapterKey] = Counter()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: RequestState) -> None:
        """Takes in a new request; its first sequence waits to compute the prompt for all."""
        self.requests[request.request.request_id] = request
        self.num_queued_requests += 1
        num_outputs = len(request.sequences) * (request.max_total_tokens - request.num_prompt_tokens)
        start_tag = self.clock.enqueue(request.flow, request.num_prompt_tokens + num_outputs)
        request.start_tag = start_tag
        for seq in request.sequences:
            seq.order = (seq.order[0], start_tag, *seq.order[2:])
        request.num_open = len(request.sequences)
        request.leader = request.sequences[0]
        for seq in request.sequences:
            self._count_waiting(seq, 1)
        self.waiting.add(request.leader)

    def begin(self, request: RequestState) -> None:
        """Its first sequence enters."""
        request.move(RequestPhase.ACTIVE)
        self.num_queued_requests -= 1
        self.clock.dequeue(request.flow)
        self.clock.begin(request.start_tag)

    def end_request(self, request: RequestState) -> None:
        """Frees all that the request still has. Its terminal event goes out with this, exactly once."""
        num_unused = sum(seq.num_left for seq in request.sequences if seq.status is not SequenceStatus.FINISHED)
        if request.phase is RequestPhase.QUEUED:
            self.num_queued_requests -= 1
            self.clock.dequeue(request.flow)
            num_unused += request.num_prompt_tokens
        self.clock.refund(request.flow, num_unused)
        request.move(RequestPhase.ENDED)
        request.leader = None
        for seq in request.sequences:
            if seq.status is not SequenceStatus.FINISHED:
                self._finish(seq)
        if request.shared_prompt is not None:
            self._release_shared_prompt(request)
        request.sequences.clear()  # no cycle: an ended request goes without waiting for the garbage collector
        del self.requests[request.request.request_id]

    # --- sequences ----------------------------------------------------------------------------------------------------

    def enter(self, seq: SequenceState, prefix: Prefix, now: float) -> tuple[NewSequence, BlockCopy | None]:
        """Gives a waiting sequence a row and blocks. The caller has made sure of both, and has leased its adapter.

        Returns what the runner needs: the sequence, and the copy of its prefix's last block if that is half full.
        """
        assert seq.last_plan is None, "a result of its last stay is still to come"
        self.waiting.remove(seq)
        seq.move(SequenceStatus.RUNNING)
        self.running.add(seq)
        seq.entered_s = now
        self._count_waiting(seq, -1)
        self.blocks.share(prefix.shared)
        new_block_ids = self.blocks.allocate(prefix.num_new_blocks)
        seq.row = heapq.heappop(self._free_rows)
        seq.block_ids, seq.num_sent_blocks = prefix.shared + new_block_ids, 0
        seq.num_computed, seq.num_published = prefix.num_computed, 0
        seq.has_entered = True
        copy = None if prefix.copied is None else BlockCopy(prefix.copied, new_block_ids[0])
        request = seq.request.request
        min_tokens = request.stopping.min_tokens
        entered = NewSequence(
            sequence_id=seq.sequence_id,
            row=seq.row,
            token_ids=tuple(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            sampling=seq.sampling,
            output=request.output,
            adapters=() if seq.adapter_slot is None else (AdapterUse(seq.adapter_slot),),
            min_tokens=min_tokens,
            banned_until_min=seq.request.stop_ids if min_tokens else frozenset(),
            keeps_hidden=seq.request.keeps_hidden,
            matcher=seq.matcher,
            pooling=request.pooling,
        )
        return entered, copy

    def preempt(self, seq: SequenceState) -> None:
        """Takes row, blocks and adapter lease away; the sequence waits again, with the tokens it has."""
        seq.move(SequenceStatus.PREEMPTED)
        self._leave(seq)
        self.waiting.add(seq)
        self._count_waiting(seq, 1)
        self.num_preemptions += 1

    def finish(self, seq: SequenceState) -> None:
        """The completion has ended. Where it was to compute the prompt, the next sibling does."""
        request = seq.request
        self.clock.refund(request.flow, seq.num_left)
        self._finish(seq)
        request.num_open -= 1
        if request.leader is seq:
            request.leader = next((s for s in request.sequences if s.status is SequenceStatus.HELD), None)
            if request.leader is not None:
                request.leader.move(SequenceStatus.WAITING)
                self.waiting.add(request.leader)

    def _finish(self, seq: SequenceState) -> None:
        was = seq.status
        if seq.is_waiting:
            self.waiting.remove(seq)
        seq.move(SequenceStatus.FINISHED)
        if was is SequenceStatus.RUNNING:
            self._leave(seq)
            return
        self._count_waiting(seq, -1)
        if seq.adapter_slot is not None:
            self.end_lease(seq)

    def _count_waiting(self, seq: SequenceState, sign: int) -> None:
        """Work ahead of a sequence that does not run, at most; the siblings' shared prompt counts once."""
        num_prompt = 0 if seq.index else seq.num_prompt_tokens
        self.num_waiting_prompt_tokens += sign * num_prompt
        self.num_waiting_tokens += sign * (num_prompt + seq.max_total_tokens - seq.num_prompt_tokens)

    def _leave(self, seq: SequenceState) -> None:
        self.running.remove(seq)
        heapq.heappush(self._free_rows, seq.row)
        self.released_rows.append(seq.row)
        # A plan under way may still write to them: the device runs plans in order, and only a later one reuses them.
        self.blocks.release(seq.block_ids)
        seq.block_ids = []
        if seq.adapter_slot is not None:
            self.end_lease(seq)

    # --- prompts shared by siblings -----------------------------------------------------------------------------------

    def on_prompt_planned(self, request: RequestState) -> None:
        """The leader's last piece of prompt is in a plan: from the next one on, siblings can share what it wrote."""
        leader = request.leader
        assert leader is not None
        request.leader = None
        held = [seq for seq in request.sequences if seq.status is SequenceStatus.HELD]
        if not held:
            return
        request.shared_prompt = leader.block_ids[: self.blocks.num_blocks_for(leader.num_prompt_tokens)]
        self.blocks.share(request.shared_prompt)
        self.shared_prompts[request] = None
        num_full = leader.num_prompt_tokens // self.blocks.block_size
        for seq in held:
            if leader.chain is not None and num_full:
                leader.chain.key(num_full - 1, leader.token_ids)
                seq.chain = leader.chain.fork(num_full)
            seq.move(SequenceStatus.WAITING)
            self.waiting.add(seq)

    def release_shared_prompts(self) -> None:
        """Releases prompts that no sibling waits for any more."""
        for request in [r for r in self.shared_prompts if not any(_is_new(seq) for seq in r.sequences)]:
            self._release_shared_prompt(request)

    def drop_shared_prompt(self) -> bool:
        """Releases the latest shared prompt for its blocks. The first sibling that waits for it computes it again.
        False when there is none."""
        if not self.shared_prompts:
            return False
        request = next(reversed(self.shared_prompts))
        self._release_shared_prompt(request)
        orphans = [seq for seq in request.sequences if _is_new(seq)]
        request.leader = orphans[0] if orphans else None
        for seq in orphans[1:]:
            if seq.adapter_slot is not None:
                self.end_lease(seq)
            self.waiting.remove(seq)
            seq.move(SequenceStatus.HELD)
        return True

    def _release_shared_prompt(self, request: RequestState) -> None:
        assert request.shared_prompt is not None
        self.blocks.release(request.shared_prompt)
        request.shared_prompt = None
        del self.shared_prompts[request]

    # --- adapters -----------------------------------------------------------------------------------------------------

    def lease(self, seq: SequenceState) -> bool:
        """Takes a reference on the sequence's adapter in its device slot; False when it is not on the device.

        The only call of planning that changes the adapter cache: an adapter that is missed here is loaded from now on.
        """
        adapter_key = seq.request.lora_key
        assert adapter_key is not None
        seq.adapter_slot = self._adapters.acquire(adapter_key)
        if seq.adapter_slot is not None:
            self._adapter_refs[adapter_key] += 1
        return seq.adapter_slot is not None

    def end_lease(self, seq: SequenceState) -> None:
        """Gives the sequence's reference back: now, or when the last plan that uses the slot has run."""
        adapter_key = seq.request.lora_key
        assert adapter_key is not None
        seq.adapter_slot = None
        if seq.last_plan is not None:
            seq.last_plan.ended_leases.append(adapter_key)
        else:
            self.release_adapter(adapter_key)

    def release_adapter(self, adapter_key: AdapterKey) -> None:
        self._adapter_refs[adapter_key] -= 1
        self._adapters.release(adapter_key)

    def adapter_failure(self, adapter_key: AdapterKey) -> Exception | None:
        return self._adapters.failure(adapter_key)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raises AssertionError when a row, a block or an adapter reference is unaccounted for, idle or not."""
        rows = [seq.row for seq in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.max_running)), f"rows leaked: {sorted(rows)}"
        held: Counter[int] = Counter()
        for seq in self.running:
            held.update(seq.block_ids)
        for request in self.shared_prompts:
            assert request.shared_prompt is not None
            held.update(request.shared_prompt)
        self.blocks.check_integrity(held)
        if not self.requests:
            left = (len(self.running), len(self.waiting), len(self.shared_prompts))
            assert left == (0, 0, 0), f"running, waiting, shared prompts outlived their requests: {left}"
            assert self.num_waiting_tokens == 0, f"{self.num_waiting_tokens} tokens of work ahead of nobody"
            assert self.num_queued_requests == 0, f"{self.num_queued_requests} requests counted as queued"

    def check_adapters(self) -> None:
        """Raises AssertionError when a reference is held for nobody. Only while no plan is under way."""
        kept: Counter[AdapterKey] = Counter()
        for request in self.requests.values():
            for seq in request.sequences:
                if seq.adapter_slot is not None and request.lora_key is not None:
                    kept[request.lora_key] += 1
        assert +self._adapter_refs == kept, f"adapter references leaked: {self._adapter_refs} for {kept}"


def _is_new(seq: SequenceState) -> bool:
    return not seq.has_entered and seq.status is not SequenceStatus.FINISHED
