"""Routing policy over any cluster and any load."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from loraplex_router.config import PolicyConfig
from loraplex_router.policy import Route, WorkerView, choose, load_bound, num_homes, rendezvous_order, tier_of

ADAPTERS = ("sql", "json", "acme/yaml")

names = st.integers(0, 999).map(lambda number: f"10.0.0.{number}:50051")
loads = st.one_of(st.integers(0, 200), st.integers(0, 1 << 40))
tiers = st.dictionaries(st.sampled_from(ADAPTERS), st.integers(2, 4))
clusters = st.lists(
    st.builds(WorkerView, names, loads, tiers), min_size=1, max_size=12, unique_by=lambda w: w.worker_id
)
routes = st.builds(
    Route,
    st.sampled_from([(), ("sql",), ("json",), ("sql", "json")]),
    st.integers(0, 1 << 20),
)
configs = st.builds(
    PolicyConfig,
    num_homes=st.integers(1, 4),
    load_factor=st.floats(1.0, 4.0),
    free_work_tokens=st.sampled_from([0, 100, 4096]),
)
randoms = st.integers(0, 1 << 32).map(Random)


@given(routes, clusters, configs, randoms)
def test_no_request_goes_to_a_worker_above_the_bound(
    route: Route, workers: list[WorkerView], config: PolicyConfig, random: Random
) -> None:
    choice = choose(route, workers, config, random)
    assert choice is not None
    chosen = choice.worker_id
    work = {worker.worker_id: worker.work_tokens for worker in workers}
    assert chosen in work
    mean = sum(work.values()) / len(work)
    assert work[chosen] <= max(config.load_factor * mean, config.free_work_tokens)


@given(routes, clusters, configs)
def test_choice_depends_on_chance_only_where_workers_are_equals(
    route: Route, workers: list[WorkerView], config: PolicyConfig
) -> None:
    """An adapter that is not hot always goes to the same worker in the same circumstances."""
    if not route.adapter_ids or num_homes(route, workers, config) > config.num_homes:
        return
    assert len({choose(route, workers, config, Random(seed)) for seed in range(8)}) == 1


@given(routes, clusters, configs, randoms)
def test_a_home_that_may_take_it_does(
    route: Route, workers: list[WorkerView], config: PolicyConfig, random: Random
) -> None:
    if not route.adapter_ids:
        return
    bound = load_bound(workers, config)
    order = rendezvous_order(route.routing_key, [worker.worker_id for worker in workers])
    homes = order[: num_homes(route, workers, config)]
    by_id = {worker.worker_id: worker for worker in workers}
    open_homes = [name for name in homes if by_id[name].work_tokens <= bound]
    choice = choose(route, workers, config, random)
    assert choice is not None
    chosen = choice.worker_id
    if open_homes:
        assert chosen in open_homes
        # Nobody among them has the weights nearer to the device.
        assert tier_of(route, by_id[chosen]) == max(tier_of(route, by_id[name]) for name in open_homes)


@given(st.sampled_from(ADAPTERS), st.sets(names, min_size=2, max_size=12), st.randoms())
def test_a_worker_that_leaves_moves_only_its_own_adapters(key: str, workers: set[str], random: Random) -> None:
    gone = random.choice(sorted(workers))
    before = rendezvous_order(key, workers)
    after = rendezvous_order(key, workers - {gone})
    assert after == [name for name in before if name != gone]


@given(st.sampled_from(ADAPTERS), st.lists(names, min_size=1, max_size=12, unique=True), st.randoms())
def test_the_order_does_not_depend_on_how_the_workers_are_listed(key: str, workers: list[str], random: Random) -> None:
    shuffled = list(workers)
    random.shuffle(shuffled)
    assert rendezvous_order(key, shuffled) == rendezvous_order(key, workers)


@given(routes, clusters, configs)
def test_the_hotter_an_adapter_the_more_homes(route: Route, workers: list[WorkerView], config: PolicyConfig) -> None:
    homes = [
        num_homes(Route(route.adapter_ids, route.work_in_flight_tokens * factor), workers, config)
        for factor in (0, 1, 4, 64)
    ]
    assert homes == sorted(homes)
    assert all(1 <= count <= len(workers) for count in homes)
    assert homes[0] == min(config.num_homes, len(workers))


def test_homes_are_spread_evenly() -> None:
    """Each worker is the first home of about as many adapters as any other."""
    workers = [f"worker-{number}:50051" for number in range(5)]
    first = [rendezvous_order(f"adapter-{number}", workers)[0] for number in range(5000)]
    counts = [first.count(worker) for worker in workers]
    expected = 1000
    # Five standard deviations of a binomial.
    assert all(abs(count - expected) < 5 * math.sqrt(5000 * 0.2 * 0.8) for count in counts), counts


def test_a_stream_of_requests_stays_balanced() -> None:
    """One hot adapter and many cold ones over four workers: nobody ends with twice the mean."""
    config = PolicyConfig(num_homes=2, free_work_tokens=200)
    random = Random(1)
    work = {f"w{number}:1": 0 for number in range(4)}
    resident: dict[str, dict[str, int]] = {name: {} for name in work}
    by_key: dict[str, int] = {}
    used: dict[str, set[str]] = {}
    for number in range(2000):
        adapter = "hot" if number % 2 else f"cold-{number % 40}"
        views = [WorkerView(name, tokens, resident[name]) for name, tokens in work.items()]
        choice = choose(Route((adapter,), by_key.get(adapter, 0)), views, config, random)
        assert choice is not None
        chosen = choice.worker_id
        work[chosen] += 100
        by_key[adapter] = by_key.get(adapter, 0) + 100
        resident[chosen][adapter] = 4
        used.setdefault(adapter, set()).add(chosen)
    mean = sum(work.values()) / len(work)
    assert max(work.values()) <= 1.3 * mean
    assert len(used["hot"]) >= 3
    assert sum(len(places) for name, places in used.items() if name != "hot") / 20 < 3
