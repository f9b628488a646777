"""Prefix cache hits between sequences, and their limits."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_fakes import adapter
from support.scheduler_harness import Harness, make_request, num_cached_blocks

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.plan import StepPlan
from loraplex_server.kv.rope import RopeScaling

PROMPT = tuple(range(1, 13))  # three full blocks of four


def first_start(harness: Harness, name: str) -> int:
    """Start of the sequence's first span: the tokens before it came out of the cache."""
    return next(s.start for plan in harness.plans for s in plan.spans if s.sequence_id.startswith(f"{name}#"))


@pytest.mark.parametrize(
    ("prompt", "num_cached"),
    [
        ((*PROMPT, 13), 12),
        (PROMPT, 8),  # all of it is there, and the last token has to run: so does its block
        ((*PROMPT[:8], 99), 8),
        ((*PROMPT[:7], 99), 4),
        ((99, *PROMPT), 0),
    ],
)
def test_the_longest_cached_beginning_is_taken_over(prompt: tuple[int, ...], num_cached: int) -> None:
    harness = Harness(num_blocks=32)
    harness.add(make_request("first", PROMPT))
    harness.run()
    harness.add(make_request("second", prompt))
    harness.run()
    assert first_start(harness, "second") == num_cached
    assert harness.logs["second"].ends[0].num_cached_tokens == num_cached
    harness.check_outputs()


def test_generated_text_is_found_too() -> None:
    harness = Harness(num_blocks=32)
    log = harness.add(make_request("first", PROMPT, max_tokens=9))
    harness.run()
    harness.add(make_request("second", (*PROMPT, *log.tokens[0], 5)))
    harness.run()
    assert first_start(harness, "second") == 20
    harness.check_outputs()


A = adapter("a")


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        (A, {}),
        (None, {"tenant": "other"}),
        (None, {"cache_salt": "salt"}),
        (AdapterKey("combined", A.digest), {}),
    ],
)
def test_nothing_is_shared_between_adapters_tenants_and_salts(key: AdapterKey | None, fields: dict[str, Any]) -> None:
    harness = Harness(num_blocks=64)
    harness.add(make_request("first", PROMPT))
    harness.run()
    harness.add(make_request("second", (*PROMPT, 13), **fields), key)
    harness.run()
    assert first_start(harness, "second") == 0
    harness.add(make_request("third", (*PROMPT, 13), **fields), key)
    harness.run()
    assert first_start(harness, "third") == 12
    harness.check_outputs()


def test_medusa_heads_change_no_kv() -> None:
    """Heads read the last hidden state, so prompts are shared with the base. (No check of texts: the fake's depend on
    the adapter, whatever its kind.)"""
    harness = Harness(num_blocks=64)
    harness.add(make_request("first", PROMPT))
    harness.run()
    harness.scheduler.add(make_request("second", (*PROMPT, 13)), AdapterKey("medusa", "f" * 64), harness.now)
    harness.residency.acquire(AdapterKey("medusa", "f" * 64))
    harness.residency.poll()
    harness.residency.poll()
    plan: StepPlan | None = harness.scheduler.schedule(harness.now)
    assert plan is not None
    assert plan.spans[0].start == 12


def test_sharers_hold_the_same_blocks_and_leave_them_alone() -> None:
    harness = Harness(num_blocks=32)
    harness.add(make_request("first", PROMPT, max_tokens=30))
    harness.turn()
    harness.turn()
    harness.add(make_request("second", (*PROMPT, 13), max_tokens=3))
    harness.turn()
    tables = {row.new.sequence_id.split("#")[0]: row.table for row in harness.runner.rows.values()}
    assert tables["first"][:3] == tables["second"][:3]
    assert set(tables["first"][3:]).isdisjoint(tables["second"][3:])
    harness.run()
    harness.check_outputs()


def test_prompts_of_one_step_do_not_share() -> None:
    """Only a later step can read the blocks that a step writes."""
    harness = Harness(num_blocks=32)
    harness.add(make_request("first", PROMPT))
    harness.add(make_request("second", PROMPT))
    harness.turn()
    assert first_start(harness, "second") == 0
    harness.run()
    harness.check_outputs()


def test_it_can_be_switched_off() -> None:
    harness = Harness(prefix_caching=False)
    harness.add(make_request("first", PROMPT))
    harness.run()
    harness.add(make_request("second", PROMPT))
    harness.run()
    assert first_start(harness, "second") == 0
    assert num_cached_blocks(harness.blocks) == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_keeps_the_key_of_the_text_that_it_was_computed_in(depth: int) -> None:
    """The first token takes the text past the length at which its rotations change, and the prompt's state is published
    with that token's result. The fake runner compares what a span begins with."""
    harness = Harness(num_states=8, rope=RopeScaling(9, has_one_set=True, restarts=True), depth=depth)
    for seed in range(3):
        harness.add(make_request(f"r{seed}", range(1, 10), max_tokens=8, seed=seed))
        harness.run()
    harness.check_outputs()
    assert first_start(harness, "r1") == first_start(harness, "r2") == 8


def test_a_cache_full_of_old_prompts_gives_way() -> None:
    harness = Harness(num_blocks=9)
    for number in range(12):
        harness.add(make_request(f"r{number}", [number + 1] * 8, max_tokens=8))
        harness.run()
    assert harness.blocks.num_evictions > 0
    harness.check_outputs()
