"""Listening gRPC server of a process: port, health, drain, handlers that come later.

It listens before what it serves is ready, so that a taken port is noticed before a model is loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from prometheus_client import CollectorRegistry

from loraplex_contracts.errors import FailedPrecondition, Unavailable
from loraplex_runtime.auth import Credentials, ServerInterceptor, follow_credentials, one_router
from loraplex_runtime.listen_config import ListenConfig
from loraplex_runtime.metrics import MetricsEndpoint, Role, new_registry
from loraplex_runtime.refusals import Refusals
from loraplex_runtime.reload import Reloader, server_credentials
from loraplex_runtime.tracing import Tracing, open_tracing

log = logging.getLogger(__name__)

RETRY_STARTING_S: Final = 1.0
# Seconds of silence until a ping, and until TCP gives up a peer that acknowledges nothing: a machine that is gone is
# noticed after their sum, on both sides of a connection. For the answer to a ping gRPC 1.85 waits a minute, whatever
# the second says, so a frozen process is noticed after 90 s at most. Shorter waits (grpc.http2.ping_timeout_ms) cut
# streams on slow networks, where the answer stands behind data: with 10 s those of 10 kB/s at 64 kbit/s.
KEEPALIVE_S: Final = 30.0
KEEPALIVE_TIMEOUT_S: Final = 10.0
# Grace of a server that another call ends: longer than any drain.
_FOREVER_S: Final = 1e6
# Clients may ping this often; gRPC's own default closes connections that ping more often than every five minutes. Many
# ping every five seconds.
MIN_PING_S: Final = 1.0
# Calls that the event loop has not accepted yet, and seconds that they may wait: gRPC would end those above 1,000, and
# those of 30 s, as CANCELLED without a reason. Accepted calls are refused with a reason, and deadlines hold throughout.
_UNBOUNDED: Final = 1 << 20

SERVING: Final = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class Listener:
    """Owns the port, the server with its health, the metrics' port and the files that are followed.

    Until `serve`, health says NOT_SERVING and every call ends as UNAVAILABLE with a retry hint.
    """

    def __init__(self, files: Reloader, server: grpc.aio.Server, health: Health, handlers: _Handlers) -> None:
        self.files = files
        self.health = health
        self.refusals = handlers.refusals
        self.address = ""
        self.credentials: Callable[[], Credentials] | None = None  # in force now; None where none are asked for
        self.registry: CollectorRegistry | None = None
        self.metrics: MetricsEndpoint | None = None
        self.tracing: Tracing | None = None
        self._server = server
        self._handlers = handlers
        self._leaving: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        config: ListenConfig,
        services: Sequence[str],
        arguments: Sequence[tuple[str, int]],
        *,
        what: str,
        role: Role,
        router_digest: str = "",
        reuse_port: bool = False,
    ) -> Listener:
        """Listens as `config` says. `services`: full names of what will be served, `arguments`: gRPC's, `what`: name of
        this server in errors, `role`: in traces, `router_digest`: of the token of the one router that may call.

        Raises InvalidArgument for files that cannot be used, FailedPrecondition for ports that cannot be had."""
        files = Reloader()
        if router_digest:
            only = one_router(router_digest)
            credentials = lambda: only  # noqa: E731
        else:
            credentials = follow_credentials(files, config.auth_file)
        tls = server_credentials(files, config.tls_cert, config.tls_key, config.tls_client_ca)
        refusals = Refusals()
        interceptors = [] if credentials is None else [ServerInterceptor(credentials, refusals.handler)]
        options = [*arguments, ("grpc.so_reuseport", int(reuse_port))]
        server = grpc.aio.server(interceptors=interceptors, options=options)
        listener = cls(files, server, Health(tuple(services)), _Handlers(what, refusals))
        listener.credentials = credentials
        health_pb2_grpc.add_HealthServicer_to_server(listener.health, server)
        _add_reflection(server, (*services, _HEALTH, reflection.SERVICE_NAME))
        server.add_generic_rpc_handlers((listener._handlers,))
        if not reuse_port:
            check_free(config.host, config.port)  # gRPC finds out as well, but writes a line of its own
        listener.address = join_address(config.host, bind(server, config.host, config.port, tls))
        await server.start()
        try:
            listener.tracing = open_tracing(config.otlp_traces_endpoint, role)
            if config.metrics_port is not None:
                host = config.metrics_host or config.host
                check_free(host, config.metrics_port, "--metrics-port")
                listener.registry = new_registry()
                listener.metrics = await MetricsEndpoint.start(host, config.metrics_port, listener.registry)
        except BaseException:
            await listener.stop(0.0)
            raise
        asks_credentials = config.auth_file is not None or config.tls_client_ca is not None
        for sentence in exposure_warnings(config.host, asks_credentials=asks_credentials, has_tls=tls is not None):
            log.warning("%s", sentence)
        return listener

    def serve(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Answers calls by `handlers` from here on, and follows the files. Health is the caller's to change."""
        self._handlers.ready = tuple(handlers)
        self.files.start()

    @property
    def serves(self) -> bool:
        """True once calls are answered."""
        return self._handlers.ready is not None

    def leave_port(self) -> None:
        """Stops listening, while calls under way go on until `stop`: clients are told to connect again, and reach
        another process on the port."""
        if self._leaving is None:
            self.health.end_watches()
            self._leaving = asyncio.create_task(self._server.stop(_FOREVER_S), name="leave the port")

    async def stop(self, grace_s: float) -> None:
        """Closes the ports; calls under way get `grace_s` to end."""
        self.files.stop()
        # Not earlier: gRPC's clients open a watch that has ended again at once, as long as the port takes calls.
        self.health.end_watches()
        await self._server.stop(grace_s)
        if self._leaving is not None:
            await self._leaving
        metrics, self.metrics = self.metrics, None
        if metrics is not None:
            await metrics.stop()
        tracing, self.tracing = self.tracing, None
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Reflection as v1alpha and as v1, whose messages are the same: newer clients ask for v1 only."""
    servicer: Any = reflection.aio.ReflectionServicer(services)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    name = reflection.SERVICE_NAME.replace("v1alpha", "v1")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": handler}),))


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a call; added last, after health and reflection."""

    def __init__(self, what: str, refusals: Refusals) -> None:
        self.ready: tuple[grpc.GenericRpcHandler, ...] | None = None
        self.refusals = refusals
        self._starting = Unavailable(f"this {what} is starting; try again in a moment", retry_after_s=RETRY_STARTING_S)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if self.ready is None:
            return self.refusals.handler(handler_call_details.method, self._starting)
        for handler in self.ready:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return self.refusals.unknown_method(handler_call_details.method)


