"""The directory's actor, without Ray's processes."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from support.fleet import ray_is_missing

from loraplex_fleet.entries import WORKER, Entry

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


async def test_a_replica_of_another_release_is_taken_in() -> None:
    from loraplex_fleet.directory import Directory

    directory = Directory()
    await directory.beat({**asdict(Entry("a", WORKER, "n", address="a:1")), "new": 1})
    (found,) = (await directory.view())["entries"]
    assert found["address"] == "a:1"
