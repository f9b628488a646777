"""Speculator: proposer and draft length by sequence and step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import FailedPrecondition, Internal, InvalidArgument
from loraplex_contracts.plan import Candidate, Draft, Span, SpanResult, StepPlan, StepResult
from loraplex_contracts.request import (
    Request,
    SamplingParams,
    SpeculationKind,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.config import SpeculationConfig
from loraplex_server.speculation import proposer as module
from loraplex_server.speculation.history import History
from loraplex_server.speculation.prompt_lookup import PromptLookupProposer
from loraplex_server.speculation.proposer import (
    DRAFT_MODEL,
    GRAMMAR,
    MEDUSA,
    PROMPT_LOOKUP,
    Ask,
    Choice,
    ForcedTokenProposer,
    Piece,
    Proposer,
    draft_key,
)
from loraplex_server.speculation.speculator import Speculator
from loraplex_server.speculation.step_costs import StepCosts

LORA = AdapterKey("lora", "1" * 64)
BOTH = AdapterKey("combined", "2" * 64)
HEADS = AdapterKey("medusa", "3" * 64)
DEFAULT = AdapterKey("medusa", "4" * 64)
SMALL = "draft_model:small"
FLAT = StepCosts({1: 1.0, 256: 1.0001})  # rows cost nothing
STEEP = StepCosts({1: 1.0, 256: 256.0})  # a row costs as much as a step


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Fake(Proposer):
    """Drafts 1, 2, 3, ... unless told otherwise; each call takes `seconds`."""

    name: str
    clock: Clock
    answer: Callable[[Ask], Any] = lambda ask: tuple(range(1, 1 + ask.num_tokens))
    seconds: float = 0.0
    behind: Callable[[Candidate], int] = lambda candidate: 0
    calls: list[list[Ask]] = field(default_factory=list[list[Ask]])
    suspended: list[str] = field(default_factory=list[str])
    ended: list[str] = field(default_factory=list[str])
    num_closed: int = 0

    def propose(self, asks: Sequence[Ask]) -> Any:
        self.calls.append(list(asks))
        self.clock.now_s += self.seconds
        return [self.answer(ask) for ask in asks]

    def num_behind(self, candidate: Candidate) -> int:
        return self.behind(candidate)

    def suspend(self, sequence_id: str) -> None:
        self.suspended.append(sequence_id)

    def end(self, sequence_id: str) -> None:
        self.ended.append(sequence_id)

    def close(self) -> None:
        self.num_closed += 1

    @property
    def lengths(self) -> dict[str, int]:
        """Lengths asked for in the last call, by sequence."""
        return {ask.candidate.sequence_id: ask.num_tokens for ask in self.calls[-1]} if self.calls else {}


class FakeHeads(Fake):
    """Drafts by the heads that a request names."""

    drafts_at_once = True
    reads_hidden = True

    def rates_key(self, choice: Choice) -> AdapterKey | None:
        return choice.medusa_key


class Table:
    """A speculator with heads and a draft model, and requests of one sequence each."""

    def __init__(
        self,
        config: SpeculationConfig | None = None,
        costs: StepCosts = FLAT,
        others: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """`others`: draft models beside the small one."""
        self.clock = Clock()
        config = config or SpeculationConfig()
        self.medusa = FakeHeads(MEDUSA, self.clock)
        self.lookup = PromptLookupProposer(history=History(config.lookup_history))
        self.small = Fake(DRAFT_MODEL, self.clock)
        self.others = {name: Fake(DRAFT_MODEL, self.clock) for name in others}
        self.speculator = Speculator(
            config,
            {
                MEDUSA: self.medusa,
                PROMPT_LOOKUP: self.lookup,
                GRAMMAR: ForcedTokenProposer(),
                SMALL: self.small,
                **{draft_key(name): one for name, one in self.others.items()},
            },
            costs,
            draft_names=("small", *others),
            clock=self.clock,
            **options,
        )
        self.requests: dict[str, Request] = {}

    def begin(
        self,
        name: str,
        kind: SpeculationKind | None,
        key: AdapterKey | None = None,
        heads: AdapterKey | None = None,
        **params: Any,
    ) -> bool:
        request = Request(name, (7, 8, 9), StoppingParams(100), speculation=SpeculationParams(kind, **params))
        self.requests[name] = request
        self.speculator.begin(request, key, heads)
        return self.speculator.needs_hidden_states(name)

    def candidate(self, name: str, tokens: Sequence[int] = (7, 8, 9), num_room: int = 50) -> Candidate:
        return Candidate(name, 0, list(tokens), 3, num_room, self.requests[name], SamplingParams(), None)

    def propose(self, *names: str, **fields: Any) -> dict[str, Draft]:
        return self.speculator.propose([self.candidate(name, **fields) for name in names])

    def may_draft(self, *names: str) -> bool:
        return self.speculator.may_draft([(name, name) for name in names])

    def step(self, *names: str, num_accepted: int = 0, **fields: Any) -> dict[str, Draft]:
        """Drafts, and their verification: that many tokens of each are right."""
        drafts = self.propose(*names, **fields)
        self.observe(drafts, num_accepted)
        return drafts

    def observe(self, drafts: dict[str, Draft], num_accepted: int) -> None:
        spans: list[Span] = []
        results: dict[str, SpanResult] = {}
        for name, draft in drafts.items():
            num_drafted = len(draft.token_ids)
            spans.append(
                Span(name, 0, 3, 1 + num_drafted, 1 + num_drafted, draft=draft.token_ids, proposer=draft.proposer)
            )
            results[name] = SpanResult((5,) * (1 + min(num_accepted, num_drafted)))
        self.speculator.observe(StepPlan(1, tuple(spans)), StepResult(1, results))


def wrong(ask: Ask) -> Any:
    raise RuntimeError("no")


# --- requests ---------------------------------------------------------------------------------------------------------


def test_what_a_request_may_ask_for() -> None:
    speculator = Table(others=("tiny",)).speculator
    assert (speculator.kinds, speculator.draft_names) == ((MEDUSA, PROMPT_LOOKUP), ("small", "tiny"))


@pytest.mark.parametrize(
    ("kind", "key", "named", "is_default", "found"),
    [
        ("medusa", None, None, False, DEFAULT),
        ("medusa", LORA, None, False, DEFAULT),
        ("medusa", BOTH, None, False, BOTH),
        ("medusa", HEADS, None, False, HEADS),
        ("medusa", BOTH, HEADS, False, HEADS),
        ("medusa", None, HEADS, False, HEADS),
        ("auto", None, None, False, DEFAULT),
        ("auto", BOTH, None, False, BOTH),
        (None, None, None, False, None),
        (None, LORA, None, False, None),
        (None, None, None, True, DEFAULT),
        (None, LORA, None, True, DEFAULT),
        (None, BOTH, None, False, BOTH),
        (None, HEADS, None, False, HEADS),
        (None, None, HEADS, False, HEADS),
        ("off", BOTH, HEADS, True, None),
        ("prompt_lookup", BOTH, HEADS, True, None),
        ("draft_model", BOTH, HEADS, True, None),
    ],
)
def test_whose_heads(
    kind: SpeculationKind | None,
    key: AdapterKey | None,
    named: AdapterKey | None,
    is_default: bool,
    found: AdapterKey | None,
) -> None:
    """The heads that a request names come first, then its adapter's, then the server's if it speculates at all."""
    for options in ({"drafts_by_default": is_default}, {"config": SpeculationConfig(4 * is_default)}):
        table = Table(default_heads=lambda: DEFAULT, **options)  # type: ignore[arg-type]
        table.small.answer = lambda ask: ()
        assert table.begin("r", kind, key, named) == (found is not None)
        table.propose("r")
        assert [ask.medusa_key for call in table.medusa.calls for ask in call] == ([found] if found else [])


def test_what_is_not_there_is_refused_and_forgotten() -> None:
    table = Table()
    with pytest.raises(FailedPrecondition, match="no Medusa heads"):
        table.begin("r", "medusa")
    with pytest.raises(InvalidArgument, match="one of small"):
        table.begin("r", "draft_model", draft_name="large")
    assert not table.speculator.is_wanted
    assert table.propose("r") == {}


def test_requests_that_do_not_speculate_cost_nothing() -> None:
    table = Table(default_heads=lambda: DEFAULT)
    assert not table.begin("a", "off")
    assert not table.begin("b", None)
    assert not table.speculator.is_wanted
    assert table.propose("a", "b") == {}
    assert not table.medusa.calls
    assert not table.small.calls


def test_an_ended_request_is_forgotten() -> None:
    """Every proposer that the request may have used forgets it, once; and nothing more is done for it."""
    table = Table()
    table.begin("a", "auto", BOTH)
    table.begin("b", "draft_model")
    table.propose("a", "b")
    table.speculator.end("a")
    table.speculator.end("a")
    table.speculator.end("never there")
    assert table.speculator.is_wanted
    assert set(table.propose("b")) == {"b"}
    assert (table.medusa.ended, table.small.ended) == (["a"], ["a"])
    # A step may still have its sequence, when the request ends in between.
    table.speculator.end("b")
    assert table.speculator.propose([table.candidate("b")]) == {}
    assert table.speculator.propose([]) == {}
    assert table.small.ended == ["a", "b"]
    assert not table.small.suspended
    assert not table.speculator.is_wanted


def test_a_sequence_that_waits_again_is_suspended_and_keeps_its_track_record() -> None:
    table = Table()
    table.begin("a", "draft_model", max_draft_tokens=4)
    while table.step("a"):
        pass  # until its misses are too many
    assert table.propose() == {}
    assert (table.small.suspended, table.small.ended) == (["a"], [])
    assert table.speculator.is_wanted
    assert all(len(draft.token_ids) == 1 for draft in table.propose("a").values())  # a probe, at most
    table.propose()
    table.speculator.end("a")
    assert (table.small.suspended, table.small.ended) == (["a", "a"], ["a"])


def test_a_preempted_sequence_enters_the_lookup_history_once() -> None:
    """The sequence enters the history at its end, with all of its text."""
    table = Table()
    table.begin("a", "prompt_lookup")
    output = [31, 32, 33, 34]
    table.propose("a", tokens=[7, 8, 9, *output])
    history = table.lookup._history
    table.propose()
    assert history.num_tokens == 0
    table.propose("a", tokens=[7, 8, 9, *output, 35])
    table.speculator.end("a")
    num_tokens = history.num_tokens
    assert 0 < num_tokens <= 3 + len(output) + 1 + 1
    table.begin("b", "prompt_lookup", fixed_length=True)
    assert table.propose("b", tokens=[7, 8, 9, 31, 32])["b"].token_ids[:3] == (33, 34, 35)


def test_completions_of_a_request_are_apart() -> None:
    table = Table()
    table.begin("r", "draft_model")
    request = table.requests["r"]
    candidates = [Candidate(f"r#{i}", i, [7], 1, 9, request, SamplingParams(), None) for i in range(3)]
    assert set(table.speculator.propose(candidates)) == {"r#0", "r#1", "r#2"}
    assert set(table.speculator.propose(candidates[1:])) == {"r#1", "r#2"}
    assert table.small.suspended == ["r#0"]
    table.speculator.end("r")
    assert table.small.ended == ["r#0", "r#1", "r#2"]


# --- steps that need no drafts ----------------------------------------------------------------------------------------


def test_who_does_not_speculate_never_holds_up_a_step() -> None:
    table = Table()
    table.begin("a", "off")
    assert not table.may_draft("a")
    table.begin("b", "draft_model")
    assert not table.may_draft("a")  # the other waits
    assert table.may_draft("a", "b")
    table.propose("a", "b")
    assert table.may_draft("a", "b")
    assert not table.may_draft("a")
    table.speculator.end("b")
    assert not table.may_draft("a", "b")


def test_in_a_cooldown_steps_are_skipped_and_counted() -> None:
    """Drafts that are accepted again after a while are noticed, though most steps were planned without drafts. One that
    has not been drafted for yet ends no other's cooldown while it waits."""
    table = Table()
    table.begin("a", "draft_model", max_draft_tokens=4)
    table.begin("waits", "draft_model")
    num_skipped = 0
    for _ in range(200):
        if table.may_draft("a"):
            table.step("a")
        else:
            table.speculator.skip()
            num_skipped += 1
    assert num_skipped > 100
    num_drafts = 0
    for _ in range(200):
        assert table.may_draft("a") == table.may_draft("a")
        if table.may_draft("a"):
            num_drafts += bool(table.step("a", num_accepted=4))
        else:
            table.speculator.skip()
    assert num_drafts > 50


