"""Engine loop over fakes."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest
from support.engine_fakes import FakeCache, FakeRunner, make_engine

from loraplex_adapters.cache.states import AdapterTraits
from loraplex_contracts.adapters import AdapterId, AdapterKey
from loraplex_contracts.errors import (
    AdapterNotFound,
    Cancelled,
    DeadlineExceeded,
    Draining,
    FailedPrecondition,
    Internal,
    LoraplexError,
    OutOfMemory,
    QueueFull,
)
from loraplex_contracts.plan import StepPlan
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    PoolingParams,
    Request,
    RequestFailed,
    SpeculationParams,
    StoppingParams,
    Tokens,
)
from loraplex_server.engine.engine import RESIDENCY_EVERY_S, Engine, start_of_last
from loraplex_server.engine.pipe import Abandon, AdapterCommand, Cancel, Reply, StopCompletion, Submit


def request(request_id: str = "r", *, num_prompt: int = 5, max_tokens: int = 4, **more: object) -> Request:
    stopping = StoppingParams(max_tokens=max_tokens)
    return Request(request_id, tuple(range(20, 20 + num_prompt)), stopping, **more)  # type: ignore[arg-type]


def run(engine: Engine, num_turns: int = 50) -> tuple[list[Event], list[Reply]]:
    events: list[Event] = []
    replies: list[Reply] = []
    for _ in range(num_turns):
        batch = engine.turn()
        if batch is not None:
            events += batch.events
            replies += batch.replies
    return events, replies


def terminal(events: list[Event], request_id: str) -> list[Event]:
    return [e for e in events if e.request_id == request_id and isinstance(e, CompletionEnd | RequestFailed)]


def failure(events: list[Event], request_id: str) -> LoraplexError:
    (end,) = terminal(events, request_id)
    assert isinstance(end, RequestFailed)
    return end.error


def waits_s(events: list[Event], request_id: str) -> tuple[float | None, float]:
    """Time in the queue, and for its adapter, of a request that failed."""
    (end,) = terminal(events, request_id)
    assert isinstance(end, RequestFailed)
    return end.queue_s, end.adapter_wait_s


def test_a_request_runs_to_its_length() -> None:
    engine = make_engine()
    engine.handle(Submit(request(adapter_id="a")))
    events, _ = run(engine)
    assert isinstance(events[0], Admitted)
    assert [t for e in events if isinstance(e, Tokens) for t in e.token_ids] == [15, 16, 17, 18]
    (end,) = terminal(events, "r")
    assert isinstance(end, CompletionEnd)
    assert end.reason is FinishReason.LENGTH
    assert engine.integrity_report() == ""


def test_what_the_runner_has_lost_is_reported() -> None:
    class Losing(FakeRunner):
        def check_integrity(self) -> None:
            raise AssertionError("a place of a state is lost")

    assert "place of a state" in make_engine(Losing()).integrity_report()


def test_an_unknown_adapter_fails_its_request_only() -> None:
    engine = make_engine()
    engine.handle(Submit(request("bad", adapter_id="zzz")))
    engine.handle(Submit(request("good", adapter_id="a")))
    events, _ = run(engine)
    assert isinstance(failure(events, "bad"), AdapterNotFound)
    assert waits_s(events, "bad") == (None, 0.0)
    assert isinstance(terminal(events, "good")[0], CompletionEnd)
    assert engine.integrity_report() == ""


def test_an_adapters_files_say_how_its_embeddings_are_made() -> None:
    cache, runner = FakeCache(own={"a": AdapterTraits(pooling="mean"), "b": AdapterTraits(pooling="cls")}), FakeRunner()
    engine = make_engine(runner, cache)
    for name in ("a", "b"):
        engine.handle(Submit(request(name, adapter_id=name, pooling=PoolingParams("embed"))))
    events, _ = run(engine, 1)
    assert isinstance(failure(events, "b"), FailedPrecondition)
    ((entered,),) = [plan.entered for plan in runner.plans]
    assert entered.pooling == PoolingParams("embed", "mean")
    engine.handle(Cancel("a", Cancelled("seen")))
    run(engine, 1)


def test_others_run_while_an_adapter_is_fetched() -> None:
    cache = FakeCache(delay=20)
    engine = make_engine(cache=cache)
    engine.handle(Submit(request("slow", adapter_id="a")))
    engine.handle(Submit(request("base")))
    first, _ = run(engine, 10)
    assert isinstance(terminal(first, "base")[0], CompletionEnd)
    assert not terminal(first, "slow")
    rest, _ = run(engine, 40)
    assert isinstance(terminal(rest, "slow")[0], CompletionEnd)


def test_cancel_before_and_after_the_adapter_is_there() -> None:
    engine = make_engine(cache=FakeCache(delay=10))
    engine.handle(Submit(request("r", adapter_id="a")))
    run(engine, 2)
    engine.handle(Cancel("r", Cancelled("gone")))
    engine.handle(Cancel("r", Cancelled("gone again")))
    engine.handle(Submit(request("s", max_tokens=100)))
    events, _ = run(engine, 5)
    engine.handle(Cancel("s", Cancelled("gone")))
    more, _ = run(engine, 2)
    assert isinstance(failure(events, "r"), Cancelled)
    assert isinstance(failure(more, "s"), Cancelled)
    assert engine.integrity_report() == ""


def test_a_deadline_ends_a_request_that_waits_for_its_adapter() -> None:
    now = [0.0]
    engine = make_engine(cache=FakeCache(delay=1000), clock=lambda: now[0])
    now[0] = 1.0
    engine.handle(Submit(request(adapter_id="a", deadline_s=5.0, arrival_s=0.5)))
    events, _ = run(engine, 3)
    assert not terminal(events, "r")
    assert engine.idle_timeout_s() == pytest.approx(4.0, abs=0.01)
    now[0] = 5.1
    events, _ = run(engine, 1)
    assert isinstance(failure(events, "r"), DeadlineExceeded)
    assert waits_s(events, "r") == (pytest.approx(4.6), pytest.approx(4.1))


def test_requests_that_wait_for_an_adapter_count_as_queued() -> None:
    cache = FakeCache(delay=1000)
    engine = make_engine(cache=cache, max_queued=3)
    for number in range(4):
        engine.handle(Submit(request(f"r{number}", adapter_id="ab"[number % 2])))
    engine.handle(Submit(request("base")))
    events, _ = run(engine, 3)
    for name in ("r3", "base"):
        error = failure(events, name)
        assert isinstance(error, QueueFull)
        assert error.retry_after_s
    assert not terminal(events, "r2")
    engine.handle(Cancel("r0", Cancelled("gone")))
    engine.handle(Submit(request("base")))  # there is room again
    events, _ = run(engine, 10)
    assert isinstance(terminal(events, "base")[0], CompletionEnd)


def test_who_was_let_in_is_not_refused_once_its_adapter_is_there() -> None:
    engine = make_engine(cache=FakeCache(delay=5), max_queued=3)
    for number in range(3):
        engine.handle(Submit(request(f"r{number}", adapter_id="a")))
    events, _ = run(engine)
    assert all(isinstance(terminal(events, f"r{number}")[0], CompletionEnd) for number in range(3))
    assert engine.integrity_report() == ""


def test_a_grown_queue_is_news() -> None:
    """Routers and metrics see a queue grow while the only requests wait for a long fetch."""
    engine = make_engine(cache=FakeCache(delay=1000))
    engine.turn()
    engine.handle(Submit(request("one", adapter_id="a")))
    batch = engine.turn()
    assert batch is not None
    assert batch.load.num_queued == 1
    engine.handle(Submit(request("two", adapter_id="a", n=2)))
    batch = engine.turn()
    assert batch is not None
    assert batch.load.num_queued == 3


def test_the_first_turn_reports_limits_and_needs_no_command() -> None:
    """Endpoint pickers send no adapter to a worker without slots for them."""
    engine = make_engine()
    assert engine.can_step
    batch = engine.turn()
    assert batch is not None
    assert batch.usage is not None
    assert batch.load.num_blocks > 0
    assert not engine.can_step
    assert engine.turn() is None


def test_leases_are_listed_now_and_then_and_once_nothing_runs() -> None:
    """A listing shows who uses an adapter, also after the last request, when nothing else happens any more."""
    now = 0.0
    reported: list[bool] = []
    engine = make_engine(clock=lambda: now)
    engine.turn()
    engine.handle(Submit(request(adapter_id="a", max_tokens=100)))
    for _ in range(60):
        now += RESIDENCY_EVERY_S / 20
        batch = engine.turn()
        reported.append(batch is not None and batch.changes is not None)
    assert sum(reported) == 1  # it has begun
    engine.handle(Cancel("r", Cancelled("enough")))
    batches = [engine.turn() for _ in range(3)]
    assert [batch is not None and batch.changes is not None for batch in batches].count(True) == 1
    assert not engine.can_step


def test_a_deadline_in_the_far_future_can_be_waited_for() -> None:
    engine = make_engine(cache=FakeCache(delay=1000))
    engine.handle(Submit(request(adapter_id="a", deadline_s=1e12)))
    run(engine, 2)
    timeout_s = engine.idle_timeout_s()
    assert timeout_s is not None
    assert 0 < timeout_s <= threading.TIMEOUT_MAX


@pytest.mark.parametrize("adapter_id", ["", "a"])
@pytest.mark.parametrize("wrong", [{"num_prompt": 0}, {"num_prompt": 256}, {"max_tokens": 0}, {"n": 0}])
def test_a_request_that_the_front_end_should_have_refused_ends_alone(wrong: dict[str, int], adapter_id: str) -> None:
    cache = FakeCache(delay=3)
    engine = make_engine(cache=cache)
    engine.handle(Submit(request("good", adapter_id=adapter_id)))
    engine.turn()
    engine.handle(Submit(request("bad", adapter_id=adapter_id, **wrong)))
    events, _ = run(engine)
    assert isinstance(failure(events, "bad"), Internal)
    assert isinstance(terminal(events, "good")[0], CompletionEnd)
    assert engine.integrity_report() == ""


def test_a_step_that_raises_fails_the_one_at_fault() -> None:
    def fail(plan: StepPlan) -> None:
        if any(span.sequence_id.startswith("bad") for span in plan.spans):
            raise MemoryError

    engine = make_engine(FakeRunner(fail))
    for name in ("good", "bad", "fine"):
        engine.handle(Submit(request(name)))
    events, _ = run(engine)
    assert isinstance(failure(events, "bad"), OutOfMemory)
    for name in ("good", "fine"):
        assert [t for e in events if isinstance(e, Tokens) and e.request_id == name for t in e.token_ids] == [
            15,
            16,
            17,
            18,
        ]
    assert engine.integrity_report() == ""


def test_an_unknown_exception_is_internal_with_an_opaque_id() -> None:
    def fail(plan: StepPlan) -> None:
        raise KeyError("secret path")

    engine = make_engine(FakeRunner(fail))
    engine.handle(Submit(request()))
    events, _ = run(engine, 3)
    error = failure(events, "r")
    assert isinstance(error, Internal)
    assert "secret" not in error.message
    assert error.metadata["error_id"] in error.message


def test_a_stop_string_ends_one_completion() -> None:
    engine = make_engine()
    engine.handle(Submit(request(n=2, max_tokens=50)))
    run(engine, 6)
    engine.handle(StopCompletion("r", 1))
    engine.handle(StopCompletion("r", 1))
    events, _ = run(engine, 60)
    ends = {e.index: e.reason for e in events if isinstance(e, CompletionEnd)}
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.STOP}
    assert engine.integrity_report() == ""


def test_adapter_operations_answer_once() -> None:
    engine = make_engine(cache=FakeCache(delay=5))
    engine.handle(AdapterCommand(1, "load", "a"))
    engine.handle(AdapterCommand(2, "load", "zzz"))
    engine.handle(AdapterCommand(3, "get", "b"))
    engine.handle(AdapterCommand(4, "load", "b"))
    engine.handle(Abandon(4))
    _, replies = run(engine, 10)
    by_id = {reply.operation_id: reply for reply in replies}
    assert len(replies) == 3
    assert by_id[1].adapters[0].adapter_id == "a"
    assert isinstance(by_id[2].error, AdapterNotFound)
    assert [info.adapter_id for info in by_id[3].adapters] == ["b"]


def test_each_load_is_told_from_the_others() -> None:
    cache = FakeCache(delay=5)
    engine = make_engine(cache=cache)
    for operation_id in (1, 2):
        engine.handle(AdapterCommand(operation_id, "load", "a"))
    run(engine, 10)
    assert cache.load_calls == {1, 2}


def test_a_look_at_templates_is_no_use_of_the_adapter() -> None:
    cache = FakeCache()
    engine = make_engine(cache=cache)
    engine.handle(AdapterCommand(1, "templates", "a"))
    _, replies = run(engine, 5)
    assert replies[0].version is not None
    assert cache.uses["a"] == 0
    engine.handle(Submit(request(adapter_id="a")))
    run(engine)
    assert cache.uses["a"] == 1


def test_looks_at_templates_that_wait_for_one_adapter_ask_for_it_once() -> None:
    """And on news only: thousands of chats would slow the steps of other requests down."""

    @dataclass
    class CountingCache(FakeCache):
        num_asked: int = 0

        def resolve(self, *given: Any, **more: Any) -> AdapterKey | None:
            self.num_asked += 1
            return super().resolve(*given, **more)

    cache = CountingCache(delay=20)
    engine = make_engine(cache=cache)
    for operation_id in range(100):
        engine.handle(AdapterCommand(operation_id, "templates", AdapterId("a")))
    run(engine, 10)
    assert cache.num_asked == 1
    engine.handle(AdapterCommand(100, "templates", AdapterId("a")))
    engine.handle(AdapterCommand(101, "load", AdapterId("a")))
    engine.handle(AdapterCommand(102, "templates", AdapterId("b")))
    _, replies = run(engine, 15)
    assert {reply.operation_id for reply in replies} == set(range(103))
    assert engine.integrity_report() == ""


@pytest.mark.parametrize("adapter_id", ["a", "a@" + "c" * 8])
def test_a_prompt_is_answered_by_the_version_whose_template_made_it(adapter_id: str) -> None:
    """Also where the adapter was loaded anew meanwhile."""
    engine = make_engine(cache=FakeCache(old_digests=("c" * 64,)))
    engine.handle(Submit(request("old", adapter_id=adapter_id, adapter_digest="c" * 64)))
    engine.handle(Submit(request("new", adapter_id="a", adapter_digest="a" * 64)))
    engine.handle(Submit(request("gone", adapter_id=adapter_id, adapter_digest="d" * 64)))
    events, _ = run(engine)
    admitted = {event.request_id: event.adapter_digest for event in events if isinstance(event, Admitted)}
    assert admitted == {"old": "c" * 64, "new": "a" * 64}
    error = failure(events, "gone")
    assert (error.reason, error.retry_after_s) == ("UNAVAILABLE", 0.0)
    assert engine.integrity_report() == ""


def test_shutdown_ends_everything_once() -> None:
    engine = make_engine(cache=FakeCache(delay=1000))
    engine.handle(Submit(request("waiting", adapter_id="a")))
    engine.handle(Submit(request("running", max_tokens=100)))
    engine.handle(AdapterCommand(9, "load", "b"))
    run(engine, 3)
    batch = engine.abort_all()
    for name in ("waiting", "running"):
        assert isinstance(failure(list(batch.events), name), Draining)
    assert isinstance(batch.replies[0].error, Draining)
    assert engine.integrity_report() == ""


def naming_heads(request_id: str, adapter_id: str = "") -> Request:
    """One token, before which there is nothing to draft: this engine has no proposer for heads."""
    return request(
        request_id, max_tokens=1, adapter_id=adapter_id, speculation=SpeculationParams("medusa", medusa_id="b")
    )


@pytest.mark.parametrize("adapter_id", ["", "a", "b"])
def test_heads_that_are_none_are_refused_and_nothing_stays_pinned(adapter_id: str) -> None:
    engine = make_engine(cache=FakeCache(delay=3))
    engine.handle(Submit(naming_heads("r", adapter_id)))
    engine.handle(Submit(request("other", adapter_id="b")))
    events, _ = run(engine)
    error = failure(events, "r")
    assert isinstance(error, FailedPrecondition)
    assert (error.field, error.resource) == ("speculation.medusa.adapter_id", "b")
    assert isinstance(terminal(events, "other")[0], CompletionEnd)
    assert engine.integrity_report() == ""


def test_a_name_may_lose_its_heads_and_get_some() -> None:
    """The name is bound anew by a load: requests are answered by what it means when they come."""
    cache = FakeCache(kinds={"b": "medusa"})
    engine = make_engine(cache=cache)
    outcomes: list[bool] = []
    for number, kind in enumerate(("medusa", "lora", "combined")):
        cache.kinds["b"] = kind
        engine.handle(Submit(naming_heads(f"r{number}")))
        events, _ = run(engine)
        outcomes.append(isinstance(terminal(events, f"r{number}")[0], CompletionEnd))
    assert outcomes == [True, False, True]
    assert engine.integrity_report() == ""


KEY = AdapterKey("lora", "a" * 64)


@pytest.mark.parametrize(
    ("wanted", "token_ids", "start"),
    [
        ((5,), (5, 1, 5, 2), 2),
        ((1, 2), (1, 2, 1, 2, 1), 2),
        ((1, 1), (1, 1, 1), 1),
        ((1, 2), (1, 2), 0),
        ((1, 2), (2, 1), None),
        ((1, 2, 3), (2, 3), None),
        ((0xD800, 300_000), (9, 0xD800, 300_000), 1),
        ((0, 256), (1, 0, 0, 256, 0), 2),
    ],
)
def test_the_last_occurrence_counts(wanted: tuple[int, ...], token_ids: tuple[int, ...], start: int | None) -> None:
    assert start_of_last(wanted, token_ids) == start
