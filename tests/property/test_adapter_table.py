"""Adapter cache under any order of events: no leak, overflow or starvation."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex_adapters.cache.listing import Listing, key_row, listing_order
from loraplex_adapters.cache.names import AdapterTable
from loraplex_adapters.cache.residency import RESERVED_ROUNDS, AdapterCacheConfig
from loraplex_adapters.cache.states import (
    IN_TRANSIT,
    KEY_TRANSITIONS,
    NAME_TRANSITIONS,
    DropDevice,
    DropHost,
    Fetch,
    FetchName,
    KeyEvent,
    KeyRecord,
    KeyState,
    NameEvent,
    NameRecord,
    NameState,
    Promote,
    Refetch,
    Stage,
)
from loraplex_contracts.adapters import NOBODY, AdapterId, AdapterInfo, AdapterKey, AdapterUser
from loraplex_contracts.errors import (
    AdapterInvalid,
    AdapterLoadsBusy,
    AdapterNotFound,
    IllegalTransition,
    LoraplexError,
    SourceUnavailable,
)
from loraplex_contracts.mixtures import Member, Mixture

NAMES = [f"n{i}" for i in range(5)]
NUM_CONTENTS = 6
TTL_S = 10.0
# Two tenants with limits, and two without.
USERS = [AdapterUser("a", 320), AdapterUser("b"), AdapterUser("c", 448), NOBODY]


def key_of(content: int) -> AdapterKey:
    return AdapterKey("lora", f"{content:064x}")


def bytes_of(key: AdapterKey) -> int:
    """Size of a content: 0 to 4 fit the device, some of them barely; content 5 never does."""
    return [64, 128, 192, 320, 384, 4096][int(key.digest, 16)]


@dataclass
class Request:
    """One request as the engine sees it: a name, then a key, then a lease; of a mixture several. One that `borrows`
    asks for the slot in every turn instead, and can do without."""

    names: tuple[str, ...]
    user: AdapterUser
    borrows: bool = False
    keys: tuple[AdapterKey, ...] = ()
    has_lease: bool = False

    @property
    def distinct(self) -> tuple[AdapterKey, ...]:
        return tuple(sorted(set(self.keys)))

    @property
    def holds(self) -> list[tuple[AdapterKey, str]]:
        return list(zip(self.keys, self.names, strict=True)) if self.keys else []


def rows(table: AdapterTable) -> list[AdapterInfo]:
    """The rows that a listing shows, made anew."""
    listed = [
        table.row(record.name)
        for record in table.names.values()
        if not (record.state is NameState.FAILED and isinstance(record.error, AdapterNotFound))
    ]
    listed += [key_row(r, r.last_name) for r in table.residency.records.values() if not r.names]
    return sorted(listed, key=listing_order)


class World:
    """Plays engine, loader, mover and source against the table, and keeps a model of the tiers beside it."""

    def __init__(self) -> None:
        config = AdapterCacheConfig(
            host_bytes=640, device_bytes=384, num_device_slots=3, disk_bytes=1, max_pending_loads=4, failure_ttl_s=TTL_S
        )
        self.table = AdapterTable(config)
        self.now = 0.0
        self.files = {name: idx % NUM_CONTENTS for idx, name in enumerate(NAMES)}
        self.requests: list[Request] = []
        self.fetches: list[Fetch] = []
        self.moves: list[Stage | Promote] = []
        self.on_host: set[AdapterKey] = set()
        self.on_device: dict[int, AdapterKey] = {}
        self.has_outcome = False
        self.listing = Listing()

    # --- what can happen (each takes two numbers that choose the details) ---

    def submit(self, a: int, b: int) -> None:
        if len(self.requests) < 12:
            borrows = b % 4 == 0
            num_names = 1 if borrows or b < 6 else 2 + b % 2
            names = tuple(NAMES[(a + i) % len(NAMES)] for i in range(num_names))
            self.requests.append(Request(names, USERS[(a + b) % len(USERS)], borrows))

    def turn_engine(self, a: int, b: int) -> None:
        """Every request takes its next step, as in the engine's turn."""
        self.now += 0.1
        self.poll()
        for request in list(self.requests):
            self._step(request)

    def _step(self, request: Request) -> None:
        residency = self.table.residency
        keys = request.distinct
        if not request.keys:
            try:
                request.keys = self._resolve(request)
            except LoraplexError:
                self.requests.remove(request)
        elif request.borrows:
            (key,) = keys
            slot = residency.borrow(key)
            assert slot is None or self.on_device[slot] == key
        elif not request.has_lease:
            if residency.failure(*keys) is not None:
                self.end(request)
                return
            if len(keys) == 1:
                (key,) = keys
                slot = residency.acquire(key)
                slots = None if slot is None else (slot,)
            else:
                slots = residency.acquire_all(keys)
            if slots is not None:
                assert tuple(self.on_device[slot] for slot in slots) == keys
                request.has_lease = True
        self.collect()

    def _resolve(self, request: Request) -> tuple[AdapterKey, ...]:
        if len(request.names) > 1:
            members = tuple(Member(AdapterId(name), 1.0) for name in request.names)
            return self.table.resolve_members(Mixture(members), self.now, request.user) or ()
        key = self.table.resolve(request.names[0], self.now, request.user)
        return () if key is None else (key,)

    def preempt(self, a: int, b: int) -> None:
        running = [r for r in self.requests if r.has_lease]
        if running:
            request = running[a % len(running)]
            request.has_lease = False
            for key in request.distinct:
                self.table.residency.release(key)

    def finish(self, a: int, b: int) -> None:
        if self.requests:
            self.end(self.requests[a % len(self.requests)])

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        for key in request.distinct if request.has_lease else ():
            self.table.residency.release(key)
        for key, name in request.holds:
            self.table.residency.drop_hold(key, request.user.tenant, name)

    def load(self, a: int, b: int) -> None:
        name = NAMES[a % len(NAMES)]
        try:
            key = self.table.load(name, b % 2 == 0, self.now, USERS[b % len(USERS)])
        except LoraplexError:
            key = None
        if key is not None:
            assert self.table.names[name].key == key
        self.collect()

    def unload(self, a: int, b: int) -> None:
        name = NAMES[a % len(NAMES)]
        record = self.table.names.get(name)
        is_failed = record is not None and record.state is NameState.FAILED
        is_known = not isinstance(record.error, AdapterNotFound) if record is not None else False
        if record is None or (record.key is None and not (is_failed and is_known)):
            with pytest.raises(AdapterNotFound):
                self.table.unload(name)
        else:
            assert self.table.unload(name) == record.key
            assert name not in self.table.names

    def replace_files(self, a: int, b: int) -> None:
        self.files[NAMES[a % len(NAMES)]] = b % NUM_CONTENTS

    def wait(self, a: int, b: int) -> None:
        self.now += TTL_S + 1
        self.poll()

    def end_fetch(self, a: int, b: int) -> None:
        if self.fetches:
            self.take_fetch(self.fetches.pop(a % len(self.fetches)), fails=b % 5 == 0)

    def end_move(self, a: int, b: int) -> None:
        if self.moves:
            self.take_move(["lost", "failed", "done", "done", "done"][b % 5])

    # --- the engine's poll, and the outcomes ---

    def poll(self) -> None:
        residency = self.table.residency
        is_awake = self.table.is_due or self.has_outcome
        is_awake |= any(r.state is KeyState.FAILED and r.failed_until_s <= self.now for r in residency.records.values())
        self.has_outcome = False
        self.table.advance(self.now)
        self.collect()
        moves = self.table.take_moves()
        assert is_awake or not moves, "there was something to do, and an idle engine would not have known"
        for move in moves:
            match move:
                case DropHost(key):
                    self.on_host.discard(key)
                case DropDevice(key, slot):
                    assert not any(r.has_lease and key in r.keys for r in self.requests), "leased weights were dropped"
                    assert self.on_device.pop(slot) == key
                case Promote(_, slot):
                    assert slot not in self.on_device, "a slot was given away twice"
                    self.moves.append(move)
                case Stage():
                    self.moves.append(move)

    def collect(self) -> None:
        self.fetches += self.table.take_fetches()

    def take_fetch(self, fetch: Fetch, fails: bool) -> None:
        self.has_outcome = True
        found = key_of(self.files[fetch.name])
        residency = self.table.residency
        if isinstance(fetch, Refetch) and fails:
            residency.refetch_failed(fetch, SourceUnavailable("gone"), self.now)
        elif isinstance(fetch, Refetch):
            residency.refetched(fetch, found, self.now)
        elif fails:
            self.table.name_failed(fetch.name, fetch.ticket, AdapterInvalid("bad"), self.now)
        else:
            self.table.name_fetched(fetch.name, fetch.ticket, found, bytes_of(found), 4, self.now)
        self.collect()

    def take_move(self, result: str) -> None:
        self.has_outcome = True
        move = self.moves.pop(0)  # the mover works in order
        residency, key = self.table.residency, move.key
        if result == "lost" and key not in self.on_host:
            residency.lost(key, self.now)
        elif result == "failed":
            residency.failed(key, SourceUnavailable("broken"), self.now)
        else:
            self.on_host.add(key)
            if isinstance(move, Promote):
                self.on_device[move.slot] = key
                residency.promoted(key)
            else:
                residency.staged(key)
        self.collect()

    # --- what must hold ---

    def check(self) -> None:
        residency = self.table.residency
        self.table.check_integrity()
        holds = Counter(hold for r in self.requests for hold in r.holds)
        leases = Counter(key for r in self.requests if r.has_lease for key in r.distinct)
        assert holds == {(r.key, name): num for r in residency.records.values() for name, num in r.holds.items()}
        assert leases == Counter({r.key: r.num_leases for r in residency.records.values() if r.num_leases})
        for user in USERS:
            num_bytes = residency.use.num_bytes(user.tenant, residency.records)
            assert user.max_bytes is None or num_bytes <= user.max_bytes
        assert len(self.table._fetching) == sum(isinstance(fetch, FetchName) for fetch in self.fetches)
        # What the table has decided to drop is there until the next poll; the budgets hold without it.
        dropping = {m.key for m in residency.moves if isinstance(m, DropDevice)}
        assert sum(bytes_of(key) for key in self.on_device.values() if key not in dropping) <= 384
        dropping = {m.key for m in residency.moves if isinstance(m, DropHost)}
        assert sum(bytes_of(key) for key in self.on_host - dropping) <= 640
        self.listing.apply_changes(self.table.take_changes())
        expected = rows(self.table)
        assert list(self.listing.rows()) == expected, "a change that nobody heard of"
        resident = [row for tier in ("device", "host", "disk") for row in expected if row.tier == tier]
        resident += [row for row in expected if row.tier == "source" and row.is_sourced]
        assert list(self.listing.nearest()) == [
            (row.tier, row.adapter_id, row.digest, row.is_sourced) for row in resident
        ]

    def drain(self) -> None:
        """Whatever happened: every request that is left is served or told why not, and in the end nothing is left."""
        for request in [r for r in self.requests if r.has_lease]:
            self.end(request)
        for _ in range(8 * RESERVED_ROUNDS * (len(self.requests) + 1)):
            self.turn_engine(0, 0)
            self._work()
            # A served request runs for a turn and ends; the others go on waiting, and borrowers go on borrowing.
            for request in [r for r in self.requests if r.has_lease]:
                self.end(request)
            if all(r.borrows for r in self.requests) and not self.fetches and not self.moves:
                break
        assert all(r.borrows for r in self.requests), "requests that were never served"
        for request in list(self.requests):
            self.end(request)
        self.table.check_idle()
        for name in list(self.table.names):
            with contextlib.suppress(AdapterNotFound):  # what is remembered as missing goes by itself
                self.table.unload(name)
        for _ in range(50):
            self.now += 1.0
            self.poll()
            self._work()
        residency = self.table.residency
        assert not residency.records
        assert not self.table.names
        assert residency.host_used == residency.device_used == 0
        assert not residency.is_due
        assert not self.on_device
        assert not self.on_host

    def _work(self) -> None:
        if self.moves:
            self.take_move("done")
        if self.fetches:
            self.take_fetch(self.fetches.pop(0), fails=False)


