"""Adapters that are there, on their way, failing, or kept out by others."""

from __future__ import annotations

import pytest
from support.scheduler_fakes import adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.errors import AdapterInvalid, Cancelled

A, B, C = adapter("a"), adapter("b"), adapter("c")


def test_one_that_is_loading_holds_nobody_up() -> None:
    harness = Harness(load_polls=3)
    harness.add(make_request("waits"), A)
    harness.add(make_request("base"))
    plan = harness.turn()
    assert plan is not None
    assert [s.sequence_id.split("#")[0] for s in plan.spans] == ["base"]
    harness.run()
    harness.check_outputs()


def test_rows_of_one_adapter_stand_together_base_first() -> None:
    harness = Harness(num_slots=3)
    keys = [B, None, A, C, A, None, B, C]
    for number, key in enumerate(keys):
        harness.add(make_request(f"r{number}", max_tokens=9), key)
    for _ in range(3):
        harness.turn()
    plan = harness.turn()
    assert plan is not None
    slots = [harness.runner.rows[span.row].new.adapters for span in plan.spans]
    order = [-1 if not uses else uses[0].adapter_slot for uses in slots]
    assert order == sorted(order)
    assert order.count(-1) == 2
    harness.run()


def test_references_follow_running_sequences() -> None:
    harness = Harness(max_running=4)
    harness.add(make_request("r", n=3, max_tokens=3), A)
    harness.add(make_request("s", max_tokens=20), A)
    harness.turn()
    harness.turn()
    harness.turn()
    assert harness.residency.refs == {A: 2}  # the siblings enter with the next step
    harness.turn()
    assert harness.residency.refs == {A: 4}
    harness.cancel("r", Cancelled("the client went away"))
    assert harness.residency.refs == {A: 1}
    harness.run()


def adapter_counts(harness: Harness) -> tuple[int, int]:
    """Requests that found their adapter on the device, and those that did not."""
    load = harness.scheduler.load()
    return load.num_adapter_hits, load.num_adapter_misses


def test_each_request_finds_its_adapter_or_does_not() -> None:
    """One that waited for its adapter has not found it, although it has it in the end."""
    harness = Harness(num_slots=1)
    for number in range(12):
        harness.add(make_request(f"r{number}"), (A, B, C)[number % 3])
        harness.run()
    assert adapter_counts(harness) == (0, 12)
    harness.add(make_request("same"), C)
    harness.add(make_request("base"))
    harness.run()
    assert adapter_counts(harness) == (1, 12)


def test_a_request_that_ends_in_the_queue_says_how_long_it_waited() -> None:
    harness = Harness(load_polls=100)
    harness.now = 1.0
    late = harness.add(make_request("late", arrival_s=0.75, deadline_s=1.5), A)
    cancelled = harness.add(make_request("cancelled", arrival_s=1.0), A)
    runs = harness.add(make_request("runs", max_tokens=200, deadline_s=1.5))
    for _ in range(52):
        harness.turn()
    harness.cancel("cancelled", Cancelled("the client went away"))
    # Both have missed their adapter since the first turn, at 1.01 s.
    assert late.waits_s is not None
    queue_s, adapter_wait_s = late.waits_s
    assert queue_s == pytest.approx(adapter_wait_s + 0.26)
    assert 0.7 < queue_s < 0.77
    assert cancelled.waits_s == (pytest.approx(0.52), pytest.approx(0.51))
    assert runs.waits_s == (None, 0.0), "it had begun"


def test_completions_and_members_of_a_mixture_count_as_one_request() -> None:
    harness = Harness(num_slots=2)
    harness.add(make_request("first", n=3), A)
    harness.run()
    harness.add(make_request("again", n=3), A)
    harness.run()
    assert adapter_counts(harness) == (1, 1)
    for name in ("mixture", "same"):
        harness.add_mixture(make_request(name, n=2), (A, B))
        harness.run()
    assert adapter_counts(harness) == (2, 2)


def test_a_failing_adapter_fails_its_requests_and_no_other() -> None:
    harness = Harness()
    error = AdapterInvalid("adapter_model.safetensors is cut short; write it again")
    harness.residency.failures[A] = error
    harness.add(make_request("bad"), A)
    harness.add(make_request("worse", n=2), A)
    harness.add(make_request("good"), B)
    harness.run()
    assert harness.logs["bad"].error is error
    assert harness.logs["worse"].error is error
    harness.check_output("good")


