"""Strict fake runner and adapter cache for scheduler tests.

The runner keeps a number per KV position that depends on all tokens before it, on the adapter, and on whose the
request is. A token is drawn from that number, the seed and the position. So a wrong block, a stale copy, a slot that
has changed hands or a prefix shared across tenants changes the text; most are caught before that, by an assertion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import NewSequence, Span, SpanResult, StepPlan, StepResult
from loraplex_contracts.request import PositionLogprobs, Request, seed_of_completion
from loraplex_server.kv.rope import RopeScaling

VOCAB_SIZE = 24
EOS = frozenset({0})


def adapter(name: str) -> AdapterKey:
    return AdapterKey("lora", f"{name:0>64}")


class FakeResidency:
    """Device slots, filled in the order of wishes after `load_polls` polls; idle adapters are evicted for others.

    One that has just come stays `offer_polls` polls for whoever wanted it. With 0, two wishes for one slot can push
    each other out for ever.
    """

    def __init__(self, num_slots: int, load_polls: int = 0, offer_polls: int = 8) -> None:
        self.num_slots = num_slots
        self.load_polls = load_polls
        self.offer_polls = offer_polls
        self.failures: dict[AdapterKey, LoraplexError] = {}
        self.slots: dict[AdapterKey, int] = {}
        self.refs: dict[AdapterKey, int] = {}
        self._idle: OrderedDict[AdapterKey, None] = OrderedDict()
        self._wanted: OrderedDict[AdapterKey, None] = OrderedDict()
        self._loading: dict[AdapterKey, tuple[int, int]] = {}  # slot, polls to go
        self._offers: dict[AdapterKey, int] = {}  # polls to go
        self._free = list(range(num_slots))

    def acquire(self, key: AdapterKey) -> int | None:
        if key not in self.slots:
            if key not in self._loading and key not in self.failures:
                self._wanted[key] = None
            return None
        self.refs[key] = self.refs.get(key, 0) + 1
        self._idle.pop(key, None)
        self._offers.pop(key, None)
        return self.slots[key]

    def acquire_all(self, keys: tuple[AdapterKey, ...]) -> tuple[int, ...] | None:
        if any(key not in self.slots for key in keys):
            for key in keys:
                if self.acquire(key) is not None:
                    self.release(key)
            return None
        return tuple(slot for key in keys if (slot := self.acquire(key)) is not None)

    def put_first(self, wants: Sequence[AdapterKey | tuple[AdapterKey, ...]]) -> None:
        for want in reversed(wants):
            if isinstance(want, AdapterKey) and want in self._wanted:
                self._wanted.move_to_end(want, last=False)

    def release(self, key: AdapterKey) -> None:
        assert self.refs.get(key, 0) > 0, f"{key} was released more often than acquired"
        self.refs[key] -= 1
        if not self.refs[key]:
            del self.refs[key]
            self._idle[key] = None

    def failure(self, *keys: AdapterKey) -> LoraplexError | None:
        return next((self.failures[key] for key in keys if key in self.failures), None)

    def poll(self) -> None:
        self._offers = {key: to_go - 1 for key, to_go in self._offers.items() if to_go > 0}
        for key, (slot, to_go) in list(self._loading.items()):
            if to_go > 0:
                self._loading[key] = (slot, to_go - 1)
            else:
                del self._loading[key]
                self.slots[key] = slot
                self._idle[key] = None
                self._offers[key] = self.offer_polls
        for key in list(self._wanted):
            if not self._free and not self.evict_idle():
                return
            self._loading[key] = (self._free.pop(), self.load_polls)
            del self._wanted[key]

    def evict_idle(self) -> bool:
        key = next((key for key in self._idle if key not in self._offers), None)
        if key is None:
            return False
        del self._idle[key]
        self._free.append(self.slots.pop(key))
        return True

    def key_in(self, slot: int) -> AdapterKey | None:
        return next((key for key, at in self.slots.items() if at == slot), None)


Owner = AdapterKey | tuple[AdapterKey, ...] | None  # of a mixture several


def content(before: int, token_id: int, namespace: int, rotation: int = 0) -> int:
    """Contents of the KV cache at a position. `rotation`: the number of its frequencies, see RopeScaling.sets."""
    return hash((before, token_id, namespace, rotation) if rotation else (before, token_id, namespace)) & 0xFFFFFFFF


def rotation_at(position: int, num_first: int, rope: RopeScaling | None) -> int:
    """`num_first`: see RopeScaling."""
    return 0 if rope is None else rope.set_of(num_first if position < num_first else position + 1)


def namespace_of(request: Request, key: Owner) -> int:
    name = repr((key, request.tenant, request.cache_salt))
    return int.from_bytes(name.encode()[-400:], "little") % (2**61 - 1)


def draw(state: int, seed: int, position: int, banned: frozenset[int]) -> int:
    """The token after `position`. Few different ones, so that stops are met and prefixes shared."""
    token_id = hash((state, seed, position)) % VOCAB_SIZE
    while token_id in banned:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


@dataclass(frozen=True)
class Expected:
    """The expected end of one completion, computed alone and without any cache."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    reason: str
    prompt_logprobs: tuple[PositionLogprobs, ...]


