"""Listings of a worker's adapters in pages, by permission."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.listings import ListingWorker, info, names_of

from loraplex_contracts.adapters import AdapterInfo
from loraplex_contracts.errors import ListingTooLarge, SourceUnavailable
from loraplex_proto.paging import list_query
from loraplex_proto.v1 import adapter_pb2
from loraplex_runtime.auth import Identity
from loraplex_server.grpc import adapter_service as listing
from loraplex_server.grpc.middleware import RequestGate

ACME = Identity("acme", adapters=("acme/*", "shared"))


async def test_without_a_page_size_everything_comes_at_once() -> None:
    worker = ListingWorker(["b", "d"])
    worker.put(info("c"), info("a", "failed", "source"))
    assert names_of(await worker.ask()) == ["a", "c"]
    answer = await worker.ask(include_unloaded=True)
    assert names_of(answer) == ["a", "b", "c", "d"]
    assert answer.next_page_token == ""
    assert (answer.adapters[1].state, answer.adapters[1].tier) == (1, 1)


async def test_an_unloaded_name_whose_content_drains_is_listed_as_both() -> None:
    worker = ListingWorker(["a"])
    worker.put(info("a", "draining"), info("b", "draining"))
    rows = (await worker.ask(include_unloaded=True)).adapters
    states = [(row.adapter_id, adapter_pb2.AdapterState.Name(row.state)) for row in rows]
    assert states == [("a", "ADAPTER_STATE_KNOWN"), ("a", "ADAPTER_STATE_DRAINING"), ("b", "ADAPTER_STATE_DRAINING")]


async def test_an_adapter_that_comes_with_the_model_is_listed() -> None:
    assert names_of(await ListingWorker(["a"], own=("model-heads",)).ask(include_unloaded=True)) == ["a", "model-heads"]


async def test_pages_are_full_and_the_last_one_has_no_token() -> None:
    worker = ListingWorker(f"a{number}" for number in range(6))
    pages = await worker.walk(include_unloaded=True, page_size=2)
    assert [names_of(page) for page in pages] == [["a0", "a1"], ["a2", "a3"], ["a4", "a5"]]


async def test_by_prefix_and_by_state() -> None:
    worker = ListingWorker(f"{org}/{number:03}" for org in ("a", "ab", "b") for number in range(300))
    worker.put(info("ab/100"), info("b/7", "on_host", "host"))
    found = names_of(*await worker.walk(include_unloaded=True, page_size=70, prefix="ab"))
    assert found == [f"ab/{number:03}" for number in range(300)]
    on_host = adapter_pb2.ADAPTER_STATE_ON_HOST
    assert names_of(await worker.ask(include_unloaded=True, state=on_host)) == ["b/7"]
    known = names_of(*await worker.walk(include_unloaded=True, state=adapter_pb2.ADAPTER_STATE_KNOWN, page_size=100))
    assert (len(known), "ab/100" in known) == (899, False)


async def test_nobody_learns_of_what_is_not_theirs() -> None:
    """Pages are full of the caller's own, no token names or betrays another adapter."""
    others = [f"{org}/{number}" for org in ("a", "acme-2", "b", "z") for number in range(400)]
    worker = ListingWorker([*others, "acme/1", "acme/2", "acme/3", "shared"])
    worker.put(info("zz/9"))
    pages = await worker.walk(ACME, include_unloaded=True, page_size=2)
    assert [names_of(page) for page in pages] == [["acme/1", "acme/2"], ["acme/3", "shared"]]
    fields = {"include_unloaded": True, "page_size": 2, "page_token": pages[0].next_page_token}
    assert list_query(adapter_pb2.ListAdaptersRequest(**fields)).after == "acme/2"  # pyright: ignore[reportArgumentType]
    assert names_of(await worker.ask(Identity("none"), include_unloaded=True)) == []


async def test_more_than_a_message_holds_is_refused_at_once_and_listed_in_pages() -> None:
    worker = ListingWorker(f"{'x' * 100}-{number:06}" for number in range(40_000))
    with pytest.raises(ListingTooLarge) as raised:
        await worker.ask(include_unloaded=True)
    assert raised.value.field == "page_size"
    assert len(names_of(*await worker.walk(include_unloaded=True, page_size=1000))) == 40_000


async def test_a_source_that_has_not_answered_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "FIRST_SCAN_S", 0.05)
    worker = ListingWorker()
    worker.put(info("a"))
    worker.source.has_looked = False
    with pytest.raises(SourceUnavailable) as raised:
        await worker.ask(include_unloaded=True)
    assert raised.value.retry_after_s
    assert names_of(await worker.ask()) == ["a"], "what is loaded can be said"
    waiting = asyncio.ensure_future(worker.ask(include_unloaded=True))
    await asyncio.sleep(0)
    worker.source.names, worker.source.has_looked = ["b"], True
    assert names_of(await waiting) == ["a", "b"]


async def test_listings_of_many_adapters_leave_the_event_loop_to_others() -> None:
    """50,000 adapters: the first page within 50 ms, gaps below 0.1 s; three times that on a machine with other work."""
    worker = ListingWorker(f"adapter-{number:06}" for number in range(50_000))
    clock = time.perf_counter
    longest_s = 0.0

    async def neighbour() -> None:
        nonlocal longest_s
        while True:
            before_s = clock()
            await asyncio.sleep(0)
            longest_s = max(longest_s, clock() - before_s)

    task = asyncio.ensure_future(neighbour())
    everything = [asyncio.ensure_future(worker.ask(include_unloaded=True)) for _ in range(4)]
    await asyncio.sleep(0.01)
    first_s: list[float] = []
    for _ in range(3):
        before_s = clock()
        assert len(names_of(await worker.ask(include_unloaded=True, page_size=100))) == 100
        first_s.append(clock() - before_s)
    assert {len(answer.adapters) for answer in await asyncio.gather(*everything)} == {50_000}
    task.cancel()
    assert min(first_s) < 3 * 0.05
    assert longest_s < 3 * 0.1


async def test_loads_and_unloads_are_logged_with_tenant_and_adapter(caplog: pytest.LogCaptureFixture) -> None:
    async def done(*_: object, **__: object) -> list[AdapterInfo]:
        return [info("sql")]

    engine: Any = SimpleNamespace(load_adapter=done, unload_adapter=done, get_adapter=done)
    one = listing.AdapterServicer(engine, RequestGate(), ListingWorker()._listing)
    with caplog.at_level(logging.INFO, "loraplex.requests"):
        await one.LoadAdapter(adapter_pb2.LoadAdapterRequest(adapter_id="sql"), None)
        await one.GetAdapter(adapter_pb2.GetAdapterRequest(adapter_id="sql"), None)
        await one.UnloadAdapter(adapter_pb2.UnloadAdapterRequest(adapter_id="sql"), None)
    lines = [record.getMessage().partition(" total_s")[0] for record in caplog.records]
    assert lines == [f"{method} ended: OK (tenant=default adapter=sql" for method in ("LoadAdapter", "UnloadAdapter")]


async def test_a_load_that_goes_well_has_a_request_id() -> None:
    async def load_adapter(*_: Any, **__: Any) -> list[AdapterInfo]:
        return [info("sql")]

    gate = RequestGate()
    servicer = listing.AdapterServicer(cast("Any", SimpleNamespace(load_adapter=load_adapter)), gate, cast("Any", None))
    with gate.call("LoadAdapter") as call:
        await cast("Any", servicer.LoadAdapter).__wrapped__(
            servicer, adapter_pb2.LoadAdapterRequest(adapter_id="sql"), None
        )
    assert call.record.request_id
    assert call.record.adapter == "sql"
