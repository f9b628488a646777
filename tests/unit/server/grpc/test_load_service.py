"""Load reports of a worker to its routers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from loraplex_adapters.cache import listing as listing_module
from loraplex_adapters.cache.listing import Listing, Resident
from loraplex_contracts.adapters import AdapterInfo
from loraplex_contracts.load import Forecast, Load
from loraplex_proto.services import WORKER, path_of
from loraplex_proto.v1 import worker_pb2
from loraplex_proto.validate import HEARTBEAT_INTERVALS
from loraplex_runtime.auth import Credentials, Identity, admit, token_digest
from loraplex_server.engine.client import ChangeSignal, EngineClient, EngineState
from loraplex_server.grpc import protobuf as convert
from loraplex_server.grpc.load_service import WorkerServicer, is_worth_sending
from loraplex_server.grpc.middleware import RequestGate

INTERVAL_S = 0.03
SILENCE_S = 4 * INTERVAL_S  # long enough to see that nothing comes
BUSY = Load(num_running=2, pending_tokens=8000, num_blocks=100, num_free_blocks=50, max_running=8)


def row(name: str, tier: Any = "device") -> AdapterInfo:
    return AdapterInfo(name, "lora", "0" * 64, "ready", tier, 1, 8, 0, False)


class Watched:
    """A worker whose engine says what the test says."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(stalled="", lost=asyncio.Event(), changes=ChangeSignal(), state=EngineState(BUSY))
        self.gate = RequestGate()
        self.servicer = WorkerServicer(cast(EngineClient, self.engine), self.gate)
        self.stream: AsyncIterator[worker_pb2.WatchLoadResponse] = self.servicer.WatchLoad(
            worker_pb2.WatchLoadRequest(min_interval_s=INTERVAL_S), None
        )
        self._asked: asyncio.Future[worker_pb2.WatchLoadResponse] | None = None

    def say(self, **changes: Any) -> None:
        self.engine.state.load = replace(self.engine.state.load, **changes)
        self.engine.changes.notify()

    async def told(self, timeout_s: float = 5.0) -> worker_pb2.Load | None:
        """The next message; None if none comes in time. The next call goes on waiting for it."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(anext(self.stream))
        done, _ = await asyncio.wait([self._asked], timeout=timeout_s)
        if not done:
            return None
        found, self._asked = self._asked.result(), None
        return found.load


async def test_changes_are_told_and_drift_is_not() -> None:
    watched = Watched()
    first = await watched.told()
    assert first is not None
    assert (first.running_requests, first.pending_tokens) == (2, 8000)
    for _ in range(3):
        watched.say(pending_tokens=watched.engine.state.load.pending_tokens - 100, num_free_blocks=40)
        assert await watched.told(INTERVAL_S) is None
    watched.say(num_running=3)
    load = await watched.told()
    assert load is not None
    assert (load.running_requests, load.pending_tokens, load.free_kv_blocks) == (3, 7700, 40)
    watched.say(pending_tokens=4000)
    load = await watched.told()
    assert load is not None
    assert load.pending_tokens == 4000


async def test_another_message_follows_when_requests_came_or_went() -> None:
    """A router cannot know whether a report that comes just after a request counts it."""
    watched = Watched()
    await watched.told()
    watched.say(num_running=3)
    await watched.told()
    load = await watched.told(HEARTBEAT_INTERVALS * INTERVAL_S / 2)
    assert load is not None
    assert load.running_requests == 3
    assert await watched.told(HEARTBEAT_INTERVALS * INTERVAL_S / 2) is None


async def test_not_more_often_than_asked_for() -> None:
    watched = Watched()
    clock = asyncio.get_running_loop().time
    await watched.told()
    times = [clock()]
    for running in range(3, 7):
        watched.say(num_running=running)
        while (load := await watched.told()) is not None and load.running_requests != running:
            times.append(clock())
        times.append(clock())
    assert all(after - before > 0.8 * INTERVAL_S for before, after in itertools.pairwise(times))


async def test_a_heartbeat_when_nothing_happens() -> None:
    watched = Watched()
    await watched.told()
    assert await watched.told(HEARTBEAT_INTERVALS * INTERVAL_S / 2) is None
    assert await watched.told(HEARTBEAT_INTERVALS * INTERVAL_S * 5) is not None


async def test_what_changes_while_a_message_is_sent_is_not_missed() -> None:
    watched = Watched()
    await watched.told()  # the handler has not gone on since it gave this
    watched.say(num_queued=5)
    load = await watched.told(HEARTBEAT_INTERVALS * INTERVAL_S / 2)
    assert load is not None
    assert load.queued_requests == 5


async def test_adapters_that_move() -> None:
    watched = Watched()
    await watched.told()
    watched.engine.state.listing.apply_changes({"a": (row("a", "host"),)})
    watched.say()
    load = await watched.told()
    assert load is not None
    assert [adapter.adapter_id for adapter in load.adapters] == ["a"]
    watched.say()
    assert await watched.told(SILENCE_S) is None
    before = watched.engine.state.listing.nearest()
    watched.engine.state.listing.apply_changes({"a": (replace(row("a", "host"), num_running=1),)})
    assert watched.engine.state.listing.nearest() is before, "nothing that a router is told"
    watched.engine.state.listing.apply_changes({"a": (row("a"),)})
    watched.say()
    load = await watched.told()
    assert load is not None
    assert load.adapters[0].tier == 4


async def test_adapters_that_are_fetched() -> None:
    watched = Watched()
    first = await watched.told()
    assert first is not None
    assert not first.waiting_adapter_ids
    fetching = replace(row("b", "source"), state="fetching")
    watched.engine.state.listing.apply_changes({"b": (fetching,), "key": (fetching,), "c": (row("c", "source"),)})
    watched.say(block_tokens=16, num_state_slots=9, num_free_state_slots=5, num_state_snapshots=2)
    load = await watched.told()
    assert load is not None
    assert (load.total_state_slots, load.free_state_slots, load.state_snapshots) == (9, 5, 2)
    assert (list(load.waiting_adapter_ids), load.kv_block_tokens) == (["b"], 16)
    watched.engine.state.listing.apply_changes({"b": (row("b"),), "key": ()})
    watched.say()
    load = await watched.told()
    assert load is not None
    assert not load.waiting_adapter_ids
    many = {str(number): (replace(row(str(number), "source"), state="fetching"),) for number in range(500)}
    watched.engine.state.listing.apply_changes(many)
    assert len(watched.engine.state.listing.fetching()) == 100


WAITS_S = {("acme", "acme/a"): 1.0, ("beta", "beta/b"): 2.0, ("acme", ""): 3.0}


@pytest.mark.parametrize(
    ("roles", "adapters", "sees_all"),
    [({"admin"}, ("acme/*",), False), ({"admin"}, ("*",), True), ({"router"}, ("acme/*",), True)],
)
async def test_callers_see_what_their_credential_allows(
    roles: set[str], adapters: tuple[str, ...], sees_all: bool
) -> None:
    identity = Identity("acme", frozenset(roles), adapters)
    admit(
        lambda: Credentials({token_digest("token"): identity}),
        path_of(WORKER, "WatchLoad"),
        [("authorization", "Bearer token")],
    )
    watched = Watched()
    names = ("acme/a", "beta/b")
    fetched = {f"{name}-new": (replace(row(f"{name}-new", "source"), state="fetching"),) for name in names}
    watched.engine.state.listing.apply_changes({name: (row(name),) for name in names} | fetched)
    watched.say(forecast=Forecast(0.001, 0.1, 0.01, 9.0, WAITS_S, 100))
    watched_load = await watched.told()
    assert watched_load is not None
    asked = await watched.servicer.GetLoad(worker_pb2.GetLoadRequest(), None)
    for load in (watched_load, asked.load):
        assert [one.adapter_id for one in load.adapters] == (list(names) if sees_all else ["acme/a"])
        assert list(load.waiting_adapter_ids) == (["acme/a-new", "beta/b-new"] if sees_all else ["acme/a-new"])
        assert {one.tenant for one in load.forecast.waits} == ({"acme", "beta"} if sees_all else {"acme"})
        assert (load.forecast.longest_tokens, load.running_requests) == (100, 2)


async def test_the_last_message_of_a_worker_that_leaves() -> None:
    watched = Watched()
    await watched.told()
    watched.gate.is_leaving = True
    watched.engine.changes.notify()
    load = await watched.told()
    assert load is not None
    assert load.draining
    watched.say(num_running=0, pending_tokens=7999)
    load = await watched.told()
    assert load is not None
    assert not load.running_requests
    with pytest.raises(StopAsyncIteration):
        await anext(watched.stream)


async def test_a_lost_engine_ends_the_watch() -> None:
    watched = Watched()
    await watched.told()
    waiting = asyncio.ensure_future(anext(watched.stream))
    await asyncio.sleep(2 * INTERVAL_S)
    watched.engine.lost.set()
    watched.engine.changes.notify()
    with pytest.raises(StopAsyncIteration):
        await asyncio.wait_for(waiting, 5)


@pytest.mark.parametrize(
    ("told", "now", "is_worth"),
    [(0, 512, False), (0, 513, True), (100_000, 87_500, False), (100_000, 87_400, True), (600, 0, True)],
)
def test_how_much_work_is_worth_sending(told: int, now: int, is_worth: bool) -> None:
    loads = [worker_pb2.Load(pending_tokens=tokens) for tokens in (now, told)]
    assert is_worth_sending(*loads) == is_worth


def test_of_too_many_adapters_the_nearest_are_listed() -> None:
    rows = [row(f"{number:04}", "disk") for number in range(1500)] + [row("y", "host"), row("z"), row("s", "source")]
    listing = Listing()
    listing.apply_changes({one.adapter_id: (one,) for one in rows})
    listed = convert.residents_to_pb(listing.nearest())
    assert len(listed) == 1024
    assert [adapter.adapter_id for adapter in listed[:3]] == ["z", "y", "0000"]


def test_names_with_a_source_of_their_own_are_listed_behind_the_nearest_and_without_bytes_too() -> None:
    listing = Listing()
    listing.apply_changes({str(number): (row(str(number)),) for number in range(1024)})
    before = listing.nearest()
    sourced = replace(row("sql", "disk"), source="v1", is_sourced=True)
    own = replace(row("own", "disk"), source="v1")  # as it was before a restart
    unbound = replace(row("fetching", "source"), source="v1", digest="")
    listing.apply_changes(
        {"sql": (sourced,), "own": (own,), "fetching": (unbound,), "3": (replace(row("3"), is_sourced=True),)}
    )
    listed = convert.residents_to_pb(listing.nearest())
    assert listing.nearest() is not before
    assert [one.adapter_id for one in listed[1024:]] == ["sql"]
    assert {one.adapter_id for one in listed if one.has_source} == {"sql", "3"}
    gone = replace(sourced, tier="source", num_uses=1)
    listing.apply_changes({"sql": (gone,)})
    assert listing.nearest()[-1] == ("source", "sql", "0" * 64, True)
    listing.apply_changes({"sql": (), "3": (row("3"),)})
    assert not any(one.has_source for one in listing.nearest())


def test_of_many_names_with_a_source_of_their_own_only_listed_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    num_made = 0

    class Counted(Resident):
        def __new__(cls, *values: Any) -> Counted:
            nonlocal num_made
            num_made += 1
            return super().__new__(cls, *values)

    monkeypatch.setattr(listing_module, "Resident", Counted)
    listing = Listing()
    names = [f"{number:04}" for number in range(4000)]
    listing.apply_changes({name: (replace(row(name, "disk"), source="v1", is_sourced=True),) for name in names})
    assert [one.adapter_id for one in listing.nearest()] == names[:2048]
    assert num_made <= 1024 + 2048  # those that were skipped among them
