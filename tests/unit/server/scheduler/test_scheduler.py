"""The scheduler's everyday life: chunks, order, limits, refusals, deadlines, cancellation."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from support.scheduler_fakes import adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    QueueFull,
)
from loraplex_contracts.plan import SpanResult, StepPlan, StepResult
from loraplex_contracts.request import Admitted, Request, seed_of_completion
from loraplex_server.scheduler.sequence_table import RequestState

LONG = tuple(range(1, 21))


def shape(plan: StepPlan | None) -> list[tuple[str, int, int, int]]:
    """The plan's spans, sorted: request, start, tokens, samples."""
    assert plan is not None
    spans = [(s.sequence_id.split("#")[0], s.start, s.num_tokens, s.num_samples) for s in plan.spans]
    return sorted(spans)


def test_a_prompt_is_cut_into_chunks_and_only_the_last_is_sampled() -> None:
    harness = Harness(max_step_tokens=8, block_size=4)
    harness.add(make_request("r", LONG, max_tokens=2))
    assert shape(harness.turn()) == [("r", 0, 8, 0)]
    assert shape(harness.turn()) == [("r", 8, 8, 0)]
    assert shape(harness.turn()) == [("r", 16, 4, 1)]
    assert shape(harness.turn()) == [("r", 20, 1, 1)]
    harness.run()
    harness.check_outputs()


def test_decodes_come_first_then_prompts_under_way_then_newcomers() -> None:
    harness = Harness(max_step_tokens=8, max_running=4, prefix_caching=False)
    harness.add(make_request("decoding", max_tokens=9))
    harness.turn()
    harness.add(make_request("long", LONG))
    harness.add(make_request("new", LONG))
    assert shape(harness.turn()) == [("decoding", 3, 1, 1), ("long", 0, 7, 0)]
    assert shape(harness.turn()) == [("decoding", 4, 1, 1), ("long", 7, 7, 0)]
    assert shape(harness.turn()) == [("decoding", 5, 1, 1), ("long", 14, 6, 1), ("new", 0, 1, 0)]


def test_priority_goes_before_arrival() -> None:
    harness = Harness(max_running=1)
    for name, priority, arrival_s in [("early", 0, 1.0), ("late", 0, 2.0), ("urgent", 5, 3.0), ("idle", -5, 0.0)]:
        harness.add(make_request(name, priority=priority, arrival_s=arrival_s, max_tokens=1))
    order = [shape(harness.turn())[0][0] for _ in range(4)]
    assert order == ["urgent", "early", "late", "idle"]


def test_what_enters_is_what_the_request_says() -> None:
    harness = Harness()
    harness.add(make_request("r", n=2, seed=11, min_tokens=2, stop_token_ids=frozenset({5}), ignore_eos=False))
    first, second = harness.turn(), harness.turn()
    assert first is not None
    assert second is not None
    leader, sibling = first.entered[0], second.entered[0]
    assert leader.token_ids == (1, 2, 3) == sibling.token_ids
    assert leader.num_prompt_tokens == 3
    assert (leader.sampling.seed, sibling.sampling.seed) == (11, seed_of_completion(11, 1))
    assert leader.min_tokens == 2
    assert leader.banned_until_min == {0, 5}
    harness.run()
    harness.check_outputs()


def test_the_context_ends_a_completion() -> None:
    harness = Harness(max_context_tokens=10)
    log = harness.add(make_request("r", max_tokens=500))
    harness.run()
    assert len(log.tokens[0]) == 7
    assert log.ends[0].reason.value == "length"
    harness.check_outputs()


def test_the_whole_kv_cache_ends_a_completion_wherever_it_stands() -> None:
    """Alone or in a batch, the text ends at the same token: what fits the cache, and the one token that needs none."""
    alone = Harness(num_blocks=6, block_size=4)
    log = alone.add(make_request("r", max_tokens=500))
    alone.run()
    assert len(log.tokens[0]) == 20 + 1 - 3
    crowded = Harness(num_blocks=6, block_size=4)
    for number in range(4):
        crowded.add(make_request(f"r{number}", max_tokens=500))
    crowded.run()
    crowded.check_outputs()
    assert crowded.scheduler.load().num_preemptions > 0


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (make_request("taken"), InvalidArgument, "request_id"),
        (make_request("r", range(1, 34)), ContextLengthExceeded, "input"),
        (make_request("r", deadline_s=1.0), DeadlineExceeded, None),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    request_: Request, error: type[LoraplexError], field: str | None
) -> None:
    harness = Harness(num_blocks=9, block_size=4, max_context_tokens=60)
    harness.now = 1.0
    harness.add(make_request("taken"))
    with pytest.raises(error) as raised:
        harness.scheduler.add(request_, None, harness.now)
    assert type(raised.value) is error
    assert raised.value.field == field
    harness.run()


