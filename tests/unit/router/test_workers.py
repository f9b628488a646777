"""Connections of members that come, go and get names."""

from __future__ import annotations

from typing import Any, cast

import pytest

from loraplex_proto.v1 import worker_pb2
from loraplex_router.membership import Member
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import Upstream
from loraplex_router.watch import Watcher
from loraplex_router.workers import Workers


class Unwatched:
    def add(self, upstream: Any) -> None: ...


@pytest.fixture
def replicas() -> Replicas:
    return Replicas()


@pytest.fixture
def workers(replicas: Replicas) -> Workers:
    return Workers(replicas, cast(Watcher, Unwatched()), lambda member: cast(Upstream, member))


def staying(replicas: Replicas) -> list[str]:
    return [replica.worker_id for replica in replicas.all() if not replica.is_leaving]


def test_a_worker_whose_name_comes_later_stays(workers: Workers, replicas: Replicas) -> None:
    workers.update([Member("h:1", "h:1"), Member("b", "h:2")])
    for worker_id in workers.upstreams:
        replicas.on_report(worker_id, worker_pb2.Load(), 1.0)
    assert [view.hash_name for view in replicas.views()] == ["h:1", "b"]
    connection, flight = workers.upstreams["h:1"], replicas.begin("h:1", "sql", 50, 2.0)
    for _ in range(2):
        workers.update([Member("a", "h:1"), Member("b", "h:2")])
        assert workers.upstreams.keys() == {"h:1", "b=h:2"}
        assert workers.upstreams["h:1"] is connection
        assert [(view.hash_name, view.share) for view in replicas.views()] == [("a", 1.0), ("b", 1.0)]
        assert staying(replicas) == ["h:1", "b=h:2"]
    workers.update([Member("b", "h:2")])
    assert staying(replicas) == ["b=h:2"]
    replicas.end(flight)
    assert replicas.has_left("h:1")


def test_another_name_at_an_address_is_another_worker(workers: Workers, replicas: Replicas) -> None:
    workers.update([Member("a", "h:1")])
    workers.update([Member("b", "h:1")])
    assert workers.upstreams.keys() == {"a=h:1", "b=h:1"}
    assert staying(replicas) == ["b=h:1"]
