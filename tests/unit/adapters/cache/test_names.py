"""Names, fetches, remembered failures and LoadAdapter, case by case."""

from __future__ import annotations

import pytest
from support.residency import fetch_of, turn

from loraplex_adapters.cache.names import ABANDONED_S, MAX_REMEMBERED_FAILURES, AdapterTable
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import Fetch, FetchName, Promote
from loraplex_adapters.cache.versions import MAX_VERSIONS, Versions
from loraplex_contracts.adapters import OWN_ORIGIN, AdapterId, AdapterKey, AdapterOrigin, AdapterUser, LoadOptions
from loraplex_contracts.errors import (
    AdapterInUse,
    AdapterInvalid,
    AdapterLoadsBusy,
    AdapterMemoryFull,
    AdapterNotFound,
    AdapterOutsideRoot,
    AdapterVersionNotFound,
    DigestMismatch,
    IllegalTransition,
    InvalidArgument,
    LoraplexError,
    QuotaExceeded,
    SourceUnavailable,
)
from loraplex_contracts.mixtures import Member, Merge, Mixture

TTL_S = 30.0


def key_of(content: int) -> AdapterKey:
    return AdapterKey("lora", f"{content:064x}")


OLD, NEW = key_of(1), key_of(2)


def make_table(num_slots: int = 2, max_pending: int = 8) -> AdapterTable:
    return AdapterTable(
        AdapterCacheConfig(1000, 1000, num_slots, 1, max_pending_loads=max_pending, failure_ttl_s=TTL_S)
    )


def end_fetch(table: AdapterTable, key: AdapterKey, num_bytes: int = 100, now: float = 0.0) -> None:
    fetch = fetch_of(table)
    table.name_fetched(fetch.name, fetch.ticket, key, num_bytes, 4, now)


def fail_fetch(table: AdapterTable, error: Exception, now: float = 0.0) -> None:
    fetch = fetch_of(table)
    table.name_failed(fetch.name, fetch.ticket, error, now)


def bound(table: AdapterTable, name: str, key: AdapterKey) -> None:
    assert table.resolve(name, 0.0) is None
    end_fetch(table, key)
    turn(table)


def test_a_name_is_fetched_once_and_bound_for_good() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    assert table.resolve("x", 0.0) is None  # single flight
    end_fetch(table, OLD)
    assert table.resolve("x", 0.0) == OLD
    assert table.resolve("x", 1e9) == OLD
    assert not table.take_fetches()
    assert table.residency.records[OLD].num_holds == 2


def test_two_names_of_one_content_share_it() -> None:
    table = make_table()
    bound(table, "x", OLD)
    bound(table, "y", OLD)
    assert len(table.residency.records) == 1
    assert table.residency.device_used == 100
    table.unload("x")
    assert table.resolve("y", 0.0) == OLD


def test_a_failure_is_answered_from_memory_until_it_expires() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    fail_fetch(table, AdapterInvalid("broken"), now=1.0)
    raised: list[LoraplexError] = []
    for now in (1.0, 2.0, 1.0 + TTL_S - 0.01):
        with pytest.raises(AdapterInvalid, match="broken") as caught:
            table.resolve("x", now)
        raised.append(caught.value)
    assert len(set(map(id, raised))) == 3  # each its own traceback
    assert not table.take_fetches()
    assert table.resolve("x", 1.0 + TTL_S) is None
    end_fetch(table, OLD)
    assert table.resolve("x", 1.0 + TTL_S) == OLD


def test_a_failure_is_not_remembered_for_longer_than_it_says_that_it_lasts() -> None:
    table = make_table()
    for name, error in (("broken", AdapterInvalid("broken")), ("x", AdapterMemoryFull("full", retry_after_s=2.0))):
        assert table.resolve(name, 0.0) is None
        fail_fetch(table, error, now=1.0)
    with pytest.raises(AdapterMemoryFull):
        table.resolve("x", 2.9)
    turn(table, now=3.0)
    assert table.row("x").last_error_reason == AdapterMemoryFull.reason
    assert table.resolve("x", 3.0) is None
    end_fetch(table, OLD)
    assert table.resolve("x", 3.0) == OLD


def test_a_name_that_there_is_not_leaves_nothing() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    fail_fetch(table, AdapterNotFound("no"))
    turn(table, now=TTL_S + 1)
    assert not table.names


