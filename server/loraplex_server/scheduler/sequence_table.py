"""Requests and sequences, and the table that owns their rows, blocks and adapter leases.

A request is what a client sent; each of its `n` completions is a sequence. The scheduler owns both; the runner has a
mirror of the running ones' tokens and block tables, fed by plans alone. The table is mechanism only: what to admit,
what to preempt and when a completion ends is decided elsewhere.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import NamedTuple, Protocol

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import IllegalTransition, LoraplexError
from loraplex_contracts.load import Flow
from loraplex_contracts.mixtures import WeightedKey
from loraplex_contracts.plan import AdapterUse, BlockCopy, GrammarMatcher, NewSequence, Span, StepPlan
from loraplex_contracts.request import Request, SamplingParams
from loraplex_server.kv.blocks import BlockPool, KeyChain
from loraplex_server.kv.states import NO_STATE, StatePool
from loraplex_server.scheduler.fair_clock import FairClock, Place

# Output tokens that a completion is charged for in the fair order until it ends, or max_tokens where that is less. What
# it has then is charged in their place: most requests name no max_tokens, and may have the whole context.
EXPECTED_TOKENS = 256


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
    """The size of a step that was done."""

    num_rows: int  # that decode
    num_prompt_tokens: int
    is_full: bool  # somebody had to wait for a row, for blocks or for the step's budget


class Snapshot(NamedTuple):
    """A state that a plan leaves behind a block, for the prefix cache."""

    seq: SequenceState
    chain: KeyChain  # of that time: a text that outgrows its rotations gets another before the result is taken in
    block_idx: int
    slot: int  # one reference, until the result has come


@dataclass(slots=True, eq=False)
class InFlight:
    """A plan whose result has not come yet. Owned by the scheduler, filled when the plan is made."""

    plan: StepPlan
    # Each span with its sequence: a result finds the object that it is for, not whoever has its name by then.
    spans: list[tuple[SequenceState, Span]]
    # Adapter leases that end when the plan has run: until then the device reads the slot.
    ended_leases: list[AdapterKey] = field(default_factory=list[AdapterKey])
    snapshots: list[Snapshot] = field(default_factory=list[Snapshot])
    size: StepSize = field(default_factory=lambda: StepSize(0, 0, False))


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from `add` to its terminal event."""

    request: Request
    adapters: tuple[WeightedKey, ...]  # that its sequences need in slots to run
    adapter_digest: str
    # Tokens that a completion may have in all: the least of max_tokens, the context and the whole KV cache.
    max_total_tokens: int
    num_prompt_tokens: int
    # Not to be sampled while below min_tokens; ends a completion from then on.
    stop_ids: frozenset[int]
    keeps_hidden: bool = False
    adapted_from: int | None = 0  # the first token that its adapter changes; None: it changes none
    queued_s: float = 0.0  # since when it waits or has waited
    place: Place = Place(0.0, 1, False)  # in the fair order
    phase: RequestPhase = RequestPhase.QUEUED
    sequences: list[SequenceState] = field(default_factory=list["SequenceState"])
    num_open: int = 0  # sequences that have not finished
    # The sequence that is to compute the prompt for all; None once it is computed.
    leader: SequenceState | None = None
    # Blocks of the computed prompt, kept until all siblings have entered. One reference on each.
    shared_prompt: list[int] | None = None
    # With it, in models with states: the slot with the state before the prompt's last token. One reference.
    shared_state: int = NO_STATE
    num_prompt_logprobs: int = 0  # sent so far, of positions 1, 2, ...; only where the request wants them
    num_cached_tokens: int = 0
    # Since when its adapter has had no slot while it was its turn, and how many had been admitted by then.
    blocked_since_s: float | None = None
    num_admitted_when_blocked: int = 0
    # Since when it waits for its adapter, its turn or not; and how long it did before.
    adapter_missed_s: float | None = None
    adapter_wait_s: float = 0.0
    is_adapter_counted: bool = False  # as found on the device, or as not found
    adapter_keys: tuple[AdapterKey, ...] = field(init=False)  # each step looks at those of all that wait

    def __post_init__(self) -> None:
        self.adapter_keys = tuple(key for key, _ in self.adapters)

    def move(self, to: RequestPhase) -> None:
        """Moves the request to a phase. Raises IllegalTransition, and changes nothing, when the table does not have
        that step."""
        if to not in REQUEST_TRANSITIONS[self.phase]:
            raise IllegalTransition(f"request {self.request.request_id}: {self.phase.value} -> {to.value}")
        self.phase = to

    def adapter_wait_so_far_s(self, now: float) -> float:
        """Seconds that it has waited for its adapter."""
        return self.adapter_wait_s + (0.0 if self.adapter_missed_s is None else now - self.adapter_missed_s)

    @property
    def has_held(self) -> bool:
        """True if siblings wait for the leader's prompt."""
        return any(seq.status is SequenceStatus.HELD for seq in self.sequences)

    @property
    def flow(self) -> Flow:
        return self.request.tenant, self.request.adapter_name

    @property
    def num_expected(self) -> int:
        """Output tokens that each of its completions is charged for until it ends."""
        return min(self.max_total_tokens - self.num_prompt_tokens, EXPECTED_TOKENS)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if some logprobs of the prompt are still to be computed."""
        return self.request.output.prompt_logprobs and self.num_prompt_logprobs < self.num_prompt_tokens - 1


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
    # Until it enters, this list and matcher are the request's: thousands of completions may wait.
    token_ids: list[int]  # prompt and the output known so far
    chain: KeyChain | None  # None: no prefix caching
    matcher: GrammarMatcher | None = None  # of its grammar; behind the last of `token_ids`
    status: SequenceStatus = SequenceStatus.WAITING
    has_entered: bool = False  # at least once

    # Running. `num_computed` is the scheduler's view: it runs ahead of the device, and is taken back where drafts miss.
    row: int = -1
    adapter_slots: tuple[int, ...] = ()  # of the request's adapters; empty: none are leased
    entered_s: float = 0.0
    block_ids: list[int] = field(default_factory=list[int])
    num_sent_blocks: int = 0  # that the runner has in the row's table
    num_computed: int = 0
    num_published: int = 0  # blocks looked at for the prefix cache
    state_slot: int = NO_STATE  # of its own, in models with states
    state_source: int = NO_STATE  # the slot that its first span begins with, until that is in a plan
    num_found: int = 0  # computed tokens that the prefix cache had of it on entry, beyond the last snapshot too

    # In flight: survives a preemption, because the result still counts.
    num_coming: int = 0  # tokens that a plan under way will sample, where that number is certain
    is_draft_coming: bool = False  # a draft is being verified: nothing can be planned before its result
    last_plan: InFlight | None = None  # the latest plan that it is in, while that is under way

    def move(self, to: SequenceStatus) -> None:
        """Moves the sequence to a status. Raises IllegalTransition, and changes nothing, when the table does not have
        that step."""
        if to not in SEQUENCE_TRANSITIONS[self.status]:
            raise IllegalTransition(f"sequence {self.sequence_id}: {self.status.value} -> {to.value}")
        self.status = to

    @property
    def num_tokens(self) -> int:
        """Number of tokens: those known and those certain to come."""
        return len(self.token_ids) + self.num_coming

    def start_at(self, start: float) -> None:
        """Puts the start tag of its request's place into its order."""
        self.order = (self.order[0], start, *self.order[2:])

    @property
    def num_outputs(self) -> int:
        """Number of output tokens that are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_left(self) -> int:
        """Number of output tokens that the sequence may still have."""
        return self.max_total_tokens - len(self.token_ids)

    @property
    def is_waiting(self) -> bool:
        """True if the sequence stands in the queue."""
        return self.status is SequenceStatus.WAITING or self.status is SequenceStatus.PREEMPTED


class AdapterLeases(Protocol):
    """The part of the adapter cache that the scheduler may touch."""

    @property
    def num_slots(self) -> int:
        """Number of slots of the device: distinct adapters that can run at a time."""
        ...

    def acquire(self, key: AdapterKey) -> int | None:
        """Takes a reference for one running sequence and returns the device slot.

        None when the weights are not on the device now: no reference is taken, and a load is wanted from here on.
        """
        ...

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        """Does what `acquire` does, for several distinct keys: all of them or none."""
        ...

    def release(self, key: AdapterKey) -> None:
        """Gives one reference back."""
        ...

    def put_first(self, wants: Sequence[AdapterKey | tuple[AdapterKey, ...]]) -> None:
        """Puts these loads first among those that are wanted, in this order."""
        ...

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        """The reason that keeps these keys from the device for good (source gone, no room for all), or None."""
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
    state_slot: int = NO_STATE  # with the state behind those tokens
    num_found: int = 0  # computed tokens that blocks have, where no state lets them be used


class _Charge(NamedTuple):
    """Tokens that a request had beyond what it was charged for in the fair order; below 0: fewer."""

    serial: int
    adapter_name: str
    place: Place
    num_tokens: int


class SequenceTable:
    """Owns requests and sequences, rows, block references and adapter leases. Every method leaves them consistent."""

    def __init__(self, max_running: int, blocks: BlockPool, adapters: AdapterLeases, states: StatePool | None) -> None:
        """`states`: of a model whose layers keep some; each running sequence has a slot."""
        self.blocks = blocks
        self.states = states
        self.max_running = max_running
        self.requests: dict[str, RequestState] = {}
        self.waiting = OrderedSequences()
        self.running = OrderedSequences()
        self.released_rows: list[int] = []  # since the last plan, which tells the runner
        self.shared_prompts: dict[RequestState, None] = {}  # requests with one, in the order of their making
        self.num_queued_requests = 0
        self.num_not_running = 0  # sequences
        self.num_waiting_tokens = 0  # of work ahead, for all of those
        self.num_waiting_prompt_tokens = 0  # among them
        self.clock = FairClock()
        self._charges: dict[str, list[_Charge]] = {}  # by tenant, since `move_waiting`
        self.num_preemptions = 0
        # Tokens of the prompts of requests that have begun, and those of them out of the prefix cache.
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_adapter_hits = 0  # requests that found their adapters on the device, and those that did not
        self.num_adapter_misses = 0
        self.kv_wait_s = 0.0  # time in which the head of the queue lacked blocks, or a slot for its state
        self._adapters = adapters
        self._free_rows = list(range(max_running))  # a heap: low rows first keeps the batch dense
        self._adapter_refs: Counter[AdapterKey] = Counter()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    @property
    def num_adapter_slots(self) -> int:
        return self._adapters.num_slots

    @property
    def leased_adapters(self) -> set[AdapterKey]:
        """Adapters of sequences that run, are about to, or have ended in a plan that is under way."""
        return set(self._adapter_refs)

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: RequestState) -> None:
        """Takes in a new request; its first sequence waits to compute the prompt for all."""
        self.move_waiting()  # by charges that this one's place has in it already
        self.requests[request.request.request_id] = request
        self.num_queued_requests += 1
        num_tokens = request.num_prompt_tokens + len(request.sequences) * request.num_expected
        request.place = self.clock.enqueue(request.flow, num_tokens)
        request.num_open = len(request.sequences)
        request.leader = request.sequences[0]
        request.leader.start_at(request.place.start)
        for seq in request.sequences:
            self._count_waiting(seq, 1)
        self.waiting.add(request.leader)

    def begin(self, request: RequestState) -> None:
        """Makes a request active, as its first sequence enters."""
        request.move(RequestPhase.ACTIVE)
        self.num_queued_requests -= 1
        self.clock.dequeue(request.flow)
        # One that passes others, because its adapter is there, does not take the clock past them: whatever comes next
        # would have to wait for all of those.
        first = next((seq for seq in self.waiting if not seq.has_entered), None)
        start = request.place.start
        for seq in request.sequences:
            seq.start_at(start)
        self.clock.begin(start if first is None else min(start, first.order[1]))

    def end_request(self, request: RequestState) -> None:
        """Frees all that the request still has. Its terminal event goes out with this, exactly once."""
        unfinished = [seq for seq in request.sequences if seq.status is not SequenceStatus.FINISHED]
        num_tokens = sum(seq.num_outputs - request.num_expected for seq in unfinished)
        if request.phase is RequestPhase.QUEUED:
            self.num_queued_requests -= 1
            self.clock.dequeue(request.flow)
            num_tokens -= request.num_prompt_tokens
        self._charge(request, num_tokens)
        request.move(RequestPhase.ENDED)
        request.leader = None
        for seq in unfinished:
            self._finish(seq)
        if request.shared_prompt is not None:
            self._release_shared_prompt(request)
        self._release_shared_state(request)
        request.sequences.clear()  # no cycle: an ended request goes without waiting for the garbage collector
        del self.requests[request.request.request_id]

    def _charge(self, request: RequestState, num_tokens: int) -> None:
        """Charges a request for so many more tokens, or gives them back where they are below 0."""
        if num_tokens:
            self.clock.charge(request.flow, request.place, num_tokens)
            tenant, adapter_name = request.flow
            charge = _Charge(request.sequences[0].order[2], adapter_name, request.place, num_tokens)
            self._charges.setdefault(tenant, []).append(charge)

    def move_waiting(self) -> None:
        """Moves what waits by what requests before it were charged since the last call: else each would keep the place
        that an estimate gave it. For all of them at once, since thousands may wait."""
        if not self._charges:
            return
        for seq in self.waiting:
            request = seq.request
            if request.phase is not RequestPhase.QUEUED or not (charges := self._charges.get(request.request.tenant)):
                continue
            if num_tokens := _tokens_before(seq, charges):
                request.place = self.clock.moved(request.place, num_tokens)
                seq.start_at(request.place.start)
        self._charges.clear()
        self.waiting.sort(key=attrgetter("order"))

    # --- sequences ----------------------------------------------------------------------------------------------------

    def enter(self, seq: SequenceState, prefix: Prefix, now: float) -> tuple[NewSequence, BlockCopy | None]:
        """Gives a waiting sequence a row and blocks. The caller has made sure of both, and has leased its adapter.

        Returns what the runner needs: the sequence, and the copy of its prefix's last block if that is half full.
        """
        assert seq.last_plan is None, "a result of its last stay is still to come"
        self.waiting.remove(seq)
        seq.move(SequenceStatus.RUNNING)
        self.running.add(seq)
        if not seq.has_entered:
            seq.token_ids = seq.token_ids.copy()
            seq.matcher = None if seq.matcher is None else seq.matcher.copy()
        seq.entered_s = now
        self._count_waiting(seq, -1)
        self.blocks.share(prefix.shared)
        new_block_ids = self.blocks.allocate(prefix.num_new_blocks)
        if self.states is not None:
            if prefix.state_slot != NO_STATE:
                self.states.share(prefix.state_slot)
            seq.state_source, seq.state_slot = prefix.state_slot, self.states.take()
            seq.num_found = prefix.num_found
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
            adapters=tuple(
                AdapterUse(slot, weight)
                for slot, (_, weight) in zip(seq.adapter_slots, seq.request.adapters, strict=True)
            ),
            adapted_from=seq.request.adapted_from or 0,
            min_tokens=min_tokens,
            banned_until_min=seq.request.stop_ids if min_tokens else frozenset(),
            keeps_hidden=seq.request.keeps_hidden,
            matcher=seq.matcher,
            pooling=request.pooling,
        )
        return entered, copy

    def preempt(self, seq: SequenceState) -> None:
        """Takes row, blocks and adapter lease away; the sequence waits again, with the tokens it has."""
        self.restart(seq)
        self.num_preemptions += 1

    def restart(self, seq: SequenceState) -> None:
        """Preempts a sequence for its own sake: its tokens have to be computed again."""
        seq.move(SequenceStatus.PREEMPTED)
        self._leave(seq)
        self.waiting.add(seq)
        self._count_waiting(seq, 1)

    def finish(self, seq: SequenceState) -> None:
        """Ends a sequence's completion. Where it was to compute the prompt, the next sibling does."""
        request = seq.request
        self._charge(request, seq.num_outputs - request.num_expected)
        self._finish(seq)
        request.num_open -= 1
        if request.leader is seq:
            request.leader = next((s for s in request.sequences if s.status is SequenceStatus.HELD), None)
            if request.leader is not None:
                request.leader.move(SequenceStatus.WAITING)
                request.leader.start_at(request.place.start)
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
        if seq.adapter_slots:
            self.end_lease(seq)

    def _count_waiting(self, seq: SequenceState, sign: int) -> None:
        """Counts the work ahead of a sequence that does not run, at most; the siblings' shared prompt counts once.
        `sign`: 1 adds it, -1 takes it away."""
        num_prompt = 0 if seq.index else seq.num_prompt_tokens
        self.num_not_running += sign
        self.num_waiting_prompt_tokens += sign * num_prompt
        self.num_waiting_tokens += sign * (num_prompt + seq.max_total_tokens - seq.num_prompt_tokens)

    def _leave(self, seq: SequenceState) -> None:
        self.running.remove(seq)
        heapq.heappush(self._free_rows, seq.row)
        self.released_rows.append(seq.row)
        # A plan under way may still write to them: the device runs plans in order, and only a later one reuses them.
        self.blocks.release(seq.block_ids)
        seq.block_ids = []
        if self.states is not None:
            self.states.release(seq.state_slot)
            seq.state_slot = NO_STATE
            self.end_source(seq)
            if seq.request.leader is seq:
                self._release_shared_state(seq.request)
        if seq.adapter_slots:
            self.end_lease(seq)

    def end_source(self, seq: SequenceState) -> None:
        """Releases the state slot that the sequence's first span begins with. Called once that span is in a plan:
        whatever is written to the slot comes later."""
        if self.states is not None and seq.state_source != NO_STATE:
            self.states.release(seq.state_source)
            seq.state_source = NO_STATE

    # --- prompts shared by siblings -----------------------------------------------------------------------------------

    def on_prompt_planned(self, request: RequestState) -> None:
        """Called when the leader's last piece of prompt is in a plan: from the next plan on, siblings can share what it
        wrote."""
        leader = request.leader
        assert leader is not None
        request.leader = None
        held = [seq for seq in request.sequences if seq.status is SequenceStatus.HELD]
        if not held:
            return
        # Without a slot for the state, each sibling computes the prompt by itself.
        if self.states is None or request.shared_state != NO_STATE:
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
            if seq.adapter_slots:
                self.end_lease(seq)
            self.waiting.remove(seq)
            seq.move(SequenceStatus.HELD)
        return True

    def _release_shared_prompt(self, request: RequestState) -> None:
        assert request.shared_prompt is not None
        self.blocks.release(request.shared_prompt)
        request.shared_prompt = None
        self._release_shared_state(request)
        del self.shared_prompts[request]

    def _release_shared_state(self, request: RequestState) -> None:
        if self.states is not None and request.shared_state != NO_STATE:
            self.states.release(request.shared_state)
            request.shared_state = NO_STATE

    # --- adapters -----------------------------------------------------------------------------------------------------

    def lease(self, seq: SequenceState) -> bool:
        """Takes references on all of the sequence's adapters in their slots; False when one is not on the device.

        The only call of planning that changes the adapter cache: an adapter that is missed here is loaded from now on.
        """
        keys = seq.request.adapter_keys
        if len(keys) == 1:
            slot = self._adapters.acquire(keys[0])
            slots = None if slot is None else (slot,)
        else:
            slots = self._adapters.acquire_all(keys)
        if slots is None:
            return False
        seq.adapter_slots = slots
        self._adapter_refs.update(keys)
        return True

    def count_adapter(self, request: RequestState, *, was_found: bool) -> None:
        """Counts whether a request found its adapters on the device; only the first time says so."""
        if not request.is_adapter_counted:
            request.is_adapter_counted = True
            self.num_adapter_hits += was_found
            self.num_adapter_misses += not was_found

    def end_lease(self, seq: SequenceState) -> None:
        """Gives the sequence's references back: now, or when the last plan that uses the slot has run."""
        seq.adapter_slots = ()
        if seq.last_plan is not None:
            seq.last_plan.ended_leases += seq.request.adapter_keys
        else:
            for adapter_key in seq.request.adapter_keys:
                self.release_adapter(adapter_key)

    def release_adapter(self, adapter_key: AdapterKey) -> None:
        self._adapter_refs[adapter_key] -= 1
        if not self._adapter_refs[adapter_key]:
            del self._adapter_refs[adapter_key]
        self._adapters.release(adapter_key)

    def put_first(self, wants: Sequence[tuple[AdapterKey, ...]]) -> None:
        self._adapters.put_first([keys[0] if len(keys) == 1 else keys for keys in wants])

    def adapter_failure(self, keys: tuple[AdapterKey, ...]) -> LoraplexError | None:
        return self._adapters.failure(*keys)

    # --- checks -------------------------------------------------------------------------------------------------------

    def check_integrity(self, flights: Iterable[InFlight] = ()) -> None:
        """Raises AssertionError when a row, a block, a state slot or an adapter reference is unaccounted for, idle or
        not. `flights`: plans under way."""
        rows = [seq.row for seq in self.running] + self._free_rows
        assert sorted(rows) == list(range(self.max_running)), f"rows leaked: {sorted(rows)}"
        held: Counter[int] = Counter()
        for seq in self.running:
            held.update(seq.block_ids)
        for request in self.shared_prompts:
            assert request.shared_prompt is not None
            held.update(request.shared_prompt)
        self.blocks.check_integrity(held)
        if self.states is not None:
            slots = Counter(seq.state_slot for seq in self.running)
            slots.update(seq.state_source for seq in self.running if seq.state_source != NO_STATE)
            shared = (request.shared_state for request in self.requests.values())
            slots.update(slot for slot in shared if slot != NO_STATE)
            slots.update(snapshot.slot for flight in flights for snapshot in flight.snapshots)
            self.states.check_integrity(slots)
        if not self.requests:
            left = (len(self.running), len(self.waiting), len(self.shared_prompts))
            assert left == (0, 0, 0), f"running, waiting, shared prompts outlived their requests: {left}"
            assert self.num_not_running == 0, f"{self.num_not_running} sequences counted as waiting"
            assert self.num_waiting_tokens == 0, f"{self.num_waiting_tokens} tokens of work ahead of nobody"
            assert self.num_queued_requests == 0, f"{self.num_queued_requests} requests counted as queued"

    def check_adapters(self) -> None:
        """Raises AssertionError when a reference is held for nobody. Only while no plan is under way."""
        kept: Counter[AdapterKey] = Counter()
        for request in self.requests.values():
            for seq in request.sequences:
                if seq.adapter_slots:
                    kept.update(request.adapter_keys)
        assert +self._adapter_refs == kept, f"adapter references leaked: {self._adapter_refs} for {kept}"


def _tokens_before(seq: SequenceState, charges: Sequence[_Charge]) -> int:
    """Tokens by which a request that waits moves, for those of its tenant's charges whose requests came before it: all
    of its own flow's, and where it opened its flow those that opened theirs."""
    request, opens_flow = seq.request.request, seq.request.place.opens_flow
    num_tokens = 0
    for charge in charges:
        if charge.serial >= seq.order[2]:
            continue
        if charge.adapter_name == request.adapter_name:
            num_tokens += charge.num_tokens * charge.place.num_flows
        elif opens_flow and charge.place.opens_flow:
            num_tokens += charge.num_tokens
    return num_tokens


def _is_new(seq: SequenceState) -> bool:
    return not seq.has_entered and seq.status is not SequenceStatus.FINISHED
