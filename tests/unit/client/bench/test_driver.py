"""Sending a load to a scripted server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from loraplex import AsyncClient, InvalidArgument
from loraplex.bench.arrivals import Arrival, LoadSpec
from loraplex.bench.driver import Recording, Selection, Session, run_load
from loraplex_contracts import errors
from loraplex_proto.v1.inference_pb2 import FINISH_REASON_LENGTH, GenerateStreamResponse, Usage


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
        await run_load(client, load, {"ignore_eos": True}, recording, max_in_flight=max_in_flight)
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
        await run_load(client, arrivals(0.0, 0.05, adapter_id="sql"), {}, recording, max_in_flight=9)
    assert recording.summary().failed == 2
    assert [seen.method for seen in fake.seen].count("ListAdapters") == 1


async def test_cancelled_in_the_middle_it_keeps_what_it_has(fake: Any) -> None:
    fake.is_endless = True
    recording = Recording()
    async with AsyncClient(fake.address) as client:
        await client.info()
        load = arrivals(0.0, 0.0, 60.0)
        task = asyncio.create_task(run_load(client, load, {}, recording, max_in_flight=10))
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
