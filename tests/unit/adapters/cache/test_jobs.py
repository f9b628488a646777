"""The fair queue of background jobs."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from loraplex_adapters.cache.jobs import FairQueue


def test_flows_take_turns() -> None:
    queue = FairQueue[str]()
    for number in range(5):
        queue.put(f"a{number}", "a")
    assert queue.get() == "a0"
    queue.put("b0", "b")
    queue.put("b1", "b")
    queue.put("c0")
    assert [queue.get() for _ in range(queue.qsize())] == ["a1", "b0", "c0", "a2", "b1", "a3", "a4"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_nothing_is_lost_and_no_flow_waits_for_more_than_one_of_each_other(puts: list[tuple[str, bool]]) -> None:
    queue, waiting, waits = FairQueue[tuple[str, int]](), list[tuple[str, int]](), dict.fromkeys("abc", 0)

    def take() -> None:
        flow, _ = taken = queue.get()
        assert taken == next(item for item in waiting if item[0] == flow), "a flow's own are in order"
        waiting.remove(taken)
        for other in waits:
            waits[other] = waits[other] + 1 if other != flow and any(item[0] == other for item in waiting) else 0
            assert waits[other] <= 2

    for number, (flow, takes) in enumerate(puts):
        queue.put((flow, number), flow)
        waiting.append((flow, number))
        if takes:
            take()
    while waiting:
        take()
    assert queue.qsize() == 0


def test_get_waits() -> None:
    queue, found = FairQueue[int](), list[int]()
    thread = threading.Thread(target=lambda: found.append(queue.get()))
    thread.start()
    queue.put(7)
    thread.join(10)
    assert found == [7]


def test_clear() -> None:
    queue = FairQueue[int]()
    queue.put(1, "a")
    queue.put(2, "b")
    queue.clear()
    queue.put(3)
    assert queue.get() == 3