@pytest.mark.parametrize("error", [AdapterInvalid("broken"), AdapterOutsideRoot("broken")])
def test_a_failed_load_is_listed_until_it_succeeds(error: LoraplexError) -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    fail_fetch(table, error)
    turn(table, now=10 * TTL_S)
    row = table.row("x")
    assert (row.state, row.error, row.last_error, row.last_error_reason) == (
        "failed", "broken", "broken", error.reason,
    )  # fmt: skip
    assert table.resolve("x", 10 * TTL_S) is None
    row = table.row("x")
    assert (row.state, row.error, row.last_error) == ("fetching", "", "broken")
    end_fetch(table, OLD)
    assert table.row("x").last_error == ""


def test_a_failed_reload_is_listed_beside_the_content_that_serves() -> None:
    table = make_table()
    bound(table, "x", OLD)
    table.take_changes()
    for now in (0.0, 1.0):
        assert table.load("x", False, now) is None
        fail_fetch(table, AdapterInvalid("cut short"))
        with pytest.raises(AdapterInvalid):
            table.load("x", False, now)
    row = table.row("x")
    assert (row.digest, row.error, row.last_error) == (OLD.digest, "", "cut short")
    assert table.take_changes()[OLD] == (row,)
    assert table.resolve("x", 2.0) == OLD
    assert table.load("x", False, 2.0) is None
    end_fetch(table, NEW)
    assert table.row("x").last_error == ""


def test_remembered_failures_are_bounded() -> None:
    table = make_table()
    for error in (AdapterNotFound("no"), AdapterInvalid("broken")):
        for idx in range(MAX_REMEMBERED_FAILURES + 50):
            assert table.resolve(f"{error.reason}{idx}", 0.0) is None
            fail_fetch(table, error)
    # Names that there are not do not displace what is known of others.
    assert len(table.names) == 2 * MAX_REMEMBERED_FAILURES


def test_unloading_forgets_a_failure() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    fail_fetch(table, AdapterInvalid("broken"))
    assert table.unload("x") is None
    assert not table.names
    assert table.take_changes() == {"x": ()}


# --- options of a load ------------------------------------------------------------------------------------------------

ELSEWHERE = AdapterOrigin("team/v2")


def test_a_load_from_another_place_is_kept_to() -> None:
    table = make_table()
    options = LoadOptions(ELSEWHERE)
    assert table.load("x", False, 0.0, options=options) is None
    fetch = fetch_of(table)
    assert fetch.origin == ELSEWHERE
    table.name_fetched("x", fetch.ticket, OLD, 100, 4, 0.0, base="tiny")
    turn(table)
    assert table.load("x", False, 0.0, options=options) == OLD
    assert (table.row("x").source, table.row("x").base) == (ELSEWHERE.source, "tiny")
    assert table.load("x", False, 0.0) is None  # again, from there
    assert fetch_of(table).origin == ELSEWHERE
    table.unload("x")
    assert table.resolve("x", 0.0) is None
    assert fetch_of(table).origin == OWN_ORIGIN


def test_a_load_from_another_place_that_fails_leaves_the_name_where_it_was() -> None:
    table = make_table()
    bound(table, "x", OLD)
    options = LoadOptions(ELSEWHERE)
    assert table.load("x", False, 0.0, options=options) is None
    fail_fetch(table, AdapterNotFound("no such folder"))
    with pytest.raises(AdapterNotFound):
        table.load("x", False, 0.0, options=options)
    row = table.row("x")
    assert (row.digest, row.source, row.last_error) == (OLD.digest, "", "no such folder")
    # A name that was never bound is listed with the place that it was to come from.
    assert table.load("y", False, 0.0, options=options) is None
    fail_fetch(table, AdapterNotFound("no such folder"))
    turn(table, now=2 * TTL_S)
    assert (table.row("y").state, table.row("y").source) == ("failed", ELSEWHERE.source)


