"""Assembles a router and runs it: port, services, watchers, metrics; starting and draining in the right order.

`start_router` is for whoever has an event loop already (tests, `loraplex serve`), `run_router` for a process of its
own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from loraplex_proto.status import UnknownMethods
from loraplex_router.adapters import AdapterFanOut
from loraplex_router.calls import Call, Calls
from loraplex_router.config import RouterConfig, ServerOptions
from loraplex_router.inference import InferenceRelay
from loraplex_router.metrics import RouterMetrics, WorkersCollector
from loraplex_router.replicas import Replicas
from loraplex_router.upstream import ADAPTERS, INFERENCE, Upstream, follow_worker_credentials
from loraplex_router.watch import Watcher
from loraplex_runtime.auth import ServerInterceptor, follow_credentials
from loraplex_runtime.health import Health
from loraplex_runtime.ports import bind, check_free, exposure_warnings, join_address
from loraplex_runtime.reload import Reloader
from loraplex_runtime.shutdown import HOW_TO_HURRY, Ending
from loraplex_runtime.telemetry import MetricsEndpoint, new_registry
from loraplex_runtime.tls import server_credentials

log = logging.getLogger(__name__)

# How long a start waits for the workers' first word. Workers may well come later.
SETTLE_S: Final = 2.0
# Between a typed farewell and the port's end.
FAREWELL_S: Final = 1.0


@dataclass(slots=True)
class Router:
    """A running router. Whoever started it calls `drain` once."""

    config: RouterConfig
    port: int
    replicas: Replicas
    calls: Calls
    health: Health
    metrics_endpoint: MetricsEndpoint | None
    _server: grpc.aio.Server
    _watcher: Watcher
    _upstreams: dict[str, Upstream]
    _files: Reloader

    @property
    def address(self) -> str:
        return join_address(self.config.host, self.port)

    def heard_s(self, worker_id: str) -> float:
        """When the worker last sent anything, by the monotonic clock."""
        return self._upstreams[worker_id].heard_s

    async def drain(self, drain_s: float | None = None, *, announce_s: float = 0.0) -> None:
        """Says NOT_SERVING for `announce_s`, then refuses what is new and gives what runs `drain_s` to end.

        The port stays open until the last request has ended, so that new ones hear why they are refused. What still
        runs after `drain_s` ends as UNAVAILABLE (DRAINING)."""
        self.health.begin_drain()
        await asyncio.sleep(announce_s)
        self.health.end_watches()
        grace_s = self.config.drain_s if drain_s is None else drain_s
        await self.calls.drain(grace_s)
        if num_cut_off := self.calls.cut_off():
            log.warning("%d requests did not end within %g s and are cut off", num_cut_off, grace_s)
        await self._server.stop(FAREWELL_S)
        await self._watcher.stop()
        self._files.stop()
        if self.metrics_endpoint is not None:
            await self.metrics_endpoint.stop()
        for upstream in self._upstreams.values():
            await upstream.close()


async def start_router(config: RouterConfig) -> Router:
    """Listens, connects to the workers and waits a moment for their first reports.

    Raises InvalidArgument (files) and FailedPrecondition (ports)."""
    files = Reloader()
    credentials = follow_credentials(files, config.auth_file)
    tls = server_credentials(files, config.tls_cert, config.tls_key)
    registry = None if config.metrics_port is None else new_registry()
    metrics = RouterMetrics(registry)
    health = Health((INFERENCE, ADAPTERS))
    replicas = Replicas(config.workers, on_change=lambda: health.set_ready(replicas.num_routable > 0))
    shown = follow_worker_credentials(files, config.worker_token or config.worker_token_file, config.worker_ca)
    upstreams = {worker_id: Upstream(worker_id, config.server, shown) for worker_id in config.workers}
    calls = Calls(config.max_in_flight, metrics)

    interceptors = [] if credentials is None else [ServerInterceptor(credentials)]
    server = grpc.aio.server(interceptors=interceptors, options=server_options(config.server))
    relay = InferenceRelay(config, replicas, upstreams, metrics)
    _add_services(server, calls, relay, AdapterFanOut(config.policy, replicas, upstreams), health)
    endpoint: MetricsEndpoint | None = None
    try:
        if not config.server.reuse_port:
            check_free(config.host, config.port)  # gRPC finds out as well, but writes a line of its own
        port = bind(server, config.host, config.port, tls)
        if registry is not None and config.metrics_port is not None:
            WorkersCollector(registry, replicas)
            endpoint = await MetricsEndpoint.start(config.metrics_host or config.host, config.metrics_port, registry)
    except BaseException:
        for upstream in upstreams.values():
            await upstream.close()
        raise
    await server.start()
    watcher = Watcher(replicas, upstreams, config.watch)
    watcher.start()
    for sentence in exposure_warnings(
        config.host, asks_credentials=credentials is not None, has_tls=config.tls_cert is not None
    ):
        log.warning("%s", sentence)
    await watcher.settled(SETTLE_S)
    files.start()
    return Router(config, port, replicas, calls, health, endpoint, server, watcher, upstreams, files)


async def run_router(
    config: RouterConfig,
    on_ready: Callable[[Router], None] = lambda router: None,
    ending: Ending | None = None,
) -> None:
    """Runs a router until SIGTERM, SIGINT or SIGHUP, then drains it. A second signal ends it at once.

    With an `ending` of the caller's, signals are the caller's too."""
    router = await start_router(config)
    if ending is None:
        ending = Ending()
        ending.listen()
    on_ready(router)
    await ending.asked.wait()
    log.info("draining: %d requests are under way; %s", len(router.calls), HOW_TO_HURRY)
    announce_s = ending.announce_s(config.announce_s)
    await ending.drain(router.drain(announce_s=announce_s), lambda: router.drain(0.0))


def server_options(options: ServerOptions) -> list[tuple[str, int]]:
    """What clients behind balancers and firewalls need of the router's port."""
    arguments = [
        ("grpc.max_receive_message_length", options.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(options.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(options.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(options.min_client_ping_s * 1000)),
        ("grpc.so_reuseport", int(options.reuse_port)),
    ]
    if options.max_connection_age_s > 0:
        arguments += [
            ("grpc.max_connection_age_ms", int(options.max_connection_age_s * 1000)),
            ("grpc.max_connection_age_grace_ms", int(options.max_connection_age_grace_s * 1000)),
        ]
    return arguments


def _add_services(
    server: grpc.aio.Server, calls: Calls, relay: InferenceRelay, adapters: AdapterFanOut, health: Health
) -> None:
    services: dict[str, dict[str, Callable[[Call, bytes], Awaitable[Any]]]] = {
        INFERENCE: {
            "Generate": relay.generate,
            "GenerateStream": relay.generate_stream,
            "Tokenize": relay.tokenize,
            "GetInfo": relay.get_info,
        },
        ADAPTERS: {
            "LoadAdapter": adapters.load,
            "UnloadAdapter": adapters.unload,
            "GetAdapter": adapters.get,
            "ListAdapters": adapters.list,
        },
    }
    for service, methods in services.items():
        handlers: dict[str, Any] = {}
        for name, body in methods.items():
            is_stream = name == "GenerateStream"
            make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            handlers[name] = make(calls.handler(name, body))  # no (de)serializers: from bytes to bytes
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
    reflection.enable_server_reflection([INFERENCE, ADAPTERS, health_name, reflection.SERVICE_NAME], server)
    server.add_generic_rpc_handlers((UnknownMethods(),))
