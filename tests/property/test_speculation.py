"""Speculation under any drafts: unchanged texts, no leak, correct counts."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.scheduler_fakes import VOCAB_SIZE, adapter
from support.scheduler_harness import Harness, RequestLog, make_request

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import Cancelled, DeadlineExceeded, OutOfMemory, Overloaded
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import CompletionEnd, Event, Request, RequestFailed, SpeculationParams, Tokens
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation.history import History
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import DRAFT_MODEL, MEDUSA, PROMPT_LOOKUP, Ask, Proposer
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts

KEYS = [None, adapter("a"), adapter("b")]
HEADS = AdapterKey("medusa", "f" * 64)
# Prompts begin alike, and repeat themselves.
OPENINGS = [(1, 2, 3, 4, 5, 6, 7, 8, 9), (3, 4, 5, 3, 4, 5, 3, 4), (5,) * 10]
MOODS = ("right", "right and on", "wrong", "random", "mixed", "stops", "too long", "no ids", "silent", "raising", "bad")


class Moody(Proposer):
    """Drafts in a mood of its own or in any. Knows what is right, and whom it has been asked for."""

    def __init__(self, name: str, mood: str, dice: Random) -> None:
        self.name = name
        self.mood = mood
        self.known: set[str] = set()
        self.harness: Speculating | None = None
        self._dice = dice

    def propose(self, asks: Sequence[Ask]) -> Any:
        for ask in asks:
            self.known.add(ask.candidate.sequence_id)
            assert 1 <= ask.num_tokens <= ask.candidate.num_room
        mood = self._dice.choice(MOODS) if self.mood == "any" else self.mood
        if mood == "raising":
            raise RuntimeError("not today")
        if mood == "bad":
            return self._dice.choice([None, [], [None for _ in asks], [(1,)] * (len(asks) + 1)])
        return [self._answer(ask, mood) for ask in asks]

    def _answer(self, ask: Ask, mood: str) -> tuple[int, ...]:
        candidate, dice = ask.candidate, self._dice
        assert self.harness is not None
        request_id, rest = candidate.sequence_id.rsplit("#", 1)
        text = self.harness.expected(request_id, int(rest.split("@")[0])).token_ids
        truth = text[len(candidate.token_ids) - candidate.num_prompt_tokens :]
        lie = tuple((token_id + 1) % VOCAB_SIZE for token_id in truth)
        answers: dict[str, tuple[int, ...]] = {
            "right": truth[: ask.num_tokens],
            "right and on": (*truth, 1, 2, 3),
            "wrong": lie[: ask.num_tokens],
            "random": tuple(dice.choices(range(VOCAB_SIZE), k=ask.num_tokens)),
            "mixed": (*truth[: dice.randint(0, 3)], *lie[: dice.randint(0, 2)]),
            "stops": (*truth[: dice.randint(0, 2)], 0, 3, *truth[2:], 0),
            "too long": (*truth, *range(60)),
            "no ids": (*truth[: dice.randint(0, 2)], dice.choice([-1, VOCAB_SIZE, 1 << 65]), *truth),
        }
        return answers.get(mood, ())

    def end(self, sequence_id: str) -> None:
        self.known.discard(sequence_id)


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    num_slots: int
    num_tokens: int
    is_adaptive: bool
    row_s: float  # what a row of a step costs, of the 1 s that it takes
    moods: tuple[str, str]
    seed: int


SETTINGS = st.builds(
    Setting,
    num_blocks=st.sampled_from([18, 22, 30, 80]),
    block_size=st.sampled_from([1, 2, 4]),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 30),
    num_slots=st.integers(1, 2),
    num_tokens=st.sampled_from([0, 3]),
    is_adaptive=st.sampled_from([True, True, False]),
    row_s=st.sampled_from([0.001, 0.1, 0.9]),
    moods=st.tuples(st.sampled_from((*MOODS, "any")), st.sampled_from((*MOODS, "any"))),
    seed=st.integers(0, 99),
)


class Speculating(Harness):
    """The harness with a speculator in its loop, as the engine has it."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(
            num_blocks=setting.num_blocks,
            block_size=setting.block_size,
            max_running=setting.max_running,
            max_step_tokens=max(setting.max_running, setting.max_step_tokens),
            max_context_tokens=40,
            num_slots=setting.num_slots,
            max_bypasses=3,
        )
        dice = Random(setting.seed)
        lookup = PromptLookupProposer(history=History(SpeculationConfig().lookup_history))
        self.medusa = Moody(MEDUSA, setting.moods[0], dice)
        self.draft = Moody(DRAFT_MODEL, setting.moods[1], dice)
        self.medusa.harness = self.draft.harness = self
        self.speculator = Speculator(
            SpeculationConfig(setting.num_tokens, adaptive=setting.is_adaptive),
            {MEDUSA: self.medusa, PROMPT_LOOKUP: lookup, "draft_model:d": self.draft},
            StepCosts({1: 1.0, 101: 1.0 + 100 * setting.row_s}),
            draft_names=("d",),
            default_heads=lambda: HEADS,
            num_token_ids=VOCAB_SIZE,
            max_step_tokens=self.config.max_step_tokens,
            clock=lambda: self.now,
        )
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def add(self, request: Request, key: AdapterKey | None = None) -> RequestLog:
        self.speculator.begin(request, key, None)
        try:
            return super().add(request, key)
        except Overloaded:
            self.speculator.end(request.request_id)
            raise

    def take(self, events: list[Event]) -> None:
        super().take(events)
        for entry in events:
            if isinstance(entry, Tokens):
                assert entry.num_accepted <= min(entry.num_drafted, len(entry.token_ids))
                self.speculator.count(entry)
                if entry.num_drafted:
                    self.drafted[entry.proposer] += entry.num_drafted
                    self.accepted[entry.proposer] += entry.num_accepted
            elif isinstance(entry, CompletionEnd | RequestFailed) and self.logs[entry.request_id].is_over:
                self.speculator.end(entry.request_id)

    def turn(self, seconds: float = 0.01) -> StepPlan | None:
        self.now += seconds
        self.residency.poll()
        drafts = self.speculator.propose(self.scheduler.candidates()) if self.speculator.is_wanted else {}
        plan = self.scheduler.schedule(self.now, drafts)
        self.take(self.scheduler.take_events())
        if plan is not None:
            for span in plan.spans:
                assert all(0 <= token_id < VOCAB_SIZE for token_id in span.draft)
            result = self.runner.execute(plan)
            if drafts:
                self.speculator.observe(plan, result)
            self.take(self.scheduler.apply(plan, result, self.now))
        self.scheduler.check_integrity()
        return plan

    def finish(self) -> None:
        """Runs to the end, where nothing of anybody is left, and the counts of all answers are the speculator's."""
        self.run()
        assert self.turn() is None
        assert not self.speculator.is_wanted
        assert not self.medusa.known
        assert not self.draft.known
        assert self.drafted == self.speculator.drafted
        assert +self.accepted == +self.speculator.accepted
        for log in self.logs.values():
            assert 0 <= log.num_accepted <= log.num_drafted
        assert sum(log.num_drafted for log in self.logs.values()) == self.drafted.total()


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> tuple[Request, AdapterKey | None]:
    opening = draw(st.sampled_from(OPENINGS))
    prompt = opening[: draw(st.integers(1, len(opening)))]
    request = make_request(
        request_id,
        (*prompt, *draw(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=2))),
        max_tokens=draw(st.integers(1, 14)),
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_token_ids=draw(st.sampled_from([frozenset[int](), frozenset({3}), frozenset({0, 5})])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        n=draw(st.sampled_from([1, 1, 2, 3])),
        priority=draw(st.sampled_from([0, 0, 1])),
    )
    speculation = SpeculationParams(
        draw(st.sampled_from([None, "off", "auto", "auto", "medusa", "prompt_lookup", "draft_model"])),
        max_draft_tokens=draw(st.sampled_from([0, 1, 5])),
        fixed_length=draw(st.booleans()),
        max_ngram=draw(st.sampled_from([0, 2])),
    )
    return replace(request, speculation=speculation), draw(st.sampled_from(KEYS))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), setting=SETTINGS)
