"""Fairness of rows, slots and loads between adapters and tenants."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.simulated_adapters import AdapterSimulation
from support.simulated_load import Fate, Simulation, request

from loraplex_contracts.request import Request
from loraplex_server.scheduler.sequence_table import EXPECTED_TOKENS

STEP_S, MAX_TOKENS = 0.02, 40
OWN_S = STEP_S * MAX_TOKENS  # of one text
CAPACITY = 16 / OWN_S  # texts per second in 16 rows


def step_s(rows: int, prompts: int) -> float:
    return STEP_S


def arrivals(
    rate: float, seconds: float, adapters: list[str], *, tenant: str = "t", seed: int = 0, from_s: float = 0.0
) -> list[tuple[float, Request]]:
    """Poisson arrivals, over the adapters in turns."""
    random, at_s = Random(f"{seed} {tenant} {adapters[0]}"), from_s
    found: list[tuple[float, Request]] = []
    while (at_s := at_s + random.expovariate(rate)) < from_s + seconds:
        name = f"{tenant}-{adapters[0]}-{len(found)}"
        adapter_id = adapters[len(found) % len(adapters)]
        one = request(name, max_tokens=MAX_TOKENS, arrival_s=at_s, adapter_id=adapter_id, tenant=tenant)
        found.append((at_s, one))
    return found


def run(simulation: AdapterSimulation, *groups: list[tuple[float, Request]]) -> list[list[Fate]]:
    simulation.run(sorted(chain(*groups), key=lambda arrival: arrival[0]))
    simulation.scheduler.check_integrity()
    simulation.residency.check_integrity()
    assert all(fate.ended_s is not None for fate in simulation.fates.values()), "every request ends"
    return [[simulation.fates[one.request_id] for _, one in group] for group in groups]


def waits_s(fates: list[Fate]) -> list[float]:
    """Seconds from arrival to begin; all requests have begun."""
    assert all(fate.error is None for fate in fates), [fate.error for fate in fates if fate.error is not None][:1]
    return [fate.began_s - fate.request.arrival_s for fate in fates if fate.began_s is not None]


def names(prefix: str, num: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(num)]


def test_a_hot_adapter_starves_no_cold_one() -> None:
    """Three times the capacity for one adapter, and little for each of 20 others, of one tenant, in four slots."""
    simulation = AdapterSimulation(step_s, max_queue_wait_s=20)
    hot = arrivals(3 * CAPACITY, 6, ["hot"])
    hot_fates, cold_fates = run(simulation, hot, arrivals(2, 6, names("cold", 20)))
    # A slot has to drain for each, after `max_adapter_wait_s`.
    assert max(waits_s(cold_fates)) <= 1.0 + 4 * OWN_S
    assert sum(fate.error is None for fate in hot_fates) >= 0.5 * CAPACITY * 6, "and the hot one is served"


def test_cold_adapters_do_not_starve_a_hot_one() -> None:
    """One fills half of the rows; others come and go in the slots beside it."""
    simulation = AdapterSimulation(step_s, max_queue_wait_s=20)
    hot_fates, _ = run(simulation, arrivals(CAPACITY / 2, 8, ["hot"]), arrivals(3, 8, names("cold", 20)))
    assert max(waits_s(hot_fates)) <= 1.0 + OWN_S


def test_a_tenant_with_many_adapters_starves_no_other() -> None:
    """One floods with another adapter for each request; another asks for one adapter, and a third for some."""
    simulation = AdapterSimulation(step_s, max_queue_wait_s=20)
    flood = arrivals(CAPACITY, 8, names("many", 500), tenant="flood")
    one = arrivals(1, 8, ["one"], tenant="quiet", seed=1)
    some = arrivals(0.5, 8, names("some", 50), tenant="third", seed=2)
    _, one_fates, some_fates = run(simulation, flood, one, some)
    assert max(waits_s(one_fates)) <= 3 * OWN_S
    assert max(waits_s(some_fates)) <= 3 * OWN_S


def test_a_burst_of_loads_holds_up_no_other_tenant() -> None:
    """A hundred requests for as many adapters wait when another tenant's first one comes."""
    simulation = AdapterSimulation(step_s, max_queue_wait_s=0)
    burst = arrivals(10_000, 0.01, names("many", 100), tenant="burst")
    single = [arrivals(1000, 0.002, [f"b{n}"], tenant="quiet", seed=n, from_s=1.0 + n) for n in range(4)]
    _, *fates = run(simulation, burst, *single)
    assert max(wait for group in fates for wait in waits_s(group)) <= 3 * OWN_S