# --- who, and how much ------------------------------------------------------------------------------------------------


def test_one_call_of_each_proposer() -> None:
    """Each proposer is called once, with all of its sequences, their parameters filled in."""
    table = Table(SpeculationConfig(default_draft_tokens=5, max_draft_tokens=6))
    table.begin("a", "draft_model", fixed_length=True, max_draft_tokens=3)
    table.begin("b", "medusa", BOTH)
    table.begin("c", "draft_model", max_draft_tokens=90)
    table.begin("d", "prompt_lookup")
    table.begin("e", None)
    table.begin("f", "off")
    drafts = table.propose("a", "b", "c", "d", "e", "f", tokens=[7, 8, 9, 4, 7, 8])
    assert [len(calls) for calls in (table.small.calls, table.medusa.calls)] == [1, 1]
    params = {ask.candidate.sequence_id: ask.params for call in table.small.calls for ask in call}
    assert params["a"].max_draft_tokens == 3
    assert params["c"].max_draft_tokens == 6
    assert [ask.medusa_key for ask in table.medusa.calls[0]] == [BOTH]
    assert {name: draft.proposer for name, draft in drafts.items()} == {
        "a": DRAFT_MODEL,
        "b": MEDUSA,
        "c": DRAFT_MODEL,
        "d": PROMPT_LOOKUP,
        "e": drafts["e"].proposer,
    }
    assert drafts["d"].token_ids[:4] == (9, 4, 7, 8)
    assert all(len(draft.token_ids) <= 6 for draft in drafts.values())


