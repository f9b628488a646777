"""Drafts for a step: who drafts for which sequence, and how much. Counts what was drafted and what was accepted.

Owns what each speculating request may use, what each sequence's drafts have come to so far, and the proposers. Decides
with `choice` (once per request) and `lengths` (once per step); never touches a tensor. Called by the engine's loop.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from loraplex_adapters.key import AdapterKey
from loraplex_server.config import SpeculationConfig
from loraplex_server.events import Tokens
from loraplex_server.request import Request
from loraplex_server.scheduler.plan import Candidate, Draft, StepPlan, StepResult
from loraplex_server.speculation.acceptance import MAX_PAUSE, AcceptancePool, TrackRecord
from loraplex_server.speculation.base import MEDUSA, PROMPT_LOOKUP, Ask, Proposer
from loraplex_server.speculation.choice import Choice, brings_heads, choose
from loraplex_server.speculation.copying import STARTS, Piece, Source
from loraplex_server.speculation.costs import ProposerCost, ProposerCosts, StepCosts
from loraplex_server.speculation.history import History
from loraplex_server.speculation.lengths import Offer, choose_lengths, longest_pause
from loraplex_server.speculation.lookup import PromptLookupProposer

log = logging.getLogger(__name__)

# Sets of heads of which something is remembered beyond their sequences.
MAX_POOLS = 4096

# A sequence for which nothing is accepted is looked at in every fourth step: pauses that matter are multiples of that.
_REST = 4

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class _Sequence:
    """What drafting for one sequence has come to."""

    choice: Choice
    records: dict[tuple[str, Source], TrackRecord] = field(default_factory=dict[tuple[str, Source], TrackRecord])
    asked: set[str] = field(default_factory=set[str])  # proposers that have seen it
    rests_until: int = 0  # the step in which it is looked at again
    # Of the draft under way.
    proposer: str = ""
    pieces: Sequence[Piece] = ()

    @property
    def is_dry(self) -> bool:
        """Whether all that it could be drafted by are in a pause, as far as they have been tried."""
        if self.choice.params.fixed_length or not self.records:
            return False
        tried = {name for name, _ in self.records}
        return len(tried) == len(self.choice.proposers) and all(
            record.is_dry for (_, source), record in self.records.items() if source in STARTS
        )


class _Option(NamedTuple):
    """The proposer that promises the most for one sequence in this step."""

    candidate: Candidate
    sequence: _Sequence
    proposer: str
    survival: Sequence[float]
    pieces: Sequence[Piece]  # of a lookup, what is copied


class Speculator:
    """See the module. `proposers` by the names that Choice has for them; prompt lookup is its own."""

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Mapping[str, Proposer],
        step_costs: StepCosts,
        *,
        draft_names: Sequence[str] = (),
        default_heads: AdapterKey | None = None,
        drafts_by_default: bool = False,
        num_token_ids: int = 1 << 31,
        max_step_tokens: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`drafts_by_default`: whether requests that do not say use the default heads. `num_token_ids`: token ids below
        it can go into the target and come out of it."""
        self._config = config
        self._lookup = PromptLookupProposer(history=History(config.lookup_history))
        self._proposers: dict[str, Proposer] = {**proposers, PROMPT_LOOKUP: self._lookup}
        self._step_costs = step_costs
        self._proposer_costs = ProposerCosts()
        self._draft_names = tuple(draft_names)
        self._default_heads = default_heads
        self._drafts_by_default = drafts_by_default or config.num_tokens > 0
        self._num_token_ids = num_token_ids
        self._max_step_tokens = max_step_tokens
        self._clock = clock
        self._requests: dict[str, Choice] = {}  # those that speculate
        self._sequences: dict[str, _Sequence] = {}
        self._pools: dict[tuple[str, Source, AdapterKey | None], AcceptancePool] = {}
        self._num_heads: dict[AdapterKey, int] = {}  # where a draft was shorter than asked for
        self._num_failures: Counter[str] = Counter()  # of each proposer's calls
        self._step = 0
        # Of the present step, by proposer, those that somebody has asked for.
        self._candidates: Sequence[Candidate] = ()
        self._costs: dict[str, ProposerCost] = {}
        self._pauses: dict[str, int] = {}
        self.drafted: Counter[str] = Counter()  # tokens by the proposer's own name, since the start
        self.accepted: Counter[str] = Counter()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What a request may ask for, for GetInfo."""
        return (MEDUSA, PROMPT_LOOKUP, *(name for name in self._proposers if name not in (MEDUSA, PROMPT_LOOKUP)))

    # --- requests -----------------------------------------------------------------------------------------------------

    def begin(self, request: Request, key: AdapterKey | None, heads: AdapterKey | None) -> bool:
        """Takes in an accepted request; whether its sequences' hidden states have to be kept.

        `key` is its adapter's, `heads` those that it names apart. Raises FailedPrecondition or InvalidArgument for what
        this server does not have.
        """
        own = key if brings_heads(key) else None
        kind = request.speculation.kind
        wants_default = kind in ("medusa", "auto") or (kind is None and self._drafts_by_default)
        found = heads or own or (self._default_heads if wants_default else None)
        choice = choose(request, found, self._config, self._draft_names)
        if choice.proposers:
            self._requests[request.request_id] = choice
        return choice.uses_heads

    def end(self, request_id: str) -> None:
        """The request is over. Harmless for one that did not speculate."""
        self._requests.pop(request_id, None)

    @property
    def is_wanted(self) -> bool:
        """Whether there is anything to do in a step."""
        return bool(self._requests or self._sequences)

    # --- a step -------------------------------------------------------------------------------------------------------

    def propose(self, candidates: Sequence[Candidate]) -> dict[str, Draft]:
        """Drafts by sequence id, for those of the candidates that a draft pays for."""
        self._step += 1
        self._forget_all_but({candidate.sequence_id for candidate in candidates})
        self._candidates = candidates
        self._costs.clear()
        self._pauses.clear()
        drafts: dict[str, Draft] = {}
        # By sequence, who had nothing to say in this step, such as heads that are on their way: the next best is asked.
        silent: dict[str, set[str]] = {}
        waiting: Sequence[Candidate] = candidates
        while waiting:
            asked = self._sized_options(waiting, silent, len(candidates), drafts)
            for name in dict.fromkeys(option.proposer for option, _ in asked):
                drafts |= self._ask(name, [entry for entry in asked if entry[0].proposer == name])
            unanswered = [option for option, _ in asked if option.candidate.sequence_id not in drafts]
            for option in unanswered:
                silent.setdefault(option.candidate.sequence_id, set()).add(option.proposer)
            waiting = [option.candidate for option in unanswered]
        return drafts

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from what became of the drafts."""
        for span in plan.spans:
            sequence = self._sequences.get(span.sequence_id) if span.draft else None
            out = result.spans.get(span.sequence_id)
            if sequence is None or out is None or not out.token_ids:
                continue
            self._learn(sequence, len(span.draft), len(out.token_ids) - 1)

    def count(self, tokens: Tokens) -> None:
        """Takes in what the client is told, so that the sums are those of all answers: where a draft runs beyond the
        end of a completion, what is behind it was accepted by nobody."""
        if tokens.num_drafted:
            self.drafted[tokens.proposer] += tokens.num_drafted
            self.accepted[tokens.proposer] += tokens.num_accepted

    def close(self) -> None:
        for name, proposer in self._proposers.items():
            try:
                proposer.close()
            except Exception:
                log.exception("%s did not close well", name)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _forget_all_but(self, sequence_ids: set[str]) -> None:
        """One that ended, or waits again: nothing is lost that could not be made anew."""
        for sequence_id in self._sequences.keys() - sequence_ids:
            sequence = self._sequences.pop(sequence_id)
            for name in sequence.choice.proposers:
                try:
                    self._proposers[name].forget(sequence_id)
                except Exception:
                    self._note_failure(name, "could not forget a sequence")

    def _cost(self, name: str) -> ProposerCost:
        cost = self._costs.get(name)
        if cost is None:
            cost = self._costs[name] = self._proposer_costs.cost(name, self._clock())
        return cost

    def _longest_pause(self, name: str) -> int:
        """Of all that may use the proposer: they probe together when nothing is accepted."""
        pause = self._pauses.get(name)
        if pause is None:
            choices = [self._requests.get(candidate.request.request_id) for candidate in self._candidates]
            num_users = sum(choice is not None and name in choice.proposers for choice in choices)
            pause = longest_pause(len(choices), num_users, self._step_costs, self._cost(name))
            self._pauses[name] = pause
        return pause

    def _sized_options(
        self,
        candidates: Sequence[Candidate],
        silent: Mapping[str, Collection[str]],
        num_rows: int,
        drafts: Mapping[str, Draft],
    ) -> list[tuple[_Option, int]]:
        """Whom to ask for which of these, and for how many tokens. `num_rows`: of the step, beside `drafts`."""
        options = [
            option
            for candidate in candidates
            if (option := self._best_option(candidate, num_rows, silent.get(candidate.sequence_id, ())))
        ]
        if not options:
            return []
        num_drafted = sum(len(draft.token_ids) for draft in drafts.values())
        lengths = choose_lengths(
            [Offer(one.proposer, one.survival, one.sequence.choice.params.fixed_length) for one in options],
            num_rows=num_rows + num_drafted,
            num_tokens=num_rows,
            budget=self._max_step_tokens - num_rows - num_drafted,
            step_costs=self._step_costs,
            proposer_costs={one.proposer: self._cost(one.proposer) for one in options},
        )
        return [(option, num) for option, num in zip(options, lengths, strict=True) if num > 0]

    def _best_option(self, candidate: Candidate, num_rows: int, silent: Collection[str]) -> _Option | None:
        choice = self._requests.get(candidate.request.request_id)
        if choice is None or candidate.num_room < 1:
            return None
        sequence = self._sequences.get(candidate.sequence_id)
        if sequence is None:
            sequence = self._sequences[candidate.sequence_id] = _Sequence(choice)
        if self._step < sequence.rests_until:
            return None
        options = [
            option
            for name in choice.proposers
            if name not in silent and (option := self._option(candidate, sequence, name))
        ]
        if not options and sequence.is_dry:
            sequence.rests_until = (self._step // _REST + 1) * _REST
        if len(options) < 2:
            return options[0] if options else None
        return max(options, key=lambda option: self._speed(option, num_rows))

    def _speed(self, option: _Option, num_rows: int) -> float:
        """Tokens per second that it promises at best, if all rows of the step had the same."""
        cost = self._cost(option.proposer)
        tokens, best = 1.0, 1.0 / self._step_costs.seconds(num_rows)
        for num, survival in enumerate(option.survival, start=1):
            tokens += survival
            taken_s = self._step_costs.seconds(num_rows * (1 + num)) + cost.seconds(num, num * num_rows)
            best = max(best, tokens / taken_s)
        return best

    def _option(self, candidate: Candidate, sequence: _Sequence, name: str) -> _Option | None:
        """None where it has nothing to offer in this step."""
        params, heads = sequence.choice.params, sequence.choice.heads
        num_tokens = min(params.max_draft_tokens, candidate.num_room)
        if name == PROMPT_LOOKUP:
            pieces = self._lookup.pieces(candidate, params, num_tokens)
            if not pieces:
                return None
        else:
            if name == MEDUSA and heads is not None:
                num_tokens = min(num_tokens, self._num_heads.get(heads, num_tokens))
            pieces = (Piece("own", num_tokens),)
        survival = self._survival(sequence, name, pieces)
        return _Option(candidate, sequence, name, survival, pieces) if survival else None

    def _survival(self, sequence: _Sequence, name: str, pieces: Sequence[Piece]) -> Sequence[float]:
        """The chances of the tokens of a draft, as many as may be tried."""
        holds_back = not sequence.choice.params.fixed_length
        curve: list[float] = []
        chance = 1.0
        for source, num_tokens, evidence, _ in pieces:
            record = self._record(sequence, name, source)
            max_pause = self._longest_pause(name) if holds_back and record.is_dry else MAX_PAUSE
            found = record.survival(self._step, num_tokens, evidence, max_pause=max_pause, holds_back=holds_back)
            curve += found if chance == 1.0 else [chance * survival for survival in found]
            if len(found) < num_tokens:
                break
            chance = curve[-1]
        return curve

    def _learn(self, sequence: _Sequence, num_drafted: int, num_accepted: int) -> None:
        """Each piece of a draft stands for its source, as far as those before it were right."""
        for source, num_tokens, evidence, _ in sequence.pieces:
            num = min(num_tokens, num_drafted)
            self._record(sequence, sequence.proposer, source).observe(self._step, num, min(num, num_accepted), evidence)
            num_drafted -= num
            num_accepted -= num
            if num_drafted <= 0 or num_accepted < 0:
                break

    def _record(self, sequence: _Sequence, name: str, source: Source) -> TrackRecord:
        """One for each source: a match in an earlier output is not worth what one in the own text is."""
        record = sequence.records.get((name, source))
        if record is None:
            place = (name, source, sequence.choice.heads if name == MEDUSA else None)
            pool = self._pools.get(place)
            if pool is None:
                pool = AcceptancePool.of(self._proposers[name].name, source)
                _remember(self._pools, place, pool)
            record = sequence.records[name, source] = TrackRecord.new(pool)
        return record

    def _ask(self, name: str, asked: Sequence[tuple[_Option, int]]) -> dict[str, Draft]:
        proposer = self._proposers[name]
        asks = [Ask(one.candidate, num, one.sequence.choice.params, one.sequence.choice.heads) for one, num in asked]
        start_s = self._clock()
        try:
            answers = zip(asks, proposer.propose(asks), strict=True)
            proposed = [self._usable(token_ids, ask.num_tokens) for ask, token_ids in answers]
        except Exception:
            self._note_failure(name, "could not draft; the step goes on without")
            return {}
        end_s = self._clock()
        # What comes for the first time is read first, and heads may be on their way: that is not what drafting costs.
        # A lookup has found its drafts before it is asked.
        is_usual = name != PROMPT_LOOKUP and all(name in one.sequence.asked for one, _ in asked) and any(proposed)
        if is_usual:
            lengths = [ask.num_tokens for ask in asks]
            self._proposer_costs.observe(name, max(lengths), sum(lengths), end_s - start_s, end_s)
        drafts: dict[str, Draft] = {}
        for (option, num_tokens), token_ids in zip(asked, proposed, strict=True):
            heads = option.sequence.choice.heads
            if name == MEDUSA and heads is not None and 0 < len(token_ids) < num_tokens:
                _remember(self._num_heads, heads, len(token_ids))
            option.sequence.asked.add(name)
            if token_ids:
                option.sequence.proposer = name
                option.sequence.pieces = option.pieces
                drafts[option.candidate.sequence_id] = Draft(token_ids, proposer.name)
        return drafts

    def _usable(self, token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """As much of a draft as was asked for, up to a token that the target does not have: it cannot even be run."""
        draft = tuple(token_ids[:num_tokens])
        if not draft or (min(draft) >= 0 and max(draft) < self._num_token_ids):
            return draft
        for idx, token_id in enumerate(draft):
            if not 0 <= token_id < self._num_token_ids:
                return draft[:idx]
        return draft

    def _note_failure(self, name: str, what: str) -> None:
        """Into the log, ever more rarely: a proposer may fail in every step."""
        self._num_failures[name] += 1
        num_failures = self._num_failures[name]
        if num_failures & (num_failures - 1) == 0:
            log.exception("%s %s (failure %d)", name, what, num_failures)


def _remember(known: dict[_K, _V], key: _K, value: _V) -> None:
    """In place of what has been known for the longest, where there is too much."""
    if key not in known and len(known) >= MAX_POOLS:
        del known[next(iter(known))]
    known[key] = value
