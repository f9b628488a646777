"""Speculator: drafts for each step, and counts of what was drafted and accepted.

Owns the proposers, what each speculating request may use, and what each sequence's drafts have come to. What to draft
is decided in `policy`. Called by the engine's loop; never touches a tensor.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import get_args

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument
from loraplex_contracts.plan import Candidate, Draft, StepPlan, StepResult
from loraplex_contracts.request import Request, SpeculationKind, SpeculationParams, Tokens
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation.policy import DraftedSequence, LeastCost, Option, Policy
from loraplex_server.speculation.proposer import (
    GRAMMAR,
    MEDUSA,
    PROMPT_LOOKUP,
    Ask,
    Choice,
    Proposer,
    draft_key,
)
from loraplex_server.speculation.step_costs import StepCosts

log = logging.getLogger(__name__)

DEFAULT_NUM_TOKENS = 8  # per step at most, where neither request nor server say; 12 and 16 were slower


class Speculator:
    """Drafts for the sequences of a step (see the module). `proposers` by the names that Choice has for them."""

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Mapping[str, Proposer],
        step_costs: StepCosts,
        *,
        draft_names: Sequence[str] = (),
        least_costs: Mapping[str, LeastCost] | None = None,
        default_heads: Callable[[], AdapterKey] | None = None,
        drafts_by_default: bool = False,
        num_token_ids: int = 1 << 31,
        max_step_tokens: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`draft_names`: of draft models, as requests have them. `least_costs`: theirs, as measured. `default_heads`:
        gives the server's as they are now. `drafts_by_default`: whether requests that do not say speculate, as they do
        where the configuration has a number of draft tokens. `num_token_ids`: token ids below it can go into the target
        and come out of it."""
        self._config = config
        self._proposers = dict(proposers)
        self._policy = Policy(
            self._proposers, step_costs, least_costs or {}, max_step_tokens, clock, self._note_failure
        )
        self.draft_names = tuple(draft_names)
        self._default_heads = default_heads
        self._drafts_by_default = drafts_by_default or config.default_draft_tokens > 0
        self._num_token_ids = num_token_ids
        self._clock = clock
        self._requests: dict[str, Choice] = {}  # those that speculate
        self._sequences: dict[str, DraftedSequence] = {}
        self._active: set[str] = set()  # sequences that were candidates in the last step with `propose`
        self.failures: Counter[tuple[str, str, type[Exception]]] = Counter()  # proposer, what it could not do, error
        self.drafted: Counter[str] = Counter()  # tokens by the proposer's own name, since the start
        self.accepted: Counter[str] = Counter()

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that a request may name, except for draft models."""
        return tuple(kind for kind in get_args(SpeculationKind) if kind in self._proposers)

    # --- requests -----------------------------------------------------------------------------------------------------

    def begin(self, request: Request, adapter_key: AdapterKey | None, medusa_key: AdapterKey | None) -> None:
        """Takes in an accepted request.

        `medusa_key`: of the Medusa heads that it names beside its adapter. Raises FailedPrecondition or InvalidArgument
        for what this server does not have.
        """
        check_named_heads(request, medusa_key)
        heads = medusa_key or (adapter_key if adapter_key is not None and adapter_key.has_heads else None)
        kind = request.speculation.kind
        if kind is None:
            kind = "auto" if heads is not None or self._drafts_by_default else "off"
        if heads is None and kind in ("medusa", "auto") and self._default_heads is not None:
            heads = self._default_heads()
        choice = choose(kind, request, heads, self._config, self.draft_names)
        if choice.proposers:
            self._requests[request.request_id] = choice

    def needs_hidden_states(self, request_id: str) -> bool:
        """True if the runner has to keep the last hidden state of the request's sequences: a proposer reads them."""
        choice = self._requests.get(request_id)
        return choice is not None and any(self._proposers[name].reads_hidden for name in choice.proposers)

    def end(self, request_id: str) -> None:
        """Forgets the sequences of a request that is over. Harmless for one that did not speculate."""
        if self._requests.pop(request_id, None) is None:
            return
        for sequence_id in [name for name, one in self._sequences.items() if one.request_id == request_id]:
            self._active.discard(sequence_id)
            sequence = self._sequences.pop(sequence_id)
            for name in sequence.choice.proposers:
                with self._guarded(name, "could not end a sequence"):
                    self._proposers[name].end(sequence_id)

    @property
    def is_wanted(self) -> bool:
        """True if any request speculates."""
        return bool(self._requests)

    def may_draft(self, decoding: Iterable[tuple[str, str]]) -> bool:
        """True if `propose` may give a draft for the next step, in which these sequences decode (ids of each and of its
        request); False while all of them that speculate are in a cooldown. Pure and cheap. Before each step the engine
        calls either `propose` or, where this is False, `skip`, and need not wait for the step under way."""
        step = self._policy.step + 1
        for sequence_id, request_id in decoding:
            sequence = self._sequences.get(sequence_id)
            if request_id in self._requests and (sequence is None or sequence.may_draft(step)):
                return True
        return False

    def skip(self) -> None:
        """Counts a step that is planned without drafts. Cooldowns go on."""
        self._policy.skip()

    # --- a step -------------------------------------------------------------------------------------------------------

    def propose(self, candidates: Sequence[Candidate]) -> dict[str, Draft]:
        """Drafts by sequence id, for those of the candidates that a draft pays for. Raises nothing: a proposer that
        fails drafts nothing."""
        self._see(candidates)
        self._policy.begin([self._requests.get(candidate.request.request_id) for candidate in candidates])
        drafts: dict[str, Draft] = {}
        # By sequence, proposers without a draft in this step, such as heads on their way: the next best is asked.
        silent: dict[str, set[str]] = {}
        waiting = [
            (candidate, self._sequences[candidate.sequence_id])
            for candidate in candidates
            if candidate.sequence_id in self._active and candidate.num_room > 0
        ]
        while waiting:
            num_drafted = sum(len(draft.token_ids) for draft in drafts.values())
            asked = self._policy.choose(waiting, silent, num_drafted)
            for name in dict.fromkeys(option.proposer for option, _ in asked):
                drafts |= self._ask(name, [entry for entry in asked if entry[0].proposer == name])
            unanswered = [option for option, _ in asked if option.candidate.sequence_id not in drafts]
            for option in unanswered:
                silent.setdefault(option.candidate.sequence_id, set()).add(option.proposer)
            waiting = [(option.candidate, option.sequence) for option in unanswered]
        self._policy.end(
            [(self._sequences[sequence_id].proposer, len(draft.token_ids)) for sequence_id, draft in drafts.items()]
        )
        return drafts

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from what became of the drafts."""
        for span in plan.spans:
            sequence = self._sequences.get(span.sequence_id) if span.draft else None
            out = result.spans.get(span.sequence_id)
            if sequence is None or out is None or not out.token_ids:
                continue
            with self._guarded(sequence.proposer, "could not learn from a draft"):
                self._policy.learn(sequence, len(span.draft), len(out.token_ids) - 1)

    def count(self, tokens: Tokens) -> None:
        """Takes in what the client is told, so that the sums are those of all answers: where a draft runs beyond the
        end of a completion, its tokens behind that end do not count."""
        if tokens.num_drafted:
            self.drafted[tokens.proposer] += tokens.num_drafted
            self.accepted[tokens.proposer] += tokens.num_accepted

    def close(self) -> None:
        for name, proposer in self._proposers.items():
            with self._guarded(name, "did not close well"):
                proposer.close()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _see(self, candidates: Sequence[Candidate]) -> None:
        """Begins the records of new candidates, and suspends sequences that are no longer candidates: these wait, or
        have ended before their request, and proposers may drop what is costly to keep. What is known of their drafts
        stays until the request ends."""
        active: set[str] = set()
        for candidate in candidates:
            choice = self._requests.get(candidate.request.request_id)
            if choice is None:
                continue
            active.add(candidate.sequence_id)
            if candidate.sequence_id not in self._sequences:
                self._sequences[candidate.sequence_id] = DraftedSequence(candidate.request.request_id, choice)
        for sequence_id in self._active - active:
            for name in self._sequences[sequence_id].choice.proposers:
                with self._guarded(name, "could not suspend a sequence"):
                    self._proposers[name].suspend(sequence_id)
        self._active = active

    def _ask(self, name: str, asked: Sequence[tuple[Option, int]]) -> dict[str, Draft]:
        """The usable drafts of one call of a proposer."""
        proposer = self._proposers[name]
        asks = [
            Ask(one.candidate, num, one.sequence.choice.params, one.sequence.choice.medusa_key) for one, num in asked
        ]
        proposed: list[tuple[int, ...]] = []
        with self._guarded(name, "could not draft"):
            start_s = self._clock()
            answers = zip(asks, proposer.propose(asks), strict=True)
            proposed = [self._usable(token_ids, ask) for ask, token_ids in answers]
            self._policy.note_call(name, asked, proposed, self._clock() - start_s)
        drafts: dict[str, Draft] = {}
        for (option, _), token_ids in zip(asked, proposed, strict=bool(proposed)):
            if token_ids:
                option.sequence.proposer = name
                option.sequence.pieces = option.pieces
                drafts[option.candidate.sequence_id] = Draft(token_ids, proposer.name)
        return drafts

    def _usable(self, token_ids: Sequence[int], ask: Ask) -> tuple[int, ...]:
        """The part of a draft that can be used: as much as was asked for, up to a token that the target does not have
        (it cannot even be run), or that the grammar does not allow."""
        draft = tuple(token_ids[: ask.num_tokens])
        if draft and not (min(draft) >= 0 and max(draft) < self._num_token_ids):
            draft = draft[: next(i for i, one in enumerate(draft) if not 0 <= one < self._num_token_ids)]
        matcher = ask.candidate.matcher
        return draft if matcher is None or not draft else draft[: matcher.num_legal(draft)]

    @contextmanager
    def _guarded(self, name: str, what: str) -> Generator[None]:
        """Guards all that a proposer does: its errors cost drafts, never a step. Each kind is logged once."""
        try:
            yield
        except Exception as error:
            self._note_failure(name, what, error)

    def _note_failure(self, name: str, what: str, error: Exception) -> None:
        failure = (name, what, type(error))
        if failure not in self.failures:
            fields = {"proposer": name, "failure": what, "error_type": type(error).__name__}
            log.error("%s %s; the step goes on without", name, what, exc_info=error, extra=fields)
        self.failures[failure] += 1


def check_named_heads(request: Request, medusa_key: AdapterKey | None) -> None:
    """Raises FailedPrecondition where `speculation.medusa.adapter_id` names an adapter without heads, which would draft
    nothing. `medusa_key`: of that adapter; None where nothing is named."""
    if medusa_key is not None and not medusa_key.has_heads:
        adapter_id = request.speculation.medusa_id
        raise FailedPrecondition(
            f"`speculation.medusa.adapter_id` names {adapter_id!a}, which is a LoRA without Medusa heads; name an "
            "adapter that has some, or leave `speculation.medusa` out",
            field="speculation.medusa.adapter_id",
            resource=adapter_id,
        )


def choose(
    kind: SpeculationKind,
    request: Request,
    medusa_key: AdapterKey | None,
    config: SpeculationConfig,
    draft_names: Collection[str],
) -> Choice:
    """The proposers that the request may use. `kind`: its own, or the default. `medusa_key`: its heads, perhaps those
    of its own adapter. Raises FailedPrecondition or InvalidArgument for what this server does not have."""
    params = request.speculation
    match kind:
        case "off":
            return Choice()
        case "medusa":
            if medusa_key is None:
                raise FailedPrecondition(
                    "there are no Medusa heads for this request: its adapter brings none and the server has no "
                    "--default-medusa; name some in `speculation.medusa.adapter_id`",
                    field="speculation.medusa",
                    resource="speculation.medusa",
                )
            proposers = (MEDUSA,)
        case "prompt_lookup":
            proposers = (PROMPT_LOOKUP,)
        case "draft_model":
            proposers = (draft_key(_draft_name(params, draft_names)),)
        case "auto":
            proposers = (
                *((GRAMMAR,) if request.grammar is not None else ()),
                *((MEDUSA,) if medusa_key is not None else ()),
                PROMPT_LOOKUP,
                *(draft_key(name) for name in draft_names),
            )
    return Choice(proposers, _filled(params, config), medusa_key if MEDUSA in proposers else None)


def _draft_name(params: SpeculationParams, names: Collection[str]) -> str:
    if not names:
        raise FailedPrecondition(
            "this server has no draft model (--draft-model); leave `speculation.draft_model` out",
            resource="speculation.draft_model",
        )
    if not params.draft_name and len(names) == 1:
        return next(iter(names))
    if params.draft_name not in names:
        raise InvalidArgument(
            f"`speculation.draft_model.name` must be one of {', '.join(sorted(names))}; it is {params.draft_name!a}",
            field="speculation.draft_model.name",
        )
    return params.draft_name


def _filled(params: SpeculationParams, config: SpeculationConfig) -> SpeculationParams:
    """The parameters with the server's defaults filled in. Bounds of n-grams stay as they are: what 0 means is prompt
    lookup's own matter."""
    wanted = params.max_draft_tokens or config.default_draft_tokens or DEFAULT_NUM_TOKENS
    return replace(
        params,
        max_draft_tokens=min(wanted, config.max_draft_tokens),
        fixed_length=params.fixed_length or not config.adaptive,
    )