@pytest.mark.parametrize("kind", ["draft_model", "prompt_lookup", "medusa"])
def test_no_more_than_there_is_room_for(kind: SpeculationKind) -> None:
    table = Table()
    table.begin("a", kind, BOTH, fixed_length=True)
    tokens = [7, 8, 9, 4, 5, 6, 7, 8]
    assert table.propose("a", tokens=tokens, num_room=0) == {}
    assert not table.small.calls
    assert not table.medusa.calls
    assert len(table.propose("a", tokens=tokens, num_room=2)["a"].token_ids) == 2


def test_fixed_lengths_stay() -> None:
    """Fixed lengths stay however often they miss, and whatever a step costs; those that adapt give up where it does not
    pay."""
    table = Table(costs=STEEP)
    table.begin("fixed", "draft_model", fixed_length=True, max_draft_tokens=5)
    table.begin("adaptive", "draft_model", max_draft_tokens=5)
    for _ in range(20):
        table.step("fixed", "adaptive")
        assert table.small.lengths["fixed"] == 5
    assert table.small.lengths == {"fixed": 5}
    table = Table(SpeculationConfig(adaptive=False), STEEP)
    table.begin("a", "draft_model", max_draft_tokens=5)
    table.step("a")
    assert table.small.lengths == {"a": 5}