def expect(
    request: Request, key: Owner, index: int, max_total_tokens: int, rope: RopeScaling | None = None
) -> Expected:
    namespace, prompt = namespace_of(request, key), request.prompt_token_ids

    def states_of(text: Sequence[int]) -> list[int]:
        """States of the text behind each of its tokens."""
        num_first = len(prompt) if rope is None else rope.num_first(len(prompt), len(text))
        states: list[int] = []
        for at, token_id in enumerate(text):
            before = states[-1] if states else 0
            states.append(content(before, token_id, namespace, rotation_at(at, num_first, rope)))
        return states

    states = states_of(prompt)
    state = states[-1]
    of_prompt = tuple(_logprob(states[at - 1], prompt[at]) for at in range(1, len(prompt)))
    stopping, seed = request.stopping, seed_of_completion(request.sampling.seed, index)
    stops = stopping.stop_token_ids | (frozenset[int]() if stopping.ignore_eos else EOS)
    tokens: list[int] = []
    logprobs: list[PositionLogprobs] = []
    while True:
        position = len(prompt) + len(tokens) - 1
        token_id = draw(state, seed, position, stops if len(tokens) < stopping.min_tokens else frozenset())
        tokens.append(token_id)
        logprobs.append(_logprob(state, token_id))
        state = content(state, token_id, namespace) if rope is None else states_of((*prompt, *tokens))[-1]
        if token_id in stops and len(tokens) > stopping.min_tokens:
            is_eos = token_id in EOS and not stopping.ignore_eos
            return Expected(tuple(tokens), tuple(logprobs), "eos" if is_eos else "stop", of_prompt)
        if len(tokens) == stopping.max_tokens or len(prompt) + len(tokens) == max_total_tokens:
            return Expected(tuple(tokens), tuple(logprobs), "length", of_prompt)


def _logprob(state_before: int, token_id: int) -> PositionLogprobs:
    """Logprob of a token of the prompt or of the text: a value that tells the state before it."""
    return PositionLogprobs(token_id, -(state_before % 1000) / 100)


@dataclass
class Row:
    """A mirror of one sequence, as the runner has it."""

    new: NewSequence
    token_ids: list[int]
    namespace: int
    key: Owner
    table: list[int] = field(default_factory=list)
    num_computed: int | None = None  # None: its first span says