def test_a_prompt_that_just_fits_runs() -> None:
    harness = Harness(num_blocks=9, block_size=4, max_context_tokens=60)
    harness.add(make_request("r", range(1, 33), max_tokens=9))
    harness.run()
    harness.check_outputs()
    assert harness.logs["r"].ends[0].reason.value == "length"


def test_a_full_queue_takes_others_of_a_tenant_that_did_not_fill_it() -> None:
    harness = Harness(max_running=1, max_queued=4)
    harness.add(make_request("running", max_tokens=30))
    harness.turn()
    for number in range(4):
        harness.add(make_request(f"flood{number}", tenant="flood"))
    with pytest.raises(QueueFull):
        harness.add(make_request("flood4", tenant="flood"))
    for number in range(2):
        harness.add(make_request(f"quiet{number}", tenant="quiet"))
    with pytest.raises(QueueFull):
        harness.add(make_request("quiet2", tenant="quiet"))
    harness.run()


def test_a_full_queue_says_when_to_try_again() -> None:
    harness = Harness(max_running=1, max_queued=2)
    harness.add(make_request("running", max_tokens=30))
    harness.turn()
    harness.add(make_request("q0"))
    harness.add(make_request("q1"))
    with pytest.raises(QueueFull) as raised:
        harness.add(make_request("q2"))
    assert raised.value.retry_after_s is not None
    assert 0 < raised.value.retry_after_s <= 30
    harness.run()
    harness.add(make_request("q2"))
    harness.run()


def test_a_deadline_ends_a_request_waiting_or_running() -> None:
    harness = Harness(max_running=1)
    harness.add(make_request("running", max_tokens=100, deadline_s=0.5))
    harness.add(make_request("waiting", deadline_s=0.3))
    harness.turn()
    harness.turn(seconds=0.3)
    assert isinstance(harness.logs["waiting"].error, DeadlineExceeded)
    assert not harness.logs["running"].is_over
    # Nothing is left to plan, and the event comes out all the same.
    assert harness.turn(seconds=0.3) is None
    assert isinstance(harness.logs["running"].error, DeadlineExceeded)
    harness.check_idle()