def test_lengths_follow_what_is_accepted() -> None:
    table = Table(costs=StepCosts({1: 1.0, 2: 1.25, 256: 64.75}))  # a quarter of a step for a row
    table.begin("good", "draft_model", max_draft_tokens=8)
    table.begin("bad", "draft_model", max_draft_tokens=8)
    for _ in range(30):
        drafts = table.propose("good", "bad")
        table.observe({name: draft for name, draft in drafts.items() if name == "good"}, 8)
        table.observe({name: draft for name, draft in drafts.items() if name == "bad"}, 0)
    table.propose("good", "bad")
    assert table.small.lengths["good"] >= 4
    assert table.small.lengths.get("bad", 0) <= 1


def test_the_budget_of_the_step_is_shared() -> None:
    table = Table(max_step_tokens=12)
    for idx in range(4):
        table.begin(f"{idx}", "draft_model", max_draft_tokens=8, fixed_length=idx == 0)
    table.propose("0", "1", "2", "3")
    assert sum(table.small.lengths.values()) == 8
    assert table.small.lengths["0"] >= max(table.small.lengths.values())
    # Rows that nobody drafts for take their part of it.
    table.begin("off", "off")
    table.propose("0", "1", "2", "3", *["off"] * 6)
    assert sum(table.small.lengths.values()) == 2


def test_no_more_is_asked_for_than_a_draft_can_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(ask: Ask) -> tuple[Piece, ...]:
        return (Piece("own", min(ask.num_tokens, 2 if ask.medusa_key == BOTH else 99)),)

    table = Table()
    monkeypatch.setattr(table.medusa, "pieces", pieces)
    table.begin("two", "medusa", BOTH, fixed_length=True)
    table.begin("many", "medusa", HEADS, fixed_length=True)
    table.propose("two", "many")
    assert table.medusa.lengths == {"two": 2, "many": 8}


class OneLegalToken:
    """A grammar's matcher, as far as the speculator asks it."""

    def num_legal(self, draft: Sequence[int]) -> int:
        return 1