class FakeRunner:
    """Executes plans in order. `owner_of`: request and key by sequence id, for what the plan does not say."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_running: int,
        max_step_tokens: int,
        residency: FakeResidency,
        owner_of: Callable[[str], tuple[Request, Owner]],
        num_states: int = 0,
        rope: RopeScaling | None = None,
    ) -> None:
        self._rope = rope
        self.rows: dict[int, Row] = {}
        self.num_steps = 0
        self.failing: dict[str, LoraplexError] = {}  # by request id: its next span fails
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_running = max_running
        self._max_step_tokens = max_step_tokens
        self._residency = residency
        self._owner_of = owner_of
        self._kv: dict[tuple[int, int], int] = {}  # (block, offset) -> content
        self._num_states = num_states
        self._states: dict[int, int] = {}  # slot -> content of the position before

    def execute(self, plan: StepPlan) -> StepResult:
        self.num_steps += 1
        assert plan.step == self.num_steps, "plans are executed in order"
        assert 0 < plan.num_tokens <= self._max_step_tokens
        self._apply_membership(plan)
        self._apply_copies(plan)
        self._check_order(plan)
        for span in plan.spans:
            self._prepare(span)
        # All reads come before all writes: nobody may rely on what the same step writes for another.
        for span in plan.spans:
            self._check_past(self.rows[span.row], span.start)
            self._check_state(span)
        slots = [slot for span in plan.spans for slot in _slots_written(span)]
        assert len(set(slots)) == len(slots), "two spans write to one state slot"
        written: set[tuple[int, int]] = set()
        results = {span.sequence_id: self._run(span, written) for span in plan.spans}
        for row in self.rows.values():
            self._check_past(row, row.num_computed or 0)
        return StepResult(plan.step, results)

    def _apply_membership(self, plan: StepPlan) -> None:
        assert len(set(plan.released)) == len(plan.released)
        for row in plan.released:
            del self.rows[row]  # KeyError: released, but never entered
        planned = {span.sequence_id for span in plan.spans}
        for new in plan.entered:
            assert 0 <= new.row < self._max_running
            assert new.row not in self.rows, f"row {new.row} is taken"
            assert new.sequence_id in planned, "entered, but not run"
            request, key = self._owner_of(new.sequence_id)
            assert new.token_ids[: new.num_prompt_tokens] == request.prompt_token_ids
            assert (key is None) == (not new.adapters)
            self.rows[new.row] = Row(new, list(new.token_ids), namespace_of(request, key), key)

    def _apply_copies(self, plan: StepPlan) -> None:
        sources = {copy.source for copy in plan.copies}
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets)
        assert sources.isdisjoint(targets), "the order of copies would matter"
        for copy in plan.copies:
            for offset in range(self._block_size):
                self._kv.pop((copy.target, offset), None)
                if (copy.source, offset) in self._kv:
                    self._kv[copy.target, offset] = self._kv[copy.source, offset]

    def _check_order(self, plan: StepPlan) -> None:
        groups = [self.rows[span.row].key for span in plan.spans]
        changes = [key for at, key in enumerate(groups) if at == 0 or key != groups[at - 1]]
        assert len(set(changes)) == len(changes), "rows of one adapter are not contiguous"
        assert None not in changes[1:], "base rows do not come first"
        assert len({span.row for span in plan.spans}) == len(plan.spans)

    def _prepare(self, span: Span) -> None:
        row = self.rows[span.row]
        assert row.new.sequence_id == span.sequence_id
        row.table += span.new_block_ids
        assert all(0 < block_id < self._num_blocks for block_id in row.table)
        assert len(set(row.table)) == len(row.table)
        if row.num_computed is None:
            row.num_computed = span.start
        assert span.start == row.num_computed, f"{span.sequence_id} starts at {span.start}, not at {row.num_computed}"
        end = span.start + span.num_tokens
        assert span.num_tokens > len(span.draft)
        assert end <= len(row.table) * self._block_size, "tokens without a block"
        if span.num_samples:
            assert span.num_samples == 1 + len(span.draft)
            assert end - len(span.draft) == len(row.token_ids), "sampling behind a token that is not the last"
        else:
            assert not span.draft
            assert end < len(row.token_ids)
        if row.key is not None:
            in_slots = tuple(self._residency.key_in(use.adapter_slot) for use in row.new.adapters)
            wanted = row.key if isinstance(row.key, tuple) else (row.key,)
            assert in_slots == wanted, f"{span.sequence_id} runs with {in_slots} instead of {wanted}"

    def _content(self, row: Row, before: int, token_id: int, position: int) -> int:
        num_first = 0
        if self._rope is not None:
            num_first = self._rope.num_first(row.new.num_prompt_tokens, len(row.new.token_ids))
            num_room = self._rope.num_room(num_first)
            assert num_room is None or position < num_first + num_room, "it should have been computed anew"
        return content(before, token_id, row.namespace, rotation_at(position, num_first, self._rope))

    def _check_past(self, row: Row, num_tokens: int) -> None:
        state = 0
        for at in range(num_tokens):
            state = self._content(row, state, row.token_ids[at], at)
            where = (row.table[at // self._block_size], at % self._block_size)
            assert self._kv.get(where) == state, f"{row.new.sequence_id}: wrong KV at position {at}, block {where[0]}"

    def _check_state(self, span: Span) -> None:
        assert (span.state is not None) == bool(self._num_states)
        if span.state is None:
            return
        if span.start == 0:
            assert span.state.source == 0, "a text begins with another's state"
        else:
            row = self.rows[span.row]
            before = 0
            for at in range(span.start):
                before = self._content(row, before, row.token_ids[at], at)
            assert self._states.get(span.state.source) == before, f"{span.sequence_id}: wrong state at {span.start}"
        assert all(0 < slot <= self._num_states for slot in _slots_written(span))
        for position, _ in span.state.copies:
            assert span.start < position <= span.start + span.num_tokens
            assert not span.draft

    def _run(self, span: Span, written: set[tuple[int, int]]) -> SpanResult:
        row, size = self.rows[span.row], self._block_size
        request, _key = self._owner_of(span.sequence_id)
        tokens = row.token_ids + list(span.draft)
        sampled: list[int] = []
        states: dict[int, int] = {}
        for at in range(span.start, span.start + span.num_tokens):
            before = self._kv[row.table[(at - 1) // size], (at - 1) % size] if at else 0
            where = (row.table[at // size], at % size)
            assert where not in written, "two sequences write to one place"
            written.add(where)
            states[at] = self._kv[where] = self._content(row, before, tokens[at], at)
        first = span.start + span.num_tokens - span.num_samples
        for nth, at in enumerate(range(first, span.start + span.num_tokens)):
            num_output = at + 1 - row.new.num_prompt_tokens
            banned = row.new.banned_until_min if num_output < row.new.min_tokens else frozenset[int]()
            sampled.append(draw(states[at], row.new.sampling.seed, at, banned))
            if nth < len(span.draft) and span.draft[nth] != sampled[-1]:
                break
        num_rejected = max(0, span.num_samples - len(sampled))
        row.token_ids += sampled
        row.num_computed = span.start + span.num_tokens - num_rejected
        if span.state is not None:
            self._states[span.state.target] = states[row.num_computed - 1]
            for position, slot in span.state.copies:
                self._states[slot] = states[position - 1]
        error = self.failing.pop(request.request_id, None)
        if error is not None:
            return SpanResult(error=error)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if span.prompt_logprobs:
            last = min(span.start + span.num_tokens, row.new.num_prompt_tokens - 1)
            logprobs = tuple(_logprob(states[at - 1], tokens[at]) for at in range(span.start + 1, last + 1))
        return SpanResult(
            token_ids=tuple(sampled),
            logprobs=tuple(_logprob(states[first + nth], token_id) for nth, token_id in enumerate(sampled)),
            prompt_logprobs=logprobs,
        )


def _slots_written(span: Span) -> list[int]:
    return [] if span.state is None else [span.state.target, *(slot for _, slot in span.state.copies)]


Drafts = Mapping[str, tuple[int, ...]]
