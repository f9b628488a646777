"""Figures out of what became of requests."""

from __future__ import annotations

import pytest

from loraplex.bench.arrivals import Arrival
from loraplex.bench.driver import Residency
from loraplex.bench.outcomes import Distribution, Failure, Outcome, distribution, percentile, summarize
from loraplex.types import Adapter, Usage


def arrival(at_s: float = 0.0, adapter_id: str = "") -> Arrival:
    return Arrival(at_s, adapter_id, max_tokens=8, token_ids=(1,))


def done(at_s: float, sent_s: float, token_times: list[tuple[float, int]], *, cold: bool = False) -> Outcome:
    outcome = Outcome(arrival(at_s, "x"), sent_s=sent_s, is_cold=cold)
    for now_s, num_tokens in token_times:
        outcome.take(num_tokens, now_s)
    outcome.ended_s = token_times[-1][0]
    return outcome


def test_latencies_count_from_when_the_request_was_due() -> None:
    outcome = done(1.0, 3.0, [(4.0, 1), (4.5, 1), (6.0, 1)])
    assert (outcome.ttft_s, outcome.total_s) == (3.0, 5.0)
    assert outcome.tpot_s == pytest.approx(1.0)


def test_tokens_that_came_with_the_first_took_no_time_of_their_own() -> None:
    outcome = done(0.0, 0.0, [(1.0, 4), (3.0, 4)])
    assert outcome.num_tokens == 8
    assert outcome.tpot_s == pytest.approx(0.5)
    assert done(0.0, 0.0, [(1.0, 4)]).tpot_s is None


def test_a_message_without_tokens_is_no_first_token() -> None:
    outcome = done(0.0, 0.0, [(1.0, 0), (2.0, 1), (9.0, 0)])
    assert (outcome.ttft_s, outcome.last_token_s, outcome.total_s) == (2.0, 2.0, 9.0)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 50), (0.9, 90), (0.99, 99), (1.0, 100)])
def test_percentiles_by_nearest_rank(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(1, 101)], share) == value
    assert percentile([7.0], share) == 7.0


def test_a_distribution() -> None:
    assert distribution([3.0, None, 1.0, 2.0]) == Distribution(3, 2.0, 2.0, 3.0, 3.0, 3.0)
    assert distribution([None]) is None


def test_a_summary() -> None:
    outcomes = [
        done(0.0, 0.0, [(1.0, 1), (2.0, 1)], cold=True),
        done(1.0, 1.5, [(1.5, 1), (2.5, 1)]),
        Outcome(arrival(2.0), sent_s=2.0, failure=Failure("UNAVAILABLE", "QUEUE_FULL", "full")),
        Outcome(arrival(2.0), sent_s=2.0, failure=Failure("UNAVAILABLE", "QUEUE_FULL", "still full")),
        Outcome(arrival(2.0), sent_s=2.0, failure=Failure("NOT_FOUND", "ADAPTER_NOT_FOUND", "what?")),
        Outcome(arrival(3.0), sent_s=4.0, was_held=True),  # under way
        Outcome(arrival(3.0), was_held=True),  # not sent
    ]
    outcomes[0].usage = Usage(drafted_tokens=6, accepted_tokens=4)
    outcomes[5].take(3, 5.0)
    found = summarize(outcomes, num_scheduled=10, elapsed_s=5.0)
    assert (found.scheduled, found.sent, found.completed, found.failed, found.unfinished) == (10, 6, 2, 3, 5)
    assert (found.held, found.output_tokens, found.output_tokens_per_s, found.requests_per_s) == (2, 7, 1.4, 0.4)
    assert (found.drafted_tokens, found.accepted_tokens) == (6, 4)
    assert [(one.reason, one.count, one.example) for one in found.errors] == [
        ("QUEUE_FULL", 2, "full"),
        ("ADAPTER_NOT_FOUND", 1, "what?"),
    ]
    assert found.ttft_s is not None
    assert found.ttft_s.count == 2
    assert (found.cold_ttft_s, found.warm_ttft_s) == (distribution([1.0]), distribution([0.5]))
    assert found.late_s == distribution([0.0, 0.5, 0.0, 0.0, 0.0])


def test_nothing_at_all() -> None:
    found = summarize([], num_scheduled=3, elapsed_s=0.0)
    assert (found.unfinished, found.output_tokens_per_s, found.ttft_s) == (3, 0.0, None)


def row(adapter_id: str, state: str, worker: str = "w1") -> Adapter:
    return Adapter(adapter_id, "lora", "d", state, "device", 1, 8, 0, False, "", "", worker)  # type: ignore[arg-type]


def test_an_adapter_is_cold_until_somebody_has_it() -> None:
    residency = Residency()
    assert residency.is_cold("sql")
    assert not residency.is_cold("")
    residency.update([row("sql", "on_host"), row("sql", "on_device", "w2"), row("xml", "fetching")])
    assert not residency.is_cold("sql")
    assert residency.is_cold("xml")
    residency.answered("xml")
    assert not residency.is_cold("xml")
    residency.update([row("xml", "on_device")])  # sql was evicted
    assert residency.is_cold("sql")