def test_a_draft_that_a_grammar_cuts_makes_no_other_of_these_heads_shorter() -> None:
    matcher: Any = OneLegalToken()
    table = Table()
    table.begin("cut", "medusa", BOTH, fixed_length=True)
    table.begin("free", "medusa", BOTH, fixed_length=True)
    drafts = table.speculator.propose([table.candidate("cut")._replace(matcher=matcher)])
    assert drafts["cut"].token_ids == (1,)
    table.propose("free")
    assert table.medusa.lengths == {"free": 8}


@pytest.mark.parametrize("is_fixed", [False, True])
def test_where_nothing_is_accepted_few_steps_look(monkeypatch: pytest.MonkeyPatch, is_fixed: bool) -> None:
    looked: list[int] = []
    pieces = PromptLookupProposer.pieces

    def counted(self: PromptLookupProposer, ask: Ask) -> tuple[Piece, ...]:
        looked.append(len(ask.candidate.token_ids))
        return pieces(self, ask)

    monkeypatch.setattr(PromptLookupProposer, "pieces", counted)
    table = Table()
    table.begin("a", "prompt_lookup", max_draft_tokens=4, fixed_length=is_fixed)
    tokens = [7, 8, 9] * 4
    for _ in range(200):
        table.observe(table.propose("a", tokens=tokens), 0)
        tokens.append(7 + len(tokens) % 3)
    num_lengths = len({length for length in looked if length >= 112})  # of the last 100 steps
    assert num_lengths == 100 if is_fixed else 20 <= num_lengths <= 40
    # What is accepted again is noticed within a pause, and from then on one looks in every step.
    looked.clear()
    for _ in range(200):
        table.observe(table.propose("a", tokens=tokens), 4)
        tokens.append(7 + len(tokens) % 3)
    assert len(set(looked)) >= 60