@pytest.mark.parametrize(
    ("options", "num_bytes"),
    [
        (LoadOptions(ELSEWHERE), 0),
        (LoadOptions(ELSEWHERE), 10**12),
        (LoadOptions(expected_digest=NEW.digest), 100),
        (LoadOptions(expected_digest=NEW.digest), 10**12),
    ],
)
def test_a_load_that_fails_leaves_an_unbound_name_to_requests(options: LoadOptions, num_bytes: int) -> None:
    """The fetch fails (0 bytes), or brings other contents, or more than ever fits."""
    table = make_table()
    assert table.load("x", False, 0.0, options=options) is None
    assert table.resolve("x", 0.0) is None  # it waits for the same fetch
    if num_bytes:
        fetch = fetch_of(table)
        table.name_fetched("x", fetch.ticket, OLD, num_bytes, 4, 0.0)
    else:
        fail_fetch(table, AdapterInvalid("broken"))
    assert table.resolve("x", 0.0) is None
    fetch = fetch_of(table)
    assert fetch.origin == OWN_ORIGIN
    with pytest.raises((DigestMismatch, AdapterInvalid, AdapterMemoryFull)):
        table.load("x", False, 0.0, options=options)
    table.name_fetched("x", fetch.ticket, OLD, 100, 4, 0.0)
    assert table.resolve("x", 0.0) == OLD
    assert (table.row("x").source, table.row("x").last_error) == ("", "")


def test_an_unexpected_digest_is_refused() -> None:
    table = make_table()
    bound(table, "x", OLD)
    options = LoadOptions(expected_digest=OLD.digest)
    assert table.load("x", False, 0.0, options=options) is None
    end_fetch(table, NEW)
    with pytest.raises(DigestMismatch, match=NEW.digest):
        table.load("x", False, 0.0, options=options)
    assert table.row("x").digest == OLD.digest
    assert table.load("x", False, 0.0, options=options) is None
    end_fetch(table, OLD)
    turn(table)
    assert table.load("x", False, 0.0, options=options) == OLD


def test_if_absent_leaves_a_bound_name_as_it_is() -> None:
    table = make_table()
    bound(table, "x", OLD)
    options = LoadOptions(ELSEWHERE, if_absent=True)
    assert table.load("x", True, 0.0, options=options) is None
    assert not table.take_fetches()
    turn(table)
    assert table.load("x", True, 0.0, options=options) == OLD
    assert table.row("x").pinned
    unexpected = LoadOptions(if_absent=True, expected_digest=NEW.digest)
    with pytest.raises(DigestMismatch):  # at once: nothing is due that would wake an idle engine
        table.load("x", False, 0.0, options=unexpected)
    assert table.row("x").pinned
    # It waits for a fetch that is under way, and begins one where there is none.
    for is_asked_before in (True, False):
        name = f"y{is_asked_before}"
        if is_asked_before:
            assert table.resolve(name, 0.0) is None
        assert table.load(name, False, 0.0, options=options) is None
        end_fetch(table, NEW)
        turn(table)
        assert table.load(name, False, 0.0, options=options) == NEW
        assert not table.take_fetches()


@pytest.mark.parametrize("is_found", [False, True])
def test_if_absent_with_a_source_does_not_end_with_a_fetch_from_elsewhere(is_found: bool) -> None:
    table = make_table()
    options = LoadOptions(ELSEWHERE, if_absent=True)
    assert table.resolve("x", 0.0) is None
    assert table.load("x", True, 0.0, options=options) is None
    if is_found:
        end_fetch(table, OLD)
        assert not table.take_fetches()  # it is there: it stays as it is
    else:
        fail_fetch(table, AdapterNotFound("no such folder"))
        (fetch,) = table.take_fetches()
        assert isinstance(fetch, FetchName)
        assert fetch.origin == ELSEWHERE.without_token
        table.name_fetched("x", fetch.ticket, NEW, 100, 4, 0.0)
    turn(table)
    assert table.load("x", True, 0.0, options=options) == (OLD if is_found else NEW)
    assert table.row("x").pinned


def test_loads_with_other_options_take_turns() -> None:
    table = make_table()
    first, second = LoadOptions(AdapterOrigin("a")), LoadOptions(AdapterOrigin("b"))
    assert table.load("x", False, 0.0, options=first) is None
    assert table.load("x", False, 0.0, options=second) is None
    fetch = fetch_of(table)
    assert fetch.origin.source == "a"
    table.name_fetched("x", fetch.ticket, OLD, 100, 4, 0.0)
    turn(table)
    assert table.load("x", False, 0.0, options=first) == OLD
    assert table.load("x", False, 0.0, options=second) is None
    assert fetch_of(table).origin.source == "b"


def test_equal_loads_share_a_fetch_that_begins_after_they_came() -> None:
    table = make_table()
    for call in (1, 2, 3):
        assert table.load("x", False, 0.0, call=call) is None
    first = fetch_of(table)
    turn(table)
    assert table.load("x", False, 0.0, call=4) is None  # the files may have changed since
    table.name_fetched("x", first.ticket, OLD, 100, 4, 0.0)
    turn(table)
    # The first was given up meanwhile.
    assert [table.load("x", False, 0.0, call=call) for call in (2, 3, 4, 5)] == [OLD, OLD, None, None]
    end_fetch(table, NEW)
    turn(table)
    assert [table.load("x", False, 0.0, call=call) for call in (4, 5)] == [NEW, NEW]
    assert table.names["x"].load is None
    assert not table.take_fetches()


