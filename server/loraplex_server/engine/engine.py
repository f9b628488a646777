"""Engine loop body: schedule, execute, apply; adapters, reports.

Owns every accepted request with its hold on its adapter's key, and the adapter operations that wait for a load. Owns
neither threads nor pipes: `process` turns it, tests may too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from loraplex_adapters.cache.manager import AdapterManager
from loraplex_adapters.cache.states import AdapterTraits
from loraplex_contracts.adapters import (
    AdapterId,
    AdapterKey,
    AdapterOrigin,
    AdapterUser,
    AdapterVersion,
    held_name,
    name_in,
)
from loraplex_contracts.errors import (
    AdapterVersionNotFound,
    Code,
    DeadlineExceeded,
    LoraplexError,
    Unavailable,
    draining,
    unexpected,
)
from loraplex_contracts.load import Forecast, Load
from loraplex_contracts.mixtures import Mixture, sum_weights
from loraplex_contracts.plan import GrammarMatcher, StepPlan, StepResult
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    Grammar,
    Request,
    RequestFailed,
    Tokens,
)
from loraplex_server.engine.pending import Found, Pending
from loraplex_server.engine.pipe import (
    Abandon,
    AdapterCommand,
    Batch,
    Cancel,
    Command,
    ModelInfo,
    Reply,
    StopCompletion,
    Submit,
)
from loraplex_server.engine.pooling import resolve_pooling
from loraplex_server.engine.step_sizes import StepTally
from loraplex_server.grammars.matcher import Grammars, Matcher
from loraplex_server.model.isolation import Execute, StepHandle, execute_isolated, start_isolated
from loraplex_server.scheduler.scheduler import Scheduler
from loraplex_server.speculation.speculator import Speculator

log = logging.getLogger(__name__)

FORECAST_EVERY_S = 0.05  # it takes time for each request that waits
RESIDENCY_EVERY_S = 0.5  # while steps run: adapters' rows are listed again
# Ends of requests that were not served in time, or for want of room. The waits of those with a wrong name, which take
# no time, would hide theirs.
OF_WAITS: Final = frozenset({Code.CANCELLED, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE})
MAX_IDLE_S = 3600.0  # a lock cannot be waited for until any deadline that a client may name


class Runner(Protocol):
    """Runs steps: the only place with tensors (model/runner.py; a fake in tests)."""

    overlaps: bool  # a second step may be handed over before the first one's result is asked for

    @property
    def execute(self) -> Execute: ...

    def check_integrity(self) -> None: ...


@dataclass
class _Accepted:
    """A request from Submit to its terminal event."""

    request: Request
    num_open: int
    # Of its adapter, or of each member of its mixture: held for the request's life, as is `medusa_key`.
    adapter_keys: tuple[AdapterKey, ...] = ()
    medusa_key: AdapterKey | None = None  # of heads that it names apart from its adapter
    matcher: GrammarMatcher | None = None  # of its grammar, at the beginning; read only
    is_scheduled: bool = False  # False: its adapter is not resolved yet
    has_waited: bool = False  # for something that it names
    fetch_began_s: float | None = None
    fetch_s: float = 0.0  # until its adapter was resolved

    def note_fetch(self, now: float) -> None:
        """Notes how long its adapter has been fetched so far."""
        if self.fetch_began_s is not None and not self.adapter_keys:
            self.fetch_s = max(0.0, now - self.fetch_began_s)

    def holds(self) -> list[tuple[AdapterKey, str]]:
        """Its keys, each with the name that it holds the key by."""
        request, mixture = self.request, self.request.mixture
        if mixture is None:
            names = [held_name(request.adapter_id, request.adapter_origin)]
        elif mixture.merge is None:
            names = [held_name(member.adapter_id, member.origin) for member in mixture.members]
        else:
            names = [""]
        holds = list(zip(self.adapter_keys, names, strict=False))  # there are no keys before it is resolved
        if self.medusa_key is not None:
            holds.append((self.medusa_key, name_in(request.speculation.medusa_id)))
        return holds


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A step that overlaps the planning of the next one."""

    plan: StepPlan
    handle: StepHandle
    num_tokens: int  # of the plan
    planned_s: float


