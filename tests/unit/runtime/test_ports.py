"""Addresses, who can reach them, and ports that are taken."""

from __future__ import annotations

import socket

import grpc.aio
import pytest

from loraplex_contracts.errors import FailedPrecondition
from loraplex_runtime.ports import bind, check_free, exposure_warnings, is_public, join_address


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", False),
        ("::1", False),
        ("[::1]", False),
        ("localhost", False),
        ("0.0.0.0", True),
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