class Drain:
    """Refusal of new calls, and the wait for those under way. `num_active` returns how many there are."""

    def __init__(self, num_active: Callable[[], int]) -> None:
        self.has_begun = False
        self._num_active = num_active
        self._all_ended = asyncio.Event()

    def note_end(self) -> None:
        """Notes the end of a call."""
        if self.has_begun and not self._num_active():
            self._all_ended.set()

    async def wait(self, timeout_s: float) -> None:
        """Begins the drain; returns when the calls under way have ended, or after `timeout_s`."""
        self.has_begun = True
        if self._num_active():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)


class Health(health_pb2_grpc.HealthServicer):
    """grpc.health.v1 for the process (empty name: it lives) and for each of its services (it can be used).

    The library's servicer has watches that hold a server open for its whole grace period; these end with the server.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._statuses = {"": SERVING, **dict.fromkeys(services, NOT_SERVING)}
        self.is_draining = False
        self._has_ended = False
        self._changed = asyncio.Event()

    def set_ready(self, is_ready: bool) -> None:
        """Sets the health of all services. The process's own stays: a router without workers is alive."""
        if not self.is_draining:
            self._set({name: SERVING if is_ready or not name else NOT_SERVING for name in self._statuses})

    @property
    def is_ready(self) -> bool:
        """True if every service can be used."""
        return all(status == SERVING for status in self._statuses.values())

    def begin_drain(self) -> None:
        """Says NOT_SERVING from here on, of the process too: many balancers ask for nothing else."""
        self.is_draining = True
        self._set(dict.fromkeys(self._statuses, NOT_SERVING))

    def end_watches(self) -> None:
        """Ends watches once they have sent the last status."""
        self._has_ended = True
        self._notify()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {request.service[:80]!a}")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        messages: Any = health_pb2  # pyright's stubs are older
        statuses = {name: messages.HealthCheckResponse(status=status) for name, status in self._statuses.items()}
        return messages.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:  # noqa: N802
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, SERVICE_UNKNOWN)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            elif self._has_ended:
                return
            else:
                await changed.wait()

    def _set(self, statuses: dict[str, Any]) -> None:
        if statuses != self._statuses:
            self._statuses = statuses
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