@pytest.mark.parametrize("at_once", [False, True])
def test_an_ended_request_leaves_nothing_in_memory(at_once: bool) -> None:
    """Far deadlines do not keep it, and no cycle waits for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        harness = Harness()
        for number in range(200):
            harness.add(make_request(f"r{number}", max_tokens=2, deadline_s=1e9, n=2), adapter("a"))
            if not at_once:
                harness.run()
        harness.run()
        num_left = sum(type(one) is RequestState for one in gc.get_objects())
        assert num_left < 40
    finally:
        gc.enable()


def test_cancellation_frees_at_once_and_tells_the_runner_with_the_next_plan() -> None:
    harness = Harness()
    harness.add(make_request("gone", LONG, max_tokens=50), adapter("a"))
    harness.add(make_request("stays", max_tokens=50))
    harness.turn()
    harness.turn()
    harness.turn()
    row = next(s.row for s in harness.plans[-1].spans if s.sequence_id.startswith("gone"))
    harness.cancel("gone", Cancelled("the client went away"))
    assert harness.scheduler.load().num_running == 1
    assert harness.residency.refs == {}
    plan = harness.turn()
    assert plan is not None
    assert plan.released == (row,)
    assert len(plan.spans) == 1
    harness.cancel("gone", Cancelled("again"))  # left alone: the log would raise at a second terminal event
    harness.cancel("never heard of", Cancelled("the client went away"))
    harness.run()


def test_a_cancelled_request_hears_nothing_more() -> None:
    """Admitted is still to be handed out when the request is cancelled: it comes before the end, not after."""
    harness = Harness()
    harness.add(make_request("r"))
    plan = harness.scheduler.schedule(0.0)
    assert plan is not None
    harness.cancel("r", Cancelled("the client went away"))
    assert harness.logs["r"].admitted is not None
    harness.take(harness.scheduler.apply(plan, harness.runner.execute(plan), 0.0))
    harness.run()


def test_a_stop_string_ends_one_completion() -> None:
    harness = Harness()
    log = harness.add(make_request("r", n=2, max_tokens=20))
    for _ in range(4):
        harness.turn()
    harness.take(harness.scheduler.stop_completion("r", 0))
    assert log.ends[0].reason.value == "stop"
    assert log.ends[0].stop_token_id is None
    assert not log.is_over
    harness.take(harness.scheduler.stop_completion("r", 0))
    harness.take(harness.scheduler.stop_completion("r", 7))
    harness.run()
    assert log.error is None
    assert tuple(log.tokens[1]) == harness.expected("r", 1).token_ids


def test_an_adapter_that_is_not_active_needs_no_slot_and_shares_the_bases_prefix() -> None:
    harness = Harness(num_slots=0, block_size=4)
    harness.add(make_request("base", LONG, max_tokens=1))
    harness.run()
    harness.scheduler.add(make_request("r", LONG, max_tokens=1), adapter("a"), 0.0, adapted_from=None)
    plan = harness.scheduler.schedule(0.0, {})
    assert shape(plan) == [("r", 16, 4, 1)]
    assert plan is not None
    assert plan.entered[0].adapters == ()
    admitted = next(event for event in harness.scheduler.take_events() if isinstance(event, Admitted))
    assert admitted.adapter_digest == adapter("a").digest


def test_an_active_adapter_shares_the_blocks_before_its_first_token() -> None:
    harness = Harness(num_slots=2, block_size=4)
    harness.add(make_request("base", LONG, max_tokens=1))
    harness.run()
    for name, adapted_from, num_cached in (("late", 11, 8), ("again", 11, 16), ("earlier", 10, 8), ("always", 0, 0)):
        harness.scheduler.add(make_request(name, LONG, max_tokens=1), adapter("a"), 0.0, adapted_from=adapted_from)
        plan = harness.scheduler.schedule(0.0, {})
        while plan is None:  # until its adapter has a slot
            harness.residency.poll()
            plan = harness.scheduler.schedule(0.0, {})
        assert shape(plan) == [(name, num_cached, len(LONG) - num_cached, 1)]
        assert plan.entered[0].adapted_from == adapted_from
        ((sequence_id, _),) = ((span.sequence_id, span) for span in plan.spans)
        harness.scheduler.apply(plan, StepResult(plan.step, {sequence_id: SpanResult((1,))}), 0.0)


def test_admission_reports_the_adapter_and_the_wait() -> None:
    harness = Harness()
    harness.now = 2.0
    harness.add(make_request("r", arrival_s=1.5), adapter("a"))
    harness.run()
    admitted = harness.logs["r"].admitted
    assert isinstance(admitted, Admitted)
    assert admitted.adapter_digest == adapter("a").digest
    assert admitted.queue_s > 0.5


def test_load_counts_what_is_ahead() -> None:
    harness = Harness(max_running=1, num_blocks=11, block_size=4)
    harness.add(make_request("a", LONG, max_tokens=5))
    harness.add(make_request("b", (1, 2), max_tokens=7, n=2))
    load = harness.scheduler.load()
    assert (load.num_running, load.num_queued, load.pending_tokens) == (0, 3, 25 + 9 + 7)
    harness.turn()
    load = harness.scheduler.load()
    assert (load.num_running, load.num_queued, load.pending_tokens) == (1, 2, 5 + 9 + 7)
    assert (load.num_blocks, load.num_free_blocks, load.max_running) == (10, 5, 1)
    harness.run()


def test_time_without_blocks_for_the_next_request_is_counted() -> None:
    """Most blocks are free meanwhile: their usage does not tell that a long prompt waits for them."""
    harness = Harness(num_blocks=21, block_size=4)
    harness.add(make_request("runs", range(1, 21), max_tokens=8))
    log = harness.add(make_request("waits", range(30, 90)))
    harness.turn()
    load = harness.scheduler.load()
    assert (load.num_running, load.num_free_blocks, load.kv_wait_s) == (1, 15, 0.0)
    harness.run()
    assert log.admitted is not None
    # Both came to the first turn, 0.01 s after the start.
    assert harness.scheduler.load().kv_wait_s == pytest.approx(log.admitted.queue_s - 0.01)
    assert log.admitted.queue_s > 0.05


def test_who_waits_for_a_row_lacks_no_blocks() -> None:
    harness = Harness(max_running=1)
    harness.add(make_request("runs", max_tokens=8))
    harness.add(make_request("waits"))
    harness.run()
    assert harness.scheduler.load().kv_wait_s == 0.0


def test_results_come_in_the_order_of_plans() -> None:
    harness = Harness()
    harness.add(make_request("r", LONG, max_tokens=1))
    scheduler = harness.scheduler
    first = scheduler.schedule(0.0)
    second = scheduler.schedule(0.0)
    assert first is not None
    assert second is None  # its only token is still to come
    harness.add(make_request("s", LONG))
    second = scheduler.schedule(0.0)
    assert second is not None
    with pytest.raises(AssertionError, match="earlier plan"):
        scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="order of plans"):
        scheduler.apply(second, StepResult(second.step, {}), 0.0)
    with pytest.raises(AssertionError, match="result of step"):
        scheduler.apply(first, StepResult(second.step, {s.sequence_id: SpanResult((1,)) for s in first.spans}), 0.0)


def test_the_scheduler_is_pure() -> None:
    """No tensors, no gRPC, no event loop in the process that imports it."""
    code = (
        "import sys, loraplex_server.scheduler.scheduler\n"
        "found = {'torch', 'grpc', 'asyncio', 'google', 'numpy'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
