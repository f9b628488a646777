"""The gRPC server of a process that listens before what it serves is ready."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from loraplex_contracts.errors import Unavailable
from loraplex_proto.status import UnknownMethods, refusing
from loraplex_runtime.auth import ServerInterceptor, follow_credentials, one_router
from loraplex_runtime.health import Health
from loraplex_runtime.ports import bind, check_free, exposure_warnings, join_address
from loraplex_runtime.reload import Reloader
from loraplex_runtime.telemetry import MetricsEndpoint, new_registry
from loraplex_runtime.tls import server_credentials

log = logging.getLogger(__name__)

RETRY_STARTING_S: Final = 1.0
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class ListenConfig(Protocol):
    """Fields that the configurations of router and worker have in common."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...
    @property
    def metrics_port(self) -> int | None: ...
    @property
    def metrics_host(self) -> str | None: ...
    @property
    def auth_file(self) -> Path | None: ...
    @property
    def tls_cert(self) -> Path | None: ...
    @property
    def tls_key(self) -> Path | None: ...


class Listener:
    """Owns the port, the server with its health, the metrics' port and the files that are followed.

    Until `serve`, health says NOT_SERVING and every call ends as UNAVAILABLE with a retry hint.
    """

    def __init__(self, files: Reloader, server: grpc.aio.Server, health: Health, handlers: _Handlers) -> None:
        self.files = files
        self.health = health
        self.address = ""
        self.registry: CollectorRegistry | None = None
        self.metrics: MetricsEndpoint | None = None
        self._server = server
        self._handlers = handlers

    @classmethod
    async def open(
        cls,
        config: ListenConfig,
        services: Sequence[str],
        arguments: Sequence[tuple[str, int]],
        *,
        what: str,
        router_digest: str = "",
        reuse_port: bool = False,
    ) -> Listener:
        """Listens as `config` says. `services`: full names of what will be served, `arguments`: gRPC's, `what`: what a
        caller reads that starts, `router_digest`: of the token of the one router that may call.

        Raises InvalidArgument for files that cannot be used, FailedPrecondition for ports that cannot be had."""
        files = Reloader()
        if router_digest:
            only = one_router(router_digest)
            credentials = lambda: only  # noqa: E731
        else:
            credentials = follow_credentials(files, config.auth_file)
        tls = server_credentials(files, config.tls_cert, config.tls_key)
        interceptors = [] if credentials is None else [ServerInterceptor(credentials)]
        options = [*arguments, ("grpc.so_reuseport", int(reuse_port))]
        server = grpc.aio.server(interceptors=interceptors, options=options)
        listener = cls(files, server, Health(tuple(services)), _Handlers(what))
        health_pb2_grpc.add_HealthServicer_to_server(listener.health, server)
        reflection.enable_server_reflection((*services, _HEALTH, reflection.SERVICE_NAME), server)
        server.add_generic_rpc_handlers((listener._handlers,))
        if not reuse_port:
            check_free(config.host, config.port)  # gRPC finds out as well, but writes a line of its own
        listener.address = join_address(config.host, bind(server, config.host, config.port, tls))
        await server.start()
        try:
            if config.metrics_port is not None:
                host = config.metrics_host or config.host
                check_free(host, config.metrics_port)
                listener.registry = new_registry()
                listener.metrics = await MetricsEndpoint.start(host, config.metrics_port, listener.registry)
        except BaseException:
            await listener.stop(0.0)
            raise
        for sentence in exposure_warnings(
            config.host, asks_credentials=config.auth_file is not None, has_tls=tls is not None
        ):
            log.warning("%s", sentence)
        return listener

    def serve(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Answers calls by `handlers` from here on, and follows the files. Health is the caller's to change."""
        self._handlers.ready = tuple(handlers)
        self.files.start()

    async def stop(self, grace_s: float) -> None:
        """Closes the ports; calls under way get `grace_s` to end."""
        self.files.stop()
        await self._server.stop(grace_s)
        metrics, self.metrics = self.metrics, None
        if metrics is not None:
            await metrics.stop()


class _Handlers(grpc.GenericRpcHandler):
    """Finds the handler of a call; added last, so that it has what health and reflection leave."""

    def __init__(self, what: str) -> None:
        self.ready: tuple[grpc.GenericRpcHandler, ...] | None = None
        self._starting = refusing(
            Unavailable(f"this {what} is starting; try again in a moment", retry_after_s=RETRY_STARTING_S)
        )
        self._unknown = UnknownMethods()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if self.ready is None:
            return self._starting
        for handler in self.ready:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return self._unknown.service(handler_call_details)
