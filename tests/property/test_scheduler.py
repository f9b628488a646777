"""Scheduler under any events: one end per request, no leak, no starvation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from support.scheduler_fakes import VOCAB_SIZE, adapter
from support.scheduler_harness import Harness, make_request

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import AdapterInvalid, Cancelled, DeadlineExceeded, OutOfMemory, Overloaded
from loraplex_contracts.request import Request
from loraplex_server.kv.rope import RopeScaling

ADAPTERS = [adapter(name) for name in "abcde"]
# Few openings, so that prompts share prefixes with each other and with what others generated.
OPENINGS = [(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), (1, 2, 3, 4, 9, 9, 9, 9), (5,) * 12]


@st.composite
def requests(draw: st.DrawFn, request_id: str) -> tuple[Request, AdapterKey | None]:
    opening = draw(st.sampled_from(OPENINGS))
    prompt = opening[: draw(st.integers(1, len(opening)))] + tuple(
        draw(st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=3))
    )
    max_tokens = draw(st.integers(1, 14) | st.just(30))
    request = make_request(
        request_id,
        prompt,
        max_tokens=max_tokens,
        min_tokens=draw(st.sampled_from([0, 0, 3])),
        stop_token_ids=draw(st.sampled_from([frozenset[int](), frozenset({3}), frozenset({0, 5})])),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        prompt_logprobs=draw(st.sampled_from([False, False, False, True])),
        n=draw(st.sampled_from([1, 1, 1, 2, 4])),
        priority=draw(st.sampled_from([0, 0, 1])),
        tenant=draw(st.sampled_from(["t", "t", "u"])),
        cache_salt=draw(st.sampled_from(["", "", "s"])),
    )
    return request, draw(st.sampled_from([None, *ADAPTERS]))


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    block_size: int
    max_running: int
    max_step_tokens: int
    prefix_caching: bool
    num_slots: int
    load_polls: int
    depth: int
    drafts: str
    slice_s: float
    num_states: int = 0
    rope: RopeScaling | None = None

    def harness(self) -> Harness:
        return Harness(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_running=self.max_running,
            max_step_tokens=max(self.max_running, self.max_step_tokens),
            max_context_tokens=40,
            prefix_caching=self.prefix_caching,
            num_slots=self.num_slots,
            num_states=self.num_states,
            load_polls=self.load_polls,
            depth=self.depth,
            proposer=propose(self.drafts) if self.drafts != "none" else None,
            max_bypasses=3,
            slice_s=self.slice_s,
            rope=self.rope,
        )


SETTINGS = st.builds(
    Setting,
    # Small pools preempt, large ones do not. 15 prompt tokens in blocks of 1 have to fit.
    num_blocks=st.sampled_from([18, 20, 24, 32, 80]),
    block_size=st.sampled_from([1, 2, 3, 4]),
    max_running=st.integers(1, 6),
    max_step_tokens=st.integers(1, 24),
    prefix_caching=st.booleans(),
    num_slots=st.integers(1, 3),
    load_polls=st.integers(0, 3),
    depth=st.sampled_from([1, 2]),
    drafts=st.sampled_from(["none", "none", "right", "wrong", "mixed"]),
    slice_s=st.sampled_from([0.01, 0.03, 0.5]),  # a step takes 0.01
    num_states=st.sampled_from([0, 0, 1, 2, 3, 5, 9]),
    # Rotations that depend on a text's length: by kind, and at which length.
    rope=st.none()
    | st.builds(RopeScaling, st.integers(1, 20), st.booleans())
    | st.builds(RopeScaling, st.integers(1, 20), st.just(True), st.just(True)),
)


def propose(kind: str) -> Callable[[Harness], dict[str, tuple[int, ...]]]:
    """Drafts that are always right, never right, or right for a while; some longer than anything left."""

    def proposer(harness: Harness) -> dict[str, tuple[int, ...]]:
        drafts: dict[str, tuple[int, ...]] = {}
        for row in harness.runner.rows.values():
            sequence_id = row.new.sequence_id
            request_id, rest = sequence_id.rsplit("#", 1)
            expected = harness.expected(request_id, int(rest.split("@")[0])).token_ids
            done = len(row.token_ids) - row.new.num_prompt_tokens
            right = (*expected[done:], 1, 2)[: 1 + done % 6]
            if kind == "wrong":
                right = tuple((token_id + 1) % VOCAB_SIZE for token_id in right)
            elif kind == "mixed" and done % 3:
                right = (*right[: done % 3], VOCAB_SIZE - 1, 0)
            drafts[sequence_id] = right
        return drafts

    return proposer


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), setting=SETTINGS)
def test_texts_do_not_depend_on_the_batch(data: st.DataObject, setting: Setting) -> None:
    """Batching, chunks, preemption, prefix hits, forks, drafts and pipelining change no token and no logprob."""
    harness = setting.harness()
    for number in range(data.draw(st.integers(1, 10))):
        harness.add(*data.draw(requests(f"r{number}")))
        for _ in range(data.draw(st.integers(0, 3))):
            harness.turn()
    harness.run()
    harness.check_outputs()
    if harness.scheduler.load().num_preemptions:
        event("preempted")
    if any(plan.copies for plan in harness.plans):
        event("forked with a copy")
    if any(end.num_cached_tokens for log in harness.logs.values() for end in log.ends.values()):
        event("prefix hit")
    if any(log.num_accepted for log in harness.logs.values()):
        event("drafts accepted")
    if any(log.num_accepted < log.num_drafted for log in harness.logs.values()):
        event("drafts rejected")
    if harness.blocks.num_evictions:
        event("cached block evicted")
    if harness.states is not None and harness.states.num_evictions:
        event("state evicted")
    if setting.rope is not None and setting.rope.restarts:
        event("computed anew")


class Life(RuleBasedStateMachine):
    """Requests come, are cancelled, stopped, fail and run out of time at any moment; adapters come and go."""

    harness: Harness

    @initialize(setting=SETTINGS)
    def start(self, setting: Setting) -> None:
        self.harness = setting.harness()

    @rule(data=st.data(), deadline_s=st.none() | st.floats(0.005, 0.2))
    def add(self, data: st.DataObject, deadline_s: float | None) -> None:
        request, key = data.draw(requests(f"r{len(self.harness.logs)}"))
        now = self.harness.now
        deadline_s = None if deadline_s is None else now + deadline_s
        try:
            self.harness.add(replace(request, arrival_s=now, deadline_s=deadline_s), key)
        except Overloaded:
            assert deadline_s is not None, "the default bound is far away"

    @rule(num_turns=st.integers(1, 6))
    def turn(self, num_turns: int) -> None:
        for _ in range(num_turns):
            self.harness.turn()

    @rule(number=st.integers(0, 12))
    def cancel(self, number: int) -> None:
        log = self.harness.logs.get(f"r{number}")
        was_over = log is None or log.is_over
        self.harness.cancel(f"r{number}", Cancelled("the client went away"))
        assert log is None or log.is_over
        assert log is None or was_over or isinstance(log.error, Cancelled)

    @rule(number=st.integers(0, 12), index=st.integers(0, 3))
    def stop_completion(self, number: int, index: int) -> None:
        log = self.harness.logs.get(f"r{number}")
        self.harness.take(self.harness.scheduler.stop_completion(f"r{number}", index))
        assert log is None or log.error is not None or index >= log.request.n or index in log.ends

    @rule(number=st.integers(0, 12))
    def fail_in_step(self, number: int) -> None:
        self.harness.runner.failing[f"r{number}"] = OutOfMemory("this step did not fit; try a shorter prompt")

    @rule()
    def evict_idle_adapter(self) -> None:
        self.harness.residency.evict_idle()

    @rule(key=st.sampled_from(ADAPTERS), fails=st.booleans())
    def break_adapter(self, key: AdapterKey, fails: bool) -> None:
        if not fails:
            self.harness.residency.failures.pop(key, None)
        elif key not in self.harness.residency.slots:
            self.harness.residency.failures[key] = AdapterInvalid("the adapter's files are gone; load it again")

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.run()
        for request_id, log in self.harness.logs.items():
            assert isinstance(log.error, Cancelled | OutOfMemory | AdapterInvalid | DeadlineExceeded | None)
            for index in range(log.request.n):
                expected = self.harness.expected(request_id, index)
                tokens = tuple(log.tokens[index])
                assert expected.token_ids[: len(tokens)] == tokens, "a token that is not the request's own"
                assert expected.logprobs[: len(tokens)] == tuple(log.logprobs[index])
                if index in log.ends and log.ends[index].reason.value != "stop":
                    assert (log.ends[index].reason.value, tokens) == (expected.reason, expected.token_ids)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    depth=st.sampled_from([1, 2]),
    max_running=st.sampled_from([1, 1, 2]),
    slice_s=st.sampled_from([0.03, 0.05]),
    # Turns before the next one, its output tokens, the time that it has.
    short=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 8), st.floats(0.02, 0.2)), min_size=1, max_size=9),
)
def test_short_ones_with_little_time(
    depth: int, max_running: int, slice_s: float, short: list[tuple[int, int, float]]
) -> None:
    """Long sequences have all rows, and give them to short ones that can still end in time."""
    harness = Harness(depth=depth, max_running=max_running, slice_s=slice_s)
    for number in range(max_running):
        harness.add(make_request(f"long{number}", max_tokens=60))
    for _ in range(12):  # until it is known how long steps take
        harness.turn()
    for number, (num_turns, max_tokens, deadline_s) in enumerate(short):
        now = harness.now
        with suppress(Overloaded):
            harness.add(make_request(f"s{number}", max_tokens=max_tokens, arrival_s=now, deadline_s=now + deadline_s))
        for _ in range(num_turns):
            harness.turn()
    harness.run()
    for request_id, log in harness.logs.items():
        if log.error is None:
            harness.check_output(request_id)
        else:
            assert isinstance(log.error, DeadlineExceeded)
    if harness.scheduler.load().num_preemptions:
        event("preempted")
    if any("could not be met any more" in str(log.error) for log in harness.logs.values()):
        event("too late")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_crowd(prefix_caching: bool, depth: int) -> None:
    """Longer than what hypothesis makes: 60 requests over 5 adapters and 2 slots, in blocks for a few of them."""
    random = Random(f"{prefix_caching} {depth}")
    harness = Harness(
        num_blocks=40, max_running=7, max_step_tokens=16, load_polls=2, depth=depth, prefix_caching=prefix_caching
    )
    for number in range(60):
        opening = random.choice(OPENINGS)
        harness.add(
            make_request(
                f"r{number}",
                opening[: random.randint(1, len(opening))],
                max_tokens=random.randint(1, 40),
                n=random.choice([1, 1, 1, 3]),
                priority=random.choice([0, 0, 0, 2]),
                ignore_eos=random.random() < 0.7,
                prompt_logprobs=random.random() < 0.2,
                arrival_s=harness.now,
            ),
            random.choice([None, *ADAPTERS]),
        )
        for _ in range(random.randint(0, 4)):
            harness.turn()
    harness.run()
    harness.check_outputs()
    assert harness.scheduler.load().num_preemptions > 0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_slots=st.integers(1, 4),
    load_polls=st.integers(0, 4),
    depth=st.sampled_from([1, 2]),
    max_running=st.integers(1, 8),
    max_bypasses=st.integers(0, 20),
    num_waiting=st.integers(1, 2),
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    with_base=st.booleans(),
)
def test_no_adapter_starves(
    num_slots: int,
    load_polls: int,
    depth: int,
    max_running: int,
    max_bypasses: int,
    num_waiting: int,
    lengths: list[int],
    with_base: bool,
) -> None:
    """Endless traffic keeps all slots in use; a request for one more adapter begins within a bound all the same."""
    harness = Harness(
        num_slots=num_slots,
        load_polls=load_polls,
        depth=depth,
        max_running=max_running,
        max_bypasses=max_bypasses,
        max_adapter_wait_s=1e9,
        num_blocks=200,
    )
    num_added = 0

    def traffic() -> None:
        """Always more waiting than can run, in turn for each of the adapters that have the slots."""
        nonlocal num_added
        while harness.scheduler.load().num_queued < 2 * max_running + num_waiting:
            num_kinds = num_slots + with_base
            key = ADAPTERS[num_added % num_kinds] if num_added % num_kinds < num_slots else None
            max_tokens = lengths[num_added % 4]
            harness.add(make_request(f"t{num_added}", max_tokens=max_tokens, arrival_s=harness.now), key)
            num_added += 1

    for _ in range(20):
        traffic()
        harness.turn()
    waiting = [
        harness.add(make_request(f"w{number}", arrival_s=harness.now), adapter(f"late{number}"))
        for number in range(num_waiting)
    ]
    # Those before it (each at most 12 steps, one after the other at worst), its bypasses, one adapter's drain and load.
    bound = 13 * (3 * max_running + 2 * num_waiting + max_bypasses + num_waiting * (2 + load_polls)) + 50
    for _ in range(bound):
        if all(log.admitted for log in waiting):
            break
        traffic()
        harness.turn()
    assert all(log.admitted for log in waiting), f"not begun after {bound} steps"
    harness.run()
    harness.check_outputs()
