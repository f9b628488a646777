"""Routing policy, case by case."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from loraplex_router.config import PolicyConfig
from loraplex_router.policy import Route, WorkerView, choose, num_homes, rendezvous_order, routing_key

WORKERS = ("a:1", "b:1", "c:1", "d:1")
DISK, HOST, DEVICE = 2, 3, 4
SQL = Route(("sql",))
ORDER = rendezvous_order("sql", WORKERS)
CONFIG = PolicyConfig(num_homes=2, load_factor=1.25, free_work_tokens=1000)


def views(work: dict[str, int] | None = None, tiers: dict[str, int] | None = None) -> list[WorkerView]:
    return [
        WorkerView(name, (work or {}).get(name, 0), {"sql": tiers[name]} if tiers and name in tiers else {})
        for name in WORKERS
    ]


def chosen(route: Route, workers: list[WorkerView], config: PolicyConfig, random: Random) -> str:
    choice = choose(route, workers, config, random)
    assert choice is not None
    return choice.worker_id


def test_without_workers_there_is_no_choice() -> None:
    assert choose(SQL, [], CONFIG, Random(0)) is None


def test_a_cold_adapter_goes_to_its_first_home() -> None:
    assert chosen(SQL, views(), CONFIG, Random(0)) == ORDER[0]


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(0, DISK, 1), (DISK, HOST, 1), (HOST, DEVICE, 1), (HOST, HOST, 0)]
)
def test_the_home_with_the_nearer_weights_is_preferred(first: int, second: int, expected: int) -> None:
    tiers = {ORDER[0]: first, ORDER[1]: second}
    assert chosen(SQL, views(tiers=tiers), CONFIG, Random(0)) == ORDER[expected]


def test_weights_elsewhere_do_not_draw_requests_from_homes() -> None:
    assert chosen(SQL, views(tiers={ORDER[3]: DEVICE}), CONFIG, Random(0)) == ORDER[0]


def test_a_busy_home_is_passed_over_even_where_the_weights_are() -> None:
    work = {ORDER[0]: 9000}
    assert chosen(SQL, views(work, {ORDER[0]: DEVICE}), CONFIG, Random(0)) == ORDER[1]


def test_work_below_the_free_amount_makes_no_home_busy() -> None:
    assert chosen(SQL, views({ORDER[0]: 1000}), CONFIG, Random(0)) == ORDER[0]
    assert chosen(SQL, views({ORDER[0]: 1001}), CONFIG, Random(0)) == ORDER[1]


def test_overflow_goes_where_the_weights_are_then_by_the_order() -> None:
    work = {ORDER[0]: 9000, ORDER[1]: 9000}
    assert chosen(SQL, views(work), CONFIG, Random(0)) == ORDER[2]
    assert chosen(SQL, views(work, {ORDER[3]: DISK}), CONFIG, Random(0)) == ORDER[3]


def test_two_workers_of_one_name_are_one_home() -> None:
    double = [WorkerView(f"{ORDER[0]}'", 0, {}, ORDER[0]), WorkerView(ORDER[0], 9000, {}, ORDER[0])]
    others = [WorkerView(name, 0, {}, name) for name in ORDER[1:]]
    two_homes = replace(CONFIG, num_homes=2)
    choice = choose(SQL, [*double, *others], two_homes, Random(0))
    assert choice == (f"{ORDER[0]}'", "home")
    busy = [replace(worker, work_tokens=9000) for worker in double]
    assert choose(SQL, [*busy, *others], two_homes, Random(0)) == (ORDER[1], "home")


def test_base_requests_take_the_less_loaded_of_two() -> None:
    config = PolicyConfig(free_work_tokens=10_000)
    work = {"a:1": 0, "b:1": 100, "c:1": 200, "d:1": 300}
    random = Random(0)
    counts = Counter(chosen(Route(), views(work), config, random) for _ in range(6000))
    # Of six pairs, a wins three, b two, c one and d none.
    assert counts["d:1"] == 0
    assert 2800 < counts["a:1"] < 3200
    assert 1800 < counts["b:1"] < 2200


def test_idle_workers_share_base_requests() -> None:
    random = Random(0)
    counts = Counter(chosen(Route(), views()[:2], CONFIG, random) for _ in range(1000))
    assert min(counts.values()) > 400


def test_a_hot_adapter_is_spread_over_the_homes_that_have_it() -> None:
    hot = Route(("sql",), work_in_flight_tokens=8000)
    work = dict.fromkeys(WORKERS, 2000)
    assert num_homes(hot, views(work), CONFIG) == 4
    random = Random(0)
    tiers = dict.fromkeys(ORDER[:3], DEVICE)
    counts = Counter(chosen(hot, views(work, tiers), CONFIG, random) for _ in range(900))
    assert set(counts) == set(ORDER[:3])
    assert min(counts.values()) > 200


def test_a_choice_says_why() -> None:
    def decision(route: Route, work: dict[str, int], tiers: dict[str, int] | None = None) -> str:
        choice = choose(route, views(work, tiers), CONFIG, Random(0))
        assert choice is not None
        return choice.decision

    busy = {ORDER[0]: 9000, ORDER[1]: 9000}
    assert decision(Route(), {}) == "base"
    assert decision(SQL, {}) == "home"
    assert decision(SQL, {ORDER[0]: 9000}) == "home"
    assert decision(SQL, busy) == "overflow"
    hot = Route(("sql",), work_in_flight_tokens=8000)
    even = dict.fromkeys(WORKERS, 2000)
    assert decision(hot, even, {ORDER[0]: DEVICE}) == "home"
    assert decision(hot, even, {ORDER[3]: DEVICE}) == "hot"


def test_little_work_is_never_hot() -> None:
    alone = Route(("sql",), work_in_flight_tokens=1000)
    assert num_homes(alone, views({ORDER[0]: 1000}), CONFIG) == 2


def test_a_mixture_is_as_near_as_its_farthest_part() -> None:
    both = Route(("sql", "json"))
    order = rendezvous_order(both.routing_key, WORKERS)
    first = WorkerView(order[0], 0, {"sql": DEVICE})
    second = WorkerView(order[1], 0, {"sql": DISK, "json": DISK})
    assert chosen(both, [first, second], CONFIG, Random(0)) == order[1]


def test_a_mixture_has_one_key_whatever_the_order() -> None:
    assert routing_key(("sql", "json")) == routing_key(("json", "sql")) != routing_key(("sql",))


def test_the_order_is_the_same_everywhere() -> None:
    """Routers agree without talking: a change of the hash would scatter the adapters of a mixed deployment."""
    orders = {key: "".join(name[0] for name in rendezvous_order(key, WORKERS)) for key in ("sql", "json", "acme/a")}
    assert orders == {"sql": "abcd", "json": "badc", "acme/a": "bdac"}


def test_versions_have_the_homes_of_their_adapter() -> None:
    assert routing_key(["acme/sql@0123abcd"]) == routing_key(["acme/sql"])


def test_adapters_are_hashed_by_name() -> None:
    """A worker at another address has its predecessor's adapters."""
    named = [WorkerView(f"{name[0]}=h:{idx}", 0, name=name) for idx, name in enumerate(WORKERS)]
    assert chosen(SQL, named, CONFIG, Random(0)) == next(one.worker_id for one in named if one.name == ORDER[0])


@pytest.mark.parametrize(
    ("share", "work", "is_chosen"),
    [(0.0, 0, True), (0.0, 100, False), (0.5, 2000, True), (0.5, 2800, False), (1.0, 4500, True)],
)
def test_a_newcomer_gets_its_share_slowly(share: float, work: int, is_chosen: bool) -> None:
    busy = views(dict.fromkeys(WORKERS, 4000))
    busy[WORKERS.index(ORDER[0])] = WorkerView(ORDER[0], work, share=share)
    assert chosen(SQL, busy, CONFIG, Random(0)) == ORDER[0 if is_chosen else 1]


def test_newcomers_alone_take_everything() -> None:
    fresh = [WorkerView(name, 500, share=0.0) for name in WORKERS]
    assert chosen(SQL, fresh, CONFIG, Random(0)) == ORDER[0]