def tokens_of_clients(
    clients: list[tuple[str, str]], max_tokens: dict[str, int], lengths: dict[str, int], num_steps: int
) -> Counter[str]:
    """Tokens of prompts and texts that each tenant gets in eight rows. Each client, a tenant with an adapter, asks anew
    when its text ends: after its tenant's `lengths` tokens."""
    simulation = Simulation(step_s, max_running=8, max_queue_wait_s=0)
    live: list[Fate] = []
    taken = Counter[str]()

    def ask(tenant: str, adapter_id: str) -> None:
        name, limit = f"{tenant}-{adapter_id}-{len(simulation.fates)}", max_tokens[tenant]
        live.append(simulation.add(request(name, max_tokens=limit, tenant=tenant, adapter_id=adapter_id)))

    def is_over(fate: Fate) -> bool:
        num_tokens = 0 if fate.began_s is None else round((simulation.now - fate.began_s) / STEP_S)
        return fate.ended_s is not None or num_tokens >= lengths[fate.request.tenant]

    for client in clients:
        ask(*client)
    for _ in range(num_steps):
        simulation.step()
        for fate in [fate for fate in live if is_over(fate)]:
            live.remove(fate)
            simulation.stop(fate.request.request_id)
            ask(fate.request.tenant, fate.request.adapter_id)
    simulation.scheduler.check_integrity()
    for fate in simulation.fates.values():
        if fate.began_s is not None:
            until_s = simulation.now if fate.ended_s is None else fate.ended_s
            taken[fate.request.tenant] += len(fate.request.prompt_token_ids) + round((until_s - fate.began_s) / STEP_S)
    return taken


@pytest.mark.parametrize("num_adapters", [2, 10])
def test_texts_that_end_early_cost_a_tenant_with_several_adapters_no_more(num_adapters: int) -> None:
    """Twenty clients of each of two tenants, whose texts end long before the limit."""
    several = [("several", f"a{number % num_adapters}") for number in range(20)]
    limits, lengths = {"several": 500, "one": 500}, {"several": 40, "one": 40}
    taken = tokens_of_clients([*several, *[("one", "b")] * 20], limits, lengths, 1500)
    assert taken["several"] >= 0.7 * taken["one"] > 2000, taken


@pytest.mark.parametrize(
    ("num_clients", "num_adapters", "limits", "lengths"),
    [
        ((20, 20), 1, (40_000, 40), (40, 40)),  # one names max_tokens
        ((60, 20), 1, (40_000, 40), (40, 40)),
        ((20, 20), 20, (40_000, 40), (40, 40)),
        ((60, 20), 1, (4000, 4000), (400, 40)),  # long and short texts
        ((20, 40), 5, (4000, 4000), (100, 300)),
        ((20, 20), 1, (4000, 4000), (1500, 40)),
    ],
)
def test_two_tenants_get_the_same_whatever_their_limits_and_lengths(
    num_clients: tuple[int, int], num_adapters: int, limits: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """Tokens of both, whose clients ask anew when a text ends, differ by no more than eight rows hold."""
    clients = [("a", f"a{number % num_adapters}") for number in range(num_clients[0])]
    clients += [("b", "")] * num_clients[1]
    names = ("a", "b")
    taken = tokens_of_clients(
        clients, dict(zip(names, limits, strict=True)), dict(zip(names, lengths, strict=True)), 1500
    )
    assert abs(taken["a"] - taken["b"]) <= 2 * 8 * max(*lengths, EXPECTED_TOKENS), taken


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_whatever_others_ask_for_a_quiet_flow_begins_soon(data: st.DataObject) -> None:
    """Some tenants flood with any number of adapters; of another one a single request waits at a time."""
    num_slots, load_s = data.draw(st.integers(2, 6)), data.draw(st.sampled_from([0.0, 0.05, 0.2]))
    simulation = AdapterSimulation(step_s, max_queue_wait_s=0, num_slots=num_slots, load_s=load_s)
    floods = [
        arrivals(data.draw(st.floats(1, CAPACITY)), 3, names(f"f{n}x", data.draw(st.integers(1, 40))), tenant=f"f{n}")
        for n in range(data.draw(st.integers(1, 3)))
    ]
    num_adapters = data.draw(st.integers(1, 3))
    quiet = [
        one
        for n in range(3)
        for one in arrivals(1000, 0.002, [f"q{n % num_adapters}"], tenant="quiet", seed=n, from_s=0.5 + n)[:1]
    ]
    fates = run(simulation, quiet, *floods)[0]
    # A patience, a text that drains, a load behind those under way, and as much again for what was first in line.
    assert max(waits_s(fates), default=0.0) <= 2 * (1.0 + OWN_S + (num_slots + 1) * load_s)
