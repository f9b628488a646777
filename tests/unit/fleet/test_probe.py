"""Probe of a server that runs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from support.certificates import Pair, new_pair

from loraplex_fleet.probe import Probe, read_authorities


async def serve(pair: Pair, port: int = 0) -> tuple[grpc.aio.Server, int]:
    untyped: Any = health
    server, servicer = grpc.aio.server(), untyped.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.cert.read_bytes())])
    port = server.add_secure_port(f"127.0.0.1:{port}", credentials)
    await server.start()
    return server, port


async def num_failures(probe: Probe, at_most: int) -> int:
    """The calls that fail before one is answered."""
    for number in range(at_most):
        try:
            await probe.answers()
        except grpc.aio.AioRpcError:
            continue
        return number
    return at_most


async def test_it_trusts_new_authorities_once_its_connection_has_ended(tmp_path: Path) -> None:
    old, new, ca = new_pair(tmp_path, "old"), new_pair(tmp_path, "new"), tmp_path / "ca.crt"
    ca.write_bytes(old.cert.read_bytes())
    server, port = await serve(old)
    probe = Probe(f"127.0.0.1:{port}", ca.read_bytes(), ca.read_bytes)
    await probe.answers()
    ca.write_bytes(new.cert.read_bytes())
    await probe.answers()  # by the connection that it has
    await server.stop(None)
    server, _ = await serve(new, port)
    assert 1 <= await num_failures(probe, at_most=8) < 8
    await probe.close()
    await server.stop(None)


@pytest.mark.parametrize("broken", [b"", b"none", None])
async def test_authorities_that_are_none_are_read_again(broken: bytes | None, tmp_path: Path) -> None:
    old, new, ca = new_pair(tmp_path, "old"), new_pair(tmp_path, "new"), tmp_path / "ca.crt"
    ca.write_bytes(old.cert.read_bytes())
    read_ca = partial(read_authorities, str(ca))
    server, port = await serve(old)
    probe = Probe(f"127.0.0.1:{port}", read_ca(), read_ca)
    await probe.answers()
    ca.unlink()
    if broken is not None:
        ca.write_bytes(broken)
    with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
        await probe.work()
    await probe.answers()  # the connection is as good as it was
    await server.stop(None)
    server, _ = await serve(new, port)
    assert await num_failures(probe, at_most=2) == 2
    ca.write_bytes(new.cert.read_bytes())
    assert await num_failures(probe, at_most=8) < 8
    await probe.close()
    await server.stop(None)