def test_equal_loads_share_an_error() -> None:
    table = make_table()
    for call in (1, 2):
        assert table.load("x", False, 0.0, call=call) is None
    fail_fetch(table, AdapterInvalid("broken"))
    turn(table)
    for call in (1, 2):
        with pytest.raises(AdapterInvalid):
            table.load("x", False, 0.0, call=call)
    assert not table.take_fetches()


def test_loads_that_wait_for_an_older_fetch_share_the_next() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    older = fetch_of(table)
    for call in (1, 2):
        assert table.load("x", False, 0.0, call=call) is None
        turn(table)
    table.name_fetched("x", older.ticket, OLD, 100, 4, 0.0)
    turn(table)
    assert [table.load("x", False, 0.0, call=call) for call in (1, 2, 3)] == [None, None, None]
    end_fetch(table, NEW)
    turn(table)
    assert [table.load("x", False, 0.0, call=call) for call in (1, 2, 3)] == [NEW, NEW, None]


def test_loads_of_other_tenants_share_nothing() -> None:
    """Each is refused or counted by its own limits."""
    table = make_table()
    small, large = AdapterUser("small", 50), AdapterUser("large", 500)
    assert table.load("x", False, 0.0, small, call=1) is None
    assert table.load("x", False, 0.0, large, call=2) is None
    end_fetch(table, OLD)
    turn(table)
    with pytest.raises(QuotaExceeded):
        table.load("x", False, 0.0, small, call=1)
    assert table.load("x", False, 0.0, large, call=2) is None
    end_fetch(table, OLD)
    turn(table)
    assert table.load("x", False, 0.0, large, call=2) == OLD


def test_an_abandoned_load_does_not_hold_up_one_with_other_options() -> None:
    table = make_table()
    assert table.load("x", False, 0.0, options=LoadOptions(AdapterOrigin("a"))) is None
    end_fetch(table, OLD)
    turn(table)
    options = LoadOptions(AdapterOrigin("b"))
    assert table.load("x", False, 0.0, options=options) is None
    end_fetch(table, NEW)
    turn(table)
    assert table.load("x", False, 0.0, options=options) == NEW


def test_unloading_may_be_refused_while_requests_use_it() -> None:
    table = make_table()
    bound(table, "x", OLD)
    assert table.resolve("x", 0.0) == OLD
    with pytest.raises(AdapterInUse, match="requests: 1"):
        table.unload("x", if_unused=True)
    assert table.row("x").num_uses == 1
    table.residency.drop_hold(OLD, name="x")
    assert table.unload("x", if_unused=True) == OLD


def test_one_name_shows_nothing_of_requests_for_another_name_of_its_content() -> None:
    table = make_table()
    bound(table, "acme/x", OLD)
    bound(table, "beta/y", OLD)
    for _ in range(2):
        assert table.resolve("beta/y", 0.0) == OLD
        assert table.residency.acquire(OLD) is not None
    assert (table.row("beta/y").num_running, table.row("beta/y").num_uses) == (2, 2)
    assert (table.row("acme/x").num_running, table.row("acme/x").num_uses) == (0, 0)
    assert table.resolve("acme/x", 0.0) == OLD
    assert (table.row("beta/y").num_running, table.row("acme/x").num_running) == (2, 1)
    table.residency.drop_hold(OLD, name="acme/x")
    with pytest.raises(IllegalTransition, match="not held by the name 'acme/x'"):
        table.residency.drop_hold(OLD, name="acme/x")
    assert table.unload("acme/x", if_unused=True) == OLD
    with pytest.raises(AdapterInUse, match="requests: 2"):
        table.unload("beta/y", if_unused=True)


def test_uses_are_counted_anew_once_a_name_is_gone_with_its_requests() -> None:
    table = make_table()
    bound(table, "x", OLD)
    bound(table, "y", OLD)
    assert table.resolve("x", 0.0) == OLD
    table.unload("x")
    bound(table, "x", OLD)
    assert table.row("x").num_uses == 1  # that request runs
    table.residency.drop_hold(OLD, name="x")
    table.unload("y")
    bound(table, "y", OLD)  # it is the last one, which is listed until its requests have ended
    table.unload("x")
    bound(table, "x", OLD)
    assert table.row("x").num_uses == 0


