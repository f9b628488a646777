"""Load generator: arrivals, outcomes, and sending to a scripted server."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from typing import Any

import pytest

from loraplex import AsyncClient, InvalidArgument
from loraplex.bench import (
    DEFAULT_DURATION_S,
    Arrival,
    Distribution,
    Driver,
    Lengths,
    LoadSpec,
    Outcome,
    Popularity,
    Recording,
    Residency,
    Selection,
    Session,
    choices,
    distribution,
    gaps,
    parse_lengths,
    parse_popularity,
    percentile,
    plan,
    summarize,
    weights,
)
from loraplex.types import Adapter
from loraplex.types import Usage as SdkUsage
from loraplex_contracts import errors
from loraplex_proto.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateStreamResponse, Usage

SPEC = LoadSpec(rate=10, duration_s=20, adapter_ids=("a", "b", "c"), vocab_size=50, excluded_ids=frozenset({2}))


@pytest.mark.parametrize("cv", [0.5, 1.0, 3.0])
def test_gaps_have_the_mean_and_the_spread_that_were_asked_for(cv: float) -> None:
    found = list(islice(gaps(4.0, cv, Random(1)), 40_000))
    mean = statistics.fmean(found)
    assert mean == pytest.approx(0.25, rel=0.05)
    assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.05)


def test_even_gaps_and_none() -> None:
    assert list(islice(gaps(4.0, 0.0, Random(1)), 3)) == [0.25] * 3
    assert list(islice(gaps(float("inf"), 1.0, Random(1)), 3)) == [0.0] * 3


def test_a_plan_ends_with_its_duration() -> None:
    found = plan(SPEC)
    assert 150 < len(found) < 250
    assert all(0 < one.at_s < 20 for one in found)
    assert all(first.at_s <= second.at_s for first, second in pairwise(found))


def test_a_plan_ends_with_its_number() -> None:
    assert len(plan(replace(SPEC, num_requests=7))) == 7
    at_once = plan(replace(SPEC, rate=float("inf"), duration_s=None, num_requests=7))
    assert [one.at_s for one in at_once] == [0.0] * 7


def test_the_same_seed_gives_the_same_plan() -> None:
    assert plan(SPEC) == plan(SPEC)
    assert plan(SPEC) != plan(replace(SPEC, seed=1))


def test_times_and_prompts_do_not_depend_on_the_adapters() -> None:
    ours, theirs = plan(SPEC), plan(replace(SPEC, adapter_ids=()))
    assert [(one.at_s, one.token_ids) for one in ours] == [(one.at_s, one.token_ids) for one in theirs]
    assert {one.adapter_id for one in ours} == {"a", "b", "c"}
    assert {one.adapter_id for one in theirs} == {""}


def test_lengths_are_drawn_from_their_ranges() -> None:
    found = plan(replace(SPEC, prompt_tokens=Lengths(3, 5), output_tokens=Lengths(7, 8)))
    assert {len(one.token_ids or ()) for one in found} == {3, 4, 5}
    assert {one.max_tokens for one in found} == {7, 8}
    used = {token for one in found for token in one.token_ids or ()}
    assert used == set(range(50)) - {2}


def test_prompts_from_texts() -> None:
    found = plan(replace(SPEC, texts=("x", "y")))
    assert {one.text for one in found} == {"x", "y"}
    assert {one.token_ids for one in found} == {None}


@pytest.mark.parametrize(("text", "lengths"), [("7", Lengths(7, 7)), ("32-128", Lengths(32, 128))])
def test_lengths_as_text(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text, field="--x") == lengths
    assert str(lengths) == text


@pytest.mark.parametrize("text", ["", "0", "-3", "5-", "9-5", "a", "1-2-3", "1.5"])
def test_lengths_that_are_none(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--x takes a number of tokens"):
        parse_lengths(text, field="--x")


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"rate": 0}, "--rate"),
        ({"rate": float("nan")}, "--rate"),
        ({"cv": -1}, "--cv"),
        ({"duration_s": 0}, "--duration"),
        ({"num_requests": 0}, "--num-requests"),
        ({"rate": float("inf")}, "--num-requests"),
    ],
)
def test_loads_that_there_are_not(change: dict[str, float], flag: str) -> None:
    with pytest.raises(InvalidArgument, match=flag):
        replace(SPEC, **change)


def test_a_load_that_nothing_else_limits_has_a_duration() -> None:
    assert LoadSpec(rate=5).duration_s == DEFAULT_DURATION_S
    assert LoadSpec(rate=5, num_requests=3).duration_s is None
    assert LoadSpec(rate=5, duration_s=2).duration_s == 2


# --- popularity of adapters -----------------------------------------------------------------------------------------

NAMES = ("a", "b", "c", "d")


def counts(text: str, num_draws: int = 20_000) -> Counter[str]:
    return Counter(islice(choices(parse_popularity(text), NAMES, Random(1)), num_draws))


def test_identical_takes_the_first() -> None:
    assert counts("identical") == {"a": 20_000}


def test_distinct_takes_turns() -> None:
    assert list(islice(choices(Popularity("distinct"), NAMES, Random(1)), 6)) == ["a", "b", "c", "d", "a", "b"]


@pytest.mark.parametrize(
    ("text", "raw"),
    [
        ("uniform", [1, 1, 1, 1]),
        ("skewed", [1, 1 / 1.5, 1 / 1.5**2, 1 / 1.5**3]),
        ("zipf", [1, 1 / 2, 1 / 3, 1 / 4]),
        ("zipf:2", [1, 1 / 4, 1 / 9, 1 / 16]),
    ],
)
def test_shares(text: str, raw: list[float]) -> None:
    shares = [share / sum(raw) for share in raw]
    assert weights(parse_popularity(text), 4) == pytest.approx(shares)
    drawn = counts(text)
    assert [drawn[name] / 20_000 for name in NAMES] == pytest.approx(shares, abs=0.015)


def test_one_adapter_is_asked_for_always() -> None:
    for kind in ("identical", "distinct", "uniform", "skewed", "zipf:3"):
        assert set(islice(choices(parse_popularity(kind), ("x",), Random(1)), 300)) == {"x"}


@pytest.mark.parametrize("text", ["", "even", "zipf:", "zipf:-1", "zipf:x", "zipf:inf", "uniform:2"])
def test_what_there_is_not(text: str) -> None:
    with pytest.raises(InvalidArgument, match="--popularity takes identical"):
        parse_popularity(text)


def test_as_it_was_said() -> None:
    for text in ("uniform", "zipf:0.5"):
        assert str(parse_popularity(text)) == text


# --- outcomes ---------------------------------------------------------------------------------------------------------


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
        Outcome(arrival(2.0), sent_s=2.0, failure=errors.QueueFull("full")),
        Outcome(arrival(2.0), sent_s=2.0, failure=errors.QueueFull("still full")),
        Outcome(arrival(2.0), sent_s=2.0, failure=errors.AdapterNotFound("what?")),
        Outcome(arrival(3.0), sent_s=4.0, was_held=True),  # under way
        Outcome(arrival(3.0), was_held=True),  # not sent
    ]
    outcomes[0].usage = SdkUsage(drafted_tokens=6, accepted_tokens=4)
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


# --- sending ----------------------------------------------------------------------------------------------------------


def chunks(num: int = 2) -> list[GenerateStreamResponse]:
    found = [GenerateStreamResponse(text_delta="a", token_ids=[1]) for _ in range(num)]
    found[-1].finish_reason = FINISH_REASON_LENGTH
    found[-1].usage.CopyFrom(Usage(completion_tokens=num, drafted_tokens=3, accepted_tokens=1))
    return found


def arrivals(*times: float, adapter_id: str = "") -> list[Arrival]:
    return [Arrival(at_s, adapter_id, max_tokens=5, token_ids=(1, 2)) for at_s in times]


async def drive(fake: Any, load: list[Arrival], max_in_flight: int = 100) -> Recording:
    recording = Recording()
    async with AsyncClient(fake.address) as client:
        await client.info()
        await Driver(client, {"ignore_eos": True}, recording, max_in_flight).run(load)
    return recording


async def test_requests_go_out_when_they_are_due_whatever_became_of_the_others(fake: Any) -> None:
    fake.chunks, fake.delay_s = chunks(), 0.4
    recording = await drive(fake, arrivals(0.0, 0.1, 0.2))
    sent = [one.sent_s for one in recording.outcomes]
    assert sent == pytest.approx([0.0, 0.1, 0.2], abs=0.09), "none waited for the one before, which took 0.4 s"
    summary = recording.summary()
    assert (summary.completed, summary.output_tokens, summary.held) == (3, 6, 0)
    assert summary.ttft_s is not None
    assert 0.4 <= summary.ttft_s.p50 < 0.8
    assert (summary.drafted_tokens, summary.accepted_tokens) == (9, 3)
    request = fake.seen[-1].request
    assert (list(request.token_ids.ids), request.stopping.max_tokens, request.stopping.ignore_eos) == ([1, 2], 5, True)


async def test_what_is_held_back_counts_its_wait(fake: Any) -> None:
    fake.chunks, fake.delay_s = chunks(), 0.2
    recording = await drive(fake, arrivals(0.0, 0.0, 0.0), max_in_flight=1)
    latencies = [one.ttft_s for one in recording.outcomes]
    assert latencies == sorted(latencies, key=lambda value: value or 0)
    assert latencies[2] is not None
    assert latencies[2] >= 0.6, "due at once, served third"
    assert recording.summary().held == 2
    assert recording.summary().late_s is not None


async def test_failures_are_counted_and_the_rest_goes_on(fake: Any) -> None:
    fake.stream_error = errors.QueueFull("too many wait")
    summary = (await drive(fake, arrivals(0.0, 0.05))).summary()
    assert (summary.completed, summary.failed, summary.unfinished) == (0, 2, 0)
    (count,) = summary.errors
    assert (count.code, count.reason, count.count) == ("RESOURCE_EXHAUSTED", "QUEUE_FULL", 2)
    assert summary.ttft_s is None


async def test_cold_is_whose_adapter_was_not_ready(fake: Any, make_adapter: Callable[..., Any]) -> None:
    fake.chunks, fake.adapters = chunks(), [make_adapter("sql")]
    load = arrivals(0.0, adapter_id="sql") + arrivals(0.1, 0.3, adapter_id="xml") + arrivals(0.3)
    recording = await drive(fake, load)
    assert [one.is_cold for one in recording.outcomes] == [False, True, False, False]
    summary = recording.summary()
    assert summary.cold_ttft_s is not None
    assert summary.warm_ttft_s is not None
    assert (summary.cold_ttft_s.count, summary.warm_ttft_s.count) == (1, 2)


async def test_a_server_that_shows_no_adapters_is_measured_all_the_same(fake: Any) -> None:
    fake.error = errors.PermissionDenied("not for you")
    recording = Recording()
    async with AsyncClient(fake.address) as client:
        await Driver(client, {}, recording, 9).run(arrivals(0.0, 0.05, adapter_id="sql"))
    assert recording.summary().failed == 2
    assert [seen.method for seen in fake.seen].count("ListAdapters") == 1


async def test_cancelled_in_the_middle_it_keeps_what_it_has(fake: Any) -> None:
    fake.is_endless = True
    recording = Recording()
    async with AsyncClient(fake.address) as client:
        await client.info()
        load = arrivals(0.0, 0.0, 60.0)
        task = asyncio.create_task(Driver(client, {}, recording, 10).run(load))
        while not (recording.outcomes and recording.outcomes[-1].num_tokens > 2):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    summary = recording.summary()
    assert (summary.scheduled, summary.sent, summary.completed, summary.unfinished) == (3, 2, 0, 3)
    assert summary.output_tokens > 2
    assert 0 < summary.elapsed_s < 30
    assert fake.cancelled.wait(3)


# --- what to send ---------------------------------------------------------------------------------------------------


async def find(fake: Any, selection: Selection) -> tuple[str, ...]:
    async with AsyncClient(fake.address) as client:
        return await selection.find(client)


async def test_which_adapters(fake: Any, make_adapter: Callable[..., Any]) -> None:
    names = ("t-b", "t-a", "other")
    fake.adapters = [make_adapter(name, worker=worker) for name in names for worker in ("w1", "w2")]
    fake.adapters += [make_adapter("heads", kind="medusa"), make_adapter("both", kind="combined")]
    assert await find(fake, Selection()) == ("both", "other", "t-a", "t-b")
    assert fake.seen[-1].request.include_unloaded
    assert await find(fake, Selection(prefix="t-")) == ("t-a", "t-b")
    assert await find(fake, Selection(prefix="t-", num_adapters=1)) == ("t-a",)
    assert await find(fake, Selection(named=("x", "y"), num_adapters=1)) == ("x",)
    assert await find(fake, Selection(base_only=True)) == ()


@pytest.mark.parametrize("selection", [Selection(prefix="none-"), Selection(num_adapters=3)])
async def test_adapters_that_are_not_there(fake: Any, make_adapter: Callable[..., Any], selection: Selection) -> None:
    fake.adapters = [make_adapter("a"), make_adapter("b")]
    with pytest.raises(InvalidArgument, match="adapter"):
        await find(fake, selection)


async def test_a_server_that_has_none_is_asked_for_the_base_model(fake: Any) -> None:
    fake.chunks = chunks()
    session = Session(LoadSpec(rate=float("inf"), num_requests=3), Selection(), {})
    async with AsyncClient(fake.address) as client:
        await session.run(client)
    assert session.recording.summary().completed == 3
    document = session.described()
    assert document["server"] == {"role": "worker", "model": "m", "version": "0"}
    assert (document["load"]["num_adapters"], document["load"]["rate"]) == (0, "inf")
    sent = [seen.request for seen in fake.seen if seen.method == "GenerateStream"]
    assert {request.adapter_id for request in sent} == {""}
    assert all(0 <= token < 100 and token != 2 for request in sent for token in request.token_ids.ids)
