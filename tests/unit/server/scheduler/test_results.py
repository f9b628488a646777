"""Results of a step: stops, limits, drafts, logprobs, failures.

Results are written by hand here.
"""

from __future__ import annotations

import pytest
from support.scheduler_fakes import FakeResidency
from support.scheduler_harness import Harness, has_work, make_request, num_cached_blocks

from loraplex_contracts.errors import Internal, InvalidArgument, OutOfMemory
from loraplex_contracts.plan import Draft, SpanResult, StepPlan, StepResult
from loraplex_contracts.request import (
    CompletionEnd,
    Event,
    FinishReason,
    PositionLogprobs,
    Request,
    RequestFailed,
    StoppingParams,
    Tokens,
)
from loraplex_server.kv.blocks import BlockPool
from loraplex_server.scheduler.admission import SchedulerConfig
from loraplex_server.scheduler.scheduler import Scheduler

EOS, STOP, PLAIN = 0, 9, 1


# The first request's first sequence: this is how the runner and proposers know it.
FIRST = "r#0@1"


def make_scheduler(pool: BlockPool | None = None) -> Scheduler:
    config = SchedulerConfig(max_running=4, max_step_tokens=32, max_context_tokens=64)
    return Scheduler(config, pool or BlockPool(32, 4), FakeResidency(1), {EOS, 8})


def step(scheduler: Scheduler, *tokens: int, draft: tuple[int, ...] = ()) -> tuple[StepPlan, list[Event]]:
    """One step in which the only sequence gets `tokens`."""
    plan = scheduler.schedule(0.0, {FIRST: Draft(draft, "test")} if draft else {})
    assert plan is not None
    assert plan.spans[0].sequence_id == FIRST
    logprobs = tuple(PositionLogprobs(token_id, -0.5) for token_id in tokens)
    result = SpanResult(tokens, logprobs)
    return plan, scheduler.apply(plan, StepResult(plan.step, {plan.spans[0].sequence_id: result}), 0.0)


def request_with(stopping: StoppingParams) -> Request:
    return Request("r", (1, 2, 3), stopping)


@pytest.mark.parametrize(
    ("stopping", "tokens", "num_kept", "reason", "stop_token_id"),
    [
        (StoppingParams(5), [PLAIN, EOS], 2, FinishReason.EOS, EOS),
        (StoppingParams(5), [PLAIN, 8], 2, FinishReason.EOS, 8),
        (StoppingParams(5, ignore_eos=True), [EOS] * 5, 5, FinishReason.LENGTH, None),
        (StoppingParams(5, stop_token_ids=frozenset({STOP})), [PLAIN, STOP], 2, FinishReason.STOP, STOP),
        # Named by the request itself: a stop, though the model's own end is to be ignored.
        (StoppingParams(5, stop_token_ids=frozenset({EOS}), ignore_eos=True), [EOS], 1, FinishReason.STOP, EOS),
        (StoppingParams(5, min_tokens=2), [PLAIN, PLAIN, EOS], 3, FinishReason.EOS, EOS),
        # Below min_tokens nothing ends, even if a runner let one through.
        (StoppingParams(5, min_tokens=2), [EOS, EOS, EOS], 3, FinishReason.EOS, EOS),
        (StoppingParams(2), [PLAIN, PLAIN], 2, FinishReason.LENGTH, None),
        # Both at once: the stop says more.
        (StoppingParams(2), [PLAIN, EOS], 2, FinishReason.EOS, EOS),
        (StoppingParams(1), [STOP], 1, FinishReason.LENGTH, None),
    ],
)
def test_where_a_completion_ends(
    stopping: StoppingParams, tokens: list[int], num_kept: int, reason: FinishReason, stop_token_id: int | None
) -> None:
    scheduler = make_scheduler()
    scheduler.add(request_with(stopping), None, 0.0)
    events: list[Event] = []
    for token_id in tokens:
        events += step(scheduler, token_id)[1]
    assert [t for e in events if isinstance(e, Tokens) for t in e.token_ids] == tokens[:num_kept]
    assert events[-1] == CompletionEnd("r", 0, reason, stop_token_id, num_prompt_tokens=3, num_cached_tokens=0)
    assert not has_work(scheduler)
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("sampled", "kept", "num_accepted", "ends"),
    [
        ((5, 6, 7, 4), (5, 6, 7, 4), 3, False),  # all of the draft, and one more
        ((5, 4), (5, 4), 1, False),
        ((4,), (4,), 0, False),
        ((5, EOS), (5, EOS), 1, True),
        ((5, EOS, 7, 4), (5, EOS), 2, True),  # what was accepted behind the end is dropped
    ],
)
def test_drafts(sampled: tuple[int, ...], kept: tuple[int, ...], num_accepted: int, ends: bool) -> None:
    scheduler = make_scheduler()
    scheduler.add(request_with(StoppingParams(20)), None, 0.0)
    step(scheduler, PLAIN)
    plan, events = step(scheduler, *sampled, draft=(5, EOS, 7) if EOS in sampled else (5, 6, 7))
    span = plan.spans[0]
    assert (span.start, span.num_tokens, span.num_samples) == (3, 4, 4)
    tokens = events[0]
    assert isinstance(tokens, Tokens)
    assert tokens.token_ids == kept
    assert len(tokens.logprobs) == len(kept)
    assert (tokens.num_drafted, tokens.num_accepted) == (3, num_accepted)
    assert has_work(scheduler) == (not ends)
    if not ends:
        # Rejected ones are taken back: the next step runs the last token that counts.
        plan, _events = step(scheduler, PLAIN)
        assert (plan.spans[0].start, plan.spans[0].num_tokens) == (3 + len(kept), 1)
    scheduler.check_integrity()


