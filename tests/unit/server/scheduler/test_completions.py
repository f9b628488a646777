"""Several completions (`n`) from one prefill."""

from __future__ import annotations

import tracemalloc

import pytest
from support.scheduler_fakes import adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import StoppingParams

PROMPT = tuple(range(1, 11))  # two and a half blocks of four


def num_prompt_tokens_run(harness: Harness) -> int:
    return sum(max(0, min(s.start + s.num_tokens, len(PROMPT)) - s.start) for plan in harness.plans for s in plan.spans)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_prompt_is_computed_once(prefix_caching: bool, depth: int) -> None:
    harness = Harness(prefix_caching=prefix_caching, depth=depth)
    harness.add(make_request("r", PROMPT, n=4, max_tokens=6), adapter("a"))
    harness.run()
    harness.check_outputs()
    assert num_prompt_tokens_run(harness) == len(PROMPT) + 3  # and its last token once per sibling
    copies = [copy for plan in harness.plans for copy in plan.copies]
    assert len(copies) == 3
    assert len({copy.source for copy in copies}) == 1
    texts = {tuple(tokens) for tokens in harness.logs["r"].tokens.values()}
    assert len(texts) == 4, "siblings have seeds of their own"


@pytest.mark.parametrize("stop", [(), ("END",)])
def test_tokens_can_wait_unless_they_are_first_or_may_bring_a_stop_string(stop: tuple[str, ...]) -> None:
    """The harness checks every event for this."""
    harness = Harness()
    harness.add(make_request("r", PROMPT, n=2, stopping=StoppingParams(6, stop=stop, ignore_eos=True)))
    harness.run()
    assert {len(tokens) for tokens in harness.logs["r"].tokens.values()} == {6}


def test_siblings_share_full_blocks_and_own_the_rest() -> None:
    harness = Harness()
    harness.add(make_request("r", PROMPT, n=3, max_tokens=6))
    harness.turn()
    harness.turn()
    tables = [row.table for row in harness.runner.rows.values()]
    assert len(tables) == 3
    assert len({tuple(table[:2]) for table in tables}) == 1
    assert len({table[2] for table in tables}) == 3
    harness.run()


@pytest.mark.parametrize("num_prompt_tokens", [8, 9])
def test_a_half_filled_block_is_copied_only_where_there_is_one(num_prompt_tokens: int) -> None:
    """The last of nine tokens in blocks of four stands alone in its block; it is run again, so nothing is copied. With
    eight tokens, three of the last block are wanted."""
    harness = Harness()
    harness.add(make_request("r", range(1, num_prompt_tokens + 1), n=2, max_tokens=6))
    harness.run()
    harness.check_outputs()
    assert sum(len(plan.copies) for plan in harness.plans) == (1 if num_prompt_tokens == 8 else 0)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_more_completions_than_rows(prefix_caching: bool, depth: int) -> None:
    """The first has ended long before the last begins, and its prompt is still there."""
    harness = Harness(max_running=2, prefix_caching=prefix_caching, depth=depth)
    harness.add(make_request("r", PROMPT, n=7, max_tokens=3))
    harness.run()
    harness.check_outputs()
    assert num_prompt_tokens_run(harness) == len(PROMPT) + 6


def test_a_first_completion_of_one_token_leaves_its_prompt_to_the_others() -> None:
    harness = Harness(prefix_caching=False)
    harness.add(make_request("r", PROMPT, n=3, max_tokens=1))
    harness.run()
    harness.check_outputs()
    assert num_prompt_tokens_run(harness) == len(PROMPT) + 2


@pytest.mark.parametrize("depth", [1, 2])
def test_when_the_leader_is_stopped_halfway_the_next_one_leads(depth: int) -> None:
    harness = Harness(max_step_tokens=4, max_running=4, prefix_caching=False, depth=depth)
    log = harness.add(make_request("r", PROMPT, n=3, max_tokens=4))
    harness.turn()
    harness.take(harness.scheduler.stop_completion("r", 0))
    harness.run()
    assert log.ends[0].reason.value == "stop"
    assert log.error is None
    assert 0 not in log.tokens
    for index in (1, 2):
        assert tuple(log.tokens[index]) == harness.expected("r", index).token_ids