ACTIONS = (
    *[World.turn_engine] * 6, *[World.submit] * 4, *[World.end_move] * 5, *[World.end_fetch] * 4, *[World.finish] * 2,
    World.preempt, World.load, World.unload, World.replace_files, World.wait,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 11), st.integers(0, 11)), min_size=60, max_size=200))
def test_nothing_leaks_and_everybody_is_served(steps: list[tuple[Callable[[World, int, int], None], int, int]]) -> None:
    world = World()
    for action, a, b in steps:
        action(world, a, b)
        world.check()
    world.drain()


@pytest.mark.parametrize("state", KeyState)
@pytest.mark.parametrize("event", KeyEvent)
def test_what_the_table_does_not_list_raises_and_changes_nothing(state: KeyState, event: KeyEvent) -> None:
    record = KeyRecord(key_of(0), 64, 4, state=state)
    following = KEY_TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(IllegalTransition):
            record.step(event)
        assert record.state is state
    else:
        record.step(event)
        assert record.state is following


@pytest.mark.parametrize("state", NameState)
@pytest.mark.parametrize("event", NameEvent)
def test_names_follow_their_table(state: NameState, event: NameEvent) -> None:
    record = NameRecord("n0", state, ticket=1)
    following = NAME_TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(IllegalTransition):
            record.step(event)
        assert record.state is state
    else:
        record.step(event)
        assert record.state is following