def test_lookups_that_never_pay_are_made_in_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text repeats itself, but a row costs as much as a step; where it costs nothing, every match is tried."""
    looked: list[int] = []
    pieces = PromptLookupProposer.pieces

    def counted(self: PromptLookupProposer, ask: Ask) -> tuple[Piece, ...]:
        looked.append(1)
        return pieces(self, ask)

    monkeypatch.setattr(PromptLookupProposer, "pieces", counted)
    numbers: list[int] = []
    for costs in (STEEP, FLAT):
        table = Table(costs=costs)
        table.begin("a", "prompt_lookup", max_draft_tokens=4)
        looked.clear()
        for num in range(100):
            table.step("a", tokens=([7, 8, 9] * 50)[: 12 + num], num_accepted=4)
        numbers.append(len(looked))
    assert 20 <= numbers[0] <= 40
    assert numbers[1] >= 100


# --- auto -------------------------------------------------------------------------------------------------------------

REPEATING = [7, 8, 9, 4, 5, 6, 7, 8, 9, 4, 5, 6, 7, 8, 9]


def test_auto_goes_with_what_is_accepted() -> None:
    """Heads that miss give way to lookup, and lookup that misses to heads."""
    for right in (MEDUSA, PROMPT_LOOKUP):
        table = Table()
        table.begin("a", "auto", BOTH, max_draft_tokens=4)
        table.small.answer = wrong  # another way that does not work
        last: list[str] = []
        for _ in range(60):
            drafts = table.propose("a", tokens=REPEATING)
            table.observe(drafts, 4 if "a" in drafts and drafts["a"].proposer == right else 0)
            last += [draft.proposer for draft in drafts.values()]
        assert Counter(last[-20:])[right] >= 18, (right, last)


@pytest.mark.parametrize("right", [0, 1, 2])
def test_auto_goes_with_the_draft_model_whose_drafts_are_accepted(right: int) -> None:
    """`auto` goes with that draft model whichever the operator named first. The next sequence knows what one has
    learned of them."""
    table = Table(others=("tiny", "other"))
    models = [table.small, *table.others.values()]
    for model in models:
        model.seconds = 0.01
    for name in ("a", "b"):
        table.begin(name, "auto")
        chosen: list[int] = []
        for _ in range(60):
            num_calls = [len(model.calls) for model in models]
            drafts = table.propose(name)
            asked = [idx for idx, model in enumerate(models) if len(model.calls) > num_calls[idx]]
            table.observe(drafts, 4 if right in asked else 0)
            chosen += asked
        assert Counter(chosen[-20:])[right] >= 18, chosen
        table.speculator.end(name)
    assert chosen[:10].count(right) >= 8


def test_auto_goes_with_the_cheaper_of_two_draft_models_that_are_as_good() -> None:
    table = Table(others=("tiny",))
    table.small.seconds, table.others["tiny"].seconds = 0.9, 0.1
    table.begin("a", "auto")
    num_tokens = 3
    for _ in range(40):
        drafts = table.step("a", tokens=range(100, 100 + num_tokens), num_accepted=8)
        num_tokens += 1 + len(drafts["a"].token_ids)
    assert len(table.others["tiny"].calls) > len(table.small.calls)


@pytest.mark.parametrize("num_room", [5, 500])
def test_what_a_draft_model_has_to_read_first_counts(num_room: int) -> None:
    """The draft model reads a second a token before its first draft, which is right as all that follow. A step takes a
    second."""
    table = Table()
    behind = {"num": 10}
    table.small.behind = lambda candidate: behind["num"]

    def answer(ask: Ask) -> Any:
        table.clock.now_s += behind["num"]
        behind["num"] = 0
        return (1, 2, 3)[: ask.num_tokens]

    table.small.answer = answer
    num_asked: list[int] = []
    for idx in range(8):  # after two it is known what that costs
        name, behind["num"] = f"{idx}", 10
        table.begin(name, "draft_model", max_draft_tokens=3)
        num_before = len(table.small.calls)
        for _ in range(3):
            table.step(name, num_accepted=3, num_room=num_room)
        num_asked.append(len(table.small.calls) - num_before)
    assert num_asked[:2] == [3, 3]
    assert num_asked[-1] == (3 if num_room > 100 else 0)


def test_auto_waits_until_what_a_draft_model_would_have_saved_pays_for_what_it_reads() -> None:
    table = Table()
    behind = {"num": 20}
    table.small.behind = lambda candidate: behind["num"]

    def answer(ask: Ask) -> Any:
        table.clock.now_s += 0.5 * behind["num"]
        behind["num"] = 0
        return (1, 2, 3)[: ask.num_tokens]

    table.small.answer = answer
    first_asked: list[int] = []
    for idx in range(8):
        name, behind["num"], num_tokens = f"{idx}", 20, 3
        table.begin(name, "auto", max_draft_tokens=3)
        num_before = len(table.small.calls)
        for step in range(40):
            drafts = table.step(name, tokens=range(100, 100 + num_tokens), num_accepted=3, num_room=500)
            num_tokens += 1 + sum(len(draft.token_ids) for draft in drafts.values())
            if len(table.small.calls) > num_before:
                first_asked.append(step)
                break
    assert first_asked[0] == 0  # nobody knows yet
    assert 3 <= first_asked[-1] <= 30  # reading takes ten seconds, and a step would save up to 2.9


def test_who_cannot_pay_is_looked_at_now_and_then() -> None:
    """A draft is right, and takes ten times as long as the steps that it saves."""
    table = Table(costs=STEEP)
    table.small.seconds = 100.0
    looked: list[int] = []
    table.small.behind = lambda candidate: looked.append(1) or 0  # type: ignore[func-returns-value]
    table.begin("a", "draft_model", max_draft_tokens=4)
    for _ in range(20):
        table.step("a", num_accepted=4)
    looked.clear()
    for _ in range(160):
        table.clock.now_s -= table.clock.now_s - 1000.0  # nothing fades
        table.step("a", num_accepted=4)
    assert 5 <= len(looked) <= 40


def test_without_a_match_auto_takes_another_way() -> None:
    table = Table()
    table.begin("a", "auto", BOTH)
    assert table.propose("a", tokens=[7, 8, 9])["a"].proposer in (MEDUSA, DRAFT_MODEL)


def test_who_has_nothing_to_say_gives_way_in_the_same_step() -> None:
    """Heads that are still on their way are asked in every step, so that they come; others draft meanwhile."""
    table = Table()
    table.medusa.answer = lambda ask: ()
    table.small.answer = wrong
    table.begin("a", "auto", BOTH, max_draft_tokens=3)
    table.begin("b", "medusa", BOTH)
    for num_steps in range(1, 4):
        drafts = table.propose("a", "b", tokens=REPEATING)
        assert {name: draft.proposer for name, draft in drafts.items()} == {"a": PROMPT_LOOKUP}
        assert len(table.medusa.calls) == num_steps
    table.medusa.answer = lambda ask: (1, 2, 3)
    assert {draft.proposer for draft in table.propose("a", "b").values()} >= {MEDUSA}


def test_the_second_to_be_asked_has_what_is_left_of_the_budget() -> None:
    table = Table(max_step_tokens=9)
    table.begin("a", "auto", BOTH, max_draft_tokens=6, fixed_length=True)
    table.begin("b", "medusa", BOTH, max_draft_tokens=6, fixed_length=True)
    table.medusa.answer = lambda ask: () if ask.candidate.sequence_id == "a" else (1, 2, 3, 4, 5, 6)[: ask.num_tokens]
    table.small.answer = lambda ask: ()
    drafts = table.propose("a", "b", tokens=REPEATING)
    assert sum(len(draft.token_ids) for draft in drafts.values()) <= 7
    assert set(drafts) == {"a", "b"}


# --- costs ------------------------------------------------------------------------------------------------------------


def test_a_proposer_that_takes_too_long_is_left_out() -> None:
    """Steps take a second, and drafts, all of which are right, twenty. What has not been seen for long is tried."""
    table = Table()
    table.begin("slow", "draft_model", max_draft_tokens=3)
    table.begin("quick", "medusa", BOTH, max_draft_tokens=3)
    table.small.seconds = 20.0
    for _ in range(12):
        table.step("slow", "quick", num_accepted=3)
    assert set(table.propose("slow", "quick")) == {"quick"}
    num_calls = len(table.small.calls)
    assert num_calls < 8
    table.clock.now_s += 600.0
    while len(table.small.calls) == num_calls:
        table.step("slow", "quick", num_accepted=3)
        assert table.speculator._policy.step <= 32


def test_the_first_ask_of_a_sequence_is_not_what_drafting_costs() -> None:
    """The sequence's prompt is read at the first ask."""
    table = Table()
    for idx in range(6):
        name = f"{idx}"
        table.begin(name, "draft_model", max_draft_tokens=3)
        table.small.seconds = 50.0
        assert set(table.step(name, num_accepted=3)) == {name}
        table.small.seconds = 0.01
        assert set(table.step(name, num_accepted=3)) == {name}