class Engine:
    """Serves requests in turns: take in finished loads, admit what is resolved, run one step, report."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        cache: AdapterManager,
        runner: Runner,
        speculator: Speculator,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
    ) -> None:
        self.info = info
        # Told before a step runs how many tokens the turn computes, those of a step under way included.
        self.on_step: Callable[[int], None] = lambda num_tokens: None
        self._scheduler = scheduler
        self._cache = cache
        self._runner = runner
        self._clock = clock
        self._speculator = speculator
        self._accepted: dict[str, _Accepted] = {}
        self._grammars = grammars or Grammars(None)
        # By tenant too, since each has its own bytes.
        self._pending = Pending[tuple[AdapterId | Mixture, AdapterUser, AdapterOrigin], tuple[AdapterKey, ...]](
            "fetching an adapter",
            self._resolve_adapters,
            lambda request: (request.mixture or _adapter_of(request), request.adapter_user, request.adapter_origin),
        )
        self._pending_heads = Pending[tuple[AdapterId, AdapterUser], AdapterKey](
            "fetching Medusa heads",
            self._resolve_adapter,
            lambda request: (request.speculation.medusa_id, request.adapter_user),
        )
        self._pending_grammars = Pending[tuple[Grammar | None, str], Matcher](
            "compiling a grammar",
            self._resolve_grammar,
            lambda request: (request.grammar, request.tenant),
            self._forget_grammar,
        )
        self._operations: dict[int, AdapterCommand] = {}
        self._unasked_operations: set[int] = set()  # that came since the last turn
        self._events: list[Event] = []
        self._replies: list[Reply] = []
        self._under_way: _UnderWay | None = None
        self._num_steps = 0
        self._tally = StepTally()
        # Whether another turn now is likely to do work; the first one reports limits and residency.
        self.can_step = True
        self._residency_changed = True
        self._residency_due_s = 0.0
        self._num_queued_reported = 0
        self._forecast: Forecast | None = None
        self._forecast_due_s = 0.0

    def idle_timeout_s(self) -> float | None:
        """Time that the loop may sleep when nothing arrives: until the next deadline, or for ever."""
        if self._events or self._replies:
            return 0.0
        deadlines = [a.request.deadline_s for a in self._accepted.values() if a.request.deadline_s is not None]
        if (expiry_s := self._scheduler.next_expiry_s) is not None:
            deadlines.append(expiry_s)
        if not deadlines:
            return None
        return min(max(0.0, min(deadlines) - self._clock()) + 0.001, MAX_IDLE_S)

    def handle(self, command: Command) -> None:
        """Handles one command. A request's error becomes its own RequestFailed event."""
        self.can_step = True
        match command:
            case Submit(request):
                self._submit(request)
            case Cancel(request_id, error):
                self._end(request_id, error)
            case StopCompletion(request_id, index):
                self._take(self._scheduler.stop_completion(request_id, index))
            case AdapterCommand():
                self._operations[command.operation_id] = command
                self._unasked_operations.add(command.operation_id)
            case Abandon(operation_id):
                self._operations.pop(operation_id, None)
            case _:
                pass  # Wake: the turn looks by itself

    def turn(self) -> Batch | None:
        """Takes one turn of the loop. None when there is nothing to report."""
        now = self._clock()
        has_changes = self._cache.poll(now)
        self._residency_changed |= has_changes
        self._admit_resolved(has_changes, now)
        self._run_operations(has_changes, now)
        self._run_step(now)
        return self._report()

    def _run_step(self, now: float) -> None:
        """Plans a step and starts it. Where steps overlap, the device gets it before the result of the previous one is
        awaited, so that it never waits for the host. A step with drafts cannot overlap: drafts follow known tokens."""
        speculates = self._may_draft()
        has_ended = speculates and self._end_step()
        drafts = self._speculator.propose(self._scheduler.candidates()) if speculates else {}
        plan = self._scheduler.schedule(now, drafts)
        self._take(self._scheduler.take_events())
        self._num_steps += plan is not None
        num_tokens = 0 if plan is None else plan.num_tokens
        if plan is not None:  # the turn may also wait for the step before
            self.on_step(num_tokens + (self._under_way.num_tokens if self._under_way is not None else 0))
        if plan is None:
            has_ended |= self._end_step()
        elif self._runner.overlaps and not speculates:
            following = _UnderWay(plan, start_isolated(self._runner.execute, plan), num_tokens, now)
            self._end_step()
            self._under_way = following
        else:
            result = execute_isolated(self._runner.execute, plan)
            if drafts:
                self._speculator.observe(plan, result)
            self._apply(plan, result, num_tokens, now)
        self.can_step = plan is not None or has_ended

    def _may_draft(self) -> bool:
        """True if a sequence that decodes in the next step may get a draft. Tells the speculator of a step that it
        skips."""
        speculator = self._speculator
        if not speculator.is_wanted:
            return False
        if speculator.may_draft(self._scheduler.decoding_sequences()):
            return True
        speculator.skip()
        return False

    def _end_step(self) -> bool:
        """Waits for the step under way; False where there is none."""
        if self._under_way is None:
            return False
        step, self._under_way = self._under_way, None
        self._apply(step.plan, step.handle.result(), step.num_tokens, step.planned_s)
        return True

    def _apply(self, plan: StepPlan, result: StepResult, num_tokens: int, planned_s: float) -> None:
        ended_s = self._clock()
        self._tally.add(plan, num_tokens, planned_s, ended_s)
        self._take(self._scheduler.apply(plan, result, ended_s))

    def abort_all(self) -> Batch:
        """Ends every request as Draining. Returns the last batch."""
        self._end_step()
        error = draining()
        for request_id in list(self._accepted):
            self._end(request_id, error)
        self._replies += [Reply(operation_id, error=error) for operation_id in self._operations]
        self._operations.clear()
        return self._report() or Batch(load=self._load())

    def integrity_report(self) -> str:
        """Blocks, slots, leases and states that are unaccounted for while idle; empty for none."""
        try:
            assert not self._accepted, f"requests without a terminal event: {list(self._accepted)}"
            self._scheduler.check_integrity()
            self._cache.check_integrity()
            self._runner.check_integrity()
        except AssertionError as leak:
            return str(leak) or "an integrity check failed"
        return ""

    def close(self) -> None:
        self._grammars.close()
        self._speculator.close()
        self._cache.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _submit(self, request: Request) -> None:
        accepted = _Accepted(request, num_open=request.n)
        self._accepted[request.request_id] = accepted
        if not (request.adapter_id or request.mixture or request.speculation.medusa_id or request.grammar):
            self._schedule(accepted)
            return
        try:  # before anything is fetched
            self._scheduler.check(request, self._clock(), self._num_pending, self._num_pending_of(request.tenant))
        except LoraplexError as error:
            self._end(request.request_id, error)
            return
        self._resolve(accepted)

    def _resolve(self, accepted: _Accepted) -> None:
        """Has its grammar compiled, then the cache resolve what it names: its adapter, and heads apart from it. It does
        not wait for heads on the device."""
        request = accepted.request
        accepted.has_waited = True
        if request.grammar and accepted.matcher is None:
            self._pending_grammars.add(request)
        elif (request.adapter_id or request.mixture) and not accepted.adapter_keys:
            accepted.fetch_began_s = self._clock()
            self._pending.add(request)
        elif request.speculation.medusa_id and accepted.medusa_key is None:
            self._pending_heads.add(request)
        else:
            self._schedule(accepted)

    @property
    def _num_pending(self) -> int:
        """Number of requests whose adapter or heads are being fetched, or whose grammar is compiled. They will stand in
        the scheduler's queue and count there already."""
        return sum(waiting.num_requests for waiting in self._waiting)

    def _num_pending_of(self, tenant: str) -> int:
        return sum(waiting.num_of_tenant[tenant] for waiting in self._waiting)

    @property
    def _waiting(self) -> tuple[Pending[Any, Any], ...]:
        return self._pending_grammars, self._pending, self._pending_heads

    def _resolve_adapter(self, asked: tuple[AdapterId, AdapterUser], now: float) -> AdapterKey | None:
        return self._cache.resolve(asked[0], now, asked[1])

    def _resolve_adapters(
        self, asked: tuple[AdapterId | Mixture, AdapterUser, AdapterOrigin], now: float
    ) -> tuple[AdapterKey, ...] | None:
        named, user, origin = asked
        if isinstance(named, Mixture):
            return self._cache.resolve_mixture(named, now, user)
        key = self._cache.resolve(named, now, user, origin)
        return None if key is None else (key,)

    def _resolve_grammar(self, asked: tuple[Grammar | None, str], now: float) -> Matcher | None:
        grammar, tenant = asked
        return None if grammar is None else self._grammars.resolve(grammar, tenant)

    def _forget_grammar(self, asked: tuple[Grammar | None, str]) -> None:
        grammar, tenant = asked
        if grammar is not None:
            self._grammars.forget(grammar, tenant)

    def _admit_resolved(self, has_changes: bool, now: float) -> None:
        has_grammar = self._grammars.poll()
        for accepted, matcher in self._resolved(self._pending_grammars, has_grammar, now):
            accepted.matcher = matcher
            self._resolve(accepted)
        for accepted, keys in self._resolved(self._pending, has_changes, now):
            accepted.note_fetch(now)
            accepted.adapter_keys = keys
            self._resolve(accepted)
        for accepted, key in self._resolved(self._pending_heads, has_changes, now):
            accepted.medusa_key = key
            self._resolve(accepted)

    def _resolved(
        self, waiting: Pending[Any, Found], has_changes: bool, now: float
    ) -> Iterator[tuple[_Accepted, Found]]:
        """Requests that wait no longer, each with what was found. Ends those that have failed or are too late."""
        for request in waiting.take_expired(now):
            error = DeadlineExceeded(f"the deadline passed while {waiting.doing}; allow more time")
            self._end(request.request_id, error)
        for request, outcome in waiting.take_resolved(has_changes, now):
            if isinstance(outcome, AdapterVersionNotFound) and request.adapter_digest:
                self._end(request.request_id, _other_version(request))
            elif isinstance(outcome, LoraplexError):
                self._end(request.request_id, outcome)
            else:
                yield self._accepted[request.request_id], outcome

    def _schedule(self, accepted: _Accepted) -> None:
        # A mixture has no classifier, no templates and no heads of its own.
        mixture = accepted.request.mixture
        is_sum = mixture is not None and mixture.merge is None
        keys = accepted.adapter_keys
        adapter_key = keys[0] if keys and not is_sum else None
        accepted.is_scheduled = True
        try:
            _check_version(accepted.request, adapter_key)
            traits = None if adapter_key is None else self._cache.traits(adapter_key)
            request = resolve_pooling(accepted.request, traits)
            self._speculator.begin(request, adapter_key, accepted.medusa_key)
            keeps_hidden = self._speculator.needs_hidden_states(request.request_id)
            self._scheduler.add(
                request,
                adapter_key,
                self._clock(),
                keeps_hidden=keeps_hidden,
                num_elsewhere=self._num_pending,
                num_own_elsewhere=self._num_pending_of(request.tenant),
                matcher=accepted.matcher,
                adapted_from=_adapted_from(request, traits),
                mixture=sum_weights(keys, mixture.weights) if mixture is not None and is_sum else (),
                fetch_s=accepted.fetch_s,
            )
        except LoraplexError as error:
            accepted.is_scheduled = False
            self._end(accepted.request.request_id, error)

    def _end(self, request_id: str, error: LoraplexError) -> None:
        """Ends a request with `error`, wherever it is; a request that has ended already is left alone."""
        accepted = self._accepted.get(request_id)
        if accepted is None:
            return
        now = self._clock()
        if accepted.is_scheduled:
            self._take(self._scheduler.cancel(request_id, error, now))
        elif accepted.has_waited and error.code in OF_WAITS:
            accepted.note_fetch(now)
            queue_s = max(0.0, now - accepted.request.arrival_s)
            self._take([RequestFailed(request_id, error, queue_s, accepted.fetch_s)])
        else:
            self._take([RequestFailed(request_id, error)])

    def _take(self, events: list[Event]) -> None:
        """Passes events on; a request's terminal event drops its holds."""
        for event in events:
            self._events.append(event)
            accepted = self._accepted.get(event.request_id)
            if accepted is None:
                continue
            if isinstance(event, Tokens):
                self._speculator.count(event)
            elif isinstance(event, CompletionEnd):
                accepted.num_open -= 1
            elif isinstance(event, RequestFailed):
                accepted.num_open = 0
            if accepted.num_open == 0:
                del self._accepted[event.request_id]
                for waiting in self._waiting:
                    waiting.discard(accepted.request)
                self._speculator.end(event.request_id)
                for adapter_key, name in accepted.holds():
                    self._cache.drop_hold(adapter_key, accepted.request.tenant, name)

    # --- adapter operations -------------------------------------------------------------------------------------------

    def _run_operations(self, has_changes: bool, now: float) -> None:
        unasked, self._unasked_operations = self._unasked_operations, set()
        waited_for: set[tuple[AdapterId, AdapterUser, AdapterOrigin]] = set()  # for their templates
        for operation_id, command in list(self._operations.items()):
            # Thousands of chats may wait for the templates of one adapter: it is asked for once, and on news only.
            asked = (command.adapter_id, command.user, command.options.origin)
            is_template = command.verb == "templates"
            if is_template and (asked in waited_for or not (has_changes or operation_id in unasked)):
                continue
            try:
                reply = self._run_operation(command, now)
            except LoraplexError as error:
                reply = Reply(operation_id, error=error)
            except Exception as error:
                reply = Reply(operation_id, error=unexpected(error, f"running the adapter operation {command.verb}"))
            if reply is None:
                if is_template:
                    waited_for.add(asked)
                continue  # under way; looked at again after the next poll
            del self._operations[operation_id]
            self._residency_changed = True
            self._replies.append(reply)

    def _run_operation(self, command: AdapterCommand, now: float) -> Reply | None:
        number, adapter_id = command.operation_id, command.adapter_id
        match command.verb:
            case "load":
                info = self._cache.load(adapter_id, command.pin, now, command.user, command.options, number)
                return None if info is None else Reply(number, (info,))
            case "unload":
                return Reply(number, (self._cache.unload(adapter_id, command.if_unused),))
            case "get":
                return Reply(number, (self._cache.get(adapter_id),))
            case "templates":
                key = self._cache.resolve(adapter_id, now, command.user, command.options.origin)
                if key is None:
                    return None
                version = AdapterVersion(adapter_id, key.digest, self._cache.traits(key).templates)
                name = held_name(adapter_id, command.options.origin)
                self._cache.drop_hold(key, command.user.tenant, name, was_used=False)
                return Reply(number, version=version)

    # --- reporting ----------------------------------------------------------------------------------------------------

    def _report(self) -> Batch | None:
        load, now = self._load(), self._clock()
        # Leases come and go with requests: while steps run, they alone are no reason for a report each time.
        if self._cache.has_changes and (not self.can_step or now >= self._residency_due_s):
            self._residency_changed = True
        # Routers balance by the queue, so a change of it alone is reported too.
        has_changes = self._residency_changed or load.num_queued != self._num_queued_reported
        if not self._events and not self._replies and not has_changes:
            return None
        changes = usage = None
        if self._residency_changed:
            changes = self._cache.take_changes()
            usage = self._cache.usage()
            self._residency_changed, self._residency_due_s = False, now + RESIDENCY_EVERY_S
        steps = self._tally.report(now, is_idle=not load.num_running)
        batch = Batch(tuple(self._events), tuple(self._replies), load, changes, usage, steps)
        self._num_queued_reported = load.num_queued
        self._events, self._replies = [], []
        return batch

    def _load(self) -> Load:
        load = self._scheduler.load()
        return replace(
            load,
            num_queued=load.num_queued + sum(waiting.num_completions for waiting in self._waiting),
            num_steps=self._num_steps,
            drafted=dict(self._speculator.drafted),
            accepted=dict(self._speculator.accepted),
            forecast=self._current_forecast() if load.num_queued else None,
        )

    def _current_forecast(self) -> Forecast | None:
        now = self._clock()
        if now >= self._forecast_due_s:
            self._forecast, self._forecast_due_s = self._scheduler.forecast(), now + FORECAST_EVERY_S
        return self._forecast


