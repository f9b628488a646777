"""Preemption when KV blocks run out."""

from __future__ import annotations

import pytest
from support.scheduler_fakes import adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.errors import DeadlineExceeded
from loraplex_server.scheduler.overload import WaitLimits


def preempted(harness: Harness) -> list[str]:
    """The sequences that entered more than once, in the order of re-entry."""
    entered = [new.sequence_id.split("#")[0] for plan in harness.plans for new in plan.entered]
    return [name for at, name in enumerate(entered) if name in entered[:at]]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_latest_of_the_lowest_priority_has_to_go(prefix_caching: bool, depth: int) -> None:
    harness = Harness(num_blocks=11, block_size=2, prefix_caching=prefix_caching, depth=depth)
    harness.add(make_request("old", (1, 2, 3), max_tokens=12, arrival_s=1.0), adapter("a"))
    harness.add(make_request("late", (4, 5, 6), max_tokens=12, arrival_s=2.0), adapter("b"))
    harness.add(make_request("urgent", (7, 8, 9), max_tokens=12, arrival_s=3.0, priority=1), adapter("a"))
    while not harness.scheduler.load().num_preemptions:
        harness.turn()
    running = {s.sequence_id.split("#")[0] for s in harness.plans[-1].spans}
    assert "late" not in running
    assert "old" in running
    harness.run()
    harness.check_outputs()
    assert "late" in preempted(harness)
    assert "urgent" not in preempted(harness)


def test_one_that_comes_back_brings_all_its_tokens_and_finds_them_in_the_cache() -> None:
    harness = Harness(num_blocks=9, block_size=2)
    harness.add(make_request("old", (1, 2, 3), max_tokens=8))
    harness.add(make_request("late", (4, 5, 6), max_tokens=8))
    harness.run()
    assert preempted(harness) == ["late"]
    back = [new for plan in harness.plans for new in plan.entered if new.sequence_id.startswith("late")][1]
    assert back.num_prompt_tokens == 3
    num_known = len(back.token_ids) - 3
    assert num_known > 1
    assert back.token_ids[3:] == harness.expected("late").token_ids[:num_known]
    harness.check_outputs()
    # Prefix hits of a second entry are not the client's business.
    assert harness.logs["late"].ends[0].num_cached_tokens == 0


def test_nobody_enters_in_the_step_that_preempted() -> None:
    harness = Harness(num_blocks=11, block_size=2, max_running=8)
    for number in range(6):
        harness.add(make_request(f"r{number}", (number, 2, 3), max_tokens=12))
    num_preemptions = 0
    while harness.has_work:
        plan = harness.turn()
        now = harness.scheduler.load().num_preemptions
        if now > num_preemptions and plan is not None:
            assert plan.entered == ()
        num_preemptions = now
    assert num_preemptions > 0
    harness.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_shorter_one_enters_at_once_where_nothing_else_runs(depth: int) -> None:
    """A step without a plan would let the engine sleep until something else wakes it."""
    harness = Harness(max_running=1, depth=depth, slice_s=0.05)
    harness.add(make_request("long", (1, 2, 3), max_tokens=60))
    for _ in range(8):
        harness.turn()
    harness.add(make_request("short", (4, 5, 6), max_tokens=2))
    while not harness.scheduler.load().num_preemptions:
        plan = harness.turn()
    assert plan is not None
    assert [new.sequence_id.split("#")[0] for new in plan.entered] == ["short"]
    harness.run()
    harness.check_outputs()
    assert preempted(harness) == ["long"]


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_is_too_late_takes_no_row(depth: int) -> None:
    """It would fail at once, and the only row go back to the sequence that had it."""
    harness = Harness(max_running=1, depth=depth, slice_s=0.05)
    harness.add(make_request("long", (1, 2, 3), max_tokens=90))
    for _ in range(20):
        harness.turn()
    harness.add(make_request("late", (4, 5, 6), max_tokens=8, deadline_s=harness.now + 0.09))
    harness.run()
    assert isinstance(harness.logs["late"].error, DeadlineExceeded)
    harness.check_output("long")
    assert preempted(harness) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_one_that_is_preempted_waits_for_the_result_of_its_last_step(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shorter one seems to be too late only when its row is free: the other is first in the queue at once."""
    harness = Harness(max_running=1, depth=depth, slice_s=0.05)
    harness.add(make_request("long", (1, 2, 3), max_tokens=60))
    for _ in range(8):
        harness.turn()
    harness.add(make_request("short", (4, 5, 6), max_tokens=2))
    monkeypatch.setattr(
        WaitLimits,
        "is_too_late",
        lambda self, state, now: state.request.request_id == "short" and not self.table.running,
    )
    harness.run()
    assert isinstance(harness.logs["short"].error, DeadlineExceeded)
    harness.check_output("long")
    assert preempted(harness) == ["long"]


def test_a_prompt_that_does_not_fit_now_is_not_overtaken() -> None:
    """Smaller prompts that would fit wait behind it: or endless small ones would keep it out for ever."""
    harness = Harness(num_blocks=11, block_size=2)
    harness.add(make_request("running", (1, 2, 3), max_tokens=9))
    harness.turn()
    harness.add(make_request("large", range(1, 19), max_tokens=1))
    harness.add(make_request("small", (1,), max_tokens=1))
    harness.turn()
    assert harness.logs["small"].admitted is None
    harness.run()
    harness.check_outputs()
    names = [new.sequence_id.split("#")[0] for plan in harness.plans for new in plan.entered]
    assert names == ["running", "large", "small"]


def test_an_admission_leaves_a_spare_block() -> None:
    """The spare block keeps the newcomer from taking the one that the running sequence needs next; it would be thrown
    out for it."""
    harness = Harness(num_blocks=5, block_size=2, num_spare_blocks=1)
    harness.add(make_request("running", (1, 2, 3), max_tokens=3))
    harness.turn()
    harness.add(make_request("new", (4, 5, 6), max_tokens=1))
    harness.run()
    assert harness.scheduler.load().num_preemptions == 0
    harness.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_crowd_in_very_little_room(depth: int) -> None:
    harness = Harness(num_blocks=7, block_size=2, max_running=6, depth=depth, prefix_caching=False)
    for number in range(12):
        harness.add(make_request(f"r{number}", (number + 1, 2), max_tokens=10, n=1 + number % 2))
    harness.run()
    harness.check_outputs()
