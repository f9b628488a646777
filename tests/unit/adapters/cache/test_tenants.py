"""Bytes of adapters by tenant (tests/property/test_adapter_table.py has the general laws)."""

from __future__ import annotations

import pytest

from loraplex_adapters.cache.names import AdapterTable
from loraplex_adapters.cache.residency import AdapterCacheConfig
from loraplex_adapters.cache.states import FetchName, Promote, Stage
from loraplex_contracts.adapters import AdapterKey, AdapterUser
from loraplex_contracts.errors import QuotaExceeded

ACME = AdapterUser("acme", 250)
OTHER = AdapterUser("other")
A, B, C, D = (AdapterKey("lora", f"{content:064x}") for content in range(4))
CONTENTS = {"a": A, "b": B, "c": C, "d": D}


def name_of(key: AdapterKey) -> str:
    return next(name for name, content in CONTENTS.items() if content == key)


class Cache:
    """A table whose work is done at once. Every adapter takes 100 bytes."""

    def __init__(self) -> None:
        self.table = AdapterTable(AdapterCacheConfig(1000, 1000, 4, 1))
        self.residency = self.table.residency
        self.dropped: list[object] = []

    def turn(self) -> None:
        self.table.advance(0.0)
        for move in self.table.take_moves():
            if isinstance(move, Promote):
                self.residency.promoted(move.key)
            elif isinstance(move, Stage):
                self.residency.staged(move.key)
        for fetch in self.table.take_fetches():
            assert isinstance(fetch, FetchName)
            self.table.name_fetched(fetch.name, fetch.ticket, CONTENTS[fetch.name], 100, 4, 0.0)
        self.table.check_integrity()

    def resolved(self, name: str, user: AdapterUser) -> AdapterKey:
        """A key that is held by one request."""
        for _ in range(3):
            key = self.table.resolve(name, 0.0, user)
            if key is not None:
                return key
            self.turn()
        raise AssertionError(f"{name} was not fetched")

    def run(self, name: str, user: AdapterUser) -> AdapterKey:
        """A request that holds its adapter on the device."""
        key = self.resolved(name, user)
        for _ in range(5):
            if self.residency.acquire(key) is not None:
                return key
            self.turn()
        raise AssertionError(f"{name} did not come")

    def end(self, key: AdapterKey, user: AdapterUser) -> None:
        self.residency.release(key)
        self.residency.drop_hold(key, user.tenant, name_of(key))

    def uses(self, user: AdapterUser) -> int:
        return self.residency.use.num_bytes(user.tenant, self.residency.records)

    def in_memory(self) -> str:
        records = self.residency.records
        return "".join(name for name, key in CONTENTS.items() if key in records and records[key].is_resident)


def test_a_tenants_own_idle_adapters_leave_first() -> None:
    cache = Cache()
    idle = cache.run("d", OTHER)
    cache.end(idle, OTHER)
    for name in "ab":
        cache.end(cache.run(name, ACME), ACME)
    assert (cache.uses(ACME), cache.in_memory()) == (200, "abd")
    cache.run("c", ACME)
    assert (cache.uses(ACME), cache.in_memory()) == (200, "bcd")


def test_the_least_recently_used_of_them() -> None:
    cache = Cache()
    for name in "aba":
        cache.end(cache.run(name, ACME), ACME)
    cache.run("c", ACME)
    assert cache.in_memory() == "ac"


def test_refused_while_all_are_in_use() -> None:
    cache = Cache()
    first = cache.run("a", ACME)
    cache.run("b", ACME)
    with pytest.raises(QuotaExceeded) as caught:
        cache.resolved("c", ACME)
    assert caught.value.metadata == {"quota": "resident_adapter_bytes"}
    assert caught.value.retry_after_s == 1.0
    cache.turn()
    assert cache.in_memory() == "ab", "what was refused is not loaded"
    cache.resolved("c", OTHER)  # another tenant is not concerned
    cache.end(first, ACME)
    cache.run("c", ACME)
    assert cache.uses(ACME) == 200


def test_an_adapter_larger_than_the_limit_never_comes() -> None:
    cache = Cache()
    with pytest.raises(QuotaExceeded, match="this one takes 100") as caught:
        cache.resolved("a", AdapterUser("small", 99))
    assert caught.value.retry_after_s is None
    cache.turn()
    cache.turn()
    assert cache.in_memory() == ""


