"""Ray cluster of the commands, as far as it goes where no Ray runs."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from support.fake_workers import FakeWorker
from support.fleet import free_port, ray_is_missing

from loraplex_contracts.errors import InvalidArgument, Unavailable

pytestmark = [
    pytest.mark.ray,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own modules
    pytest.mark.skipif(bool(ray_is_missing()), reason=ray_is_missing()),
]


def refused(address: str) -> str:
    """The sentence, which comes soon: Ray itself tries for a minute."""
    from loraplex_fleet.cluster import joined

    start_s = time.monotonic()
    with pytest.raises(Unavailable) as error, joined(address):
        pass
    assert time.monotonic() - start_s < 10
    return error.value.message


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