def test_a_draft_evicts_no_more_than_the_block_that_the_next_tokens_need() -> None:
    pool = BlockPool(1 + 6, 4)
    scheduler = make_scheduler(pool)
    cached = pool.allocate(5)
    for block_id in cached:
        pool.publish(block_id, bytes([block_id]) * 32)
    pool.release(cached)
    scheduler.add(Request("r", (1, 2, 3), StoppingParams(12)), None, 0.0)
    step(scheduler, PLAIN)
    assert pool.num_clean == 0
    plan, _ = step(scheduler, PLAIN, draft=(PLAIN,) * 10)
    assert (plan.spans[0].start, len(plan.spans[0].draft)) == (3, 4), "to the end of the next block"
    assert [pool.find(bytes([block_id]) * 32) is None for block_id in cached] == [False] * 4 + [True]
    plan, _ = step(scheduler, PLAIN, draft=(PLAIN,) * 3)
    assert (plan.spans[0].start, len(plan.spans[0].draft), pool.num_evictions) == (4, 3, 1)


def test_a_longer_draft_evicts_nothing_where_a_clean_block_is_left() -> None:
    pool = BlockPool(1 + 4, 4)
    scheduler = make_scheduler(pool)
    cached = pool.allocate(2)
    for block_id in cached:
        pool.publish(block_id, bytes([block_id]) * 32)
    pool.release(cached)
    scheduler.add(Request("r", (1, 2, 3), StoppingParams(12)), None, 0.0)
    step(scheduler, PLAIN)
    plan, _ = step(scheduler, *([PLAIN] * 5), draft=(PLAIN,) * 10)
    assert (len(plan.spans[0].draft), pool.num_evictions) == (4, 0)
    plan, _ = step(scheduler, PLAIN, draft=(PLAIN,) * 3)
    assert (plan.spans[0].start, len(plan.spans[0].draft), pool.num_evictions) == (8, 3, 1)