def _adapted_from(request: Request, traits: AdapterTraits | None) -> int | None:
    """The first token of the prompt that the adapter with these traits changes; None where it changes none, now or
    later."""
    invocation = () if traits is None else traits.invocation
    return start_of_last(invocation, request.prompt_token_ids) if invocation else 0


def start_of_last(wanted: Sequence[int], token_ids: Sequence[int]) -> int | None:
    """Index of the last occurrence of `wanted` in `token_ids`. Linear time: it searches the reversed ids as text,
    because Python's search from the front is linear and the one from the back is not."""
    text, part = ("".join(map(chr, reversed(ids))) for ids in (token_ids, wanted))
    found = text.find(part)
    return None if found < 0 else len(token_ids) - found - len(wanted)


def _adapter_of(request: Request) -> AdapterId:
    """The adapter that the request names, in the version whose template made its prompt. Versions of a caller's own
    access are not known."""
    if not request.adapter_digest or request.adapter_origin.source:
        return request.adapter_id
    return AdapterId(f"{name_in(request.adapter_id)}@{request.adapter_digest}")


def _check_version(request: Request, adapter_key: AdapterKey | None) -> None:
    """Raises Unavailable where the adapter is not the one whose template made the prompt."""
    if request.adapter_digest and (adapter_key is None or adapter_key.digest != request.adapter_digest):
        raise _other_version(request)


def _other_version(request: Request) -> Unavailable:
    return Unavailable(
        f"adapter {request.adapter_id!a} was loaded again while its template made the prompt; send it again",
        resource=request.adapter_id,
        retry_after_s=0.0,
    )