@pytest.mark.parametrize("merge", [None, Merge("linear")])
def test_a_request_for_a_mixture_is_one_use_of_each_member(merge: Merge | None) -> None:
    table = make_table()
    mixture = Mixture((Member(AdapterId("x"), 1.0), Member(AdapterId("y"), 1.0)), merge)
    fetches: list[Fetch] = []
    for content in range(1, 4 if merge else 3):  # one member comes after the other, then the merged adapter
        assert table.resolve_members(mixture, 0.0) is None
        fetches += table.take_fetches()
        fetch = fetches.pop(0)
        assert isinstance(fetch, FetchName)
        table.name_fetched(fetch.name, fetch.ticket, key_of(content), 100, 4, 0.0)
    assert [table.row(name).num_uses for name in ("x", "y")] == [0, 0]
    for num_requests in (1, 2):
        assert table.resolve_members(mixture, 0.0) is not None
        assert [table.row(name).num_uses for name in ("x", "y")] == [num_requests, num_requests]


def test_requests_for_a_version_use_the_name() -> None:
    table = make_table()
    bound(table, "x", OLD)
    bound(table, "y", OLD)
    assert table.resolve(f"x@{OLD.digest[:12]}", 0.0) == OLD
    assert (table.row("x").num_uses, table.row("y").num_uses) == (1, 0)
    with pytest.raises(AdapterInUse, match="requests: 1"):
        table.unload("x", if_unused=True)
    table.residency.drop_hold(OLD, name="x")
    assert table.unload("x", if_unused=True) == OLD


def test_too_many_fetches_are_refused_with_a_hint() -> None:
    table = make_table(max_pending=2)
    assert table.resolve("a", 0.0) is None
    assert table.resolve("b", 0.0) is None
    with pytest.raises(AdapterLoadsBusy) as raised:
        table.resolve("c", 0.0)
    assert raised.value.retry_after_s
    with pytest.raises(AdapterLoadsBusy):
        table.load("d", False, 0.0)
    assert set(table.names) == {"a", "b"}
    assert table.resolve("a", 0.0) is None  # joining is free


def test_each_tenant_has_a_queue_of_its_own() -> None:
    table = make_table(max_pending=2)
    other = AdapterUser("other")
    for name in "ab":
        assert table.resolve(name, 0.0) is None
    assert table.resolve("b", 0.0, other) is None
    assert table.resolve("c", 0.0, other) is None
    assert table.resolve("d", 0.0, other) is None
    with pytest.raises(AdapterLoadsBusy):
        table.resolve("e", 0.0, other)
    fetches = [fetch for fetch in table.take_fetches() if isinstance(fetch, FetchName)]
    assert [(fetch.name, fetch.tenant) for fetch in fetches] == [("a", ""), ("b", ""), ("c", "other"), ("d", "other")]
    table.name_failed("c", fetches[2].ticket, AdapterNotFound("none"), 0.0)
    assert table.resolve("e", 0.0, other) is None
    assert len(table._fetching) == 4


def test_load_binds_anew_and_running_requests_keep_the_old() -> None:
    table = make_table()
    bound(table, "x", OLD)
    assert table.resolve("x", 0.0) == OLD
    assert table.residency.acquire(OLD) is not None
    assert table.load("x", False, 0.0) is None
    assert table.resolve("x", 0.0) == OLD  # until the load is done
    end_fetch(table, NEW)
    turn(table)
    assert table.load("x", False, 0.0) == NEW
    assert table.resolve("x", 0.0) == NEW
    assert table.residency.records[OLD].num_leases == 1
    table.residency.release(OLD)
    table.residency.drop_hold(OLD, name="x")
    table.residency.drop_hold(OLD, name="x")
    assert OLD not in table.residency.records
    turn(table)


def test_a_failed_load_keeps_the_old_binding() -> None:
    table = make_table()
    bound(table, "x", OLD)
    assert table.load("x", False, 0.0) is None
    fail_fetch(table, AdapterInvalid("broken"))
    turn(table)
    with pytest.raises(AdapterInvalid, match="broken"):
        table.load("x", False, 0.0)
    assert table.resolve("x", 0.0) == OLD