def test_drafts_never_enter_the_prefix_cache() -> None:
    """A block that rejected drafts filled is published with what came to stand there, not with the drafts."""
    pool = BlockPool(32, 4)
    scheduler = make_scheduler(pool)
    scheduler.add(request_with(StoppingParams(20)), None, 0.0)
    step(scheduler, PLAIN)
    step(scheduler, 4, draft=(5, 6, 7, 5, 6, 7))
    assert num_cached_blocks(pool) == 1  # 1 2 3 PLAIN
    step(scheduler, 4, draft=(5, 6, 7, 5, 6, 7))
    assert num_cached_blocks(pool) == 1
    step(scheduler, 5, 6, 7, 4, draft=(5, 6, 7))
    assert num_cached_blocks(pool) == 2  # 4 4 5 6
    # Ten tokens by now. The draft fills the third block, and the text does too, but its last token is only known: what
    # is computed in its place is the first of the rejected ones.
    step(scheduler, 5, 4, draft=(5, 6, 7))
    assert num_cached_blocks(pool) == 2
    step(scheduler, 4)
    assert num_cached_blocks(pool) == 3


def test_what_lies_behind_a_stop_is_not_published() -> None:
    pool = BlockPool(32, 4)
    scheduler = make_scheduler(pool)
    scheduler.add(request_with(StoppingParams(20)), None, 0.0)
    step(scheduler, PLAIN)
    step(scheduler, 5, EOS, 7, 5, 6, 7, draft=(5, EOS, 7, 5, 6))
    assert not has_work(scheduler)
    assert num_cached_blocks(pool) == 1