def test_an_adapter_counts_for_each_tenant_that_uses_it() -> None:
    cache = Cache()
    limited = AdapterUser("limited", 100)
    for user in (ACME, limited, OTHER):
        cache.end(cache.run("a", user), user)
    assert [cache.uses(user) for user in (ACME, limited, OTHER)] == [100, 100, 100]
    cache.run("b", limited)
    assert cache.in_memory() == "ab", "others use it"
    assert [cache.uses(user) for user in (ACME, limited)] == [100, 100]


def test_what_others_hold_can_be_given_up() -> None:
    cache = Cache()
    limited = AdapterUser("limited", 100)
    cache.run("a", OTHER)
    cache.end(cache.run("a", limited), limited)
    cache.run("b", limited)
    assert cache.in_memory() == "ab"


def test_it_counts_until_it_has_left_memory() -> None:
    cache = Cache()
    cache.end(cache.run("a", ACME), ACME)
    assert cache.uses(ACME) == 100
    cache.table.unload("a")
    assert cache.uses(ACME) == 0


def test_a_request_that_goes_before_its_adapter_comes_leaves_nothing_behind() -> None:
    cache = Cache()
    key = cache.resolved("a", ACME)
    assert cache.uses(ACME) == 100
    cache.residency.drop_hold(key, ACME.tenant, "a")
    assert cache.uses(ACME) == 0


def test_what_is_on_its_way_counts_whoever_has_left() -> None:
    cache = Cache()
    cache.residency.drop_hold(cache.resolved("c", OTHER), OTHER.tenant, "c")  # fetched
    keys = [cache.resolved(name, ACME) for name in "ab"]
    for key in keys:
        assert cache.residency.acquire(key) is None
    cache.table.advance(0.0)  # promotions that have not ended
    for key in keys:
        cache.residency.drop_hold(key, ACME.tenant, name_of(key))
    assert cache.uses(ACME) == 200
    with pytest.raises(QuotaExceeded):
        cache.table.resolve("c", 0.0, ACME)


def test_a_lower_limit_holds_for_what_comes_next() -> None:
    cache = Cache()
    lower = AdapterUser("acme", 100)
    kept = [cache.run(name, ACME) for name in "ab"]
    cache.run("a", lower)
    with pytest.raises(QuotaExceeded):
        cache.resolved("c", lower)
    cache.end(A, lower)
    for key in kept:
        cache.end(key, ACME)
    cache.run("c", lower)
    assert cache.in_memory() == "c"


def loaded(cache: Cache, name: str, user: AdapterUser, *, pin: bool = False) -> AdapterKey:
    for _ in range(5):
        key = cache.table.load(name, pin, 0.0, user)
        if key is not None:
            return key
        cache.turn()
    raise AssertionError(f"{name} was not loaded")


def test_what_a_tenant_loads_counts_for_it() -> None:
    cache = Cache()
    loaded(cache, "a", ACME)
    loaded(cache, "b", ACME, pin=True)
    assert (cache.uses(ACME), cache.in_memory()) == (200, "ab")
    loaded(cache, "c", ACME)
    assert cache.in_memory() == "bc", "the pinned one stays"
    with pytest.raises(QuotaExceeded):
        cache.run("d", AdapterUser("acme", 100))
    with pytest.raises(QuotaExceeded):
        loaded(cache, "d", AdapterUser("acme", 100))
    assert cache.in_memory() == "bc"


def test_an_explicit_load_without_room_counts_for_nobody() -> None:
    cache = Cache()
    table = cache.table
    for name in "abcd":
        cache.run(name, OTHER)
    CONTENTS["e"] = AdapterKey("lora", f"{9:064x}")
    try:
        assert cache.in_memory() == "abcd"
        loaded(cache, "e", AdapterUser("late", 500))
    finally:
        del CONTENTS["e"]
    num_on_host = cache.uses(AdapterUser("late"))
    record = table.residency.records[AdapterKey("lora", f"{9:064x}")]
    assert num_on_host == (100 if record.is_resident else 0)
