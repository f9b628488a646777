"""Admission of waiting sequences, by priority and fair share.

A sequence whose adapter is not on the device is skipped, and others pass it. Once it has been passed too often or for
too long it is *starving*, and an adapter has to drain for it: younger sequences then enter only without an adapter, or
with one that runs already and is not the one that will drain the soonest. So a slot comes free after at most the
longest of that adapter's running sequences, and no idle adapter takes it first.

A sequence that lacks a row or blocks is not passed. It keeps its adapter's slot while it is first, so that a load for a
later one cannot evict the adapter again.

Two more rules keep answers in time. Where all rows are taken by long sequences, a new one that is much shorter gets the
row of one that has run for a while (`preempt_for_shorter`). And none enters where one more row would make most running
sequences miss their deadlines (`_is_held_back`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import DeadlineExceeded, LoraplexError
from loraplex_contracts.load import MUCH_SHORTER
from loraplex_contracts.plan import BlockCopy, Draft, NewSequence
from loraplex_contracts.request import Admitted, Event
from loraplex_server.kv.rope import RopeScaling
from loraplex_server.kv.states import NO_STATE
from loraplex_server.scheduler.overload import StepSpeed, WaitLimits
from loraplex_server.scheduler.sequence_table import (
    Prefix,
    RequestPhase,
    RequestState,
    SequenceState,
    SequenceStatus,
    SequenceTable,
)

LOOKS_PER_SLICE = 32  # for a sequence to preempt for: looking takes time of every step
MAX_HOLD_S = 1.0  # for which deadlines of running sequences may keep others out
# A sequence with less time than this part of what it needs is late anyway: no other waits for it.
GIVEN_UP = 0.75


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of a step and of the queue. Raises ValueError for values that contradict each other."""

    max_running: int  # rows: sequences in the batch
    max_step_tokens: int
    max_context_tokens: int  # prompt plus output of one sequence
    max_queued: int = 4096  # requests that have not begun
    model_digest: str = ""  # into every prefix-cache key
    # Free blocks that an admission leaves to those that run already, so that it does not cost a preemption at once.
    num_spare_blocks: int = 1
    # A request whose adapter finds no device slot is overtaken by requests for adapters that are there: by this many
    # sequences, or for this long. Then slots are made to drain for it.
    max_bypasses: int = 32
    max_adapter_wait_s: float = 1.0
    # A request without a deadline is refused, or ends, rather than wait for longer than this. 0: it waits for ever.
    max_queue_wait_s: float = 60.0
    # A sequence that has run for so long gives its row to a new one that is much shorter and has waited for so long.
    slice_s: float = 0.5
    rope: RopeScaling | None = None  # of a model whose rotations depend on a text's length

    def __post_init__(self) -> None:
        checks = (
            (self.max_running >= 1, "max_running must be at least 1"),
            # With this, a decoding sequence never waits for the budget: policy has one case less.
            (self.max_step_tokens >= self.max_running, "max_step_tokens must be at least max_running"),
            (self.max_context_tokens >= 2, "max_context_tokens must be at least 2"),
            (self.max_queued >= 1, "max_queued must be at least 1"),
            (self.num_spare_blocks >= 0, "num_spare_blocks must not be negative"),
            (self.max_bypasses >= 0, "max_bypasses must not be negative"),
            (self.max_adapter_wait_s >= 0, "max_adapter_wait_s must not be negative"),
            (self.max_queue_wait_s >= 0, "max_queue_wait_s must not be negative"),
            (self.slice_s > 0, "slice_s must be above 0"),
        )
        for is_ok, rule in checks:
            if not is_ok:
                raise ValueError(rule)