def test_a_draft_is_cut_to_the_end_of_the_completion_the_budget_and_free_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add(request_with(StoppingParams(4)), None, 0.0)
    step(scheduler, PLAIN)
    plan, _events = step(scheduler, PLAIN, draft=(5,) * 9)
    assert plan.spans[0].draft == (5, 5)  # one more token can follow them
    plan, _events = step(scheduler, PLAIN, draft=(5,) * 9)
    assert plan.spans[0].draft == (5,)
    plan, _events = step(scheduler, PLAIN, draft=(5,) * 9)
    assert plan.spans[0].draft == ()

    scheduler = make_scheduler()
    scheduler.add(request_with(StoppingParams(60)), None, 0.0)
    step(scheduler, PLAIN)
    plan, _events = step(scheduler, PLAIN, draft=(5,) * 50)
    assert plan.num_tokens == 32

    # Blocks that are free anyway, and nobody is preempted for a bet: 15 in all, 7 of them the other's.
    scheduler = make_scheduler(BlockPool(16, 2))
    scheduler.add(request_with(StoppingParams(60)), None, 0.0)
    scheduler.add(make_request("other", range(1, 15), max_tokens=1), None, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    mine, other = sorted(plan.spans, key=lambda span: span.num_tokens)
    results = {mine.sequence_id: SpanResult((PLAIN,)), other.sequence_id: SpanResult((PLAIN,))}
    second = make_request("second", range(1, 15), max_tokens=9)
    scheduler.apply(plan, StepResult(plan.step, results), 0.0)
    scheduler.add(second, None, 0.0)
    plan = scheduler.schedule(0.0, {mine.sequence_id: Draft((5,) * 3, "test")})
    assert plan is not None
    assert [len(span.draft) for span in plan.spans] == [3, 0]
    results = {span.sequence_id: SpanResult((PLAIN,)) for span in plan.spans}
    scheduler.apply(plan, StepResult(plan.step, results), 0.0)
    plan = scheduler.schedule(0.0, {mine.sequence_id: Draft((5,) * 50, "test")})
    assert plan is not None
    assert scheduler.load().num_free_blocks == 1  # in the prefix cache
    assert scheduler.load().num_preemptions == 0
    assert 3 < len(plan.spans[0].draft) < 20


def test_half_of_the_budget_is_kept_for_prompts() -> None:
    scheduler = make_scheduler()
    scheduler.add(request_with(StoppingParams(60)), None, 0.0)
    step(scheduler, PLAIN)
    scheduler.add(make_request("s", range(1, 41)), None, 0.0)
    plan = scheduler.schedule(0.0, {FIRST: Draft((5,) * 50, "test")})
    assert plan is not None
    assert [(s.num_tokens, len(s.draft)) for s in plan.spans] == [(16, 15), (16, 0)]


def test_one_sequence_fails_and_its_neighbours_go_on() -> None:
    harness = Harness()
    harness.add(make_request("bad", n=3, max_tokens=9))
    harness.add(make_request("good", n=2, max_tokens=9))
    for _ in range(3):
        harness.turn()
    error = OutOfMemory("this request's step did not fit; try a shorter prompt")
    harness.runner.failing["bad"] = error
    harness.turn()
    assert harness.logs["bad"].error is error
    harness.run()
    harness.check_output("good")


@pytest.mark.parametrize("token_id", [PLAIN, EOS])
def test_an_error_behind_draft_tokens_counts_where_they_do_not_end_the_completion(token_id: int) -> None:
    scheduler = make_scheduler()
    scheduler.add(request_with(StoppingParams(9)), None, 0.0)
    step(scheduler, PLAIN)
    plan = scheduler.schedule(0.0, {FIRST: Draft((token_id, 5, 5), "test")})
    assert plan is not None
    error = InvalidArgument("the options leave no token")
    result = SpanResult((token_id,), (PositionLogprobs(token_id, -0.5),), error=error)
    tokens, end = scheduler.apply(plan, StepResult(plan.step, {FIRST: result}), 0.0)
    assert isinstance(tokens, Tokens)
    assert (tokens.token_ids, tokens.num_drafted, tokens.num_accepted) == ((token_id,), 3, 1)
    if token_id == EOS:
        assert isinstance(end, CompletionEnd)
        assert end.reason is FinishReason.EOS
    else:
        assert isinstance(end, RequestFailed)
        assert end.error is error
    assert not scheduler.load().num_running
    scheduler.check_integrity()


@pytest.mark.parametrize("result", [SpanResult(), SpanResult(token_ids=(1, 2))])
def test_a_runner_that_breaks_its_word_fails_the_request_not_the_batch(result: SpanResult) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), None, 0.0)
    scheduler.add(make_request("b"), None, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    first, second = plan.spans
    results = {first.sequence_id: result, second.sequence_id: SpanResult(token_ids=(1,))}
    events = scheduler.apply(plan, StepResult(plan.step, results), 0.0)
    failed = [event for event in events if isinstance(event, RequestFailed)]
    assert [event.request_id for event in failed] == ["a"]
    assert isinstance(failed[0].error, Internal)
    assert scheduler.load().num_running == 1


def test_a_span_without_a_result_fails_too() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a"), None, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    events = scheduler.apply(plan, StepResult(plan.step, {}), 0.0)
    assert isinstance(events[-1], RequestFailed)
    assert not has_work(scheduler)


def test_prompt_logprobs_come_once_and_before_the_tokens() -> None:
    harness = Harness(max_step_tokens=8)
    harness.add(make_request("warm", range(1, 21)))
    harness.run()
    log = harness.add(make_request("r", range(1, 21), prompt_logprobs=True, n=2))
    plan = harness.turn()
    assert plan is not None
    assert plan.spans[0].start == 0, "a prefix hit would leave positions without logprobs"
    assert len(log.prompt_logprobs) == 8, "each step sends its own: all at once would hold up others"
    harness.run()
    assert [one.token_id for one in log.prompt_logprobs] == list(range(2, 21))
    harness.check_outputs()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_prompt_logprobs_survive_a_preemption_in_the_middle_of_the_prompt(prefix_caching: bool) -> None:
    """Some positions are computed twice, and each is reported once."""
    harness = Harness(max_step_tokens=8, prefix_caching=prefix_caching)
    harness.add(make_request("other", (1, 2), max_tokens=20))
    harness.turn()
    harness.add(make_request("r", range(1, 21), prompt_logprobs=True))
    harness.turn()
    table = harness.scheduler._table  # pyright: ignore[reportPrivateUsage]
    table.preempt(table.running[-1])
    harness.turn()
    start = min(s.start for s in harness.plans[-1].spans if s.sequence_id.startswith("r#"))
    assert start == (4 if prefix_caching else 0), "seven tokens are known, one block of them is full"
    harness.run()
    harness.check_outputs()


def test_prompt_logprobs_of_one_token_are_none() -> None:
    harness = Harness()
    log = harness.add(make_request("r", (5,), prompt_logprobs=True))
    harness.run()
    assert log.prompt_logprobs == ()
