"""Ray cluster of the commands, as far as it goes where no Ray runs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fake_workers import FakeWorker
from support.fleet import free_port, ray_is_missing

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, Unavailable
from loraplex_fleet import cli
from loraplex_fleet.spec import parse_spec
from loraplex_fleet.status import Status

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


class FakeServe:
    """Serve's client, with applications that end once they were looked at `drain` times."""

    def __init__(self, names: Iterable[str] = (), drain: int = 2) -> None:
        self.applications: dict[str, Any] = {
            one: {
                "name": one,
                "status": "RUNNING",
                "deployments": {},
                "deployed_app_config": {"name": one, "import_path": "a.b:c", "route_prefix": None},
            }
            for one in names
        }
        self.was_shut_down = False
        self._drain = drain
        self._looks: dict[str, int] = {}
        self._to_end = list[str]()

    def get_serve_details(self) -> dict[str, Any]:
        """The details. An end shows at the second look: Serve takes calls in any order."""
        details = {"applications": dict(self.applications)}
        self._go_on()
        return details

    def _go_on(self) -> None:
        for name in list(self._looks):
            self._looks[name] -= 1
            if self._looks[name] < 0:
                del self._looks[name], self.applications[name]
        while self._to_end:
            name = self._to_end.pop()
            self.applications[name] = {**self.applications[name], "status": "DELETING"}
            self._looks[name] = self._drain

    def delete_apps(self, names: list[str], *, blocking: bool) -> None:
        assert not blocking
        self._to_end += names

    def deploy_apps(self, config: Any) -> None:
        """Runs what it is given, and nothing else."""
        given = {one["name"]: one for one in config.model_dump(exclude_unset=True)["applications"]}
        self.applications = {
            name: {"name": name, "status": "DEPLOYING", "deployed_app_config": one} for name, one in given.items()
        }

    def shutdown(self) -> None:
        self.was_shut_down = True


def with_serve(monkeypatch: pytest.MonkeyPatch, client: FakeServe | None) -> list[str]:
    """Puts the client in the place of Serve. Returns what else is ended."""
    from loraplex_fleet import cluster

    ended = list[str]()

    def end_own_ray() -> bool:
        ended.append("Ray")
        return True

    def find_directory(fleet: str) -> None:
        ended.append(f"directory of {fleet}")

    monkeypatch.setattr(cluster, "_serve_client", lambda **_: client)
    monkeypatch.setattr(cluster, "_end_own_ray", end_own_ray)
    monkeypatch.setattr(cluster, "find_directory", find_directory)
    monkeypatch.setattr(cluster, "END_LOOK_S", 0.0)
    monkeypatch.setattr(cluster, "changing", contextlib.nullcontext)
    if client is not None:
        monkeypatch.setattr(cluster.serve, "shutdown", client.shutdown)
    return ended


A, B = ("a-routers", "a-workers"), ("b-routers", "b-workers")


def test_the_last_fleet_ends_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    client = FakeServe(A)
    ended = with_serve(monkeypatch, client)
    assert cluster.end("a", 5.0) == cluster.Ended(fleet=True, ray=True)
    assert client.was_shut_down
    assert "Ray" in ended