def test_texts_do_not_depend_on_drafts(data: st.DataObject, setting: Setting) -> None:
    harness = Speculating(setting)
    for number in range(data.draw(st.integers(1, 8))):
        harness.add(*data.draw(requests(f"r{number}")))
        for _ in range(data.draw(st.integers(0, 3))):
            harness.turn()
    harness.finish()
    harness.check_outputs()
    for name in (MEDUSA, PROMPT_LOOKUP, DRAFT_MODEL):
        if harness.accepted[name]:
            event(f"{name}: accepted")
        if harness.drafted[name] > harness.accepted[name]:
            event(f"{name}: rejected")
    if harness.scheduler.load().num_preemptions:
        event("preempted")


class Life(RuleBasedStateMachine):
    """Requests come, are cancelled, stopped, fail and run out of time at any moment, drafted for or not."""

    harness: Speculating

    @initialize(setting=SETTINGS)
    def start(self, setting: Setting) -> None:
        self.harness = Speculating(setting)

    @rule(data=st.data(), deadline_s=st.none() | st.floats(0.005, 0.2))
    def add(self, data: st.DataObject, deadline_s: float | None) -> None:
        request, key = data.draw(requests(f"r{len(self.harness.logs)}"))
        now = self.harness.now
        deadline_s = None if deadline_s is None else now + deadline_s
        with contextlib.suppress(Overloaded):  # turns of 30 s are slow
            self.harness.add(replace(request, arrival_s=now, deadline_s=deadline_s), key)

    @rule(num_turns=st.integers(1, 6), seconds=st.sampled_from([0.01, 0.01, 30.0]))
    def turn(self, num_turns: int, seconds: float) -> None:
        for _ in range(num_turns):
            self.harness.turn(seconds)

    @rule(number=st.integers(0, 12))
    def cancel(self, number: int) -> None:
        self.harness.cancel(f"r{number}", Cancelled("the client went away"))

    @rule(number=st.integers(0, 12), index=st.integers(0, 2))
    def stop_completion(self, number: int, index: int) -> None:
        self.harness.take(self.harness.scheduler.stop_completion(f"r{number}", index))

    @rule(number=st.integers(0, 12))
    def fail_in_step(self, number: int) -> None:
        self.harness.runner.failing[f"r{number}"] = OutOfMemory("this step did not fit; try a shorter prompt")

    @rule(mood=st.sampled_from(MOODS))
    def change_mood(self, mood: str) -> None:
        self.harness.medusa.mood = mood

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.finish()
        for request_id, log in self.harness.logs.items():
            assert isinstance(log.error, Cancelled | OutOfMemory | DeadlineExceeded | Overloaded | None)
            for index in range(log.request.n):
                expected = self.harness.expected(request_id, index)
                tokens = tuple(log.tokens[index])
                assert expected.token_ids[: len(tokens)] == tokens, "a token that is not the request's own"
                if index in log.ends and log.ends[index].reason.value != "stop":
                    assert (log.ends[index].reason.value, tokens) == (expected.reason, expected.token_ids)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
