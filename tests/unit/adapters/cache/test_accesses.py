"""Callers' own accesses to the Hub in the adapter cache."""

from __future__ import annotations

import pytest
from support.residency import fetch_of, turn

from loraplex_adapters.cache.accesses import MAX_ACCESSES, Accesses, is_access_name, shown_name
from loraplex_adapters.cache.names import MAX_REMEMBERED_FAILURES, AdapterTable
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import FetchName, Refetch
from loraplex_contracts.adapters import AdapterKey, AdapterOrigin, AdapterUser, LoadOptions
from loraplex_contracts.errors import AdapterLoadsBusy, AdapterNotFound, SourceUnavailable

TTL_S, FAILURE_TTL_S = 600.0, 30.0
OLD, NEW = (AdapterKey("lora", f"{content:064x}") for content in (1, 2))
ACME, OTHER = AdapterUser("acme"), AdapterUser("other")
SQL = "hub:org/sql"
ALICE, BOB, NOBODY = (AdapterOrigin(SQL, "main", token) for token in ("hf_alice", "hf_bob", ""))


@pytest.fixture
def table() -> AdapterTable:
    return AdapterTable(AdapterCacheConfig(1000, 1000, 4, 1, failure_ttl_s=FAILURE_TTL_S, access_ttl_s=TTL_S))


def opened(table: AdapterTable, origin: AdapterOrigin, user: AdapterUser = ACME, now: float = 0.0) -> FetchName:
    """The fetch of an access that is new, or over."""
    assert table.resolve_at(origin, now, user) is None
    fetch = fetch_of(table)
    table.name_fetched(fetch.name, fetch.ticket, OLD, 100, 4, now)
    turn(table, now)
    return fetch


def test_what_a_token_has_fetched_is_its_callers_alone(table: AdapterTable) -> None:
    fetch = opened(table, ALICE)
    assert fetch.origin == ALICE  # with the token, for this fetch
    assert table.resolve_at(ALICE, 1.0, ACME) == OLD
    assert not table.take_fetches()
    # The content is here, and nobody else gets it for that.
    for origin, user in ((BOB, ACME), (ALICE, OTHER), (NOBODY, ACME), (AdapterOrigin(SQL, "", ALICE.token), ACME)):
        assert table.resolve_at(origin, 1.0, user) is None
        refused = fetch_of(table)
        assert refused.origin == origin
        table.name_failed(refused.name, refused.ticket, AdapterNotFound("the Hub has none"), 1.0)
        with pytest.raises(AdapterNotFound):
            table.resolve_at(origin, 1.0, user)
    # Nor by name, with a version or without.
    version = f"org/sql@{OLD.digest[:12]}"
    assert table.resolve(version, 1.0, ACME) is None
    plain = fetch_of(table)
    assert (plain.name, plain.origin.source) == ("org/sql", "")
    table.name_failed(plain.name, plain.ticket, AdapterNotFound("none"), 1.0)
    for name in ("org/sql", version):
        with pytest.raises(AdapterNotFound):
            table.resolve(name, 1.0, ACME)
    with pytest.raises(AdapterNotFound):
        table.row(version)


def test_no_listing_shows_an_access(table: AdapterTable) -> None:
    assert table.resolve_at(ALICE, 0.0, ACME) is None
    assert not any(table.take_changes().values())  # while it is fetched
    fetch = fetch_of(table)
    table.name_fetched(fetch.name, fetch.ticket, OLD, 100, 4, 0.0)
    turn(table)
    table.resolve_at(ALICE, 1.0, ACME)
    assert not any(table.take_changes().values())
    turn(table, TTL_S + 1)  # it drains
    assert not any(table.take_changes().values())
    # A name of the same content is listed as ever, and alone.
    assert table.resolve("mine", 1.0) is None
    plain = fetch_of(table)
    table.name_fetched(plain.name, plain.ticket, OLD, 100, 4, 1.0)
    opened(table, BOB)
    assert [row.adapter_id for row in table.take_changes()[OLD]] == ["mine"]


def test_an_access_is_shown_again_after_a_while(table: AdapterTable) -> None:
    opened(table, ALICE)
    assert table.resolve_at(ALICE, TTL_S - 1, ACME) == OLD
    assert opened(table, ALICE, now=TTL_S).origin == ALICE
    assert table.resolve_at(ALICE, TTL_S + 1, ACME) == OLD
    # Revoked: nothing is left of it.
    assert table.resolve_at(ALICE, 2 * TTL_S, ACME) is None
    fetch = fetch_of(table)
    table.name_failed(fetch.name, fetch.ticket, AdapterNotFound("the Hub has none"), 2 * TTL_S)
    with pytest.raises(AdapterNotFound):
        table.resolve_at(ALICE, 2 * TTL_S, ACME)
    turn(table, 2 * TTL_S + FAILURE_TTL_S)
    assert not table.names
    # Requests that began with it hold the weights to their ends.
    assert table.residency.records[OLD].num_holds == 2


