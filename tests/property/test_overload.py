"""Scheduler under overload, in simulated time."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_fakes import adapter
from support.simulated_load import Fate, Simulation, request

from loraplex_contracts.errors import Cancelled, DeadlineExceeded, Overloaded, ResourceExhausted
from loraplex_contracts.request import Request

StepTime = Callable[[int, int], float]


def fixed(rows: int, prompts: int) -> float:
    """A device that computes the whole batch in one go."""
    return 0.02


def growing(rows: int, prompts: int) -> float:
    """A device whose steps get longer with every row and every prompt token: with all rows in use nobody would be done
    in twice the time that one takes alone."""
    return 0.02 + 0.0025 * rows + 0.0005 * prompts


def alone_s(step_s: StepTime) -> float:
    simulation = Simulation(step_s)
    fate = simulation.add(request("alone"))
    simulation.run()
    assert fate.ended_s is not None
    return fate.ended_s


def capacity(step_s: StepTime) -> float:
    """Requests per second where nobody minds when."""
    simulation = Simulation(step_s, max_queue_wait_s=0)
    for number in range(320):
        simulation.add(request(f"r{number}"))
    simulation.run()
    return 320 / simulation.now


def arrivals(
    rate: float, seconds: float, deadline_s: float | None, *, seed: int = 0, **fields: str
) -> list[tuple[float, Request]]:
    """Poisson arrivals."""
    random, at_s, name = Random(seed), 0.0, str(fields)
    found: list[tuple[float, Request]] = []
    while (at_s := at_s + random.expovariate(rate)) < seconds:
        deadline = None if deadline_s is None else at_s + deadline_s
        found.append((at_s, request(f"{name}{len(found)}", deadline_s=deadline, arrival_s=at_s, **fields)))
    return found


def good(fates: list[Fate]) -> int:
    return sum(fate.is_good for fate in fates)


@pytest.mark.parametrize("step_s", [fixed, growing])
def test_goodput_does_not_fall_with_overload(step_s: StepTime) -> None:
    """The deadline is twice what a request takes alone. The first seconds are for learning how fast the engine is."""
    deadline_s, learning_s, seconds = 2 * alone_s(step_s), 5.0, 25.0
    goodput: dict[float, float] = {}
    for factor in (0.8, 1.0, 2.0, 5.0):
        simulation = Simulation(step_s)
        simulation.run(arrivals(factor * capacity(step_s), seconds, deadline_s))
        fates = [fate for fate in simulation.fates.values() if fate.request.arrival_s > learning_s]
        goodput[factor] = good(fates) / (seconds - learning_s)
        assert all(fate.error is None or isinstance(fate.error, ResourceExhausted | DeadlineExceeded) for fate in fates)
        refused = [fate.error for fate in fates if isinstance(fate.error, Overloaded)]
        assert all(error.retry_after_s for error in refused)
        if factor >= 2:
            assert len(refused) > 0.5 * (len(fates) - good(fates)), "refused at once, not late"
    best = max(goodput.values())
    assert goodput[2.0] >= 0.9 * best, goodput
    assert goodput[5.0] >= 0.9 * best, goodput


def test_a_normal_load_is_never_refused() -> None:
    simulation = Simulation(fixed)
    simulation.run(arrivals(0.6 * capacity(fixed), 60, 4 * alone_s(fixed)))
    assert good(list(simulation.fates.values())) == len(simulation.fates)


@pytest.mark.parametrize("field", ["tenant", "adapter_id"])
def test_one_flood_does_not_cost_the_others_anything(field: str) -> None:
    """One floods with five times what there is; three others ask for a tenth each, and get it."""
    rate, deadline_s = capacity(fixed), 3 * alone_s(fixed)
    flood = arrivals(5 * rate, 30, deadline_s, **{field: "flood"})
    quiet = [arrivals(rate / 10, 30, deadline_s, seed=n, **{field: f"quiet{n}"}) for n in (1, 2, 3)]
    simulation = Simulation(fixed)
    simulation.run(sorted(sum(quiet, flood), key=lambda arrival: arrival[0]))
    for mine in quiet:
        fates = [simulation.fates[one.request_id] for _, one in mine]
        assert good(fates) >= 0.97 * len(fates), "refused or late for somebody else's flood"
    flooding = [simulation.fates[one.request_id] for _, one in flood]
    assert good(flooding) >= 0.6 * rate * 30, "and the flood gets what is left"


def test_without_a_deadline_a_request_waits_as_long_as_the_flag_says() -> None:
    simulation = Simulation(fixed, max_queue_wait_s=3.0)
    simulation.run(arrivals(3 * capacity(fixed), 30, None))
    fates = list(simulation.fates.values())
    waits = [fate.began_s - fate.request.arrival_s for fate in fates if fate.began_s is not None]
    assert 1.0 < max(waits) <= 3.0 + 0.05
    refused = [fate for fate in fates if fate.error is not None]
    assert refused
    assert all(isinstance(fate.error, Overloaded) for fate in refused)
    assert "--max-queue-wait" in str(refused[-1].error)
    assert len(fates) - len(refused) >= 0.95 * 30 * capacity(fixed), "nobody is refused in vain"


def test_with_the_flag_at_zero_everybody_waits() -> None:
    simulation = Simulation(fixed, max_queue_wait_s=0.0)
    simulation.run(arrivals(2 * capacity(fixed), 30, None))
    assert all(fate.error is None for fate in simulation.fates.values())


def test_a_speed_that_was_measured_wrong_refuses_nobody_for_long() -> None:
    """The engine crawls for a while; as soon as it is itself again, so is what it takes on."""
    slow_until_s = 10.0
    simulation = Simulation(lambda rows, prompts: 0.5 if simulation.now < slow_until_s else 0.02)
    load = arrivals(0.8 * capacity(fixed), 60, 4 * alone_s(fixed))
    simulation.run(load)
    later = [simulation.fates[one.request_id] for at_s, one in load if at_s > slow_until_s + 5]
    assert good(later) >= 0.97 * len(later)


def test_forecasts_do_not_count_what_comes_after() -> None:
    """A flood of lower priority keeps nobody out: neither the engine nor the front end refuses for it."""
    simulation = Simulation(fixed, max_queue_wait_s=0)
    for number in range(100):
        simulation.add(request(f"low{number}", max_tokens=400, priority=-1))
    simulation.run(until_s=10.0)
    forecast = simulation.scheduler.forecast()
    assert forecast is not None
    forecast.check(("default", ""), 16, 350, left_s=10.0)


def test_who_cancels_pays_for_what_was_done() -> None:
    simulation = Simulation(fixed, max_queue_wait_s=0)
    for number in range(32):
        simulation.add(request(f"running{number}", max_tokens=400))
    simulation.run(until_s=2.0)
    for number in range(20):
        simulation.add(request(f"left{number}", max_tokens=4000, tenant="leaves"))
        simulation.scheduler.cancel(f"left{number}", Cancelled("the client went away"), simulation.now)
    late = simulation.add(request("late", max_tokens=400, tenant="leaves"))
    simulation.run(until_s=20.0)
    assert late.ended_s is not None, "it has used nothing, so it is the first of those that wait"


def test_who_could_not_be_done_in_time_even_alone_is_served_all_the_same() -> None:
    simulation = Simulation(fixed)
    simulation.run(arrivals(0.5 * capacity(fixed), 5, None))
    hopeless = simulation.add(request("hopeless", max_tokens=1000, deadline_s=simulation.now + 2.0))
    simulation.run()
    assert hopeless.began_s is not None
    assert isinstance(hopeless.error, DeadlineExceeded)
    assert hopeless.ended_s == pytest.approx(hopeless.request.deadline_s, abs=0.1)


@settings(max_examples=15, deadline=None)
@given(
    num_long=st.integers(17, 200),
    long_tokens=st.integers(1000, 4000),
    short_tokens=st.integers(1, 200),
    num_short=st.integers(1, 12),
    same_flow=st.booleans(),
)
def test_a_short_request_begins_soon_behind_any_number_of_long_ones(
    num_long: int, long_tokens: int, short_tokens: int, num_short: int, same_flow: bool
) -> None:
    """Within two slices, and a look for each of those that come with it."""
    simulation = Simulation(fixed, num_blocks=60_000, max_queue_wait_s=0)
    long = [simulation.add(request(f"l{number}", max_tokens=long_tokens)) for number in range(num_long)]
    simulation.run(until_s=3.0)
    tenant = "default" if same_flow else "other"
    short = [
        simulation.add(request(f"s{number}", max_tokens=short_tokens, tenant=tenant, arrival_s=simulation.now))
        for number in range(num_short)
    ]
    came_s = simulation.now
    simulation.run(until_s=came_s + 2.0)
    for number, fate in enumerate(short):
        assert fate.began_s is not None
        assert fate.began_s - came_s <= 1.0 + 0.06 * (number + 1)
    assert all(fate.error is None for fate in [*long, *short])


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_nobody_gives_way_who_would_have_to_compute_for_longer_than_a_slice(prefix_caching: bool) -> None:
    def slow_prompts(num_rows: int, num_prompt_tokens: int) -> float:
        return 0.02 + num_prompt_tokens / 500

    simulation = Simulation(slow_prompts, max_running=2, max_queue_wait_s=0, prefix_caching=prefix_caching)
    for number in range(2):
        simulation.add(request(f"l{number}", prompt_tokens=1000, max_tokens=2000))
    simulation.run(until_s=10.0)
    simulation.add(request("short", max_tokens=5, arrival_s=simulation.now))
    simulation.run(until_s=14.0)
    assert simulation.scheduler.load().num_preemptions == int(prefix_caching)


def test_long_requests_go_on_while_short_ones_never_end() -> None:
    """Short ones come for as long as it takes, as many as there is room for; each long one has its turns."""
    simulation = Simulation(fixed, num_blocks=8192)
    long = [simulation.add(request(f"l{number}", max_tokens=400)) for number in range(20)]
    alone_s = 2 * 400 * 0.02  # in two batches
    simulation.run(arrivals(0.5 * capacity(fixed), 4 * alone_s, None, tenant="short"), until_s=4 * alone_s)
    assert all(fate.ended_s is not None and fate.error is None for fate in long), "half of the rows' time is theirs"


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_request_ends_once_whatever_its_deadline(data: st.DataObject) -> None:
    simulation = Simulation(growing, max_running=4, num_blocks=64, max_queue_wait_s=2.0)
    for number in range(data.draw(st.integers(1, 40))):
        simulation.add(
            request(
                f"r{number}",
                prompt_tokens=data.draw(st.integers(1, 60)),
                max_tokens=data.draw(st.integers(1, 80)),
                deadline_s=data.draw(st.none() | st.floats(0.01, 5).map(lambda s: simulation.now + s)),
                tenant=data.draw(st.sampled_from("ab")),
                priority=data.draw(st.sampled_from([0, 0, 1])),
                n=data.draw(st.sampled_from([1, 1, 3])),
            )
        )
        simulation.run(until_s=simulation.now + data.draw(st.floats(0, 0.5)))
    simulation.run()
    simulation.scheduler.check_integrity()
    for fate in simulation.fates.values():
        assert fate.ended_s is not None
        if fate.request.deadline_s is not None:
            assert fate.ended_s <= fate.request.deadline_s + 0.2 or fate.error is None


def test_what_has_room_is_not_refused_for_texts_that_nobody_waits_for() -> None:
    """Few long prompts have filled steps, with hardly a row beside them. As many as there are rows come at once then:
    they wait for prompts alone."""
    simulation = Simulation(lambda rows, prompts: 0.2 + 0.001 * prompts, max_queue_wait_s=20.0, prefix_caching=False)
    for number in range(3):
        simulation.add(request(f"first{number}", prompt_tokens=1000, max_tokens=100))
    simulation.run()
    fates = [simulation.add(request(f"r{number}", prompt_tokens=500, max_tokens=100)) for number in range(16)]
    simulation.run()
    assert [fate.error for fate in fates] == [None] * 16


def test_prompts_alone_can_be_too_much() -> None:
    """Rows are free all the time, but prompts are not done in time: what is refused is refused at once."""

    def step_s(rows: int, prompts: int) -> float:
        return 0.01 + 0.001 * prompts

    simulation = Simulation(step_s, max_queue_wait_s=3.0, prefix_caching=False)
    load = arrivals(2.0, 60, None)
    fields = {"prompt_tokens": 1000, "max_tokens": 2}
    simulation.run([(at_s, request(one.request_id, **fields, arrival_s=at_s)) for at_s, one in load])
    fates = list(simulation.fates.values())
    refused = [fate for fate in fates if fate.error is not None]
    assert all(isinstance(fate.error, Overloaded) for fate in refused)
    at_once = [fate for fate in refused if fate.ended_s is not None and fate.ended_s - fate.request.arrival_s < 0.5]
    assert len(at_once) >= 0.9 * len(refused) >= 20
    assert len(fates) - len(refused) >= 0.9 * 60 / 1.05


def test_who_waits_for_an_adapters_slot_waits_for_more_than_prompts() -> None:
    """Rows and blocks are free, but the only slot is taken for long."""
    simulation = Simulation(fixed, num_slots=1, max_queue_wait_s=3.0)
    for number in range(40):  # fill the rows, so that it is measured what they do
        simulation.add(request(f"first{number}"))
    simulation.run()
    simulation.add(request("long", max_tokens=4000), adapter("a"))
    simulation.run(until_s=simulation.now + 0.5)
    fates = [simulation.add(request(f"r{number}", max_tokens=400), adapter("b")) for number in range(15)]
    assert any(isinstance(fate.error, Overloaded) for fate in fates)
    assert simulation.add(request("no adapter", max_tokens=400)).error is None, "it passes them"