# --- what proposers may do --------------------------------------------------------------------------------------------


def test_a_proposer_that_raises_costs_its_own_drafts(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    table.small.answer = wrong
    table.begin("a", "draft_model")
    table.begin("b", "medusa", BOTH)
    table.begin("c", "prompt_lookup")
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            assert set(table.step("a", "b", "c", tokens=REPEATING, num_accepted=8)) == {"b", "c"}
    # Not in every step.
    assert len(caplog.records) == 1
    record = vars(caplog.records[-1])
    assert "draft_model:small could not draft" in record["message"]
    assert (record["proposer"], record["failure"], record["error_type"]) == (SMALL, "could not draft", "RuntimeError")
    assert table.speculator.failures == {(SMALL, "could not draft", RuntimeError): 20}
    table.small.answer = lambda ask: (1,)
    assert "a" in table.propose("a")


@pytest.mark.parametrize("method", ["pieces", "num_behind", "propose", "suspend", "end"])
def test_lookup_that_raises_costs_its_own_drafts(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lookup's own drafts are lost, wherever it raises."""
    table = Table()
    monkeypatch.setattr(PromptLookupProposer, method, lambda *args: wrong(args[-1]))
    table.begin("a", "prompt_lookup", fixed_length=True)
    table.begin("b", "medusa", BOTH)
    for _ in range(5):
        drafts = table.step("a", "b", tokens=REPEATING, num_accepted=8)
        assert set(drafts) == ({"b"} if method in ("pieces", "num_behind", "propose") else {"a", "b"})
    assert set(table.step("b", tokens=REPEATING)) == {"b"}
    table.speculator.end("a")
    table.speculator.end("b")
    assert not table.speculator.is_wanted
    assert [(name, error) for name, _, error in table.speculator.failures] == [(PROMPT_LOOKUP, RuntimeError)]
    assert len(caplog.records) == 1


def test_a_sequence_that_breaks_a_lookup_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sequence gets its drafts in another way."""
    pieces = PromptLookupProposer.pieces

    def broken(self: PromptLookupProposer, ask: Ask) -> tuple[Piece, ...]:
        if ask.candidate.sequence_id == "a":
            raise RuntimeError("no")
        return pieces(self, ask)

    monkeypatch.setattr(PromptLookupProposer, "pieces", broken)
    table = Table()
    table.begin("a", "auto", BOTH)
    table.begin("b", "prompt_lookup")
    for _ in range(3):
        drafts = table.step("a", "b", tokens=REPEATING, num_accepted=8)
        assert drafts["b"].proposer == PROMPT_LOOKUP
        assert drafts["a"].proposer != PROMPT_LOOKUP
    assert sum(table.speculator.failures.values()) == 1


@pytest.mark.parametrize(
    ("answers", "draft"),
    [
        ([(1, 2, 3)], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
        ([tuple(range(50))], tuple(range(4))),
        ([(1, 2, 31)], (1, 2, 31)),
        ([(1, 32, 2)], (1,)),
        ([(1, -1, 2)], (1,)),
        ([(1 << 80,)], None),
        ([()], None),
        ([None], None),
        (["beat"], None),
        ([], None),
        ([(1,), (2,)], None),
        (None, None),
    ],
)
def test_answers_of_every_kind(answers: Any, draft: tuple[int, ...] | None) -> None:
    """The draft model was asked for 4 tokens of a vocabulary of 32."""
    table = Table(num_token_ids=32)
    table.small.propose = lambda asks: answers  # type: ignore[method-assign]
    table.begin("a", "draft_model", max_draft_tokens=4, fixed_length=True)
    assert table.propose("a") == ({} if draft is None else {"a": Draft(draft, DRAFT_MODEL)})


def test_one_that_cannot_end_or_close(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    table.small.end = wrong  # type: ignore[method-assign, assignment]
    table.begin("a", "auto", BOTH)
    table.propose("a")
    table.speculator.end("a")
    assert table.medusa.ended == ["a"]
    assert "could not end" in caplog.text
    table = Table()
    table.medusa.close = lambda: wrong(None)  # type: ignore[method-assign, assignment, arg-type]
    table.speculator.close()
    assert table.small.num_closed == 1
    assert "did not close well" in caplog.text


# --- what is learnt and counted ---------------------------------------------------------------------------------------


def test_counts_are_those_of_the_answers() -> None:
    speculator = Table().speculator
    speculator.count(Tokens("a", 0, (1, 2, 3), num_drafted=4, num_accepted=2, proposer=MEDUSA))
    speculator.count(Tokens("b", 1, (1,), num_drafted=3, num_accepted=0, proposer=PROMPT_LOOKUP))
    speculator.count(Tokens("b", 1, (1,)))
    speculator.count(Tokens("a", 0, (1, 2), num_drafted=1, num_accepted=1, proposer=MEDUSA))
    assert speculator.drafted == {MEDUSA: 5, PROMPT_LOOKUP: 3}
    assert +speculator.accepted == {MEDUSA: 3}


def test_failed_spans_and_those_without_drafts_teach_nothing() -> None:
    table = Table(costs=STEEP)
    table.begin("a", "draft_model", fixed_length=True, max_draft_tokens=4)
    draft = table.propose("a")["a"]
    record = table.speculator._sequences["a"].records[SMALL, "own"]
    before = record.survival(9, 4, max_pause=64)
    spans = (
        Span("a", 0, 3, 5, 5, draft=draft.token_ids, proposer=DRAFT_MODEL),
        Span("unknown", 1, 3, 5, 5, draft=draft.token_ids, proposer=DRAFT_MODEL),
    )
    failed = SpanResult(error=Internal("no"))
    table.speculator.observe(StepPlan(1, spans), StepResult(1, {"a": failed}))
    table.speculator.observe(StepPlan(1, spans), StepResult(1, {}))
    table.speculator.observe(StepPlan(1, (Span("a", 0, 3, 1, 1),)), StepResult(1, {"a": SpanResult((5,))}))
    assert record.survival(9, 4, max_pause=64) == before
    table.observe({"a": draft}, 4)
    assert record.survival(9, 4, max_pause=64) > before


def test_what_sequences_learn_of_heads_outlives_them() -> None:
    """The next sequence with the same heads begins with what was learned, one with other heads does not."""
    table = Table(costs=StepCosts({1: 1.0, 2: 1.3, 256: 77.5}))
    table.begin("a", "medusa", BOTH, max_draft_tokens=6, fixed_length=True)
    for _ in range(40):
        table.step("a", num_accepted=0)
    for name, heads in (("same", BOTH), ("other", HEADS)):
        table.begin(name, "medusa", heads, max_draft_tokens=6)
    table.propose("same", "other")
    assert table.medusa.lengths.get("same", 0) < table.medusa.lengths["other"]


def test_what_is_known_of_heads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_KNOWN", 3)
    table = Table()
    for idx in range(10):
        table.begin(f"{idx}", "medusa", AdapterKey("medusa", f"{idx:064x}"))
        table.step(f"{idx}")
    assert len(table.speculator._policy._rates) == 3
