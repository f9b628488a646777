"""Listening before the service is ready, health, addresses, errors of ports and files."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Sequence
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
from loraplex_runtime.listener import (
    NOT_SERVING,
    SERVICE_UNKNOWN,
    SERVING,
    Health,
    Listener,
    bind,
    check_free,
    exposure_warnings,
    is_public,
    join_address,
    server_options,
)


@dataclass(frozen=True)
class Config:
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int | None = None
    metrics_host: str | None = None
    auth_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    otlp_traces_endpoint: str | None = None


@asynccontextmanager
async def listening(arguments: Sequence[tuple[str, int]] = (), **given: Any) -> AsyncIterator[Listener]:
    listener = await Listener.open(Config(**given), ["a.Service"], arguments, what="worker", role="worker")
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
            if hasattr(health, "List"):  # not in earlier releases of the library
                listed = (await health.List(health_pb2.HealthListRequest())).statuses
                assert {name: one.status for name, one in listed.items()} == {"": SERVING, "a.Service": NOT_SERVING}
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


@pytest.mark.parametrize("stall_s", [0.5, pytest.param(33.0, marks=pytest.mark.slow)])
async def test_calls_that_come_while_the_loop_is_busy_are_answered(stall_s: float) -> None:
    """gRPC ends those above a bound, or too old, without a reason."""
    arguments = server_options(1 << 20, max_age_s=600.0, max_age_grace_s=600.0)
    async with listening(arguments) as listener:
        with grpc.insecure_channel(listener.address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            calls = [check.future(b"", timeout=60.0) for _ in range(1500)]
            time.sleep(stall_s)  # the loop is busy
            codes = await asyncio.to_thread(lambda: {call.code() for call in calls})
    assert codes == {grpc.StatusCode.OK}


async def test_a_client_may_ping_every_second() -> None:
    """gRPC's own clients in Python ping every ten seconds at most, others at will."""

    def frame(kind: int, body: bytes = b"") -> bytes:
        return len(body).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + body

    settings, ping, goaway = 4, 6, 7
    kinds: list[int] = []
    async with listening(server_options(1 << 20, max_age_s=600.0, max_age_grace_s=600.0)) as listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(listener.address.rpartition(":")[2]))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(settings))
        for num_pings in range(1, 6):  # more often than allowed, the fourth ends the connection
            writer.write(frame(ping, b"12345678"))
            while kinds.count(ping) < num_pings:
                head = await asyncio.wait_for(reader.readexactly(9), 10)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                kinds.append(head[3])
                assert head[3] != goaway
            await asyncio.sleep(1.1)
        writer.close()


# --- health -----------------------------------------------------------------------------------------------------------

NAME = "loraplex.v1.InferenceService"


def request(service: str) -> Any:
    return health_pb2.HealthCheckRequest(service=service)


async def check(health: Health, service: str) -> Any:
    return (await health.Check(request(service), None)).status


async def test_readiness_follows_and_liveness_stays() -> None:
    health = Health((NAME,))
    assert await check(health, "") == SERVING
    assert await check(health, NAME) == NOT_SERVING
    health.set_ready(True)
    assert await check(health, NAME) == SERVING
    health.set_ready(False)
    assert await check(health, NAME) == NOT_SERVING
    assert await check(health, "") == SERVING


async def test_draining_is_final() -> None:
    health = Health((NAME,))
    health.set_ready(True)
    health.begin_drain()
    health.set_ready(True)
    assert await check(health, "") == NOT_SERVING
    assert await check(health, NAME) == NOT_SERVING


async def test_a_watch_tells_every_change_and_ends() -> None:
    health = Health((NAME,))
    seen: list[Any] = []
    told = asyncio.Event()

    async def watch() -> None:
        async for answer in health.Watch(request(NAME), None):
            seen.append(answer.status)
            told.set()

    task = asyncio.create_task(watch())
    for change in (lambda: None, lambda: health.set_ready(True), health.begin_drain):
        change()
        await told.wait()
        told.clear()
    assert seen == [NOT_SERVING, SERVING, NOT_SERVING]
    health.end_watches()
    await task
    assert len(seen) == 3


async def test_a_watch_of_an_unknown_service_waits() -> None:
    health = Health((NAME,))
    watch = health.Watch(request("nobody"), None)
    assert (await anext(watch)).status == SERVICE_UNKNOWN
    health.end_watches()
    assert [answer async for answer in watch] == []


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("[::1]", False),
        ("localhost", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:10.1.1.1", True),
        ("0.0.0.0", True),
        ("::0", True),
        ("10.1.1.1", True),
    ],
)
def test_who_can_reach_the_port(host: str, expected: bool) -> None:
    assert is_public(host) is expected


def test_brackets_where_they_are_needed() -> None:
    hosts = ("127.0.0.1", "::1", "[::1]", "a.b")
    assert [join_address(host, 1) for host in hosts] == ["127.0.0.1:1", "[::1]:1", "[::1]:1", "a.b:1"]


def test_what_an_operator_is_told() -> None:
    def told(host: str, **has: bool) -> str:
        return " ".join(exposure_warnings(host, asks_credentials=has.get("auth", False), has_tls=has.get("tls", False)))

    assert told("127.0.0.1") == told("::1") == ""
    assert "--auth-file" in told("0.0.0.0")
    assert "--tls-cert" in told("::", auth=True)
    assert told("0.0.0.0", auth=True, tls=True) == ""


async def test_a_taken_port_is_known_beforehand() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=f"cannot listen on 127.0.0.1:{port}"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
    check_free("127.0.0.1", 0)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    assert bind(server, "127.0.0.1", port, None) == port  # the probe has left nothing there
    await server.start()
    with pytest.raises(FailedPrecondition):
        check_free("127.0.0.1", port)
    await server.stop(None)


def test_a_free_port_needs_an_address_too() -> None:
    with pytest.raises(FailedPrecondition, match=r"cannot listen on 192\.0\.2\.1:0"):
        check_free("192.0.2.1", 0)


@pytest.mark.parametrize("host", ["nowhere.invalid", "unix:/tmp/socket"])
def test_a_name_without_an_address(host: str) -> None:
    with pytest.raises(FailedPrecondition, match="0: this is no address, nor a name that has one; see --metrics-host"):
        check_free(host, 0, "--metrics-port")


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_others(host: str) -> None:
    with pytest.raises(FailedPrecondition, match="cannot listen"):
        check_free(host, 5)


async def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    port = bind(server, "::1", 0, None)
    await server.start()
    with pytest.raises(FailedPrecondition):
        check_free("::1", port)
    await server.stop(None)
