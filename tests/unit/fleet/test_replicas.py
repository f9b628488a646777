"""Replicas of Ray Serve, as far as they go without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fleet import ray_is_missing

from loraplex_contracts.errors import FailedPrecondition
from loraplex_fleet.entries import WORKER, Entries, Entry, View
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


def a_worker(monkeypatch: pytest.MonkeyPatch, directory: FakeDirectory, **more: Any) -> Any:
    """A worker's replica, not started."""
    from loraplex_fleet import replicas

    class Context:
        replica_tag = "abc"

    monkeypatch.setattr(replicas, "_log_with_serve", lambda: None)
    monkeypatch.setattr(replicas.serve, "get_replica_context", Context)
    monkeypatch.setattr(replicas.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(replicas, "DirectoryClient", lambda _: directory)
    spec = parse_spec({"model": "m", **more})

    class Worker(replicas.Worker):
        def __del__(self) -> None:  # which Serve awaits
            pass

    worker: Any = Worker.__new__(Worker)
    replicas.Replica.__init__(worker, spec, WORKER)
    return worker


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"worker": {"store": "/dev/null/store"}}, "worker.store, /dev/null/store, cannot be made on this node"),
        ({"secrets": {"worker-token-file": "/nowhere"}}, "worker-token-file, /nowhere, cannot be read on this node"),
    ],
)
async def test_what_fails_before_the_child_reaches_the_directory(
    more: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = FakeDirectory()
    worker = a_worker(monkeypatch, directory, **more)
    with pytest.raises(RuntimeError, match=says):
        await worker.run(worker._prepare)
    (failure,) = directory.entries.view(0.0).failures
    assert says in failure.text


def test_a_token_that_is_no_text(tmp_path: Path) -> None:
    from loraplex_fleet.replicas import read_token

    (tmp_path / "token").write_bytes(b"\xff")
    with pytest.raises(FailedPrecondition, match="other bytes than ASCII"):
        read_token(str(tmp_path / "token"))
