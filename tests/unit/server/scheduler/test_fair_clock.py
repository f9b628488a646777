"""Start-time fair queueing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.load import Flow
from loraplex_server.scheduler.fair_clock import FairClock

A, B = ("a", ""), ("b", "")


def served(clock: FairClock, arrivals: list[tuple[Flow, int]], num_served: int) -> list[tuple[Flow, int]]:
    """The first requests that are served, when all come at once."""
    queue = sorted((clock.enqueue(*one).start, number, one) for number, one in enumerate(arrivals))
    for start, _, (flow, _) in queue[:num_served]:
        clock.dequeue(flow)
        clock.begin(start)
    return [one for *_, one in queue[:num_served]]


def test_one_flow_is_served_in_order_of_arrival() -> None:
    arrivals = [(A, 5), (A, 500), (A, 1), (A, 7)]
    assert served(FairClock(), arrivals, 4) == arrivals


def test_a_flow_that_floods_waits_for_itself() -> None:
    clock = FairClock()
    queue = [clock.enqueue(A, 100).start for _ in range(50)]
    assert clock.enqueue(B, 100).start <= queue[0]


def test_who_comes_late_has_no_claim_on_the_past() -> None:
    clock = FairClock()
    for _ in range(10):
        start = clock.enqueue(A, 100).start
        clock.dequeue(A)
        clock.begin(start)
    starts = [clock.enqueue(B, 100).start for _ in range(3)]
    assert starts[0] == 900
    assert clock.start_of(A) == 1000 < starts[2]


def test_what_was_not_used_is_given_back() -> None:
    clock = FairClock()
    clock.charge(A, clock.enqueue(A, 4096), -4000)
    assert clock.start_of(A) == 96


@given(sizes=st.lists(st.integers(1, 400), min_size=40, max_size=40), num_served=st.integers(1, 40))
def test_two_flows_get_the_same_within_one_request_of_each(sizes: list[int], num_served: int) -> None:
    """Both flows get the same while both have something waiting."""
    arrivals = [(A, size) for size in sizes] + [(B, size) for size in reversed(sizes)]
    taken = served(FairClock(), arrivals, num_served)
    by_flow = {flow: sum(size for at, size in taken if at == flow) for flow in (A, B)}
    assert abs(by_flow[A] - by_flow[B]) <= 2 * max(sizes)


@given(num_adapters=st.integers(1, 30), num_served=st.integers(10, 60))
def test_a_tenant_with_many_adapters_gets_no_more_than_one_with_one(num_adapters: int, num_served: int) -> None:
    many = [("many", f"a{number}") for number in range(num_adapters)]
    clock = FairClock()
    arrivals = [(flow, 10) for _ in range(60) for flow in many] + [(("one", ""), 10)] * 60
    taken = served(clock, arrivals, num_served)
    num_of_one = sum(flow[0] == "one" for flow, _ in taken)
    # Requests that open a flow wait for each other, beside those of flows that go on.
    assert num_of_one >= num_served / 3 - 2


def test_another_adapter_for_each_request_is_no_way_to_the_front() -> None:
    clock = FairClock()
    starts = [clock.enqueue(("many", f"a{number}"), 10).start for number in range(100)]
    assert starts == [10.0 * number for number in range(100)]
    assert clock.enqueue(("one", ""), 10).start == 0
    # One at a time as well: the clock goes on.
    clock = FairClock()
    waiting = clock.enqueue(B, 10).start, clock.enqueue(B, 10).start
    for number in range(3):
        flow = ("many", f"a{number}")
        start = clock.enqueue(flow, 10).start
        clock.dequeue(flow)
        clock.begin(start)
    assert start > waiting[1]


def test_what_opens_a_flow_is_given_back_too() -> None:
    clock = FairClock()
    clock.charge(("t", "a"), clock.enqueue(("t", "a"), 4096), -4000)
    assert clock.start_of(("t", "b")) == 96


def test_a_tenant_with_several_flows_gets_back_what_it_was_charged() -> None:
    clock = FairClock()
    flows = [("t", f"a{number}") for number in range(3)]
    places = [clock.enqueue(flow, 4096) for flow in flows]
    assert [place.num_flows for place in places] == [1, 2, 3]
    for flow, place in zip(flows, places, strict=True):
        clock.charge(flow, place, -4000)
    # As if each had asked for 96 tokens.
    ends = [place.start + 96 * place.num_flows for place in places]
    assert [clock.start_of(flow) for flow in flows] == ends


def test_what_a_text_had_beyond_its_charge_is_charged_even_where_its_flow_is_forgotten() -> None:
    clock = FairClock()
    place = clock.enqueue(A, 256)
    clock.charge(A, place, 744)
    assert clock.start_of(A) == 1000
    del clock._ends[A]  # pyright: ignore[reportPrivateUsage]
    clock.charge(A, place, 744)
    assert clock.start_of(A) == 744


def test_what_waits_moves_but_not_into_the_past() -> None:
    clock = FairClock()
    place = clock.enqueue(A, 100)
    clock.begin(50.0)
    assert clock.moved(place, 70).start == 70
    assert clock.moved(place, -70).start == 50


def test_flows_that_are_gone_are_forgotten() -> None:
    clock = FairClock()
    for number in range(10_000):
        flow = (f"t{number}", "")
        place = clock.enqueue(flow, 10)
        clock.dequeue(flow)
        clock.begin(place.start)
        clock.charge(flow, place, -10)
    assert len(clock._ends) < 200  # pyright: ignore[reportPrivateUsage]
