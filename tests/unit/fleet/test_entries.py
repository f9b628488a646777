"""Directory of a fleet: leases, names, what routers make of it."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from loraplex_fleet.entries import (
    DRAINING,
    LEASE_S,
    READY,
    ROUTER,
    STARTING,
    WORKER,
    Entries,
    Entry,
    View,
    follow,
    members_text,
    view_of,
)
from loraplex_router.membership import members_of

SETTLED = LEASE_S + 1.0


def worker(replica_id: str, node: str = "n1", **more: str) -> Entry:
    return Entry(replica_id, WORKER, node, **{"state": READY, "address": f"{replica_id}:1", **more})


def test_names_are_the_lowest_free_ones() -> None:
    entries = Entries(0.0)
    assert [entries.beat(worker(one), SETTLED) for one in ("a", "b", "c")] == ["w0", "w1", "w2"]
    assert entries.beat(Entry("r", ROUTER, "n1", READY), SETTLED) == "r0"
    entries.drop("b")
    assert entries.beat(worker("d"), SETTLED) == "w1", "the replacement inherits the name"


def test_a_name_goes_to_the_node_where_it_was() -> None:
    entries = Entries(0.0)
    for replica_id, node in (("a", "n1"), ("b", "n2")):
        entries.beat(worker(replica_id, node), SETTLED)
    entries.drop("a")
    entries.drop("b")
    assert entries.beat(worker("c", "n2"), SETTLED) == "w1"
    assert entries.beat(worker("d", "n3"), SETTLED) == "w0"


def test_a_lease_that_is_not_renewed_ends() -> None:
    entries = Entries(0.0)
    entries.beat(worker("a"), SETTLED)
    entries.beat(worker("b"), SETTLED + 4.0)
    assert set(entries.view(SETTLED + 4.5).members) == {"w0", "w1"}
    view = entries.view(SETTLED + LEASE_S)
    assert view.members == {"w1": "b:1"}
    assert "not heard for 5 s" in view.failures[0].text


def test_only_those_that_serve_are_members() -> None:
    entries = Entries(0.0)
    entries.beat(worker("a", state=STARTING, address=""), SETTLED)
    assert entries.view(SETTLED).members == {}
    entries.beat(worker("a"), SETTLED)
    assert entries.view(SETTLED).members == {"w0": "a:1"}
    entries.beat(worker("a", state=DRAINING), SETTLED)
    assert entries.view(SETTLED).members == {}
    assert entries.view(SETTLED).entries[0].name == "w0", "and nobody else gets the name before it is gone"
    assert entries.beat(worker("b"), SETTLED) == "w1"


def test_a_directory_that_starts_again_gives_no_names_until_all_have_spoken() -> None:
    entries = Entries(100.0)
    assert entries.beat(worker("new"), 100.5) == ""
    assert entries.beat(worker("old", name="w0"), 101.0) == "w0"
    assert entries.beat(worker("new"), 100.0 + LEASE_S) == "w1"


def test_of_two_with_one_name_the_later_gets_another() -> None:
    entries = Entries(0.0)
    entries.beat(worker("a", name="w0"), SETTLED)
    assert entries.beat(worker("b", name="w0"), SETTLED) == "w1"
    assert entries.beat(worker("a", name="w0"), SETTLED) == "w0"


def test_a_reason_is_remembered() -> None:
    entries = Entries(0.0)
    entries.beat(worker("a"), SETTLED)
    entries.drop("a", "out of memory")
    entries.drop("unknown", "whatever")
    assert [one.text for one in entries.view(SETTLED).failures] == ["out of memory"]


def test_a_young_directory_takes_nothing_away() -> None:
    entries = Entries(0.0)
    last = {"w0": "a:1", "w1": "b:1"}
    entries.beat(worker("c", name="w1"), 1.0)
    assert follow(last, entries.view(1.0)) == {"w0": "a:1", "w1": "c:1"}
    entries.beat(worker("c", name="w1"), LEASE_S)
    assert follow(last, entries.view(LEASE_S)) == {"w1": "c:1"}
    assert follow(last, View()) == last


def test_a_view_crosses_as_json() -> None:
    entries = Entries(0.0)
    entries.beat(replace(worker("a"), metrics_ports=(9000,)), SETTLED)
    entries.drop("b", "x")
    view = entries.view(SETTLED)
    assert view_of(json.loads(json.dumps(view.plain()))) == view


def test_what_another_release_adds_is_left_out() -> None:
    entries = Entries(0.0)
    entries.beat(worker("a"), SETTLED)
    entries.beat(worker("b"), SETTLED)
    entries.drop("b", "x")
    view = entries.view(SETTLED)
    plain = view.plain()
    more = {name: [{**one, "new": 1} for one in plain[name]] for name in ("entries", "failures")}
    assert view_of({**plain, **more, "new": 1}) == view


def test_routers_read_the_file() -> None:
    members = members_of(members_text({"w1": "10.0.0.1:5", "w0": "10.0.0.2:5"}).encode())
    assert [(one.name, one.address) for one in members] == [("w0", "10.0.0.2:5"), ("w1", "10.0.0.1:5")]
    assert members_of(members_text({}).encode()) == ()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from(["beat", "drop", "wait"])), max_size=60))
def test_no_two_members_share_a_name(events: list[tuple[str, str]]) -> None:
    entries, names, now_s = Entries(0.0), dict[str, str](), SETTLED
    for replica_id, event in events:
        now_s += 0.7 if event == "wait" else 0.0
        if event == "beat":
            names[replica_id] = entries.beat(worker(replica_id, name=names.get(replica_id, "")), now_s)
        elif event == "drop":
            entries.drop(replica_id)
        view = entries.view(now_s)
        assert len(view.members) == len(view.entries)
        members_of(members_text(view.members).encode())