def test_load_reads_anew_even_when_an_older_fetch_is_under_way() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    first = fetch_of(table)
    assert table.load("x", False, 0.0) is None
    assert not table.take_fetches()
    table.name_fetched("x", first.ticket, OLD, 100, 4, 0.0)
    turn(table)
    assert table.load("x", False, 0.0) is None  # what the older fetch found is not the answer
    assert table.resolve("x", 0.0) == OLD
    end_fetch(table, NEW)
    turn(table)
    assert table.load("x", False, 0.0) == NEW


def test_load_reads_anew_after_an_older_fetch_failed() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    first = fetch_of(table)
    assert table.load("x", False, 0.0) is None
    table.name_failed("x", first.ticket, AdapterInvalid("old"), 0.0)
    end_fetch(table, NEW)
    turn(table)
    assert table.load("x", False, 0.0) == NEW


def test_load_ignores_a_remembered_failure() -> None:
    table = make_table()
    assert table.resolve("x", 0.0) is None
    fail_fetch(table, AdapterInvalid("broken"))
    assert table.load("x", False, 0.1) is None
    end_fetch(table, OLD)
    turn(table)
    assert table.load("x", False, 0.1) == OLD


def test_load_ends_when_there_is_no_room() -> None:
    table = make_table(num_slots=1)
    bound(table, "x", OLD)
    assert table.resolve("x", 0.0) == OLD
    assert table.residency.acquire(OLD) is not None
    # Somebody waits for the slot, so the load of a third cannot get anywhere, and says so rather than wait.
    bound(table, "y", NEW)
    assert table.resolve("y", 0.0) == NEW
    assert table.residency.acquire(NEW) is None
    assert table.load("z", False, 0.0) is None
    end_fetch(table, key_of(3))
    turn(table)
    turn(table)
    assert table.load("z", False, 0.0) == key_of(3)


def test_a_pinned_load_stays_wanted_while_there_is_no_room() -> None:
    table = make_table(num_slots=1)
    bound(table, "x", OLD)
    assert table.resolve("x", 0.0) == OLD
    assert table.residency.acquire(OLD) is not None
    assert table.load("y", True, 0.0) is None
    end_fetch(table, NEW)
    turn(table)
    turn(table)
    assert table.load("y", True, 0.0) == NEW
    assert list(table.residency.wants) == [NEW]
    table.residency.release(OLD)
    turn(table)
    assert table.residency.records[NEW].slot == 0


def test_a_load_that_can_never_fit_leaves_only_its_error_behind() -> None:
    table = make_table()
    assert table.load("x", False, 0.0) is None
    end_fetch(table, OLD, num_bytes=1001)
    turn(table)
    with pytest.raises(AdapterMemoryFull):
        table.load("x", False, 0.0)
    assert not table.residency.records
    turn(table, now=TTL_S + 1)
    assert (table.row("x").state, table.row("x").error_reason) == ("failed", AdapterMemoryFull.reason)


def test_a_pin_that_can_never_be_kept_is_refused() -> None:
    table = make_table()
    assert table.load("x", True, 0.0) is None
    end_fetch(table, OLD, num_bytes=600)
    turn(table)
    assert table.load("x", True, 0.0) == OLD
    assert table.load("y", True, 0.0) is None
    end_fetch(table, NEW, num_bytes=500)
    turn(table)
    with pytest.raises(AdapterMemoryFull, match="pin") as raised:
        table.load("y", True, 0.0)
    assert raised.value.metadata == {"can_ever_fit": "true"}
    assert NEW not in table.residency.records


def test_a_pinned_adapter_whose_files_changed_takes_its_own_place() -> None:
    table = make_table()
    for key in (OLD, NEW):
        assert table.load("x", True, 0.0) is None
        end_fetch(table, key, num_bytes=600)
        turn(table)
        turn(table)
        assert table.load("x", True, 0.0) == key
    assert table.residency.pinned_bytes == 600
    assert set(table.residency.records) == {NEW}


def test_a_content_that_another_name_pins_too_makes_no_way() -> None:
    table = make_table()
    for name in ("x", "y"):
        assert table.load(name, True, 0.0) is None
        end_fetch(table, OLD, num_bytes=600)
        turn(table)
        assert table.load(name, True, 0.0) == OLD
    assert table.load("x", True, 0.0) is None
    end_fetch(table, NEW, num_bytes=600)
    with pytest.raises(AdapterMemoryFull, match="pin"):
        table.load("x", True, 0.0)
    assert table.names["x"].key == OLD