@dataclass(slots=True)
class PlanBuilder:
    """A plan in the making: sequences with the number of their tokens to run, and with their drafts."""

    num_left: int  # of the step's token budget
    spans: list[tuple[SequenceState, int, Draft | None]] = field(
        default_factory=list[tuple[SequenceState, int, Draft | None]]
    )
    entered: list[NewSequence] = field(default_factory=list[NewSequence])
    copies: list[BlockCopy] = field(default_factory=list[BlockCopy])
    num_preempted: int = 0
    is_full: bool = False  # a sequence waits for a row, for blocks or for the budget

    def add(self, seq: SequenceState, num_tokens: int) -> None:
        self.num_left -= num_tokens
        self.spans.append((seq, num_tokens, None))


@dataclass(slots=True)
class _Scan:
    """Findings of one walk through the queue."""

    # In the order of the queue: an adapter, or all of a mixture.
    missing: dict[tuple[AdapterKey, ...], None] = field(default_factory=dict[tuple[AdapterKey, ...], None])
    starving: set[AdapterKey] = field(default_factory=set[AdapterKey])  # all adapters of starving requests
    by_tokens_left: list[AdapterKey] | None = None  # running adapters, once a request starves
    # Adapters that younger sequences may still use, while a request starves.
    open_keys: set[AdapterKey] = field(default_factory=set[AdapterKey])
    # Requests whose adapter cannot come at all.
    failed: dict[RequestState, LoraplexError] = field(default_factory=dict[RequestState, LoraplexError])
    longest_interval_s: float | None = None  # between tokens with which those that run end in time; None: not looked


