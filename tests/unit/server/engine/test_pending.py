"""Requests that wait for a name: asked once, told together, expired alone."""

from __future__ import annotations

import pytest

from loraplex_contracts.adapters import AdapterKey
from loraplex_contracts.errors import (
    AdapterNotFound,
    Internal,
    LoraplexError,
)
from loraplex_contracts.request import (
    Request,
    StoppingParams,
)
from loraplex_server.engine.pending import Pending

KEY = AdapterKey("lora", "a" * 64)


def named(request_id: str, adapter_id: str = "a", tenant: str = "t", deadline_s: float | None = None) -> Request:
    return Request(
        request_id, (1, 2), StoppingParams(4), adapter_id=adapter_id, tenant=tenant, deadline_s=deadline_s, n=2
    )


class Cache:
    """A cache with the outcome of each name (None: being fetched), and a record of the names that were asked for."""

    def __init__(self, **outcomes: AdapterKey | Exception | None) -> None:
        self.outcomes = outcomes
        self.asked: list[str] = []

    def resolve(self, adapter_id: str, now: float) -> AdapterKey | None:
        self.asked.append(adapter_id)
        outcome = self.outcomes[adapter_id]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def names(taken: list[tuple[Request, AdapterKey | LoraplexError]]) -> list[str]:
    return [one.request_id for one, _ in taken]


def test_the_cache_is_asked_once_per_adapter_and_again_only_on_news() -> None:
    cache = Cache(a=None, b=None)
    waiting = Pending("fetching an adapter", cache.resolve, lambda request: request.adapter_id)
    for number in range(100):
        waiting.add(named(f"r{number}", "ab"[number % 2], "tu"[number // 2 % 2]))
    assert waiting.take_resolved(False, 0.0) == []
    assert sorted(cache.asked) == ["a", "b"]
    waiting.add(named("late"))
    for _ in range(10):
        assert waiting.take_resolved(False, 0.0) == []
    assert len(cache.asked) == 2
    assert waiting.take_resolved(True, 0.0) == []
    assert len(cache.asked) == 4
    assert (waiting.num_requests, waiting.num_completions) == (101, 202)


def test_each_has_a_pin_of_its_own() -> None:
    cache = Cache(a=None, b=None)
    waiting = Pending("fetching an adapter", cache.resolve, lambda request: request.adapter_id)
    for name in ("r0", "r1", "r2"):
        waiting.add(named(name))
    waiting.add(named("other", "b"))
    waiting.take_resolved(False, 0.0)
    cache.asked.clear()
    cache.outcomes["a"] = KEY
    assert waiting.take_resolved(True, 0.0) == [(named(name), KEY) for name in ("r0", "r1", "r2")]
    assert cache.asked.count("a") == 3  # every resolve pins once
    assert waiting.num_requests == 1
    assert waiting.take_resolved(True, 0.0) == []


def test_a_name_that_is_known_is_there_at_once() -> None:
    waiting = Pending("fetching an adapter", Cache(a=KEY).resolve, lambda request: request.adapter_id)
    waiting.add(named("r"))
    assert waiting.take_resolved(False, 0.0) == [(named("r"), KEY)]


@pytest.mark.parametrize("error", [AdapterNotFound("there is no such adapter"), KeyError("secret")])
def test_a_failure_is_that_of_all_who_wait_for_it(error: Exception) -> None:
    """Once the failure is known, asking for the next one might start the fetch again."""
    cache = Cache(a=error)
    waiting = Pending("fetching an adapter", cache.resolve, lambda request: request.adapter_id)
    for name in ("r0", "r1", "r2"):
        waiting.add(named(name))
    taken = waiting.take_resolved(False, 0.0)
    assert names(taken) == ["r0", "r1", "r2"]
    expected = AdapterNotFound if isinstance(error, LoraplexError) else Internal
    assert all(isinstance(outcome, expected) for _, outcome in taken)
    assert len(cache.asked) == 1
    assert waiting.num_requests == 0


def test_who_went_away_is_not_asked_for() -> None:
    cache = Cache(a=None)
    waiting = Pending("fetching an adapter", cache.resolve, lambda request: request.adapter_id)
    waiting.add(named("r"))
    waiting.discard(named("r"))
    waiting.discard(named("r"))
    waiting.discard(named("stranger", "b"))
    assert waiting.take_resolved(True, 0.0) == []
    assert (cache.asked, waiting.num_requests) == ([], 0)
    waiting.add(named("again"))  # a new group: nobody waits for the old fetch
    waiting.take_resolved(False, 0.0)
    assert cache.asked == ["a"]


def test_deadlines() -> None:
    waiting = Pending("fetching an adapter", Cache(a=None).resolve, lambda request: request.adapter_id)
    waiting.add(named("first", deadline_s=5.0))
    waiting.add(named("second", deadline_s=7.0))
    waiting.add(named("patient"))

    def expired(now: float) -> list[str]:
        return [one.request_id for one in waiting.take_expired(now)]

    assert [expired(now) for now in (0.0, 4.9, 5.0, 6.0, 7.5, 1e9)] == [[], [], ["first"], [], ["second"], []]
    waiting.add(named("third", deadline_s=8.0))
    assert waiting.num_requests == 2
    assert expired(8.0) == ["third"]
