"""AdapterService through the router, and who may use it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.credentials import credential, write_credentials
from support.fake_workers import Cluster, FakeWorker, Generate, cluster, error_of, router_for, until

from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterMemoryFull,
    AdapterNotFound,
    DigestMismatch,
    Draining,
    EngineLost,
    InvalidAdapterId,
    InvalidArgument,
    ListingTooLarge,
    NoWorker,
    PermissionDenied,
    QueueFull,
    Unauthenticated,
    WorkerLost,
)
from loraplex_proto.v1 import adapter_pb2, adapter_pb2_grpc, inference_pb2_grpc
from loraplex_router.policy import rendezvous_order

Load, Unload, Get = adapter_pb2.LoadAdapterRequest, adapter_pb2.UnloadAdapterRequest, adapter_pb2.GetAdapterRequest
List = adapter_pb2.ListAdaptersRequest


def stub(channel: grpc.aio.Channel) -> Any:
    return adapter_pb2_grpc.AdapterServiceStub(channel)


def homes(c: Cluster, adapter_id: str) -> list[FakeWorker]:
    return [c.by_address(address) for address in rendezvous_order(adapter_id, [w.address for w in c.workers])]


# --- fan-out ------------------------------------------------------------------------------------------------------


async def test_a_load_goes_to_the_homes() -> None:
    async with cluster(4) as c:
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters
        assert [row.worker for row in rows] == [worker.address for worker in homes(c, "sql")[:2]]
        assert [bool(worker.adapters) for worker in homes(c, "sql")] == [True, True, False, False]


async def test_whoever_is_next_takes_the_place_of_a_home_that_is_going() -> None:
    async with cluster(4) as c:
        homes(c, "sql")[0].adapter_error = Draining("going")
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters
        assert [row.worker for row in rows] == [worker.address for worker in homes(c, "sql")[1:3]]


async def test_a_load_binds_the_name_anew_wherever_it_is_bound() -> None:
    async with cluster(5) as c:
        *_, spilled, listed, other = homes(c, "sql")
        spilled.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="v1")
        # Files of that name, which it will read as they are when they are needed.
        listed.adapters["sql"] = adapter_pb2.Adapter(
            adapter_id="sql", state=adapter_pb2.ADAPTER_STATE_KNOWN, tier=adapter_pb2.ADAPTER_TIER_SOURCE
        )
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters
        assert [row.worker for row in rows] == [w.address for w in [*homes(c, "sql")[:2], spilled]]
        assert not spilled.adapters["sql"].digest
        assert [worker.calls.count("LoadAdapter") for worker in (spilled, listed, other)] == [1, 0, 0]


@pytest.mark.parametrize("place", [1, 2])
async def test_a_load_that_leaves_the_old_content_somewhere_is_no_success(place: int) -> None:
    async with cluster(3) as c:
        worker = homes(c, "sql")[place]
        worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="v1")
        worker.load_error = AdapterMemoryFull("full")
        assert isinstance(await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql"))), AdapterMemoryFull)
        # One that is going takes no more requests.
        worker.load_error = Draining("going")
        assert len((await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters) == 2


async def test_a_refused_load_is_told_before_a_worker_that_is_going() -> None:
    async with cluster(3) as c:
        first, *others = homes(c, "sql")
        first.load_error = Draining("going")
        for worker in others:
            worker.load_error = AdapterMemoryFull("too large", metadata={"can_ever_fit": "false"})
        assert isinstance(await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql"))), AdapterMemoryFull)


async def test_a_worker_that_had_it_and_is_lost_did_not_load_it() -> None:
    async with cluster(3) as c:
        worker = homes(c, "sql")[2]
        worker.report(tiers={"sql": 4})
        await until(lambda: "sql" in c.router.replicas[worker.address].tiers)
        worker.adapter_error = EngineLost("gone")
        assert isinstance(await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql"))), EngineLost)


async def test_what_is_wrong_with_an_adapter_is_not_asked_for_twice() -> None:
    async with cluster(4) as c:
        for worker in c.workers:
            worker.load_error = AdapterInvalid("rank 0", resource="sql")
        error = await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql")))
        assert isinstance(error, AdapterInvalid)
        assert error.resource == "sql"
        assert sum(worker.calls.count("LoadAdapter") for worker in c.workers) == 2


async def test_a_load_that_one_home_refuses_is_no_success() -> None:
    async with cluster(3) as c:
        first, second, _ = homes(c, "sql")
        first.load_error = DigestMismatch("other files", resource="sql")
        load = Load(adapter_id="sql", expected_digest="a" * 64)
        error = await error_of(stub(c.channel).LoadAdapter(load))
        assert isinstance(error, DigestMismatch)
        assert second.adapters, "the other one has loaded it"
        first.load_error = AdapterNotFound("no such folder", resource="sql")
        assert isinstance(await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql"))), AdapterNotFound)


async def test_a_load_that_leaves_workers_with_different_contents_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(3) as c:
        first, second, _ = homes(c, "sql")
        first.digest, second.digest = "1" * 64, "2" * 64
        # Their files may be the same.
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters
        assert {(row.worker, row.digest) for row in rows} == {(one.address, one.digest) for one in (first, second)}
        (line,) = [record.getMessage() for record in caplog.records if "has the digest" in record.getMessage()]
        error = await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql", expected_digest="1" * 64)))
        assert isinstance(error, DigestMismatch)
        for worker in (first, second):
            assert all(f"{worker.digest} at {worker.address}" in text for text in (line, error.message))
        # Names that are bound stay as they are.
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql", if_absent=True))


async def test_a_load_goes_to_workers_that_remember_a_source_and_to_those_that_serve_the_folder() -> None:
    async with cluster(4) as c:
        home, *_, restarted = homes(c, "sql")
        restarted.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="1" * 64, source="v1")
        home.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="old")
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))
        assert [len(worker.loads) for worker in homes(c, "sql")] == [1, 1, 0, 1]
        restarted.digest, home.digest = "1" * 64, "2" * 64
        error = await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql")))
        assert isinstance(error, DigestMismatch)
        assert f"{restarted.digest} at {restarted.address} (from 'v1')" in error.message
        # Once requests go only to those that have the source, a load without one does too.
        restarted.report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) == {restarted.address})
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters
        assert [row.worker for row in rows] == [restarted.address]


async def test_a_load_that_another_one_has_crossed_is_no_success() -> None:
    async with cluster(3) as c:
        first, second, third = homes(c, "sql")
        first.may_load = asyncio.Event()
        load = asyncio.ensure_future(error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql", source="v1"))))
        await until(lambda: "LoadAdapter" in first.calls and "sql" in second.adapters and "sql" in third.adapters)
        for worker in (second, third):  # as a load of another router has bound it meanwhile
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="2" * 64, source="v2")
        first.digest = "1" * 64
        first.may_load.set()
        assert isinstance(await load, DigestMismatch)


async def test_workers_of_two_releases_may_have_different_digests_of_one_adapter() -> None:
    async with cluster(2) as c:
        first, second = c.workers
        first.digest, second.digest = "1" * 64, "2" * 64
        first.info["version"], second.info["version"] = "0.1.0", "0.2.0"
        for worker in c.workers:
            worker.end_watches()
        await until(lambda: {one.info.version for one in c.router.replicas.all() if one.info} == {"0.1.0", "0.2.0"})
        assert len((await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))).adapters) == 2


async def test_a_load_from_a_source_goes_to_all_and_a_later_one_without_it_to_those_that_have_it() -> None:
    async with cluster(4) as c:
        newcomer, *others = homes(c, "sql")
        for worker in c.workers:
            worker.digest = "1" * 64
        newcomer.load_error = AdapterMemoryFull("full")
        rows = (await stub(c.channel).LoadAdapter(Load(adapter_id="sql", source="v1"))).adapters
        assert {row.worker for row in rows} == {worker.address for worker in others}
        newcomer.load_error = None
        for worker in others:
            worker.report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) == {worker.address for worker in others})
        # Where the name came from is not known there: it would take the folder of that name.
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql"))
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql", source="v2", if_absent=True))
        assert newcomer.adapters == {}
        assert [len(worker.loads) for worker in others] == [3, 3, 3]
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql", source="v1", if_absent=True))
        assert newcomer.adapters["sql"].source == "v1"
        # That of its own name is what every worker takes by itself.
        await stub(c.channel).LoadAdapter(Load(adapter_id="own", source="own"))
        assert sum("own" in worker.adapters for worker in c.workers) == 2


async def test_requests_for_an_adapter_from_a_source_go_to_workers_that_have_it() -> None:
    async with cluster(4) as c:
        *others, keeper = homes(c, "sql")
        generate = inference_pb2_grpc.InferenceServiceStub(c.channel).Generate
        for worker in others:
            worker.unknown = frozenset({"sql"})
        keeper.report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas[keeper.address].sourced == {"sql"})
        for adapter_id in ("sql", "sql@" + "0" * 8):
            await generate(Generate(text="x", adapter_id=adapter_id))
        assert len(keeper.raw_requests) == 2
        keeper.report(tiers={"sql": 4}, sourced=["sql"], stalled=True)
        await until(lambda: c.router.replicas.num_routable == 3)
        for call in (generate(Generate(text="x", adapter_id="sql")), stub(c.channel).GetAdapter(Get(adapter_id="sql"))):
            error = await error_of(call)
            assert isinstance(error, NoWorker)
            assert "'sql'" in error.message
        assert sum(c.num_requests) == 2
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="other"))), AdapterNotFound)


async def test_a_worker_that_has_forgotten_an_adapter_does_not_have_it() -> None:
    """Its report may come later."""
    async with cluster(2) as c:
        c.workers[0].report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) is not None)
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="sql"))), AdapterNotFound)


async def test_a_worker_whose_engine_is_lost_may_still_have_its_adapter() -> None:
    async with cluster(2) as c:
        keeper, _ = c.workers
        keeper.report(tiers={"sql": 4}, sourced=["sql"])
        await until(lambda: c.router.replicas.keepers(["sql"]) is not None)
        keeper.adapter_error = EngineLost("the engine has ended")
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="sql"))), NoWorker)


async def test_an_unload_goes_to_all() -> None:
    async with cluster(3) as c:
        for worker in c.workers[:2]:
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql")
        rows = (await stub(c.channel).UnloadAdapter(Unload(adapter_id="sql"))).adapters
        # Not having it is fine, as long as somebody had it.
        assert {row.worker for row in rows} == {worker.address for worker in c.workers[:2]}
        assert [worker.calls.count("UnloadAdapter") for worker in c.workers] == [1, 1, 1]
        error = await error_of(stub(c.channel).UnloadAdapter(Unload(adapter_id="sql")))
        assert isinstance(error, AdapterNotFound)


async def test_an_unload_that_leaves_it_somewhere_is_no_success() -> None:
    async with cluster(2) as c:
        for worker in c.workers:
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql")
        c.workers[0].adapter_error = QueueFull("busy")
        assert isinstance(await error_of(stub(c.channel).UnloadAdapter(Unload(adapter_id="sql"))), QueueFull)
        assert not c.workers[1].adapters


async def test_an_unload_that_a_worker_does_not_answer_is_not_not_found() -> None:
    async with cluster(2) as c:
        c.workers[0].adapter_error = WorkerLost("the front end does not respond")
        assert isinstance(await error_of(stub(c.channel).UnloadAdapter(Unload(adapter_id="sql"))), WorkerLost)


@pytest.mark.parametrize("is_stalled", [False, True])
async def test_a_change_that_an_absent_worker_would_come_back_without_is_no_success(is_stalled: bool) -> None:
    async with cluster(3) as c:
        absent, *others = c.workers
        for worker in c.workers:
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", digest="v1")
        absent.report(tiers={"sql": 4})
        await until(lambda: "sql" in c.router.replicas[absent.address].tiers)
        if is_stalled:
            absent.report(tiers={"sql": 4}, stalled=True)
        else:
            await absent.stop()
        await until(lambda: c.router.replicas.num_routable == 2)
        error = await error_of(stub(c.channel).LoadAdapter(Load(adapter_id="sql")))
        assert isinstance(error, WorkerLost)
        assert absent.address in error.message
        assert not any(worker.adapters["sql"].digest for worker in others)
        await stub(c.channel).LoadAdapter(Load(adapter_id="sql", if_absent=True))
        await stub(c.channel).LoadAdapter(Load(adapter_id="other"))
        assert isinstance(await error_of(stub(c.channel).UnloadAdapter(Unload(adapter_id="sql"))), WorkerLost)
        assert not any("sql" in worker.adapters for worker in others)


async def test_a_change_that_a_worker_may_have_missed_that_never_answered_this_router_is_no_success() -> None:
    frozen = socket.create_server(("127.0.0.1", 0))  # it takes connections and says nothing
    worker = await FakeWorker("w").start()
    address = f"127.0.0.1:{frozen.getsockname()[1]}"
    with frozen:
        async with router_for([worker.address, address]) as (router, channel):
            await until(lambda: router.replicas.num_routable == 1)
            for call in (stub(channel).LoadAdapter, stub(channel).UnloadAdapter):
                error = await error_of(call(Load(adapter_id="sql")))
                assert isinstance(error, WorkerLost)
                assert address in error.message
    # Nothing runs where connections are refused.
    async with router_for([worker.address, address]) as (router, channel):
        await until(lambda: router.replicas.num_routable == 1 and "refused" in router.replicas[address].last_error)
        await stub(channel).LoadAdapter(Load(adapter_id="sql"))
    await worker.stop()


async def test_a_worker_that_drains_is_asked_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(3) as c:
        told, untold, other = c.workers
        for worker in c.workers:
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql")
        told.report(draining=True)
        await until(lambda: c.router.replicas.num_routable == 2)
        rows = (await stub(c.channel).ListAdapters(List())).adapters
        assert {row.worker for row in rows} == {untold.address, other.address}
        # Whoever has not said so yet says it now; it will take no more requests either.
        untold.adapter_error = Draining("going")
        rows = (await stub(c.channel).UnloadAdapter(Unload(adapter_id="sql"))).adapters
        assert [row.worker for row in rows] == [other.address]
        assert told.calls == []
        # The router looks after it again and again, and says it once.
        await until(lambda: told.num_watches > 3)
        assert caplog.text.count(f"{told.address} is not available") == 1


async def test_listings_have_a_row_per_worker() -> None:
    async with cluster(3) as c:
        for worker in c.workers[:2]:
            worker.adapters["sql"] = adapter_pb2.Adapter(adapter_id="sql", rank=8)
        c.workers[2].adapters["json"] = adapter_pb2.Adapter(adapter_id="json")
        rows = (await stub(c.channel).ListAdapters(List())).adapters
        holders = sorted(c.workers[:2], key=lambda worker: worker.address)
        expected = [("json", c.workers[2]), *(("sql", worker) for worker in holders)]
        assert [(row.adapter_id, row.worker) for row in rows] == [(name, w.address) for name, w in expected]
        rows = (await stub(c.channel).GetAdapter(Get(adapter_id="sql"))).adapters
        assert [(row.worker, row.rank) for row in rows] == [(worker.address, 8) for worker in c.workers[:2]]
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="xml"))), AdapterNotFound)


async def pages_of(c: Cluster, **fields: Any) -> AsyncIterator[list[tuple[str, str]]]:
    token = None
    while token != "":
        page = await stub(c.channel).ListAdapters(List(page_token=token or "", **fields))
        yield [(row.adapter_id, row.worker) for row in page.adapters]
        token = page.next_page_token


async def test_pages_of_several_workers_are_merged() -> None:
    async with cluster(3) as c:
        for number, worker in enumerate(sorted(c.workers, key=lambda worker: worker.address)):
            for idx in range(number, 60, number + 1):
                worker.adapters[f"a{idx:02}"] = adapter_pb2.Adapter(adapter_id=f"a{idx:02}", state=idx % 2 + 3)
        expected = sorted((name, worker.address) for worker in c.workers for name in worker.adapters)
        pages = [page async for page in pages_of(c, page_size=7)]
        assert [row for page in pages for row in page] == expected
        assert {len({name for name, _ in page}) for page in pages[:-1]} == {7}
        everything = (await stub(c.channel).ListAdapters(List())).adapters
        assert [(row.adapter_id, row.worker) for row in everything] == expected
        odd = [page async for page in pages_of(c, page_size=5, prefix="a1", state=adapter_pb2.ADAPTER_STATE_ON_DEVICE)]
        assert [name for name, _ in odd[0]][:1] == ["a11"]
        assert {name for page in odd for name, _ in page} == {f"a{idx}" for idx in range(11, 20, 2)}
        assert all(query.page_size for worker in c.workers for query in worker.queries), "workers are asked for pages"


async def test_a_worker_that_goes_between_two_pages_leaves_the_token_as_it_is() -> None:
    async with cluster(2) as c:
        for worker in c.workers:
            for idx in range(9):
                worker.adapters[f"a{idx}"] = adapter_pb2.Adapter(adapter_id=f"a{idx}")
        names: list[str] = []
        async for page in pages_of(c, page_size=2):
            names += sorted({name for name, _ in page})
            c.workers[0].report(draining=True)
            await until(lambda: c.router.replicas.num_routable == 1)
        assert names == [f"a{idx}" for idx in range(9)]


async def test_what_a_listing_cannot_be_asked_for() -> None:
    async with cluster(1) as c:
        for fields in ({"page_size": -1}, {"page_token": "x"}, {"prefix": "a b"}):
            error = await error_of(stub(c.channel).ListAdapters(List(**fields)))
            assert isinstance(error, InvalidArgument)
            assert error.field in fields
        for idx in range(50):
            worker = c.workers[0]
            worker.adapters[f"a{idx}"] = adapter_pb2.Adapter(adapter_id=f"a{idx}", error="x" * 100_000)
        error = await error_of(stub(c.channel).ListAdapters(List()))
        assert isinstance(error, ListingTooLarge)
        assert (error.field, error.retry_after_s) == ("page_size", None)
        assert len([page async for page in pages_of(c, page_size=1000)]) > 4, "pages are cut by size too"


async def test_a_verdict_comes_before_an_absence() -> None:
    async with cluster(2) as c:
        c.workers[0].adapter_error = Draining("going")
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="xml"))), AdapterNotFound)
        c.workers[1].adapter_error = Draining("going")
        assert isinstance(await error_of(stub(c.channel).GetAdapter(Get(adapter_id="xml"))), Draining)


async def test_ids_are_checked_before_anybody_is_asked() -> None:
    async with cluster(1) as c:
        for call in (
            stub(c.channel).LoadAdapter(Load(adapter_id="../x")),
            stub(c.channel).UnloadAdapter(Unload()),
            stub(c.channel).GetAdapter(Get(adapter_id="a\n")),
        ):
            assert isinstance(await error_of(call), InvalidAdapterId)
        assert c.workers[0].calls == []


async def test_nobody_answers_for_nobody() -> None:
    async with router_for(["127.0.0.1:1"]) as (_router, channel):
        for call in (stub(channel).ListAdapters(List()), stub(channel).LoadAdapter(Load(adapter_id="a"))):
            assert isinstance(await error_of(call), NoWorker)


async def test_a_worker_that_is_lost_while_it_is_asked() -> None:
    async with cluster(1) as c:
        (worker,) = c.workers
        await worker.stop()
        error = await error_of(stub(c.channel).GetAdapter(Get(adapter_id="a")))
        assert isinstance(error, (NoWorker, WorkerLost))


# --- credentials --------------------------------------------------------------------------------------------------


def bearer(token: str, *more: tuple[str, str]) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"), *more)


def shared_credential(folder: Path) -> tuple[Path, Path]:
    """The files of a router's token, and of the credentials of workers that believe it alone."""
    token_file = folder / "router-token"
    token_file.write_text("router")
    row = credential("router", "default", roles=("router",))
    return token_file, write_credentials(folder / "worker-credentials.json", row)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Cluster]:
    """A router that asks for credentials, in front of workers that believe it alone."""
    token_file, worker_auth_file = shared_credential(tmp_path)
    rows = (credential("a", "acme", "acme/*"), credential("o", "ops", "*", roles=("admin",)))
    auth_file = write_credentials(tmp_path / "auth.json", *rows)
    settings = {"auth_file": auth_file, "worker_token_file": token_file, "worker_auth_file": worker_auth_file}
    async with cluster(2, **settings) as c:
        yield c