def test_when_the_leader_is_stopped_in_the_queue_the_next_one_keeps_its_place() -> None:
    harness = Harness(max_running=1, prefix_caching=False)
    for request_id in "abc":
        harness.add(make_request(request_id, PROMPT, n=2, max_tokens=4))
    harness.take(harness.scheduler.stop_completion("c", 0))
    table = harness.scheduler._table  # pyright: ignore[reportPrivateUsage]
    assert [seq.sequence_id for seq in table.waiting] == ["a#0@1", "b#0@2", "c#1@3"]
    harness.run()
    harness.check_output("a")
    harness.check_output("b")
    assert tuple(harness.logs["c"].tokens[1]) == harness.expected("c", 1).token_ids


def test_stopping_all_of_them_ends_the_request() -> None:
    harness = Harness(max_step_tokens=4, max_running=4)
    log = harness.add(make_request("r", PROMPT, n=3, max_tokens=4))
    harness.turn()
    for index in (2, 0, 1):
        harness.take(harness.scheduler.stop_completion("r", index))
    assert log.is_over
    harness.run()


def test_a_cancelled_request_takes_its_siblings_and_their_prompt_along() -> None:
    harness = Harness(max_running=1)
    harness.add(make_request("r", PROMPT, n=3, max_tokens=40))
    harness.turn()
    harness.turn()
    harness.cancel("r", Cancelled("the client went away"))
    assert harness.blocks.num_free == harness.blocks.num_blocks
    harness.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_prompt_that_fills_the_cache_is_computed_for_each(prefix_caching: bool, depth: int) -> None:
    """There is no room for one completion's own block beside the kept prompt: the prompt has to go."""
    harness = Harness(num_blocks=5, block_size=4, prefix_caching=prefix_caching, depth=depth)
    harness.add(make_request("r", range(1, 16), n=3, max_tokens=2))
    harness.run()
    harness.check_outputs()


def test_a_prompt_given_up_for_its_blocks_is_computed_once_more_not_by_each() -> None:
    harness = Harness(max_running=1, prefix_caching=False)
    harness.add(make_request("r", PROMPT, n=4, max_tokens=3))
    harness.turn()
    table = harness.scheduler._table  # pyright: ignore[reportPrivateUsage]
    assert table.drop_shared_prompt()
    assert not table.drop_shared_prompt()
    harness.run()
    harness.check_outputs()
    assert num_prompt_tokens_run(harness) == 2 * len(PROMPT) + 2


def test_the_prompt_is_kept_no_longer_than_siblings_wait_for_it() -> None:
    harness = Harness(prefix_caching=False, num_blocks=33)
    harness.add(make_request("r", PROMPT, n=2, max_tokens=30))
    harness.turn()
    harness.turn()
    assert harness.scheduler.load().num_free_blocks == 32 - 4  # two shared, one of each one's own
    harness.take(harness.scheduler.stop_completion("r", 0))
    assert harness.scheduler.load().num_free_blocks == 32 - 3
    harness.run()


def test_siblings_wait_behind_their_prompt_without_holding_others_up() -> None:
    harness = Harness(max_step_tokens=4, max_running=4)
    harness.add(make_request("r", PROMPT, n=3, max_tokens=4))
    harness.turn()
    load = harness.scheduler.load()
    assert (load.num_running, load.num_queued) == (1, 2)
    harness.add(make_request("other", (7, 7), max_tokens=2))
    for _ in range(3):
        harness.turn()
    assert harness.logs["other"].admitted is not None
    harness.run()
    harness.check_outputs()


def test_waiting_completions_keep_one_prompt_in_memory() -> None:
    """64 completions of thousands of queued requests would else take many times what the prompts do."""
    harness = Harness(num_blocks=10_000, max_context_tokens=40_000, max_step_tokens=20_000)
    request = make_request("r", [1] * 20_000, n=64, max_tokens=2)
    tracemalloc.start()
    try:
        harness.add(request)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 4 * 8 * 20_000
    harness.run()
    harness.check_outputs()
