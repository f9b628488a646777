"""A server's port: its address, its exposure, binding it.

Owns the sentences for a port that cannot be had or that is open to every machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from typing import Any, Final

import grpc
import grpc.aio

from loraplex_contracts.errors import FailedPrecondition

# A dead connection is noticed after the sum of these, on both of its sides.
KEEPALIVE_S: Final = 30.0
KEEPALIVE_TIMEOUT_S: Final = 10.0
# Clients may ping this often; gRPC's own default closes connections that ping more often than every five minutes.
MIN_PING_S: Final = 10.0


def server_options(max_message_bytes: int, *, max_age_s: float, max_age_grace_s: float) -> list[tuple[str, int]]:
    """gRPC's arguments for a port behind balancers and firewalls. Connections end at `max_age_s`, so that a balancer
    spreads clients anew; their streams get `max_age_grace_s` more."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_PING_S * 1000)),
        ("grpc.max_connection_age_ms", int(max_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(max_age_grace_s * 1000)),
    ]


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address that has none yet."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def is_public(host: str) -> bool:
    """Whether others than this machine can reach a port that listens on `host`."""
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"


def exposure_warnings(host: str, *, asks_credentials: bool, has_tls: bool) -> Iterator[str]:
    """Warnings about a port that other machines can reach."""
    if not is_public(host):
        return
    if not asks_credentials:
        yield f"{host} can be reached from other machines and asks for no credential; see --auth-file"
    elif not has_tls:
        yield "credentials travel in clear text: give --tls-cert and --tls-key, or end TLS in front of this server"


def bind(server: grpc.aio.Server, host: str, port: int, tls: grpc.ServerCredentials | None) -> int:
    """Has `server` listen, with TLS where there are credentials for it. Returns the port. Raises FailedPrecondition."""
    address = join_address(host, port)
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise _cannot_listen(address) from error


def check_free(host: str, port: int) -> None:
    """Raises FailedPrecondition where `bind` would, for callers that listen much later. Not for shared ports."""
    refused: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                _try_listening(socket.socket(family, kind, protocol), address)
            except OSError as error:
                refused = error
            else:
                return  # gRPC, too, is content with one of a name's addresses
    except OSError as error:
        refused = error
    raise _cannot_listen(join_address(host, port)) from refused


def _try_listening(probe: socket.socket, address: Any) -> None:
    with contextlib.closing(probe):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
        probe.bind(address)
        probe.listen(1)  # with SO_REUSEADDR, Linux finds out here that another process listens


def _cannot_listen(address: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"cannot listen on {address}: the port is taken, or the address is not this machine's; see --host and --port",
        field="--port",
    )