def test_a_pinned_adapter_that_failed_is_brought_up_by_loading_it_again() -> None:
    table = make_table()
    residency = table.residency
    assert table.load("x", True, 0.0) is None
    end_fetch(table, OLD)
    table.advance(0.0)
    assert any(isinstance(move, Promote) for move in table.take_moves())
    residency.failed(OLD, AdapterInvalid("the copy went wrong"), now=0.0)
    turn(table)
    with pytest.raises(AdapterInvalid):
        table.load("x", True, 0.0)
    for name, key in (("a", NEW), ("b", key_of(3))):  # both slots are taken meanwhile
        bound(table, name, key)
    assert table.load("x", True, 1.0) is None
    end_fetch(table, OLD, now=1.0)
    turn(table, now=1.0)
    turn(table, now=1.0)
    assert table.load("x", True, 1.0) == OLD
    assert residency.records[OLD].slot >= 0


def test_loading_again_without_a_pin_takes_the_pin_off() -> None:
    table = make_table()
    for pin in (True, False):
        assert table.load("x", pin, 0.0) is None
        end_fetch(table, OLD)
        turn(table)
        assert table.load("x", pin, 0.0) == OLD
        assert (table.residency.records[OLD].pinned_names == {"x"}) is pin


def test_an_abandoned_load_does_not_answer_a_later_one() -> None:
    table = make_table()
    assert table.load("x", False, 0.0) is None
    end_fetch(table, OLD)
    turn(table, now=1.0)
    turn(table, now=1.0)
    later = 1.0 + ABANDONED_S + 1
    assert table.load("x", False, later) is None
    end_fetch(table, NEW, now=later)
    turn(table, now=later)
    assert table.load("x", False, later) == NEW


def test_unload_needs_a_bound_name() -> None:
    table = make_table()
    with pytest.raises(AdapterNotFound):
        table.unload("x")
    assert table.resolve("x", 0.0) is None
    with pytest.raises(AdapterNotFound):
        table.unload("x")
    end_fetch(table, OLD)
    assert table.unload("x") == OLD
    assert not table.residency.records
    assert table.resolve("x", 0.0) is None  # forgotten: bound again on the next use


def test_a_fetch_that_outlived_its_name_binds_nothing() -> None:
    table = make_table()
    bound(table, "x", OLD)
    assert table.load("x", False, 0.0) is None
    stale = fetch_of(table)
    table.unload("x")
    assert table.resolve("x", 0.0) is None
    fresh = fetch_of(table)
    table.name_fetched("x", stale.ticket, OLD, 100, 4, 0.0)
    assert table.names["x"].key is None
    table.name_fetched("x", fresh.ticket, NEW, 100, 4, 0.0)
    assert table.resolve("x", 0.0) == NEW
    assert not table._fetching


@pytest.mark.parametrize(
    "fields",
    [
        {"host_bytes": 0},
        {"device_bytes": -1},
        {"num_device_slots": 0},
        {"max_pending_loads": 0},
        {"failure_ttl_s": 0.0},
    ],
)
def test_budgets_are_checked(fields: dict[str, float]) -> None:
    good: dict[str, float] = {"host_bytes": 1, "device_bytes": 1, "num_device_slots": 1, "disk_bytes": 1}
    with pytest.raises(InvalidArgument):
        AdapterCacheConfig(**(good | fields))  # type: ignore[arg-type]


# --- versions ---------------------------------------------------------------------------------------------------------


A, B = AdapterKey("lora", "a" * 64), AdapterKey("lora", "aaaaaaaab" + "b" * 55)


def rebound(table: AdapterTable) -> None:
    """The name x is bound to A, then to B."""
    bound(table, "x", A)
    assert table.resolve("x", 0.0) == A
    assert table.load("x", False, 0.0) is None
    end_fetch(table, B)
    turn(table)
    assert table.load("x", False, 0.0) == B


def test_an_older_version_is_asked_for_by_its_digest() -> None:
    table = make_table()
    rebound(table)
    assert table.resolve("x", 0.0) == B
    assert table.resolve(f"x@{B.digest[:9]}", 0.0) == B  # under the name itself
    assert set(table.names) == {"x"}
    assert table.resolve(f"x@{A.digest[:9]}", 0.0) is None
    fetch = fetch_of(table)
    assert (fetch.name, fetch.version) == (f"x@{A.digest}", A)
    table.name_fetched(fetch.name, fetch.ticket, A, 100, 4, 0.0)
    assert table.resolve(f"x@{A.digest[:12]}", 0.0) == A
    assert table.resolve("x", 0.0) == B
    assert table.row(f"x@{A.digest[:9]}").adapter_id == f"x@{A.digest}"
    assert table.row(f"x@{B.digest[:9]}").adapter_id == "x"