@pytest.mark.parametrize("name", ["a", "misspelt"])
def test_another_fleet_keeps_ray(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    client = FakeServe((*A, *B))
    ended = with_serve(monkeypatch, client)
    outcome = cluster.end(name, 5.0)
    assert (outcome.fleet, outcome.ray) == (name == "a", False)
    assert set(outcome.left) == ({*B} if name == "a" else {*A, *B})
    assert not client.was_shut_down
    assert "Ray" not in ended


def test_ray_without_serve_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    with_serve(monkeypatch, None)
    assert cluster.end("a", 5.0) == cluster.Ended(fleet=False, ray=True)


def test_a_fleet_that_came_up_during_the_drain_keeps_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    client = FakeServe(A)
    with_serve(monkeypatch, client)
    monkeypatch.setattr(cluster.time, "sleep", lambda _: client.applications.update({B[0]: {"name": B[0]}}))
    assert cluster.end("a", 5.0) == cluster.Ended(fleet=True, ray=False, left=(B[0],))
    assert not client.was_shut_down


def test_replicas_without_a_node_are_not_given_the_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    client = FakeServe(A)
    with_serve(monkeypatch, client)
    replicas = [
        {"actor_name": "waits", "state": "STARTING", "node_id": None},
        {"actor_name": "loads", "state": "STARTING", "node_id": "1"},
        {"actor_name": "serves", "state": "RUNNING", "node_id": "1"},
        {"actor_name": "recovers", "state": "RECOVERING", "node_id": None},
    ]
    client.applications["a-workers"]["deployments"] = {"Worker": {"replicas": replicas}}
    killed = list[str]()

    def kill(name: str) -> None:
        assert client.applications["a-workers"]["status"] == "DELETING", "else Serve starts another"
        killed.append(name)

    monkeypatch.setattr(cluster.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(cluster.ray, "kill", kill)
    cluster.end("a", 5.0)
    assert killed == ["waits"]


def test_a_fleet_that_is_started_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    client = FakeServe(A, drain=100)
    with_serve(monkeypatch, client)

    num_sleeps = itertools.count(1)

    def start_again(_: float) -> None:
        if next(num_sleeps) == 2:  # once it is being ended
            client.applications[A[0]] = {"name": A[0], "status": "DEPLOYING"}

    monkeypatch.setattr(cluster.time, "sleep", start_again)
    with pytest.raises(Unavailable, match="a-routers was started again meanwhile"):
        cluster.end("a", 5.0)


def deploying(monkeypatch: pytest.MonkeyPatch, client: FakeServe) -> None:
    """Deploys a fleet of two replicas."""
    from loraplex_fleet import cluster
    from loraplex_fleet.entries import View

    with_serve(monkeypatch, client)
    monkeypatch.setattr(cluster, "node_addresses", lambda: ["127.0.0.1"])
    monkeypatch.setattr(cluster, "read_view", lambda _: View())
    cluster.deploy(parse_spec({"model": "m"}))


def test_a_deployment_leaves_other_fleets(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeServe(B)
    deploying(monkeypatch, client)
    assert set(client.applications) == {*B, "loraplex-routers", "loraplex-workers"}


def test_a_deployment_that_serve_ignores_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeServe()
    monkeypatch.setattr(client, "deploy_apps", lambda _: None)
    with pytest.raises(Unavailable, match="run `loraplex up` again"):
        deploying(monkeypatch, client)


def refused(address: str) -> str:
    """The sentence, which comes soon: Ray itself tries for a minute."""
    from loraplex_fleet.cluster import joined

    start_s = time.monotonic()
    with pytest.raises(Unavailable) as error, joined(address):
        pass
    assert time.monotonic() - start_s < 10
    return error.value.message


class FakeRay:
    """Ray on this machine: one is there once it was started, which takes a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from loraplex_fleet import cluster

        self.started = 0
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        monkeypatch.setattr(cluster.tempfile, "gettempdir", lambda: str(folder))
        monkeypatch.setattr(cluster, "START_LOOK_S", 0.01)
        monkeypatch.setattr(cluster, "_join", self._join)
        monkeypatch.setattr(cluster, "_start_here", self._start)
        monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)

    def _join(self, _: str) -> bool:
        if not self.started:
            raise ConnectionError
        return False

    def _start(self) -> str:
        time.sleep(0.1)
        self.started += 1
        return "127.0.0.2:1"


def test_two_commands_at_once_start_one_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loraplex_fleet.cluster import joined

    fake = FakeRay(monkeypatch, tmp_path)

    def up(_: int) -> bool:
        with joined("auto", may_start=True) as started:
            return started

    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(up, range(4))) == [False, False, False, True]
    assert fake.started == 1


def test_none_is_started_where_a_variable_names_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loraplex_fleet.cluster import joined

    fake = FakeRay(monkeypatch, tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(Unavailable), joined("auto", may_start=True):
        pass
    assert fake.started == 0


def test_a_start_that_lasts_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loraplex_fleet import cluster

    FakeRay(monkeypatch, tmp_path)
    monkeypatch.setattr(cluster, "LOCK_S", 0.05)
    with (
        cluster._starting(),
        pytest.raises(Unavailable, match="starting or ending Ray here"),
        cluster.joined("auto", may_start=True),
    ):
        pass


def test_what_ray_prints_has_its_address() -> None:
    from loraplex_fleet.cluster import ADDRESS

    found = ADDRESS.search("\x1b[1m  ray start --address='127.0.0.2:56379'\x1b[22m")
    assert found
    assert found[1] == "127.0.0.2:56379"


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets `joined` take for granted that there is a Ray."""
    from loraplex_fleet import cluster

    monkeypatch.setattr(cluster, "_join", lambda _: False)


@pytest.mark.usefixtures("connected")
def test_an_actor_that_ends_meanwhile_is_one_sentence() -> None:
    from ray.exceptions import ActorDiedError

    from loraplex_fleet.cluster import joined

    with pytest.raises(Unavailable, match="Ray or the fleet has ended meanwhile"), joined("auto"):
        raise ActorDiedError


@pytest.mark.usefixtures("connected")
def test_an_actor_that_refuses_is_no_end() -> None:
    from ray.exceptions import RayTaskError

    from loraplex_fleet.cluster import joined

    with pytest.raises(RayTaskError), joined("auto"):
        raise RayTaskError("apply_config", "a traceback", ValueError("no"))


def test_an_address_without_anything() -> None:
    address = f"127.0.0.1:{free_port()}"
    assert refused(address).startswith(f"no Ray answers at {address}: nothing listens there; `ray start --head`")


async def test_an_address_of_something_else() -> None:
    worker = await FakeWorker("w").start()
    try:
        assert "not the head of a Ray" in await asyncio.to_thread(refused, worker.address)
    finally:
        await worker.stop()


def test_an_address_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    monkeypatch.setattr(cluster, "HEAD_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "has not answered for 0.5 s" in refused(f"127.0.0.1:{silent.getsockname()[1]}")


def test_a_variable_that_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet.cluster import joined

    monkeypatch.setenv("RAY_ADDRESS", "foo")
    with pytest.raises(InvalidArgument, match="RAY_ADDRESS must be auto or Ray's HOST:PORT"), joined("auto"):
        pass


def test_an_up_that_another_one_replaces_has_not_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    from loraplex_fleet import cluster

    monkeypatch.setattr(cluster, "status", lambda fleet, before: Status(fleet, (), ()))  # complete
    monkeypatch.setattr(cluster, "was_replaced", lambda spec: spec.name == "mine")
    assert cli._wait(parse_spec({"model": "m"}), (), 0.0, print).is_complete
    with pytest.raises(FailedPrecondition, match="another `loraplex up` has changed fleet mine meanwhile"):
        cli._wait(parse_spec({"model": "m", "name": "mine"}), (), 0.0, print)
