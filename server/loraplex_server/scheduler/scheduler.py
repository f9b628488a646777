"""Scheduler: plans steps from requests, and applies their results.

Pure decisions over plain data: no tensors, clock, threads or I/O; time is an argument. `sequence_table` has the state,
`admission` decides about sequences that wait, `overload` about refusals.

The view advances when a plan is made, not when its result comes, so the next plan may be made while one is under way:
tokens that are still to come are counted without being known. Two plans at most are open at a time, and results come in
the order of plans. Blocks and rows that come free while a plan is under way are reused by later plans only, which the
device runs later; an adapter's slot is given back when the last plan that reads it has run.

A step has the decodes first, then pieces of prompts, then sequences that enter. A sequence gets the blocks of all its
known tokens when it enters, so only decoding needs more. When blocks run out, the sequence that is last in the order is
preempted: it waits, and computes its tokens again or finds them in the prefix cache. The first one is never preempted
and fits alone (see `_max_total_tokens`), so at least one sequence always advances.

Where a token ends a completion, whatever was computed behind it is dropped. A result finds its sequence by object, not
by name: sequences that have ended meanwhile are passed over, and the token of a preempted one still counts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LoraplexError,
    Overloaded,
    QueueFull,
)
from loraplex_contracts.load import Forecast, Load, has_place
from loraplex_contracts.mixtures import WeightedKey, mixture_digest
from loraplex_contracts.plan import (
    Candidate,
    Draft,
    GrammarMatcher,
    Span,
    SpanResult,
    StateUse,
    StepPlan,
    StepResult,
)
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    FinishReason,
    Pooled,
    PromptLogprobs,
    Request,
    RequestFailed,
    Tokens,
    seed_of_completion,
)
from loraplex_server.kv.blocks import BlockPool, KeyChain, Namespace
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.kv.states import NO_STATE, StatePool
from loraplex_server.scheduler.admission import Admission, PlanBuilder, SchedulerConfig
from loraplex_server.scheduler.overload import StepSpeed, WaitLimits
from loraplex_server.scheduler.sequence_table import (
    AdapterLeases,
    InFlight,
    RequestPhase,
    RequestState,
    SequenceState,
    SequenceStatus,
    SequenceTable,
    Snapshot,
)

MAX_PLANS_IN_FLIGHT = 2
# Tokens from one snapshot of a long prompt's states to the next, and from one to the next while a text is decoded.
PROMPT_SNAPSHOT_TOKENS = 1024
TEXT_SNAPSHOT_TOKENS = 64
_NO_DRAFTS: Mapping[str, Draft] = {}
_NO_RESULT = SpanResult()


class Scheduler:
    """Owner of every request from `add` to its terminal event. Not thread-safe: one loop calls it."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockPool,
        adapters: AdapterLeases,
        eos_token_ids: Collection[int],
        states: StatePool | None = None,
    ) -> None:
        """`states`: of a model whose layers keep some."""
        self._config = config
        self._blocks = blocks
        self._eos_token_ids = frozenset(eos_token_ids)
        self._events: list[Event] = []  # the same list for good: admission appends to it
        self._table = SequenceTable(config.max_running, blocks, adapters, states)
        self._speed = StepSpeed()
        self._limits = WaitLimits(
            config.max_queue_wait_s, config.max_step_tokens, config.num_spare_blocks, self._table, self._speed
        )
        self._admission = Admission(config, self._table, self._speed, self._limits, self._events.append)
        self._last_step_s: float | None = None  # when the last step ended; None after a time without work
        self._in_flight: deque[InFlight] = deque()
        # A heap of deadlines, and of ends of waits without one; ended requests are skipped.
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._num_added = 0
        self._num_steps = 0
        self._num_output_tokens = 0

    # --- requests -----------------------------------------------------------------------------------------------------

    def add(
        self,
        request: Request,
        adapter_key: AdapterKey | None,
        now: float,
        *,
        keeps_hidden: bool = False,
        num_elsewhere: int = 0,
        num_own_elsewhere: int = 0,
        matcher: GrammarMatcher | None = None,
        adapted_from: int | None = 0,
        mixture: tuple[WeightedKey, ...] = (),
        fetch_s: float = 0.0,
    ) -> None:
        """Accepts a request: from here on it gets exactly one terminal event. `adapter_key` is what its
        adapter_id is bound to, `adapted_from` the first token that it changes (None: none), `mixture` (distinct keys)
        what it has in its place, `fetch_s` how long it has waited for them so far. `keeps_hidden` goes to the runner
        with each of its sequences. `matcher`: of its grammar, at the beginning.

        Raises as `check` does, and has not accepted the request then.
        """
        adapters = mixture or _adapter_alone(adapter_key, adapted_from)
        self.check(request, now, num_elsewhere, num_own_elsewhere, [key for key, _ in adapters])
        self._num_added += 1
        digest = mixture_digest(mixture) if mixture else adapter_key.digest if adapter_key else ""
        state = self._new_state(request, adapters, digest, matcher, adapted_from)
        state.keeps_hidden = keeps_hidden
        state.adapter_wait_s = fetch_s
        state.queued_s = now
        self._table.add(state)
        expires_s = request.deadline_s
        if expires_s is None and self._config.max_queue_wait_s:
            expires_s = now + self._config.max_queue_wait_s
        if expires_s is not None:
            heapq.heappush(self._deadlines, (expires_s, self._num_added, state))

    def check(
        self,
        request: Request,
        now: float,
        num_elsewhere: int = 0,
        num_own_elsewhere: int = 0,
        adapter_keys: Sequence[AdapterKey] | None = None,
    ) -> None:
        """Raises Internal for a request that the front end should have refused, InvalidArgument, ContextLengthExceeded,
        DeadlineExceeded, QueueFull when no more requests may wait, or Overloaded when this one would wait for too long.
        `num_elsewhere`: requests that are still to be added, which count as queued; `num_own_elsewhere`: those of the
        request's tenant; `adapter_keys`: of adapters that it needs on the device, None: not known yet."""
        num_prompt_tokens, max_tokens = len(request.prompt_token_ids), request.stopping.max_tokens
        most = self._config.max_context_tokens - (request.pooling is None)  # a token of output needs a position
        if not 1 <= num_prompt_tokens <= most or max_tokens < 1 or request.n < 1:
            raise Internal(
                f"a request for {request.n} completions of {max_tokens} tokens behind a prompt of {num_prompt_tokens} "
                "reached the engine; please report this"
            )
        if request.request_id in self._table.requests:
            raise InvalidArgument("a request with this request_id is running; send another id", field="request_id")
        num_kv_tokens = self._blocks.num_blocks * self._blocks.block_size
        if num_prompt_tokens > num_kv_tokens:
            raise ContextLengthExceeded(
                f"the prompt is too long: it has {num_prompt_tokens} tokens and this server's whole KV cache "
                f"{num_kv_tokens}; shorten it, or start the server with more KV memory",
                field="input",
                resource="kv_cache",
            )
        if request.deadline_s is not None and request.deadline_s <= now:
            raise DeadlineExceeded("the deadline had passed before the request could be queued; allow more time")
        num_queued = self._table.num_queued_requests + num_elsewhere
        clock, tenant = self._table.clock, request.tenant
        num_own = clock.num_queued_of(tenant) + num_own_elsewhere
        if not has_place(num_queued, num_own, clock.num_tenants_with(tenant), self._config.max_queued):
            retry_after_s = self._admission.retry_after_s(num_queued)
            raise QueueFull(
                f"{num_queued} requests are waiting, which is all this server takes; try again in {retry_after_s:.1f} "
                "s or on another worker",
                resource="queue",
                retry_after_s=retry_after_s,
            )
        self._limits.check(request, adapter_keys, self._max_total_tokens(request) - num_prompt_tokens, now)

    @property
    def next_expiry_s(self) -> float | None:
        """Time at which `schedule` has to be called even if nothing can run; None where nothing expires."""
        return self._deadlines[0][0] if self._deadlines else None

    def cancel(self, request_id: str, error: LoraplexError, now: float) -> list[Event]:
        """Ends the request with `error` and frees what it has. One that has ended already is left alone."""
        state = self._table.requests.get(request_id)
        if state is not None:
            self._fail(state, error, now)
        return self.take_events()

    def stop_completion(self, request_id: str, index: int) -> list[Event]:
        """Ends one completion as STOP (its text met a stop string). One that has ended already is left alone."""
        state = self._table.requests.get(request_id)
        if state is not None and 0 <= index < len(state.sequences):
            seq = state.sequences[index]
            if seq.status is not SequenceStatus.FINISHED:
                self._finish(seq, FinishReason.STOP, None)
        return self.take_events()

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(self, now: float, drafts: Mapping[str, Draft] = _NO_DRAFTS) -> StepPlan | None:
        """Plans the next step; None when nothing can run. Events (Admitted, deadlines): `take_events`, or with `apply`.

        `drafts`: proposed tokens by sequence id. They are cut to what budget, blocks and the completion's end allow,
        and ignored where the sequence still computes its prompt. A sequence with a draft, even an empty one, is not
        planned ahead of a token that is still to come.
        """
        assert len(self._in_flight) < MAX_PLANS_IN_FLIGHT, "the result of an earlier plan has to come first"
        self._expire(now)
        self._table.move_waiting()
        step = PlanBuilder(num_left=self._config.max_step_tokens)
        self._admission.preempt_for_shorter(step, now)
        _plan_running(self._table, step, drafts, self._config.rope)
        # After a preemption nothing is admitted: what came free is for the sequences that run, where any does.
        step.is_full = step.num_preempted > 0 and bool(self._table.running)
        failed = {} if step.is_full else self._admission.run(step, now)
        plan = self._close(step) if step.spans else None
        if not self._in_flight:
            self._last_step_s = None
        elif self._last_step_s is None:
            self._last_step_s = now
        self._table.release_shared_prompts()
        for state, error in failed.items():
            self._fail(state, error, now)
        return plan

    def decoding_sequences(self) -> list[tuple[str, str]]:
        """Sequences that decode in the next step, once the steps under way have ended: the ids of each and of its
        request."""
        return [
            (seq.sequence_id, seq.request.request.request_id)
            for seq in self._table.running
            if seq.num_tokens - seq.num_computed == 1
        ]

    def candidates(self) -> list[Candidate]:
        """Running sequences that decode in the next step and may have a draft, first in the order first."""
        return [
            Candidate(
                sequence_id=seq.sequence_id,
                row=seq.row,
                token_ids=seq.token_ids,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_room=seq.max_total_tokens - len(seq.token_ids) - 1,
                request=seq.request.request,
                sampling=seq.sampling,
                adapter_slot=seq.adapter_slots[0] if len(seq.adapter_slots) == 1 else None,
                matcher=seq.matcher,
            )
            for seq in self._table.running
            if not seq.num_coming and not seq.is_draft_coming and len(seq.token_ids) - seq.num_computed == 1
        ]

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Takes in the result of the oldest plan under way; returns all events since the last time."""
        assert plan is self._in_flight[0].plan, "results come in the order of plans"
        assert result.step == plan.step, f"the result of step {result.step} for plan {plan.step}"
        flight = self._in_flight.popleft()
        num_outputs = sum(len(span.token_ids) for span in result.spans.values())
        self._num_output_tokens += num_outputs
        if self._last_step_s is not None:
            self._speed.on_step(flight.size, num_outputs, now - self._last_step_s)
        self._last_step_s = now
        self._commit(flight, result, now)
        return self.take_events()

    def take_events(self) -> list[Event]:
        """Events that have not been returned by another method, in order."""
        events = self._events[:]
        self._events.clear()
        return events

    # --- what others may know -----------------------------------------------------------------------------------------

    def load(self) -> Load:
        """The load; the engine adds steps, drafts and the forecast."""
        table, states = self._table, self._table.states
        return Load(
            num_running=len(table.running),
            num_queued=table.num_not_running,
            pending_tokens=table.num_waiting_tokens
            + sum(max(0, seq.max_total_tokens - seq.num_computed) for seq in table.running),
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            block_tokens=self._blocks.block_size,
            num_state_slots=0 if states is None else states.num_slots,
            num_free_state_slots=0 if states is None else states.num_free,
            num_state_snapshots=0 if states is None else states.num_snapshots,
            max_running=self._config.max_running,
            num_preemptions=table.num_preemptions,
            num_prompt_tokens=table.num_prompt_tokens,
            num_cached_tokens=table.num_cached_tokens,
            num_output_tokens=self._num_output_tokens,
            num_adapter_hits=table.num_adapter_hits,
            num_adapter_misses=table.num_adapter_misses,
            kv_wait_s=table.kv_wait_s,
        )

    def forecast(self) -> Forecast | None:
        """Time that requests would wait; None while none does. Takes time in proportion to those that wait."""
        return self._limits.forecast()

    def check_integrity(self) -> None:
        """Raises AssertionError when a block, row or adapter reference is unaccounted for."""
        self._table.check_integrity(self._in_flight)
        if not self._in_flight:
            self._table.check_adapters()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _fail(self, state: RequestState, error: LoraplexError, now: float) -> None:
        request_id = state.request.request_id
        failed = RequestFailed(request_id, error)
        if state.phase is RequestPhase.QUEUED:
            failed = RequestFailed(
                request_id, error, max(0.0, now - state.request.arrival_s), state.adapter_wait_so_far_s(now)
            )
        self._end_request(state)
        self._events.append(failed)

    def _end_request(self, state: RequestState) -> None:
        """Frees all that a request has. Most end long before their deadline and must not stay in memory until then."""
        self._table.end_request(state)
        if len(self._deadlines) > 2 * len(self._table.requests) + 16:
            self._deadlines = [entry for entry in self._deadlines if entry[2].phase is not RequestPhase.ENDED]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            state = heapq.heappop(self._deadlines)[2]
            has_deadline = state.request.deadline_s is not None
            if state.phase is RequestPhase.QUEUED:
                error = DeadlineExceeded("the deadline passed while the request was waiting; allow more time")
                self._fail(state, error if has_deadline else self._waited_too_long(), now)
            elif state.phase is RequestPhase.ACTIVE and has_deadline:
                error = DeadlineExceeded("the deadline passed before the end; allow more time or fewer tokens")
                self._fail(state, error, now)

    def _waited_too_long(self) -> Overloaded:
        return Overloaded(
            f"the request waited for {self._config.max_queue_wait_s:g} s, which is all that --max-queue-wait allows "
            "where a request has no deadline; try again later or on another worker",
            resource="queue",
            retry_after_s=1.0,
        )

    def _max_total_tokens(self, request: Request) -> int:
        """Most tokens of a completion, prompt included. The last token is sampled and never run, so it needs no K/V.
        With this bound a sequence that is alone always has room, and where a completion ends does not depend on who
        else is there. Pooled values count as a token."""
        if request.pooling is not None:
            return len(request.prompt_token_ids) + 1
        return min(
            len(request.prompt_token_ids) + request.stopping.max_tokens,
            self._config.max_context_tokens,
            self._blocks.num_blocks * self._blocks.block_size + 1,
        )

    def _new_state(
        self,
        request: Request,
        adapters: tuple[WeightedKey, ...],
        adapter_digest: str,
        matcher: GrammarMatcher | None,
        adapted_from: int | None,
    ) -> RequestState:
        prompt = list(request.prompt_token_ids)
        state = RequestState(
            request=request,
            adapters=adapters,
            adapter_digest=adapter_digest,
            max_total_tokens=self._max_total_tokens(request),
            num_prompt_tokens=len(prompt),
            stop_ids=request.stopping.ending_ids(self._eos_token_ids),
            adapted_from=adapted_from,
        )
        for index in range(request.n):
            state.sequences.append(
                SequenceState(
                    # Unique for good: a client may use a request id again while the last step of the old one runs.
                    sequence_id=f"{request.request_id}#{index}@{self._num_added}",
                    request=state,
                    index=index,
                    order=(-request.priority, 0.0, self._num_added, index),
                    sampling=replace(request.sampling, seed=seed_of_completion(request.sampling.seed, index)),
                    num_prompt_tokens=len(prompt),
                    max_total_tokens=state.max_total_tokens,
                    token_ids=prompt,
                    chain=self._chain(state, len(prompt)),
                    matcher=matcher,
                    status=SequenceStatus.HELD if index else SequenceStatus.WAITING,
                )
            )
        return state

    def _chain(self, state: RequestState, num_tokens: int) -> KeyChain | None:
        """The keys of the blocks of a sequence that enters with so many tokens."""
        request, rope, block_size = state.request, self._config.rope, self._blocks.block_size
        if not self._blocks.prefix_caching or (request.pooling is not None and request.pooling.needs_all):
            return None
        rope_key = 0 if rope is None else rope.key(state.num_prompt_tokens, num_tokens)
        base = Namespace(self._config.model_digest, (), request.tenant, request.cache_salt, rope=rope_key)
        first = state.adapted_from or 0
        own = base if not state.adapters else replace(base, adapters=state.adapters, adapted_from=first)
        return KeyChain(own.digest(), block_size, base.digest() if first else b"", first // block_size)

    def _close(self, step: PlanBuilder) -> StepPlan:
        """Makes the plan, and moves the view of every sequence in it on."""
        # Base rows first, then slot by slot: rows of one adapter are contiguous, so that segments merge.
        step.spans.sort(key=lambda entry: (entry[0].adapter_slots, entry[0].row))
        snapshots: list[Snapshot] = []
        flight_spans = [
            (seq, _span(seq, num_tokens, draft, self._state_use(seq, num_tokens, draft, snapshots)))
            for seq, num_tokens, draft in step.spans
        ]
        self._num_steps += 1
        plan = StepPlan(
            step=self._num_steps,
            spans=tuple(span for _seq, span in flight_spans),
            entered=tuple(step.entered),
            released=tuple(self._table.released_rows),
            copies=tuple(step.copies),
        )
        self._table.released_rows.clear()
        flight = InFlight(plan, flight_spans, snapshots=snapshots)
        flight.size.is_full = step.is_full
        self._in_flight.append(flight)
        for seq, span in flight_spans:
            if seq.num_computed < seq.num_prompt_tokens:
                flight.size.num_prompt_tokens += span.num_tokens
            else:
                flight.size.num_rows += 1
            seq.last_plan = flight
            seq.num_sent_blocks = len(seq.block_ids)
            self._table.end_source(seq)
            seq.num_computed = span.start + span.num_tokens
            if span.draft:
                seq.is_draft_coming = True
            elif span.has_output:
                seq.num_coming += 1
            if seq.request.leader is seq and seq.num_computed >= seq.num_prompt_tokens:
                self._table.on_prompt_planned(seq.request)
        return plan

    # --- states -------------------------------------------------------------------------------------------------------

    def _state_use(
        self, seq: SequenceState, num_tokens: int, draft: Draft | None, snapshots: list[Snapshot]
    ) -> StateUse | None:
        """The state slots of a span; adds snapshots that it is to take to `snapshots`."""
        states, start, end = self._table.states, seq.num_computed, seq.num_computed + num_tokens
        if states is None:
            return None
        source = seq.state_source or (seq.state_slot if start else NO_STATE)
        if draft is not None:
            return StateUse(source, seq.state_slot)
        copies: list[tuple[int, int]] = []
        request, shareable = seq.request, seq.num_prompt_tokens - 1
        is_shared = start < shareable <= end and request.leader is seq and request.shared_state == NO_STATE
        if is_shared and states.num_free and request.has_held:
            request.shared_state = states.take()
            copies.append((shareable, request.shared_state))
        for position in self._snapshot_positions(seq, start, end):
            block_idx = position // self._blocks.block_size - 1
            assert seq.chain is not None
            is_known = position <= len(seq.token_ids)
            if is_known and states.find(seq.chain.key(block_idx, seq.token_ids)) is not None:
                continue
            if not states.num_free:
                break
            slot = states.take()
            copies.append((position, slot))
            snapshots.append(Snapshot(seq, seq.chain, block_idx, slot))
        return StateUse(source, seq.state_slot, tuple(sorted(copies)))

    def _snapshot_positions(self, seq: SequenceState, start: int, end: int) -> list[int]:
        """Block borders behind which a span leaves its state for the prefix cache: the prompt's last one, where the
        blocks of another text end that began alike, and some on the way."""
        if seq.chain is None:
            return []
        size = self._blocks.block_size
        wanted = {(seq.num_prompt_tokens - 1) // size * size, seq.num_found}
        every = _multiple(size, PROMPT_SNAPSHOT_TOKENS if start < seq.num_prompt_tokens else TEXT_SNAPSHOT_TOKENS)
        wanted.update(range(start // every * every + every, end + 1, every))
        return sorted(position for position in wanted if start < position <= end)

    # --- results ------------------------------------------------------------------------------------------------------

    def _commit(self, flight: InFlight, result: StepResult, now: float) -> None:
        """Takes in the result of a plan that is no longer under way."""
        for seq, span in flight.spans:
            if seq.last_plan is flight:
                seq.last_plan = None
            if span.draft:
                seq.is_draft_coming = False
            elif span.has_output:
                seq.num_coming -= 1
            if seq.status is SequenceStatus.FINISHED:
                continue
            out = result.spans.get(span.sequence_id, _NO_RESULT)
            error, has_ended = out.error or _broken_contract(span, out), False
            if error is None or (out.error is not None and out.token_ids):
                has_ended = self._commit_span(seq, span, out)
            if error is not None and not has_ended:
                self._fail(seq.request, error, now)
        for adapter_key in flight.ended_leases:
            self._table.release_adapter(adapter_key)
        for snapshot in flight.snapshots:
            self._take_snapshot(snapshot, result)

    def _take_snapshot(self, snapshot: Snapshot, result: StepResult) -> None:
        """Publishes a state that the step has left behind a block."""
        states, (seq, chain, block_idx, slot) = self._table.states, snapshot
        assert states is not None
        out = result.spans.get(seq.sequence_id)
        if out is not None and out.error is None and len(seq.token_ids) >= (block_idx + 1) * self._blocks.block_size:
            states.publish(slot, chain.key(block_idx, seq.token_ids))
        states.release(slot)

    def _finish(self, seq: SequenceState, reason: FinishReason, stop_token_id: int | None) -> None:
        """Ends a completion that has no error; the request's last one ends the request."""
        request = seq.request
        if seq.num_left and request.request.pooling is None:
            self._speed.on_early_end()
        self._table.finish(seq)
        self._events.append(
            CompletionEnd(
                request.request.request_id,
                seq.index,
                reason,
                stop_token_id,
                num_prompt_tokens=seq.num_prompt_tokens,
                num_cached_tokens=request.num_cached_tokens,
            )
        )
        if request.num_open == 0:
            self._end_request(request)

    def _commit_span(self, seq: SequenceState, span: Span, out: SpanResult) -> bool:
        """Takes in a span's tokens. True if they ended the completion: an error behind them does not count."""
        if span.prompt_logprobs:
            self._emit_prompt_logprobs(seq.request, span, out)
        num_accepted = max(0, len(out.token_ids) - (out.error is None))
        num_rejected = len(span.draft) - num_accepted
        # One that was preempted meanwhile has no blocks any more, and cannot be back yet (see SequenceTable.enter).
        is_running = seq.status is SequenceStatus.RUNNING
        if is_running:
            seq.num_computed -= num_rejected
        kept, reason, stop_token_id = self._cut(seq, out.token_ids)
        seq.token_ids += kept
        if is_running:
            # Only K/V of the text is published, not that of rejected drafts or behind a stop.
            self._publish(seq, min(span.start + span.num_tokens - num_rejected, len(seq.token_ids)))
        if kept:
            self._emit_tokens(seq, span, out, kept, num_accepted)
        if out.pooled is not None:
            request, pooled = seq.request.request, out.pooled
            assert request.pooling is not None
            labels, per_token = request.pooling.labels, request.pooling.positions == "each"
            self._events.append(Pooled(request.request_id, pooled.values, pooled.num_columns, labels, per_token))
            reason = FinishReason.LENGTH
        rope, num_tokens = self._config.rope, len(seq.token_ids)
        if reason is not None:
            self._finish(seq, reason, stop_token_id)
        elif rope is not None and rope.outgrown(num_tokens - len(kept), num_tokens):
            seq.chain = self._chain(seq.request, num_tokens)
            if is_running:
                self._table.restart(seq)
        return reason is not None

    def _cut(
        self, seq: SequenceState, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """The tokens up to the one that ends the completion, and why it ends."""
        stopping = seq.request.request.stopping
        num_tokens = len(seq.token_ids)
        for num_kept, token_id in enumerate(token_ids, start=1):
            num_output = num_tokens + num_kept - seq.num_prompt_tokens
            if token_id in seq.request.stop_ids and num_output > stopping.min_tokens:
                is_eos = token_id in self._eos_token_ids and not stopping.ignore_eos
                return token_ids[:num_kept], FinishReason.EOS if is_eos else FinishReason.STOP, token_id
            # Below min_tokens its end is an error: no token may come next then, as the next step finds.
            if seq.matcher is not None and seq.matcher.advance(token_id) and num_output >= stopping.min_tokens:
                return token_ids[:num_kept], FinishReason.EOS, None
            if num_tokens + num_kept >= seq.max_total_tokens:
                return token_ids[:num_kept], FinishReason.LENGTH, None
        return token_ids, None, None

    def _publish(self, seq: SequenceState, num_committed: int) -> None:
        blocks = self._table.blocks
        num_full = num_committed // blocks.block_size
        if seq.chain is None or num_full <= seq.num_published:
            return
        for block_idx in range(seq.num_published, num_full):
            blocks.publish(seq.block_ids[block_idx], seq.chain.key(block_idx, seq.token_ids))
        seq.num_published = num_full

    def _emit_prompt_logprobs(self, request: RequestState, span: Span, out: SpanResult) -> None:
        """Sends logprobs of positions that are not sent yet; a prompt that was computed twice gives some twice."""
        num_new = min(span.start + span.num_tokens, request.num_prompt_tokens - 1) - request.num_prompt_logprobs
        if num_new > 0:
            first = request.num_prompt_logprobs - span.start
            request.num_prompt_logprobs += num_new
            logprobs = out.prompt_logprobs[first : first + num_new]
            self._events.append(PromptLogprobs(request.request.request_id, logprobs))

    def _emit_tokens(
        self, seq: SequenceState, span: Span, out: SpanResult, kept: tuple[int, ...], num_accepted: int
    ) -> None:
        request = seq.request
        request_id = request.request.request_id
        is_first = len(seq.token_ids) - len(kept) == seq.num_prompt_tokens
        self._events.append(
            Tokens(
                request_id,
                seq.index,
                kept,
                out.logprobs[: len(kept)],
                num_drafted=len(span.draft),
                num_accepted=min(num_accepted, len(kept)),
                proposer=span.proposer,
                # The front end finds stop strings, and the sequence runs on until it has.
                can_wait=not is_first and not request.request.stopping.stop,
            )
        )


def _plan_running(
    table: SequenceTable, step: PlanBuilder, drafts: Mapping[str, Draft], rope: RopeScaling | None
) -> None:
    """Puts every running sequence that can go on into `step`, as far as budget and blocks reach."""
    decodes: list[SequenceState] = []
    prefills: list[SequenceState] = []
    for seq in table.running:
        num_tokens = len(seq.token_ids) + seq.num_coming
        # Nothing to plan while its last token, or the verification of its draft, is still to come.
        if seq.is_draft_coming or num_tokens >= seq.max_total_tokens:
            continue
        # One that speculates waits for its token: a draft follows a token that is known. So does a grammar's mask.
        if seq.num_coming and (seq.sequence_id in drafts or seq.matcher is not None):
            continue
        # Nor one whose coming token is the first of a text that has to be computed again.
        if seq.num_coming and rope is not None and rope.outgrown(len(seq.token_ids), num_tokens):
            continue
        (decodes if num_tokens - seq.num_computed == 1 else prefills).append(seq)
    # In order, so that a sequence is preempted before its own turn.
    going = [seq for seq in decodes if _make_room(table, step, seq)]
    step.num_left -= len(going)
    has_more_work = bool(prefills) or bool(table.waiting)
    chosen = _choose_drafts(table, step, going, drafts, rope, has_more_work=has_more_work)
    for seq in going:
        step.spans.append((seq, 1, chosen.get(seq.sequence_id)))
    for seq in prefills:
        if seq.status is SequenceStatus.RUNNING and step.num_left > 0:
            step.add(seq, min(step.num_left, seq.num_tokens - seq.num_computed))


def _make_room(table: SequenceTable, step: PlanBuilder, seq: SequenceState) -> bool:
    """Allocates the block of the next token, by preemption if need be. False when `seq` itself was preempted."""
    if seq.status is not SequenceStatus.RUNNING:
        return False
    blocks = table.blocks
    if seq.num_computed < len(seq.block_ids) * blocks.block_size:
        return True
    while blocks.num_free == 0:
        if table.drop_shared_prompt():
            continue
        victim = table.running[-1]
        table.preempt(victim)
        step.num_preempted += 1
        if victim is seq:
            return False
    seq.block_ids += blocks.allocate(1)
    return True


def _choose_drafts(
    table: SequenceTable,
    step: PlanBuilder,
    going: Iterable[SequenceState],
    drafts: Mapping[str, Draft],
    rope: RopeScaling | None,
    *,
    has_more_work: bool,
) -> dict[str, Draft]:
    """The part of each draft that may run: within the budget, the completion's end, and free blocks.

    A draft may be rejected, so it takes clean blocks only. The exception is the sequence's next block, which its own
    tokens will need anyway: for that one, the least recently used block of the prefix cache may be evicted.
    """
    chosen: dict[str, Draft] = {}
    if not drafts:
        return chosen
    budget = step.num_left // 2 if has_more_work else step.num_left  # drafts are a bet, prompts are not
    blocks = table.blocks
    for seq in going:
        draft = drafts.get(seq.sequence_id)
        if draft is None or not draft.token_ids:
            continue
        num_drafted = min(len(draft.token_ids), budget, seq.max_total_tokens - len(seq.token_ids) - 1)
        if rope is not None and (num_room := rope.num_room(len(seq.token_ids))) is not None:
            num_drafted = min(num_drafted, num_room)
        num_missing = blocks.num_blocks_for(seq.num_computed + 1 + num_drafted) - len(seq.block_ids)
        if num_missing > 0:
            seq.block_ids += blocks.allocate(min(num_missing, max(1, blocks.num_clean), blocks.num_free))
            num_drafted = min(num_drafted, len(seq.block_ids) * blocks.block_size - seq.num_computed - 1)
        if num_drafted > 0:
            chosen[seq.sequence_id] = Draft(draft.token_ids[:num_drafted], draft.proposer)
            budget -= num_drafted
            step.num_left -= num_drafted
    return chosen


def _multiple(size: int, least: int) -> int:
    """The first multiple of `size` that is not below `least`."""
    return -(-least // size) * size


def _span(seq: SequenceState, num_tokens: int, chosen: Draft | None, state: StateUse | None) -> Span:
    draft, proposer = (chosen.token_ids, chosen.proposer) if chosen is not None else ((), "")
    start = seq.num_computed
    is_last_piece = start + num_tokens == seq.num_tokens
    pools = seq.request.request.pooling is not None
    wants_prompt_logprobs = start < seq.num_prompt_tokens - 1 and seq.request.wants_prompt_logprobs
    return Span(
        sequence_id=seq.sequence_id,
        row=seq.row,
        start=start,
        num_tokens=num_tokens + len(draft),
        num_samples=1 + len(draft) if is_last_piece and not pools else 0,
        new_block_ids=tuple(seq.block_ids[seq.num_sent_blocks :]) if len(seq.block_ids) > seq.num_sent_blocks else (),
        draft=draft,
        proposer=proposer,
        prompt_logprobs=wants_prompt_logprobs,
        ends_pooling=is_last_piece and pools,
        state=state,
    )


def _broken_contract(span: Span, out: SpanResult) -> LoraplexError | None:
    """The error of a span with no token where it sampled, or with more tokens than it sampled; else None."""
    if span.ends_pooling is not (out.pooled is not None):
        return Internal("a step gave no pooled values where they were wanted; please report this")
    num_wanted = 1 if span.num_samples else 0
    if num_wanted <= len(out.token_ids) <= span.num_samples:
        return None
    return Internal(
        f"a step gave {len(out.token_ids)} tokens where {span.num_samples} were sampled; please report this"
    )


def _adapter_alone(key: AdapterKey | None, adapted_from: int | None) -> tuple[WeightedKey, ...]:
    """The adapter that a request without a mixture needs in a slot, or nothing."""
    return ((key, 1.0),) if key is not None and key.changes_kv and adapted_from is not None else ()