def test_no_token_is_kept(table: AdapterTable) -> None:
    opened(table, ALICE)
    assert table.load("named", False, 0.0, options=LoadOptions(ALICE)) is None
    fetch = fetch_of(table)
    assert fetch.origin == ALICE
    assert "hf_" not in repr(fetch)
    table.name_fetched(fetch.name, fetch.ticket, NEW, 100, 4, 0.0)
    for _ in range(2):
        turn(table)
    assert table.load("named", False, 0.0, options=LoadOptions(ALICE)) == NEW
    for record in table.names.values():
        assert "hf_" not in record.name
        assert not record.origin.token
        assert not record.fetched_from.token
    assert table.names["named"].origin == NOBODY


def test_weights_that_have_left_the_store_are_fetched_with_the_next_callers_token(table: AdapterTable) -> None:
    opened(table, ALICE)
    opened(table, BOB)
    assert table.resolve_at(ALICE, 1.0, ACME) == OLD
    table.residency._drop_device(table.residency.records[OLD])  # pyright: ignore[reportPrivateUsage]
    if table.residency.records[OLD].has_host:
        table.residency._evict_from_host([table.residency.records[OLD]])  # pyright: ignore[reportPrivateUsage]
    table.take_moves()
    assert table.residency.acquire(OLD) is None
    table.advance(1.0)
    assert table.take_moves()
    table.residency.lost(OLD, 1.0)
    assert not table.take_fetches()  # nobody's token is there for it
    turn(table, 1.0)  # as the engine's turn goes on, before requests that wait look at it
    assert isinstance(table.residency.failure(OLD), SourceUnavailable)
    assert table.resolve_at(BOB, 1.0, ACME) is None
    assert fetch_of(table).origin == BOB


def test_a_name_brings_lost_weights_back_without_any_token(table: AdapterTable) -> None:
    opened(table, ALICE)
    assert table.resolve("mine", 0.0) is None
    plain = fetch_of(table)
    table.name_fetched(plain.name, plain.ticket, OLD, 100, 4, 0.0)
    record = table.residency.records[OLD]
    assert table.residency._refetch(record, frozenset())  # pyright: ignore[reportPrivateUsage]
    (refetch,) = table.take_fetches()
    assert isinstance(refetch, Refetch)
    assert (refetch.name, refetch.origin.source) == ("mine", "")


def test_accesses_of_a_tenant_are_bounded(table: AdapterTable) -> None:
    first = opened(table, ALICE).name
    other = opened(table, ALICE, OTHER).name
    for number in range(MAX_ACCESSES):
        opened(table, AdapterOrigin(SQL, "", f"hf_{number}"))
    assert first not in table.names  # the least recently used
    assert other in table.names
    assert len(table.names) == MAX_ACCESSES + 1


def test_accesses_whose_fetch_is_refused_are_bounded() -> None:
    table = AdapterTable(AdapterCacheConfig(1000, 1000, 4, 1, max_pending_loads=1))
    assert table.resolve_at(ALICE, 0.0, ACME) is None
    for number in range(2 * MAX_ACCESSES):
        with pytest.raises(AdapterLoadsBusy):
            table.resolve_at(AdapterOrigin(SQL, "", f"hf_{number}"), 0.0, ACME)
    accesses = table._accesses  # no listing has them
    assert len(accesses.use("another", ACME.tenant)) == 1


def test_tokens_that_are_tried_leave_nothing(table: AdapterTable) -> None:
    for number in range(MAX_REMEMBERED_FAILURES + 10):
        assert table.resolve_at(AdapterOrigin(SQL, "", f"hf_{number}"), 0.0, ACME) is None
        fetch = fetch_of(table)
        table.name_failed(fetch.name, fetch.ticket, AdapterNotFound("none"), 0.0)
    assert len(table.names) <= MAX_REMEMBERED_FAILURES
    turn(table, FAILURE_TTL_S)
    assert not table.names


def test_names_tell_nothing_of_a_token() -> None:
    first, second = Accesses(b"a" * 32, 1.0), Accesses(b"b" * 32, 1.0)
    names = {one.name_of(origin, "acme") for one in (first, second) for origin in (ALICE, BOB)}
    assert len(names) == 4  # the key is the process's own
    assert first.name_of(ALICE, "acme") == first.name_of(ALICE, "acme") != first.name_of(ALICE, "other")
    assert first.name_of(NOBODY, "acme") == first.name_of(NOBODY, "other")  # the server's own token: one for all
    for name in names:
        assert is_access_name(name)
        assert "hf_" not in name
        assert shown_name(name) == "org/sql"
    assert shown_name("org/sql") == "org/sql"


def test_those_that_are_good_are_not_gone_through_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    accesses = Accesses(b"key", TTL_S)
    names = [accesses.name_of(AdapterOrigin(f"hub:org/{number}", "", "hf_token"), "acme") for number in range(200)]
    for number, name in enumerate(names):
        accesses.use(name, "acme")
        accesses.opened(name, float(number))
    accesses.opened(names[0], 200.0)  # asked for again
    looked_at: list[str] = []
    is_over = Accesses.is_over

    def counted(self: Accesses, name: str, now: float) -> bool:
        looked_at.append(name)
        return is_over(self, name, now)

    monkeypatch.setattr(Accesses, "is_over", counted)
    assert accesses.over(TTL_S + 2.0) == names[1:3]
    assert looked_at == names[1:4]
    accesses.forget(names[1])
    assert accesses.over(TTL_S + 2.0) == names[2:3]