class Admission:
    """Owner of the counts that fairness needs, and of the one slot that is kept for the head of the queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: SequenceTable,
        speed: StepSpeed,
        limits: WaitLimits,
        emit: Callable[[Event], None],
    ) -> None:
        self._config = config
        self._table = table
        self._speed = speed
        self._limits = limits
        self._emit = emit
        self._preempted_for: SequenceState | None = None  # it gets the row that was taken from another
        self._next_look_s = 0.0  # for one to preempt for
        self._num_adapter_entries = 0
        self._kept_for: SequenceState | None = None
        self._lacks_blocks_since_s: float | None = None  # the head of the queue, since it was last looked at
        self._last_admitted_s: float | None = None
        self._mean_interval_s = 0.0

    def run(self, step: PlanBuilder, now: float) -> dict[RequestState, LoraplexError]:
        """Lets waiting sequences enter `step` while rows, budget and blocks last.

        Returns the requests that have to fail, once the plan is made: a sibling may be in it.
        """
        if self._lacks_blocks_since_s is not None:
            self._table.kv_wait_s += now - self._lacks_blocks_since_s
            self._lacks_blocks_since_s = None
        scan = _Scan()
        for seq in self._queue():
            if not seq.is_waiting:
                continue  # the prompt that it was to share was released during this walk
            if step.num_left <= 0 or self._table.num_free_rows == 0 or seq.last_plan is not None:
                # It lacks only a row, budget or, preempted just now, a result: its adapter is fetched and kept.
                step.is_full = True
                if self._lease_adapter(seq, scan, now):
                    self._keep_lease(seq)
                break
            if self._is_too_late(seq, now):
                scan.failed[seq.request] = DeadlineExceeded(
                    "the request waited for so long that its deadline could not be met any more; allow more time"
                )
                continue
            if not self._lease_adapter(seq, scan, now):
                continue
            is_held_back = self._is_held_back(seq, scan, now)
            prefix = None if is_held_back else self._prefix_that_fits(seq)
            if prefix is None:
                step.is_full = True
                self._keep_lease(seq)
                if not is_held_back:
                    self._lacks_blocks_since_s = now
                break
            self._enter(seq, prefix, step, now)
        if scan.missing:
            # Not in the order in which they were missed: a tenant with many adapters would make the others wait.
            self._table.put_first(list(scan.missing))
        return scan.failed

    def _is_too_late(self, seq: SequenceState, now: float) -> bool:
        return seq.request.phase is RequestPhase.QUEUED and self._limits.is_too_late(seq.request, now)

    def _queue(self) -> Iterable[SequenceState]:
        first, self._preempted_for = self._preempted_for, None
        if first is None or not first.is_waiting:
            return tuple(self._table.waiting)
        return (first, *(seq for seq in self._table.waiting if seq is not first))

    def preempt_for_shorter(self, step: PlanBuilder, now: float) -> None:
        """Takes the row of a sequence that has run for a slice, for a new one that has waited for a slice and is much
        shorter: it will be done soon, and the other, first in the queue, goes on in the next row that comes free."""
        if self._table.num_free_rows or not self._table.waiting or now < self._next_look_s:
            return
        self._next_look_s = now + self._config.slice_s / LOOKS_PER_SLICE
        longest = self._longest_after_slice(now)
        if longest is None:
            return
        waited_since = now - self._config.slice_s
        for seq in self._table.waiting:
            if seq.has_entered or seq.request.queued_s > waited_since or seq.request.num_open > 1:
                continue
            if seq.request.request.priority < longest.request.request.priority:
                return
            if MUCH_SHORTER * seq.max_total_tokens > longest.num_left or not self._would_fit(seq, longest):
                continue
            if self._is_too_late(seq, now):
                continue  # it fails when it is its turn: the row would be taken in vain
            if self._lease_adapter(seq, _Scan(), now):
                self._keep_lease(seq)
                self._table.preempt(longest)
                self._preempted_for = seq
                step.num_preempted += 1
                return

    def _longest_after_slice(self, now: float) -> SequenceState | None:
        """The running sequence that has had its slice and has the most left, of the lowest priority."""
        entered_until = now - self._config.slice_s
        ready = (
            seq
            for seq in self._table.running
            if seq.entered_s <= entered_until
            and len(seq.token_ids) > seq.num_prompt_tokens
            and self._is_cheap_to_resume(seq)
        )
        return max(ready, key=lambda seq: (-seq.request.request.priority, seq.num_left), default=None)

    def _is_cheap_to_resume(self, seq: SequenceState) -> bool:
        """True if computing its tokens again takes less than a slice, or a prefix cache keeps them."""
        has_kept = seq.chain is not None and self._table.states is None
        return has_kept or self._speed.prompt_s(len(seq.token_ids)) < self._config.slice_s

    def _would_fit(self, seq: SequenceState, leaving: SequenceState) -> bool:
        blocks = self._table.blocks
        num_free = blocks.num_free + len(leaving.block_ids) - self._config.num_spare_blocks
        return blocks.num_blocks_for(len(seq.token_ids)) <= num_free

    def _is_held_back(self, newcomer: SequenceState, scan: _Scan, now: float) -> bool:
        """True if one more row would make `newcomer`, or most that run, miss deadlines that they meet without it. Holds
        back for MAX_HOLD_S at most: the deadlines are others', and the times are estimates."""
        num_rows = len(self._table.running)
        if not num_rows or self._last_admitted_s is None or now - self._last_admitted_s >= MAX_HOLD_S:
            return False
        if scan.longest_interval_s is None:
            scan.longest_interval_s = self._longest_interval_s(now)
        limit_s = min(scan.longest_interval_s, self._interval_wanted_s(newcomer, now, self._speed.interval_s(1)))
        return self._speed.interval_s(num_rows + 1) > limit_s

    def _longest_interval_s(self, now: float) -> float:
        """Seconds between two tokens with which half of the running sequences end in time."""
        if not self._speed.is_known:
            return math.inf
        given_up_s = GIVEN_UP * self._speed.interval_s(len(self._table.running))
        intervals = sorted(self._interval_wanted_s(seq, now, given_up_s) for seq in self._table.running)
        return intervals[len(intervals) // 2]

    def _interval_wanted_s(self, seq: SequenceState, now: float, least_s: float) -> float:
        """Seconds between two of its tokens with which it ends in time. Infinite without a deadline, or where that
        would be less than `least_s`: it is late anyway."""
        deadline_s = seq.request.request.deadline_s
        num_outputs = self._speed.num_outputs(seq.num_left)
        if deadline_s is None or not num_outputs or not self._speed.is_known:
            return math.inf
        interval_s = (deadline_s - now) / num_outputs
        return interval_s if interval_s > least_s else math.inf

    def retry_after_s(self, num_queued: int) -> float:
        """A guess of when a full queue has room again: the time in which a tenth of it has left of late."""
        return min(30.0, max(0.1, self._mean_interval_s * num_queued / 10)) if self._mean_interval_s else 1.0

    def _enter(self, seq: SequenceState, prefix: Prefix, step: PlanBuilder, now: float) -> None:
        request = seq.request
        is_first = request.phase is RequestPhase.QUEUED
        if is_first:
            self._table.begin(request)
            request.num_cached_tokens = prefix.num_computed
            self._speed.on_entry(prefix.num_computed, request.num_prompt_tokens)
            self._table.num_prompt_tokens += request.num_prompt_tokens
            self._table.num_cached_tokens += prefix.num_computed
            queue_s = max(0.0, now - request.request.arrival_s)
            self._emit(Admitted(request.request.request_id, request.adapter_digest, queue_s, request.adapter_wait_s))
            if self._last_admitted_s is not None:
                self._mean_interval_s += 0.1 * (now - self._last_admitted_s - self._mean_interval_s)
            self._last_admitted_s = now
        entered, copy = self._table.enter(seq, prefix, now)
        step.entered.append(entered)
        if copy is not None:
            step.copies.append(copy)
        if self._kept_for is seq:
            self._kept_for = None
        step.add(seq, min(step.num_left, len(seq.token_ids) - seq.num_computed))

    # --- adapters -----------------------------------------------------------------------------------------------------

    def _lease_adapter(self, seq: SequenceState, scan: _Scan, now: float) -> bool:
        """Leases the sequence's adapter, if it has one. False: not now, and others may pass."""
        request, keys = seq.request, seq.request.adapter_keys
        if not keys or seq.adapter_slots:
            return True
        if keys in scan.missing:
            self._note_miss(request, now)
            return False
        if scan.starving and not scan.open_keys.issuperset(keys):
            _begin_wait(request, now)
            return False
        if self._table.lease(seq):
            self._table.count_adapter(request, was_found=True)
            request.adapter_wait_s = request.adapter_wait_so_far_s(now)
            request.adapter_missed_s = None
            request.blocked_since_s = None
            self._num_adapter_entries += 1
            return True
        failure = self._table.adapter_failure(keys)
        if failure is not None:
            scan.failed[request] = failure
            return False
        scan.missing[keys] = None
        self._note_miss(request, now)
        if self._is_starving(request, now):
            scan.starving.update(keys)
            self._choose_open_keys(scan)
        return False

    def _note_miss(self, request: RequestState, now: float) -> None:
        self._table.count_adapter(request, was_found=False)
        _begin_wait(request, now)

    def _is_starving(self, request: RequestState, now: float) -> bool:
        if request.blocked_since_s is None:
            request.blocked_since_s = now
            request.num_admitted_when_blocked = self._num_adapter_entries
        return (
            self._num_adapter_entries - request.num_admitted_when_blocked >= self._config.max_bypasses
            or now - request.blocked_since_s >= self._config.max_adapter_wait_s
        )

    def _choose_open_keys(self, scan: _Scan) -> None:
        """Opens all running adapters to younger sequences but, for each starving one that does not run, the one that
        drains the soonest.

        Chosen again in each scan, and still bounded: of the chosen one nothing new enters, so the most that it has left
        shrinks with every step, and another is chosen only for having less.
        """
        if scan.by_tokens_left is None:
            tokens_left: dict[AdapterKey, int] = {}
            for seq in self._table.running:
                num_left = seq.max_total_tokens - seq.num_computed
                for key in seq.request.adapter_keys if seq.adapter_slots else ():
                    tokens_left[key] = max(num_left, tokens_left.get(key, 0))
            scan.by_tokens_left = sorted(tokens_left, key=lambda key: (tokens_left[key], key))
        # A mixture's members that run already stay for it, so that none of their slots comes free.
        others = [key for key in scan.by_tokens_left if key not in scan.starving]
        num_running = len(scan.by_tokens_left) - len(others)
        scan.open_keys = set(scan.by_tokens_left) - set(others[: len(scan.starving) - num_running])

    def _keep_lease(self, seq: SequenceState) -> None:
        """Keeps the lease of the head of the queue, which waits. The sequence that had this before gives its lease
        back."""
        before, self._kept_for = self._kept_for, seq
        if before is not None and before is not seq and before.is_waiting and before.adapter_slots:
            self._table.end_lease(before)

    # --- blocks -------------------------------------------------------------------------------------------------------

    def _prefix_that_fits(self, seq: SequenceState) -> Prefix | None:
        """The cached prefix that the sequence takes over, if there are blocks for its other tokens; else None."""
        table = self._table
        while True:
            prefix = self._prefix(seq)
            num_wanted = prefix.num_new_blocks + table.blocks.num_unheld(prefix.shared)
            has_slot = table.states is None or table.states.num_free > 0
            # Nothing is spared for others where none runs.
            num_spared = self._config.num_spare_blocks if table.running else 0
            if has_slot and num_wanted + num_spared <= table.blocks.num_free:
                return prefix
            # While none runs, only shared prompts can take the blocks and the state slots.
            if table.running or not table.drop_shared_prompt():
                return None
            if seq.status is SequenceStatus.HELD:
                return None

    def _prefix(self, seq: SequenceState) -> Prefix:
        """The longest computed beginning of the sequence's known tokens: from the prefix cache, or its siblings'."""
        blocks, request = self._table.blocks, seq.request
        num_tokens, num_shareable = len(seq.token_ids), seq.num_prompt_tokens - 1
        cached: list[int] = []
        # The last token always runs, because its logits are wanted; so do those whose prompt logprobs are missing.
        num_reusable = num_tokens - 1
        if request.wants_prompt_logprobs:
            num_reusable = min(num_reusable, request.num_prompt_logprobs)
        if seq.chain is not None:
            for block_idx in range(num_reusable // blocks.block_size):
                block_id = blocks.find(seq.chain.key(block_idx, seq.token_ids))
                if block_id is None:
                    break
                cached.append(block_id)
        num_found = len(cached) * blocks.block_size
        state_slot, cached = self._last_snapshot(seq, cached)
        num_computed, copied = len(cached) * blocks.block_size, None
        # Keys of a prompt that is rotated as a part of a longer text now are other ones.
        rope = self._config.rope
        is_outgrown = rope is not None and rope.outgrown(seq.num_prompt_tokens, num_tokens)
        if request.shared_prompt is not None and num_shareable > num_computed and not is_outgrown:
            num_full = num_shareable // blocks.block_size
            cached = request.shared_prompt[:num_full]
            # Its own copy, because it will write its own tokens behind the prompt's.
            copied = request.shared_prompt[num_full] if num_shareable % blocks.block_size else None
            num_computed, state_slot = num_shareable, request.shared_state
        num_new = blocks.num_blocks_for(num_tokens) - len(cached)
        return Prefix(num_computed, cached, copied, num_new, state_slot, num_found)

    def _last_snapshot(self, seq: SequenceState, cached: list[int]) -> tuple[int, list[int]]:
        """The slot with the last state behind one of these blocks, and the blocks up to it. Layers that keep a state
        go on from there only."""
        states = self._table.states
        if states is None:
            return NO_STATE, cached
        # A snapshot that nobody holds is a free slot as well, and the sequence needs one of its own.
        for num_blocks in range(len(cached), 0, -1):
            assert seq.chain is not None
            slot = states.find(seq.chain.keys[num_blocks - 1])
            if slot is not None and states.num_free > states.num_unheld(slot):
                return slot, cached[:num_blocks]
        return NO_STATE, []


def _begin_wait(request: RequestState, now: float) -> None:
    if request.adapter_missed_s is None:
        request.adapter_missed_s = now
