"""Replicas of Ray Serve, as far as they go without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fleet import ray_is_missing

from loraplex_contracts.errors import FailedPrecondition
from loraplex_fleet.entries import Entries, Entry, View
from loraplex_fleet.spec import parse_spec

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


class FakeDirectory:
    """The directory, without its actor."""

    def __init__(self) -> None:
        self.entries = Entries(0.0)

    async def beat(self, entry: dict[str, Any]) -> tuple[str, View]:
        return self.entries.beat(Entry(**entry), 0.0), self.entries.view(0.0)

    async def drop(self, replica_id: str, reason: str = "") -> None:
        self.entries.drop(replica_id, reason)


def with_directory(monkeypatch: pytest.MonkeyPatch) -> FakeDirectory:
    """Puts a directory in the place of Ray and Serve."""
    from loraplex_fleet import replicas

    class Context:
        replica_tag = "abc"

    monkeypatch.setattr(replicas, "_log_with_serve", lambda: None)
    monkeypatch.setattr(replicas.serve, "get_replica_context", Context)
    monkeypatch.setattr(replicas.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    directory = FakeDirectory()
    monkeypatch.setattr(replicas, "DirectoryClient", lambda _: directory)
    return directory


async def start(kind: str, **more: Any) -> None:
    """Does what Serve does to start a replica."""
    from loraplex_fleet import replicas

    base: Any = getattr(replicas, kind)
    quiet: Any = type(kind, (base,), {"__del__": lambda _: None})  # else a coroutine, which Serve awaits
    await quiet.__new__(quiet).__init__(parse_spec({"model": "m", **more}).plain())


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"worker": {"store": "/dev/null/store"}}, "worker.store, /dev/null/store, cannot be made on this node"),
        ({"secrets": {"worker-token-file": "/nowhere"}}, "worker-token-file, /nowhere, cannot be read on this node"),
        ({"tls": {"cert": "/c", "key": "/k", "ca": "/nowhere"}}, "on this node, tls.ca /nowhere cannot be read"),
    ],
)
async def test_what_fails_before_the_child_reaches_the_directory(
    more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = with_directory(monkeypatch)
    with pytest.raises(RuntimeError, match=says):
        await start("Worker", **more)
    (failure,) = directory.entries.view(0.0).failures
    assert says in failure.text


async def test_a_router_leaves_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from loraplex_fleet import replicas

    monkeypatch.setattr(replicas.tempfile, "tempdir", str(tmp_path))
    directory = with_directory(monkeypatch)
    with pytest.raises(RuntimeError, match="nowhere"):
        await start("Router", secrets={"worker-token-file": "/nowhere"})
    assert "nowhere" in directory.entries.view(0.0).failures[0].text
    assert not list(tmp_path.glob("loraplex-router-*"))


@pytest.mark.parametrize(("state", "text"), [("ready", "no worker is healthy yet"), ("draining", "")])
async def test_a_router_that_drains_does_not_speak_of_workers(state: str, text: str) -> None:
    from loraplex_fleet.entries import ROUTER
    from loraplex_fleet.replicas import Router

    class Probe:
        async def is_ready(self) -> bool:
            return False

    router: Any = type("Router", (Router,), {"__init__": lambda _: None, "__del__": lambda _: None})()
    router._probe, router._entry = Probe(), Entry("abc", ROUTER, "127.0.0.1", state, text="no worker is healthy yet")
    assert (await router._measured(router._entry)).text == text


@pytest.mark.parametrize(("members", "text"), [({}, "no worker is healthy yet"), ({"w0": "127.0.0.1:1"}, "")])
async def test_a_router_with_tls_waits_for_the_first_member(members: dict[str, str], text: str) -> None:
    """No probe knows its certificate. Without this `up --wait` would end before the router knows a worker."""
    from loraplex_fleet.entries import ROUTER
    from loraplex_fleet.replicas import Router

    router: Any = type("Router", (Router,), {"__init__": lambda _: None, "__del__": lambda _: None})()
    router._probe, router._members = None, members
    router._entry = Entry("abc", ROUTER, "127.0.0.1", "ready", text="no worker is healthy yet")
    assert (await router._measured(router._entry)).text == text


@pytest.mark.parametrize(
    ("content", "says"), [(b"\xff", "other bytes than ASCII"), (b"", "is empty"), (b" \n", "is empty")]
)
def test_a_token_that_is_none(content: bytes, says: str, tmp_path: Path) -> None:
    from loraplex_fleet.replicas import read_token

    (tmp_path / "token").write_bytes(content)
    with pytest.raises(FailedPrecondition, match=says):
        read_token(str(tmp_path / "token"))