# --- the port ---------------------------------------------------------------------------------------------------------


def server_options(max_message_bytes: int, *, max_age_s: float, max_age_grace_s: float) -> list[tuple[str, int]]:
    """gRPC's arguments for a port behind balancers and firewalls. Connections end at `max_age_s`, so that a balancer
    spreads clients afresh; their streams get `max_age_grace_s` more."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(MIN_PING_S * 1000)),
        ("grpc.max_connection_age_ms", int(max_age_s * 1000)),
        ("grpc.max_connection_age_grace_ms", int(max_age_grace_s * 1000)),
        ("grpc.server.max_pending_requests", _UNBOUNDED),
        ("grpc.server.max_pending_requests_hard_limit", _UNBOUNDED),
        ("grpc.server_max_unrequested_time_in_server", _UNBOUNDED),
    ]


def join_address(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address that has none yet."""
    is_bare_ipv6 = ":" in host and not host.startswith("[")
    return f"[{host}]:{port}" if is_bare_ipv6 else f"{host}:{port}"


def is_public(host: str) -> bool:
    """True if other machines can reach a port that listens on `host`."""
    address = ip_address(host)
    return host != "localhost" if address is None else not address.is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, with or without brackets; None for a name. One of IPv4 in IPv6's notation is that of
    IPv4: Python before 3.13 says of no such address that it is loopback."""
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


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
        raise _cannot_listen(host, port) from error


def bound_socket(host: str, port: int, options: Iterable[int]) -> socket.socket:
    """A TCP socket that is bound and does not listen, with these options of SOL_SOCKET on. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


def check_free(host: str, port: int, flag: str = "--port") -> None:
    """Raises FailedPrecondition where `bind` would, with the port's flag. Not for shared ports."""
    refused: OSError | None = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM):
            try:
                with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                    probe.bind(address)
                    probe.listen(1)  # with SO_REUSEADDR, Linux finds out here that another process listens
            except OSError as error:
                refused = error
            else:
                return  # gRPC, too, is content with one of a name's addresses
    except OSError as error:
        refused = error
    raise _cannot_listen(host, port, flag) from refused


def why_not_listening(host: str) -> str:
    """The reason why a port of `host` cannot be had, as far as it can be told."""
    try:
        socket.getaddrinfo(host.strip("[]"), None)
    except OSError:
        return "this is no address, nor a name that has one"
    return "the port is taken, or the address is not this machine's"


def _cannot_listen(host: str, port: int, flag: str = "--port") -> FailedPrecondition:
    flags = f"{flag.replace('port', 'host')} and {flag}"
    return FailedPrecondition(
        f"cannot listen on {join_address(host, port)}: {why_not_listening(host)}; see {flags}", field=flag
    )