async def test_the_tenant_comes_from_the_credential(guarded: Cluster) -> None:
    generate = inference_pb2_grpc.InferenceServiceStub(guarded.channel).Generate
    await generate(Generate(text="x"), metadata=bearer("a", ("x-loraplex-tenant", "victim")))
    (metadata,) = [metadata for worker in guarded.workers for metadata in worker.metadata]
    assert metadata["x-loraplex-tenant"] == "acme"
    assert metadata["authorization"] != "Bearer a"


async def test_nobody_gets_past_the_router_without_a_credential(guarded: Cluster) -> None:
    generate = inference_pb2_grpc.InferenceServiceStub(guarded.channel).Generate
    assert isinstance(await error_of(generate(Generate(text="x"))), Unauthenticated)
    assert isinstance(await error_of(generate(Generate(text="x"), metadata=bearer("b"))), Unauthenticated)
    assert isinstance(await error_of(generate(Generate(text="x"), metadata=bearer("o"))), PermissionDenied)
    load = stub(guarded.channel).LoadAdapter(Load(adapter_id="acme/a"), metadata=bearer("a"))
    assert isinstance(await error_of(load), PermissionDenied)
    assert guarded.num_requests == [0, 0]
    health = health_pb2_grpc.HealthStub(guarded.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="loraplex.v1.InferenceService"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_nor_past_the_worker(guarded: Cluster) -> None:
    async with grpc.aio.insecure_channel(guarded.workers[0].address) as direct:
        generate = inference_pb2_grpc.InferenceServiceStub(direct).Generate
        call = generate(Generate(text="x"), metadata=bearer("a", ("x-loraplex-tenant", "acme")))
        assert isinstance(await error_of(call), Unauthenticated)


async def test_somebody_elses_adapter_looks_unknown(guarded: Cluster) -> None:
    generate = inference_pb2_grpc.InferenceServiceStub(guarded.channel).Generate
    foreign = await error_of(generate(Generate(text="x", adapter_id="other/a"), metadata=bearer("a")))
    assert isinstance(foreign, AdapterNotFound)
    assert foreign.resource == "other/a"
    got = await error_of(stub(guarded.channel).GetAdapter(Get(adapter_id="other/a"), metadata=bearer("a")))
    assert got.message == foreign.message
    assert all("GetAdapter" not in worker.calls for worker in guarded.workers)
    await generate(Generate(text="x", adapter_id="acme/a"), metadata=bearer("a"))


async def test_listings_show_a_tenant_its_own(guarded: Cluster) -> None:
    for name in ("acme/a", "other/b"):
        await stub(guarded.channel).LoadAdapter(Load(adapter_id=name), metadata=bearer("o"))
    seen = {
        token: {
            row.adapter_id
            for row in (await stub(guarded.channel).ListAdapters(List(), metadata=bearer(token))).adapters
        }
        for token in ("a", "o")
    }
    assert seen == {"a": {"acme/a"}, "o": {"acme/a", "other/b"}}


async def test_a_tenants_pages_are_full_of_its_own_and_betray_nobody(guarded: Cluster) -> None:
    for name in [f"{org}/{idx}" for org in ("a", "acme", "acme2", "b") for idx in range(6)]:
        for worker in guarded.workers:
            worker.adapters[name] = adapter_pb2.Adapter(adapter_id=name)
    listing = stub(guarded.channel).ListAdapters
    first = await listing(List(page_size=4), metadata=bearer("a"))
    assert sorted({row.adapter_id for row in first.adapters}) == [f"acme/{idx}" for idx in range(4)]
    last = await listing(List(page_size=4, page_token=first.next_page_token), metadata=bearer("a"))
    assert sorted({row.adapter_id for row in last.adapters}) == ["acme/4", "acme/5"]
    assert last.next_page_token == "", "acme2/0 follows, and that is not acme's to know"
    assert {query.prefix for worker in guarded.workers for query in worker.queries} == {"acme/"}


async def test_without_credentials_no_tenant_is_claimed() -> None:
    async with cluster(1) as c:
        generate = inference_pb2_grpc.InferenceServiceStub(c.channel).Generate
        await generate(Generate(text="x"), metadata=bearer("a", ("x-loraplex-tenant", "victim")))
        assert not {"authorization", "x-loraplex-tenant"} & c.workers[0].metadata[0].keys()


async def test_a_router_with_the_wrong_credential_has_no_workers(tmp_path: Path) -> None:
    _, worker_auth_file = shared_credential(tmp_path)
    token_file = tmp_path / "wrong"
    token_file.write_text("wrong")
    worker = await FakeWorker("w", worker_auth_file).start()
    async with router_for([worker.address], worker_token_file=token_file) as (router, channel):
        await until(lambda: "UNAUTHENTICATED" in router.replicas[worker.address].last_error)
        assert isinstance(await error_of(stub(channel).ListAdapters(List())), NoWorker)
    await worker.stop()
