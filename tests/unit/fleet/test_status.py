"""Status of a fleet, from Serve's view and the directory's."""

from __future__ import annotations

from typing import Any

from loraplex_fleet.entries import READY, ROUTER, STARTING, WORKER, Entry, Failure, View
from loraplex_fleet.status import PLACED_S, Ended, Status, part_of

FREE = "0.5 CPU"


def details(status: str, *replicas: dict[str, Any], wanted: int = 2) -> dict[str, Any]:
    deployment = {"target_num_replicas": wanted, "required_resources": {"CPU": 1.0, "GPU": 0}, "replicas": replicas}
    return {"status": status, "message": "as Serve says it", "deployments": {"Worker": deployment}}


def test_whole() -> None:
    entries = tuple(Entry(one, WORKER, "n", READY, name=one, address=f"{one}:1") for one in ("a", "b"))
    part = part_of(WORKER, details("RUNNING"), View(entries, settled=True), FREE, 0.0)
    assert (part.running, part.wanted, part.is_complete) == (2, 2, True)
    status = Status("f", (part,), ("n",))
    assert status.exists
    assert status.plain()["parts"][0]["replicas"][0]["address"] == "a:1"


def test_none() -> None:
    part = part_of(WORKER, None, View(), FREE, 0.0)
    assert not part.is_complete
    assert not Status("f", (part,), ()).exists
    assert part.is_taken_away
    assert part_of(WORKER, details("DELETING"), View(), FREE, 0.0).is_taken_away
    assert not part_of(WORKER, details("DEPLOYING"), View(), FREE, 0.0).is_taken_away


def test_what_waits_says_for_what() -> None:
    replicas = [{"state": "STARTING", "node_id": None, "start_time_s": 0.0} for _ in range(2)]
    part = part_of(WORKER, details("DEPLOYING", *replicas), View(), FREE, PLACED_S + 1)
    assert part.why == "2 replicas wait for a node with 1 CPU; the cluster has 0.5 CPU left"
    assert part_of(WORKER, details("DEPLOYING", *replicas), View(), FREE, PLACED_S).pending == ()


def test_a_rollout_without_room_says_how_to_make_some() -> None:
    waiting = {"state": "STARTING", "node_id": None, "start_time_s": 0.0}
    entries = tuple(Entry(one, WORKER, "n", READY, name=one, address=f"{one}:1") for one in ("a", "b"))
    part = part_of(WORKER, details("DEPLOYING", waiting), View(entries, settled=True), "nothing", PLACED_S + 1)
    assert part.why == (
        "1 replica waits for a node with 1 CPU; the cluster has nothing left; what ran before serves until then, and a "
        "count lower by one makes room, too"
    )


def test_a_router_waits_for_a_node_without_one() -> None:
    found = details("DEPLOYING", {"state": "STARTING", "node_id": None, "start_time_s": 0.0})
    router = found["deployments"]["Worker"]
    router |= {"required_resources": {}, "deployment_config": {"max_replicas_per_node": 1}}
    (sentence,) = part_of(ROUTER, found, View(), FREE, PLACED_S + 1).pending
    assert sentence == "1 replica waits for a node without another one; the cluster has 0.5 CPU left"


def test_what_starts_says_how_far_it_is() -> None:
    view = View((Entry("a", WORKER, "n", STARTING, text="loading m"),), settled=True)
    assert part_of(WORKER, details("DEPLOYING"), view, FREE, 0.0).why == "n: loading m"


def test_what_fails_says_why() -> None:
    view = View(failures=(Failure("a", WORKER, "n", "no such model"),), settled=True)
    part = part_of(WORKER, details("DEPLOY_FAILED"), view, FREE, 0.0)
    assert part.has_failed
    assert part.why == "no such model"
    assert part_of(WORKER, details("DEPLOY_FAILED"), View(), FREE, 0.0).why == "as Serve says it"


def test_each_part_that_fails_is_told() -> None:
    entries = (Entry("a", WORKER, "n", READY, name="w0", address="a:1"),)
    view = View(entries, failures=(Failure("r", ROUTER, "n", "no such file"),), settled=True)
    kinds = (WORKER, ROUTER)
    status = Status("f", tuple(part_of(kind, details("DEPLOY_FAILED"), view, FREE, 0.0) for kind in kinds), ())
    assert status.is_decided
    assert status.failure == (
        "workers do not start: as Serve says it; 1 serve as before; routers do not start: no such file; none serves"
    )
    one = part_of(WORKER, details("DEPLOYING"), view, FREE, 0.0)
    assert not Status("f", (one,), ()).is_decided
    assert not Status("f", (one,), ()).failure


def test_an_earlier_failure_is_no_reason() -> None:
    view = View((Entry("new", WORKER, "n"),), failures=(Failure("old", WORKER, "n", "it was killed"),), settled=True)
    assert view.replica_ids == {"new", "old"}
    found = details("DEPLOY_FAILED")
    assert part_of(WORKER, found, view.without_failures_of({"old"}), FREE, 0.0).why == "as Serve says it"


def test_a_traceback_of_serve_ends_with_the_reason() -> None:
    found = details("DEPLOY_FAILED")
    found["message"] = "It failed 3 times.\n  File ..., line 3, in run\nRuntimeError: no such\nmodel"
    assert part_of(WORKER, found, View(), FREE, 0.0).why == "no such model"


def test_a_router_without_a_worker_is_not_whole() -> None:
    entry = Entry("a", ROUTER, "n", READY, name="r0", address="a:1", text="no worker is healthy yet")
    part = part_of(ROUTER, details("RUNNING", wanted=1), View((entry,)), FREE, 0.0)
    assert (part.running, part.is_complete, part.why) == (1, False, "n: no worker is healthy yet")


def test_what_has_ended_is_told_as_it_was() -> None:
    assert Ended(fleet=True, ray=True).text("f") == "fleet f has ended, and so has Ray on this machine"
    assert Ended(fleet=True, ray=False).text("f") == "fleet f has ended"
    assert Ended(fleet=False, ray=True).text("f") == "there was no fleet f; Ray on this machine has ended"


def test_a_fleet_that_is_missing_names_those_that_are_there() -> None:
    left = ("b-routers", "b-workers", "a-fleet-workers", "somebody's")
    assert Ended(fleet=False, ray=False, left=left).missing("f") == "there is no fleet f; there is a-fleet, b"
    assert Ended(fleet=False, ray=False).missing("f") == "there is no fleet f"
