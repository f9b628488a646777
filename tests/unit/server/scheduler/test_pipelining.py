"""Step n+1 is planned before the result of step n is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from support.scheduler_fakes import VOCAB_SIZE, adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.errors import Cancelled, OutOfMemory
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import FinishReason

A = adapter("a")


def spans_of(plan: StepPlan | None, name: str) -> list[tuple[int, int]]:
    assert plan is not None
    return [(s.start, s.num_tokens) for s in plan.spans if s.sequence_id.startswith(f"{name}#")]


def test_a_token_that_is_still_to_come_is_planned_for() -> None:
    harness = Harness(depth=2)
    harness.add(make_request("r", (1, 2, 3), max_tokens=3))
    assert spans_of(harness.turn(), "r") == [(0, 3)]
    assert spans_of(harness.turn(), "r") == [(3, 1)]
    assert harness.logs["r"].tokens[0] == [harness.expected("r").token_ids[0]]
    assert spans_of(harness.turn(), "r") == [(4, 1)]
    # The third is under way, and there is no fourth: that much is known without it.
    assert harness.turn() is None
    harness.run()
    harness.check_outputs()
    assert harness.runner.num_steps == 3


def test_a_stop_leaves_one_step_too_many_and_nobody_hears_of_it() -> None:
    harness = Harness(depth=2)
    free = harness.add(make_request("free", max_tokens=12))
    harness.run()
    stop = free.tokens[0][4]
    harness.add(make_request("r", max_tokens=12, stop_token_ids=frozenset({stop}), seed=7))
    harness.run()
    harness.check_outputs()
    num_kept = len(harness.logs["r"].tokens[0])
    spans = [s for plan in harness.plans for s in plan.spans if s.sequence_id.startswith("r#")]
    assert len(spans) == num_kept + 1


def test_a_slot_is_given_back_when_the_last_plan_that_reads_it_has_run() -> None:
    harness = Harness(depth=2, num_slots=1)
    harness.add(make_request("r", max_tokens=50), A)
    for _ in range(4):
        harness.turn()
    harness.cancel("r", Cancelled("the client went away"))
    assert harness.residency.refs == {A: 1}, "the plan under way still reads the slot"
    assert not harness.residency.evict_idle()
    harness.turn()
    assert harness.residency.refs == {}
    harness.check_idle()


def test_the_token_of_a_preempted_sequence_counts() -> None:
    """The sequence is preempted while its step runs: the text goes on from that token, not from the one before."""
    harness = Harness(depth=2, num_blocks=9, block_size=2)
    harness.add(make_request("old", (1, 2, 3), max_tokens=9))
    harness.add(make_request("late", (4, 5, 6), max_tokens=9))
    while not harness.scheduler.load().num_preemptions:
        harness.turn()
    num_samples = sum(s.num_samples for p in harness.plans for s in p.spans if s.sequence_id.startswith("late"))
    assert len(harness.logs["late"].tokens[0]) == num_samples
    harness.run()
    harness.check_outputs()


def test_a_request_id_may_come_again_while_the_last_step_of_the_old_one_runs() -> None:
    harness = Harness(depth=2)
    harness.add(make_request("r", (1, 2, 3), max_tokens=50, seed=1))
    for _ in range(3):
        harness.turn()
    harness.cancel("r", Cancelled("the client went away"))
    old = harness.plans[-1].spans[0].sequence_id
    # The same prompt, so that both runs of the fake belong to one text.
    log = harness.add(make_request("r", (1, 2, 3), max_tokens=5, seed=2))
    harness.turn()
    assert not log.tokens, "the old one's token went to the new one"
    assert harness.plans[-1].spans[0].sequence_id != old
    harness.run()
    harness.check_outputs()


def test_a_failure_reaches_a_sequence_whose_next_step_is_planned() -> None:
    harness = Harness(depth=2)
    harness.add(make_request("bad", max_tokens=9), A)
    harness.add(make_request("good", max_tokens=9), A)
    for _ in range(3):
        harness.turn()
    harness.runner.failing["bad"] = OutOfMemory("this request's step did not fit; try a shorter prompt")
    harness.run()
    assert isinstance(harness.logs["bad"].error, OutOfMemory)
    harness.check_output("good")


def test_a_draft_is_awaited() -> None:
    """Nothing can be planned behind a draft, whose length is not known before its result."""

    def propose(harness: Harness) -> dict[str, tuple[int, ...]]:
        rows = [row for row in harness.runner.rows.values() if not row.new.sequence_id.startswith("plain")]
        return {row.new.sequence_id: (VOCAB_SIZE - 1,) * 2 for row in rows}

    harness = Harness(depth=2, proposer=propose)
    harness.add(make_request("r", max_tokens=8))
    harness.add(make_request("s", max_tokens=8))
    harness.add(make_request("plain", max_tokens=8, arrival_s=1.0))
    under_way = None
    while harness.has_work:
        plan = harness.turn()
        if under_way is not None and plan is not None:
            waiting = {s.sequence_id for s in under_way.spans if s.draft}
            assert waiting.isdisjoint(s.sequence_id for s in plan.spans)
        under_way = plan
    assert harness.logs["r"].num_drafted > 0
    assert harness.logs["plain"].num_drafted == 0
    harness.check_outputs()
    harness.check_idle()


def test_only_those_that_speculate_wait() -> None:
    """An empty draft says: wait for the token. No draft at all: go on."""
    harness = Harness(depth=2, proposer=lambda h: {r.new.sequence_id: () for r in h.runner.rows.values() if r.new.row})
    harness.add(make_request("ahead", max_tokens=9))
    harness.add(make_request("waits", max_tokens=9))
    for _ in range(6):
        harness.turn()
    num_steps = {name: sum(bool(spans_of(p, name)) for p in harness.plans) for name in ("ahead", "waits")}
    assert num_steps["waits"] < num_steps["ahead"] == 6
    harness.run()
    harness.check_outputs()


@dataclass
class FakeMatcher:
    """A matcher whose grammar ends after `num_left` tokens."""

    num_left: int
    inner: object = None
    num_words: int = 1
    error: str = ""

    def copy(self) -> FakeMatcher:
        return replace(self)

    def rebuild(self, reason: str) -> bool:
        return False

    def advance(self, token_id: int) -> bool:
        self.num_left -= 1
        return self.num_left == 0

    def num_legal(self, draft: Sequence[int]) -> int:
        return len(draft)

    def forced(self) -> Sequence[int]:
        return ()


def test_a_matcher_is_copied_only_for_a_completion_that_enters() -> None:
    """A copy takes kilobytes, and 64 completions of each of thousands of requests may wait."""
    harness = Harness(max_running=2)
    matcher = FakeMatcher(4)
    harness.add(make_request("r", max_tokens=9, n=8), matcher=matcher)
    for _ in range(2):
        harness.turn()
    running = harness.scheduler._table.running  # pyright: ignore[reportPrivateUsage]
    sequences = running[0].request.sequences
    assert len(running) == 2
    assert sum(one.matcher is matcher for one in sequences) == 6
    while harness.has_work:
        harness.turn()
    assert matcher.num_left == 4, "it stays at the beginning, for those that come"


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_with_a_grammar_waits_for_its_token_and_ends_with_the_grammar(depth: int) -> None:
    harness = Harness(depth=depth)
    ahead = harness.add(make_request("ahead", max_tokens=9))
    harness.add(make_request("waits", max_tokens=9), matcher=FakeMatcher(9))
    both = harness.add(make_request("both", max_tokens=9, n=2), matcher=FakeMatcher(4))
    exact = harness.add(make_request("exact", max_tokens=4), matcher=FakeMatcher(4))
    for _ in range(6):
        harness.turn()
    num_steps = {name: sum(bool(spans_of(p, name)) for p in harness.plans) for name in ("ahead", "waits")}
    assert num_steps["ahead"] == 6
    assert (num_steps["waits"] < 6) == (depth == 2)
    while harness.has_work:
        harness.turn()
    assert {index: len(ids) for index, ids in both.tokens.items()} == {0: 4, 1: 4}
    assert {end.reason for end in both.ends.values()} == {FinishReason.EOS}
    assert exact.ends[0].reason == FinishReason.EOS
    assert len(ahead.tokens[0]) == 9
    harness.check_idle()
