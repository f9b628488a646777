"""Command lines and ports of router processes that share an address."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from loraplex_contracts.errors import FailedPrecondition
from loraplex_router.config import RouterConfig, ServerOptions
from loraplex_router.processes import reserved_port, run_processes, spec_of
from loraplex_runtime.child_processes import Children


def test_quotas_are_divided_and_ports_are_shared() -> None:
    config = RouterConfig(workers=("a:1",), quota_share=0.5, metrics_port=9090, http_port=8000, host="0.0.0.0")
    spec = spec_of(config, 2, 50051, 8000)
    told = " ".join(spec.command)
    for flags in ("--worker a:1", "--quota-share 0.25", "--reuse-port", "--http-port 8000", "--host 0.0.0.0"):
        assert flags in told
    assert (spec.port, spec.metrics_port) == (50051, 9090)
    assert "--metrics-port" not in told, "each has one of its own"


def test_a_reserved_port_can_be_shared_and_is_not_taken_from_others() -> None:
    with reserved_port("127.0.0.1", 0, "--port", is_shared=False) as port, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", port))
        other.listen(1)
        with (
            pytest.raises(FailedPrecondition, match="taken"),
            reserved_port("127.0.0.1", port, "--port", is_shared=False),
        ):
            pass
        with reserved_port("127.0.0.1", port, "--port", is_shared=True) as same:
            assert same == port


def test_the_http_port_can_be_shared() -> None:
    from loraplex_router.http.server import bind_http

    with bind_http("127.0.0.1", 0, reuse_port=True) as first:
        port = first.getsockname()[1]
        with bind_http("127.0.0.1", port, reuse_port=ServerOptions(reuse_port=True).reuse_port) as second:
            assert second.getsockname()[1] == port


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_that_end_before_they_are_ready_have_the_signals_status(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def start(self: Children, stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        await stop.wait()

    monkeypatch.setattr(Children, "start", start)
    config = RouterConfig(workers=("a:1",), port=0, host="127.0.0.1")
    assert asyncio.run(run_processes(config, 2, lambda running: None)) == 128 + number