def test_every_state_can_be_reached_and_left() -> None:
    reached = {KeyState.KNOWN} | {target for (source, _), target in KEY_TRANSITIONS.items() if source is not target}
    assert reached == set(KeyState)
    assert {source for source, _ in KEY_TRANSITIONS} == set(KeyState)
    # Whoever is in transit hears of it, well or badly.
    for state in IN_TRANSIT:
        assert (state, KeyEvent.FAIL) in KEY_TRANSITIONS


def test_illegal_calls_change_nothing() -> None:
    table = AdapterTable(AdapterCacheConfig(640, 384, 3, 1, max_pending_loads=1))
    assert table.resolve("n0", 0.0) is None
    with pytest.raises(AdapterLoadsBusy):
        table.resolve("n1", 0.0)
    (fetch,) = table.take_fetches()
    assert isinstance(fetch, FetchName)
    key = key_of(0)
    residency = table.residency
    for illegal in (
        lambda: residency.drop_hold(key),
        lambda: residency.release(key),
        lambda: residency.acquire(key),
        lambda: residency.promoted(key),
    ):
        with pytest.raises(IllegalTransition):
            illegal()
    table.name_fetched("n0", fetch.ticket, key, 64, 4, 0.0)
    assert table.resolve("n0", 0.0) == key
    before = (residency.records[key].num_holds, residency.records[key].state, residency.device_used)
    for illegal in (
        lambda: residency.release(key),
        lambda: residency.staged(key),
        lambda: residency.promoted(key),
        lambda: residency.lost(key, 0.0),
        lambda: residency.failed(key, AdapterInvalid("bad"), 0.0),
        lambda: residency.refetched(Refetch(key, "n0"), key_of(1), 0.0),
        lambda: residency.refetch_failed(Refetch(key, "n0"), AdapterInvalid("bad"), 0.0),
    ):
        with pytest.raises(IllegalTransition):
            illegal()
    assert (residency.records[key].num_holds, residency.records[key].state, residency.device_used) == before
    residency.check_integrity()