def test_a_failure_that_comes_while_a_sibling_runs_ends_both() -> None:
    """The running one is in the plan already; its result is passed over."""
    harness = Harness(max_running=2, num_blocks=40)
    log = harness.add(make_request("r", n=2, max_tokens=30), A)
    harness.turn()
    harness.turn()
    harness.turn()
    harness.residency.slots.pop(A)  # cannot happen while it is referenced: the scheduler does not rely on that
    harness.residency.failures[A] = AdapterInvalid("gone; load it again")
    plan = harness.scheduler.schedule(harness.now)
    assert plan is not None
    harness.take(harness.scheduler.take_events())
    assert isinstance(log.error, AdapterInvalid)
    harness.scheduler.check_integrity()


def test_the_head_of_the_queue_keeps_its_slot() -> None:
    """The head lacks a row only: its adapter is fetched meanwhile and is not pushed out by one that is wanted behind
    it."""
    harness = Harness(max_running=1, num_slots=1)
    harness.add(make_request("running", max_tokens=12))
    harness.add(make_request("next"), A)
    harness.add(make_request("behind"), B)
    for _ in range(6):
        harness.turn()
    assert harness.residency.refs == {A: 1}
    # Somebody more urgent comes in front: then it is that one's turn to keep one.
    harness.add(make_request("urgent", priority=1), None)
    harness.turn()
    assert harness.residency.refs == {}
    harness.run()
    harness.check_outputs()


def test_a_kept_slot_is_given_back_by_a_cancelled_head() -> None:
    harness = Harness(max_running=1)
    harness.add(make_request("running", max_tokens=12))
    harness.add(make_request("next"), A)
    for _ in range(4):
        harness.turn()
    assert harness.residency.refs == {A: 1}
    harness.cancel("next", Cancelled("the client went away"))
    assert harness.residency.refs == {}
    harness.run()


def keep_busy(harness: Harness, number: int) -> int:
    """Requests for A and B in turn, so that some are always waiting."""
    while harness.scheduler.load().num_queued < 12:
        key = (A, B)[number % 2]
        harness.add(make_request(f"t{number}", max_tokens=6 + number % 5, arrival_s=harness.now), key)
        number += 1
    return number


def turns_until_admitted(harness: Harness, max_turns: int = 150) -> int | None:
    number = 0
    for _ in range(20):
        number = keep_busy(harness, number)
        harness.turn()
    log = harness.add(make_request("late", arrival_s=harness.now), C)
    for turn in range(max_turns):
        if log.admitted is not None:
            return turn
        number = keep_busy(harness, number)
        harness.turn()
    return None


def test_a_third_adapter_gets_one_of_two_busy_slots() -> None:
    few = turns_until_admitted(Harness(max_running=8, max_bypasses=2, max_adapter_wait_s=1e9))
    many = turns_until_admitted(Harness(max_running=8, max_bypasses=40, max_adapter_wait_s=1e9))
    assert few is not None
    assert many is not None
    assert few < many, "patience is what the configuration says"


def test_patience_ends_with_time_too() -> None:
    assert turns_until_admitted(Harness(max_running=8, max_bypasses=10**9, max_adapter_wait_s=0.2)) is not None


def test_without_a_limit_it_would_starve() -> None:
    """The request starves without the limits that the two tests above set."""
    assert turns_until_admitted(Harness(max_running=8, max_bypasses=10**9, max_adapter_wait_s=1e9)) is None


def test_only_one_adapter_is_held_back_for_it() -> None:
    harness = Harness(max_running=6, max_bypasses=0, num_blocks=200)
    harness.add(make_request("long", max_tokens=90), A)
    harness.add(make_request("short", max_tokens=20), B)
    for _ in range(4):
        harness.turn()
    harness.add(make_request("late", arrival_s=harness.now), C)
    for number in range(3):
        harness.add(make_request(f"a{number}", max_tokens=4, arrival_s=harness.now), A)
        harness.add(make_request(f"b{number}", max_tokens=4, arrival_s=harness.now), B)
        harness.add(make_request(f"base{number}", max_tokens=4, arrival_s=harness.now))
    for _ in range(12):
        harness.turn()
    begun = {name for name, log in harness.logs.items() if log.admitted}
    # B has the least to do, so B drains; A and the base go on meanwhile.
    assert begun == {"long", "short", "a0", "a1", "a2", "base0", "base1", "base2"}
    harness.run()
    harness.check_outputs()
    assert harness.logs["late"].admitted is not None


@pytest.mark.parametrize("depth", [1, 2])
def test_a_cache_that_lets_wishes_push_each_other_out_is_survived(depth: int) -> None:
    """One slot, two adapters wanted, each evicted before its use. Time makes the older one the only one to ask."""
    harness = Harness(num_slots=1, offer_polls=0, max_running=2, depth=depth, max_adapter_wait_s=0.2)
    harness.add(make_request("a", arrival_s=0.0), A)
    harness.add(make_request("b", arrival_s=0.1), B)
    harness.run(max_turns=200)
    harness.check_outputs()