def test_digits_that_two_versions_begin_with_are_refused() -> None:
    table = make_table()
    rebound(table)
    with pytest.raises(AdapterVersionNotFound, match="2 versions"):
        table.resolve("x@aaaaaaaa", 0.0)


def test_a_version_of_a_name_that_is_not_bound_is_looked_for_in_the_source() -> None:
    table = make_table()
    assert table.resolve(f"x@{A.digest[:9]}", 0.0) is None
    assert table.resolve(f"x@{B.digest[:9]}", 0.0) is None
    fetch = fetch_of(table)
    assert (fetch.name, fetch.version) == ("x", None)
    table.name_fetched("x", fetch.ticket, A, 100, 4, 0.0)
    assert table.resolve(f"x@{A.digest[:9]}", 0.0) == A
    with pytest.raises(AdapterVersionNotFound):
        table.resolve(f"x@{B.digest[:9]}", 0.0)


def test_the_content_of_another_name_is_no_version_of_this_one() -> None:
    table = make_table()
    bound(table, "x", A)
    bound(table, "y", B)
    with pytest.raises(AdapterVersionNotFound):
        table.resolve(f"x@{B.digest}", 0.0)


def test_a_version_that_has_left_the_store_is_not_found() -> None:
    table = make_table()
    rebound(table)
    assert table.resolve(f"x@{A.digest}", 0.0) is None
    fail_fetch(table, AdapterVersionNotFound("gone"))
    for _ in range(2):
        with pytest.raises(AdapterVersionNotFound):
            table.resolve(f"x@{A.digest}", 0.0)
    turn(table, now=TTL_S + 1)
    assert set(table.names) == {"x"}


def test_unloading_forgets_the_versions() -> None:
    table = make_table()
    rebound(table)
    table.residency.drop_hold(A, name="x")
    assert table.resolve(f"x@{A.digest}", 0.0) is None
    end_fetch(table, A)
    with pytest.raises(AdapterVersionNotFound):
        table.unload(f"x@{B.digest}")  # it has no record of its own
    assert table.unload(f"x@{A.digest[:9]}") == A
    assert set(table.names) == {"x"}
    assert table.resolve(f"x@{A.digest}", 0.0) is None
    end_fetch(table, A)
    table.unload("x")
    assert not table.names
    assert not table.residency.records
    assert table.resolve(f"x@{A.digest}", 0.0) is None
    assert fetch_of(table).version is None  # only the source may have it


def restarted() -> AdapterTable:
    """A table that knows a version and the origin of a name from the process before."""
    return AdapterTable(AdapterCacheConfig(1000, 1000, 2, 1), Versions([("x", A), ("x", ELSEWHERE)]))


def test_unloading_a_name_that_was_not_asked_for_forgets_its_versions() -> None:
    table = restarted()
    assert table.resolve(f"x@{A.digest}", 0.0) is None
    end_fetch(table, A)
    with pytest.raises(AdapterNotFound):
        table.unload("x")
    assert not table.names
    assert not table.residency.records
    assert not any(table.take_changes().values())


def test_unloading_a_name_whose_fetch_failed_forgets_where_it_came_from() -> None:
    for error in (AdapterNotFound("gone"), SourceUnavailable("away", retry_after_s=5.0)):
        table = restarted()
        assert table.resolve("x", 0.0) is None
        fetch = fetch_of(table)
        assert fetch.origin == ELSEWHERE.without_token
        table.name_failed("x", fetch.ticket, error, 0.0)
        assert table.unload("x") is None
        assert table.resolve("x", 0.0) is None
        assert fetch_of(table).origin == OWN_ORIGIN


def test_versions_of_a_name_are_bounded() -> None:
    table = make_table()
    bound(table, "x", key_of(100))
    for content in range(101, 102 + MAX_VERSIONS):
        assert table.load("x", False, 0.0) is None
        end_fetch(table, key_of(content))
        turn(table)
        assert table.load("x", False, 0.0) == key_of(content)
    with pytest.raises(AdapterVersionNotFound):
        table.resolve(f"x@{key_of(100).digest}", 0.0)
    assert table.resolve(f"x@{key_of(102).digest}", 0.0) is None
