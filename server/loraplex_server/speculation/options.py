"""What each proposer promises for a sequence in a step, and which of them is the best.

Owns what proposers cost and how much of their drafts has been accepted. Asks lookups for their matches and the others
how far they are behind, but nobody for a draft: whether one is wanted, and of what length, is decided first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import Candidate
from loraplex_server.speculation.acceptance import MAX_PAUSE, AcceptancePool, TrackRecord
from loraplex_server.speculation.base import MEDUSA, PROMPT_LOOKUP, Proposer
from loraplex_server.speculation.choice import Choice
from loraplex_server.speculation.copying import STARTS, Piece, Source
from loraplex_server.speculation.costs import CatchUpCosts, LeastCost, ProposerCost, ProposerCosts, StepCosts
from loraplex_server.speculation.lengths import longest_pause
from loraplex_server.speculation.lookup import PromptLookupProposer

# Sets of heads of which something is remembered beyond their sequences.
MAX_POOLS = 4096

# A sequence for which nothing is accepted is looked at in every fourth step: pauses that matter are multiples of that.
_REST = 4
# A proposer that cannot pay in a sequence is looked at again in every so many steps.
_LONG_REST = 16
# The same where others do better, and it would have to read the text first.
_BEHIND_REST = 8
# Matches that do not pay until lookups are made in every fourth step only: of many sequences they take time.
_MANY_REFUSED = 8
# Tokens of others that a sequence's pace begins with, and what is kept of a pace from step to step.
_PACE_TOKENS = 8.0
_PACE_KEPT = 0.99

_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class DraftedFor:
    """What drafting for one sequence has come to."""

    request_id: str
    choice: Choice
    records: dict[tuple[str, Source], TrackRecord] = field(default_factory=dict[tuple[str, Source], TrackRecord])
    failed: set[str] = field(default_factory=set[str])  # proposers that raised over it, and are left out
    asked: set[str] = field(default_factory=set[str])  # proposers that have seen it
    rests_until: int = 0  # the step in which it is looked at again
    rests: dict[str, int] = field(default_factory=dict[str, int])  # the same of a proposer
    num_refused: int = 0  # matches that did not pay, since the last one that was right
    missed_s: dict[str, float] = field(default_factory=dict[str, float])  # what one that is behind would have saved
    num_tokens: int = 0  # when it was last looked at, and when it was first
    num_first: int = 0
    num_steps: float = 0.0  # that have passed by then, by the Paces' count
    first_step: float = 0.0
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


class Option(NamedTuple):
    """The proposer that promises the most for one sequence in this step."""

    candidate: Candidate
    sequence: DraftedFor
    proposer: str
    survival: Sequence[float]
    pieces: Sequence[Piece]  # of a lookup, what is copied
    num_behind: int = 0  # tokens that the proposer has to read first


class _Promise(NamedTuple):
    """What an option gives at best."""

    value: float  # tokens more than the sequence would have made in that time anyway
    token_s: float  # seconds per token


class Paces:
    """How fast sequences get on that may draft in several ways: steps per token, where steps without drafts count one
    and others as much as they take longer.

    A step that gives little may lead to where the next one gives much, a lookup after the first token of a name, so
    that what a step gives per second is no measure. What counts is what it gives beyond the pace at which the sequence
    gets on anyway. Owns running averages, of all sequences with the same choice of proposers.
    """

    def __init__(self) -> None:
        self._num_steps = 0.0
        self._known: dict[tuple[str, ...], tuple[float, float]] = {}  # tokens, steps

    def add(self, num_steps: float) -> None:
        """A step that takes as long as so many without drafts."""
        self._num_steps += num_steps

    def note(self, sequence: DraftedFor, num_tokens: int) -> None:
        """The sequence has come to `num_tokens` tokens."""
        if not sequence.num_tokens:
            sequence.num_first, sequence.first_step = num_tokens, self._num_steps
        else:
            tokens, steps = self._known.get(sequence.choice.proposers, (_PACE_TOKENS, _PACE_TOKENS))
            tokens = tokens * _PACE_KEPT + num_tokens - sequence.num_tokens
            steps = steps * _PACE_KEPT + self._num_steps - sequence.num_steps
            self._known[sequence.choice.proposers] = tokens, steps
        sequence.num_tokens, sequence.num_steps = num_tokens, self._num_steps

    def pace(self, sequence: DraftedFor) -> float:
        """Of the sequence so far, and of others as if that were its first tokens."""
        tokens, steps = self._known.get(sequence.choice.proposers, (1.0, 1.0))
        num_tokens = _PACE_TOKENS + sequence.num_tokens - sequence.num_first
        num_steps = _PACE_TOKENS * steps / tokens + sequence.num_steps - sequence.first_step
        return min(1.0, num_steps / num_tokens)


class Options:
    """See the module. `proposers` by the names that Choice has for them, `lookup` among them."""

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        lookup: PromptLookupProposer,
        step_costs: StepCosts,
        least_costs: Mapping[str, LeastCost],
        clock: Callable[[], float],
        on_failure: Callable[[str, str, Exception], None],
    ) -> None:
        """`on_failure`: told of a proposer that raised, of what it could not do, and of the error."""
        self._on_failure = on_failure
        self._proposers = proposers
        self._lookup = lookup
        self._step_costs = step_costs
        self._clock = clock
        self._proposer_costs = ProposerCosts(least_costs)
        self._catch_up_costs = CatchUpCosts(least_costs)
        self._paces = Paces()
        self._pools: dict[tuple[str, Source, AdapterKey | None], AcceptancePool] = {}
        self._num_heads: dict[AdapterKey, int] = {}  # where a draft was shorter than asked for
        self._step = 0
        # Of the present step, by proposer, those that somebody has asked for.
        self._choices: Sequence[Choice | None] = ()
        self._compares = False  # whether anybody has a choice
        self._costs: dict[str, ProposerCost] = {}
        self._pauses: dict[str, int] = {}

    def begin(self, choices: Sequence[Choice | None]) -> None:
        """A new step, with a row for each of these; None where one does not speculate."""
        self._step += 1
        self._choices = choices
        self._compares = any(choice is not None and len(choice.proposers) > 1 for choice in choices)
        self._costs.clear()
        self._pauses.clear()

    @property
    def step(self) -> int:
        return self._step

    def skip(self) -> None:
        """A step in which nobody drafts."""
        self._step += 1

    # --- what is known of proposers -----------------------------------------------------------------------------------

    def cost(self, name: str) -> ProposerCost:
        """What a call costs now; the same all through a step."""
        cost = self._costs.get(name)
        if cost is None:
            cost = self._costs[name] = self._proposer_costs.cost(name, self._clock())
        return cost

    def _longest_pause(self, name: str) -> int:
        """Of all that may use the proposer: they probe together when nothing is accepted."""
        pause = self._pauses.get(name)
        if pause is None:
            num_users = sum(choice is not None and name in choice.proposers for choice in self._choices)
            pause = longest_pause(len(self._choices), num_users, self._step_costs, self.cost(name))
            self._pauses[name] = pause
        return pause

    def num_behind(self, name: str, options: Sequence[Option]) -> int:
        """How many tokens a proposer has to read before it can draft for these."""
        proposer = self._proposers[name]
        return sum(proposer.num_behind(option.candidate) for option in options)

    def note_call(self, name: str, num_asked: Sequence[int], drafts: Sequence[Sequence[int]], seconds: float) -> None:
        """A call for so many tokens of sequences that the proposer knows gave these drafts. Heads that are on their way
        give none, which is not what drafting costs; and lookups have been made before they are asked for."""
        if name != PROMPT_LOOKUP and any(drafts):
            self._proposer_costs.observe(name, max(num_asked), sum(num_asked), seconds, self._clock())

    def note_catch_up(self, name: str, num_read: int, drafts: Sequence[Sequence[int]], seconds: float) -> None:
        """A call in which so many tokens were read first."""
        lengths = [len(draft) for draft in drafts]
        drafting_s = self.cost(name).seconds(max(lengths), sum(lengths))
        self._catch_up_costs.observe(name, num_read, seconds - drafting_s, self._clock())

    def note_num_heads(self, option: Option, num_heads: int) -> None:
        """No draft of these heads will be longer."""
        heads = option.sequence.choice.heads
        if option.proposer == MEDUSA and heads is not None:
            _remember(self._num_heads, heads, num_heads)

    def note_step(self, num_rows: int, asked: Iterable[tuple[str, int]]) -> None:
        """The step has that many rows, and so many tokens that were drafted by each of these."""
        if not self._compares:
            return
        drafts: dict[str, tuple[int, int]] = {}
        for name, num_tokens in asked:
            longest, num_before = drafts.get(name, (0, 0))
            drafts[name] = max(longest, num_tokens), num_before + num_tokens
        num_drafted = sum(num_tokens for _, num_tokens in drafts.values())
        taken_s = self._step_costs.seconds(num_rows + num_drafted)
        for name, (longest, num_tokens) in drafts.items():
            taken_s += self.cost(name).seconds(longest, num_tokens)
        self._paces.add(taken_s / self._step_costs.seconds(num_rows))

    def learn(self, sequence: DraftedFor, num_drafted: int, num_accepted: int) -> None:
        """Each piece of a draft stands for its source, as far as those before it were right."""
        if num_accepted and sequence.proposer == PROMPT_LOOKUP:
            sequence.num_refused = 0
        for source, num_tokens, evidence, _ in sequence.pieces:
            num = min(num_tokens, num_drafted)
            self._record(sequence, sequence.proposer, source).observe(self._step, num, min(num, num_accepted), evidence)
            num_drafted -= num
            num_accepted -= num
            if num_drafted <= 0 or num_accepted < 0:
                break

    # --- what is best -------------------------------------------------------------------------------------------------

    def best(self, candidate: Candidate, sequence: DraftedFor, num_rows: int, silent: Collection[str]) -> Option | None:
        """Whom to ask for this sequence, if anybody, in a step of `num_rows` rows; `silent` have been."""
        choice = sequence.choice
        if len(choice.proposers) > 1:
            self._paces.note(sequence, len(candidate.token_ids))
        if self._step < sequence.rests_until:
            return None
        options = [
            option
            for name in choice.proposers
            if name not in silent
            and name not in sequence.failed
            and self._step >= sequence.rests.get(name, 0)
            and (option := self._guarded_option(candidate, sequence, name))
        ]
        if not options and sequence.is_dry:
            sequence.rests_until = (self._step // _REST + 1) * _REST
        return self._best_of(options, num_rows)

    def rest(self, option: Option, num_steps: int = _LONG_REST) -> None:
        """It does not pay, and is not looked at for a while; but the next match of a lookup may be a better one."""
        sequence = option.sequence
        if option.proposer == PROMPT_LOOKUP:
            sequence.num_refused += 1
            if sequence.num_refused < _MANY_REFUSED:
                return
            num_steps = _REST
        until = (self._step // num_steps + 1) * num_steps
        sequence.rests[option.proposer] = until
        if len(sequence.choice.proposers) == 1:
            sequence.rests_until = until

    def _best_of(self, options: Sequence[Option], num_rows: int) -> Option | None:
        """The one of most value; of those that are behind, only one that can make up for that: at best with all that
        the completion may still produce."""
        late_s = [self._catch_up_s(option) * num_rows for option in options]
        if len(options) < 2 and not any(late_s):
            return options[0] if options else None
        plain_s = self._step_costs.seconds(num_rows)
        pace = self._paces.pace(options[0].sequence)
        best, best_value = None, 1.0 - 1.0 / pace
        behind: list[tuple[Option, float, float]] = []
        for option, catch_up_s in zip(options, late_s, strict=True):
            promise = self._promise(option, num_rows, pace)
            if not catch_up_s or option.sequence.choice.params.fixed_length:
                if best is None or promise.value > best_value:
                    best, best_value = option, promise.value
            elif promise.token_s + catch_up_s / option.candidate.num_room < plain_s:
                behind.append((option, promise.value, catch_up_s))
            else:
                self.rest(option)
        for option, value, catch_up_s in behind:
            saved_s = (value - best_value) * pace * plain_s
            if saved_s > 0.0 and self._add_missed(option, saved_s) >= catch_up_s:
                best, best_value = option, value
            else:
                self.rest(option, _BEHIND_REST)
        return best

    def _catch_up_s(self, option: Option) -> float:
        num_tokens = option.num_behind
        return self._catch_up_costs.seconds(option.proposer, num_tokens, self._clock()) if num_tokens else 0.0

    def _add_missed(self, option: Option, saved_s: float) -> float:
        """Adds what the proposer would save in this step, and returns what it would have saved in the sequence's steps
        so far: where that is what reading the text costs, it is asked. With no other way to draft it does not wait."""
        sequence = option.sequence
        if len(sequence.choice.proposers) == 1:
            return math.inf
        num_steps = _BEHIND_REST if option.proposer in sequence.missed_s else 1
        missed_s = sequence.missed_s.get(option.proposer, 0.0) + saved_s * num_steps
        sequence.missed_s[option.proposer] = missed_s
        return missed_s

    def _promise(self, option: Option, num_rows: int, pace: float) -> _Promise:
        """What it gives at best, if all rows of the step had the same."""
        cost = self.cost(option.proposer)
        plain_s = self._step_costs.seconds(num_rows)
        per_second = 1.0 / (pace * plain_s)
        tokens, value, token_s = 1.0, 1.0 - 1.0 / pace, plain_s
        for num, survival in enumerate(option.survival, start=1):
            tokens += survival
            taken_s = self._step_costs.seconds(num_rows * (1 + num)) + cost.seconds(num, num * num_rows)
            value = max(value, tokens - per_second * taken_s)
            token_s = min(token_s, taken_s / tokens)
        return _Promise(value, token_s)

    def _option(self, candidate: Candidate, sequence: DraftedFor, name: str) -> Option | None:
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
        if not survival:
            return None
        return Option(candidate, sequence, name, survival, pieces, self._proposers[name].num_behind(candidate))

    def _guarded_option(self, candidate: Candidate, sequence: DraftedFor, name: str) -> Option | None:
        """The same. A proposer that raises is left out for the rest of the sequence."""
        try:
            return self._option(candidate, sequence, name)
        except Exception as error:
            sequence.failed.add(name)
            self._on_failure(name, "could not look at a sequence", error)
            return None

    def _survival(self, sequence: DraftedFor, name: str, pieces: Sequence[Piece]) -> Sequence[float]:
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

    def _record(self, sequence: DraftedFor, name: str, source: Source) -> TrackRecord:
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


def _remember(known: dict[_K, _V], key: _K, value: _V) -> None:
    """In place of what has been known for the longest, where there is too much."""
    if key not in known and len(known) >= MAX_POOLS:
        del known[next(iter(known))]
    known[key] = value
