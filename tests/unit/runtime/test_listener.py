"""Listening before the service is ready, and errors of ports and files."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, LoraplexError, Unavailable, Unimplemented
from loraplex_proto.status import from_rpc_error
from loraplex_runtime.health import NOT_SERVING, SERVING
from loraplex_runtime.listener import Listener


@dataclass(frozen=True)
class Config:
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int | None = None
    metrics_host: str | None = None
    auth_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


@asynccontextmanager
async def listening(**given: Any) -> AsyncIterator[Listener]:
    listener = await Listener.open(Config(**given), ["a.Service"], [], what="worker")
    try:
        yield listener
    finally:
        await listener.stop(0.0)


async def test_nothing_is_wrong() -> None:
    for given in ({}, {"metrics_port": 0}, {"metrics_host": "192.0.2.1"}):  # nothing is served there
        async with listening(**given):
            pass


@pytest.mark.parametrize("flag", ["auth_file", "tls"])
async def test_files_that_cannot_be_read(flag: str, tmp_path: Path) -> None:
    none = tmp_path / "none"
    given = {"tls_cert": none, "tls_key": none} if flag == "tls" else {"auth_file": none}
    with pytest.raises(InvalidArgument, match="cannot be read"):
        async with listening(**given):
            pass


async def test_ports_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given in ({"port": port}, {"metrics_port": port}, {"host": "192.0.2.1"}):
            with pytest.raises(FailedPrecondition, match="cannot listen"):
                async with listening(**given):
                    pass


async def call(channel: grpc.aio.Channel, method: str) -> bytes | LoraplexError:
    try:
        return await channel.unary_unary(f"/a.Service/{method}")(b"question")
    except grpc.RpcError as error:
        return from_rpc_error(error)


async def test_the_port_is_taken_and_answers_before_anything_is_served() -> None:
    async with listening() as listener:
        with pytest.raises(FailedPrecondition, match="cannot listen"):
            async with listening(port=int(listener.address.rpartition(":")[2])):
                pass
        async with grpc.aio.insecure_channel(listener.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            ask = health_pb2.HealthCheckRequest
            assert (await health.Check(ask())).status == SERVING  # the process lives
            assert (await health.Check(ask(service="a.Service"))).status == NOT_SERVING
            for method in ("Answer", "Other"):
                error = await call(channel, method)
                assert isinstance(error, Unavailable)
                assert error.message == "this worker is starting; try again in a moment"
                assert error.retry_after_s == 1.0

            async def answer(request: bytes, context: Any) -> bytes:
                return b"answer"

            handlers = {"Answer": grpc.unary_unary_rpc_method_handler(answer)}
            listener.serve([grpc.method_handlers_generic_handler("a.Service", handlers)])
            listener.health.set_ready(True)
            assert await call(channel, "Answer") == b"answer"
            assert isinstance(await call(channel, "Other"), Unimplemented)
            assert (await health.Check(ask(service="a.Service"))).status == SERVING
