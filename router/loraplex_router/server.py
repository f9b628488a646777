"""Assembly of a router: port, services, watchers, metrics; start and drain in order.

`start_router` is for callers with an event loop (tests, `loraplex serve`), `run_router` for a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import grpc

import loraplex_proto
from loraplex_proto.services import ADAPTERS, INFERENCE, POOLING, STATUS, WORKER
from loraplex_router.activity import Activity
from loraplex_router.adapters import AdapterFanOut
from loraplex_router.calls import Call, Calls, RouterMetrics
from loraplex_router.config import RouterConfig
from loraplex_router.inference import InferenceRelay
from loraplex_router.load_service import LoadService
from loraplex_router.membership import open_membership, parse_members
from loraplex_router.replicas import Replicas, WorkersCollector
from loraplex_router.status import StatusService
from loraplex_router.upstream import Upstream, follow_worker_credentials
from loraplex_router.watch import Watcher
from loraplex_router.workers import Workers
from loraplex_runtime.listen_config import ListenConfig
from loraplex_runtime.listener import Listener, exposure_warnings, server_options
from loraplex_runtime.metrics import describe_process, new_registry
from loraplex_runtime.shutdown import HOW_TO_HURRY, Ending

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from loraplex_router.http.server import HttpServer

log = logging.getLogger(__name__)

# Seconds for which a start waits for the workers. They may also come later.
SETTLE_S: Final = 2.0
# Seconds for the last answers to reach their clients, before the port closes.
FLUSH_S: Final = 1.0
# Seconds between leaving a shared port and refusing requests: some round trips.
LEAVE_S: Final = 0.5
# Age of a client's connection, and time for its streams to end after that.
MAX_AGE_S: Final = 600.0
MAX_AGE_GRACE_S: Final = 3600.0


@dataclass(slots=True)
class Router:
    """A running router. Its starter calls `drain` once."""

    config: RouterConfig
    replicas: Replicas
    calls: Calls
    listener: Listener
    _load: LoadService
    _workers: Workers
    http: HttpServer | None = None

    @property
    def address(self) -> str:
        return self.listener.address

    def heard_s(self, worker_id: str) -> float:
        """The time when the worker last sent anything, by the monotonic clock."""
        return self._workers.upstreams[worker_id].heard_s

    async def drain(self, drain_s: float | None = None, *, announce_s: float = 0.0) -> None:
        """Says NOT_SERVING for `announce_s`, then refuses what is new and gives what runs `drain_s` to end.

        The port stays open until the last request has ended, so that new ones hear why they are refused; a port that
        other processes share is left to them. What still runs after `drain_s` ends as UNAVAILABLE (DRAINING)."""
        self.listener.health.begin_drain()
        self._load.begin_drain()
        await asyncio.sleep(announce_s)
        if self.config.server.reuse_port:
            self.listener.leave_port()
            if self.http is not None:
                self.http.leave_port()
            await asyncio.sleep(LEAVE_S)  # for requests that were sent before their clients heard of it
            if self.http is not None:
                self.http.close_idle()
        grace_s = self.config.drain_s if drain_s is None else drain_s
        await self.calls.drain(grace_s)
        if num_cut_off := self.calls.cut_off():
            log.warning("%d requests did not end within %g s and are cut off", num_cut_off, grace_s)
        if self.http is not None:
            await self.http.stop()
        await self.listener.stop(FLUSH_S)
        await self._workers.stop()


async def listen(config: ListenConfig, *, reuse_port: bool = False) -> Listener:
    """The router's port. Until `start_router` has it, calls are refused with a retry hint.

    Raises InvalidArgument (files) and FailedPrecondition (ports)."""
    return await Listener.open(
        config,
        (INFERENCE, POOLING, ADAPTERS, WORKER, STATUS),
        server_options(config.max_message_bytes, max_age_s=MAX_AGE_S, max_age_grace_s=MAX_AGE_GRACE_S),
        what="server",
        role="router",
        reuse_port=reuse_port,
    )


def bind_http_port(config: RouterConfig) -> socket.socket | None:
    """The socket of the HTTP port, None where it is off. Raises FailedPrecondition."""
    if config.http_port is None:
        return None
    from loraplex_router.http.server import bind_http  # late: routers without HTTP need no FastAPI

    return bind_http(config.http_host or config.host, config.http_port, reuse_port=config.server.reuse_port)


async def start_router(
    config: RouterConfig, listener: Listener | None = None, http_socket: socket.socket | None = None
) -> Router:
    """Listens (unless there is a `listener` already, and an `http_socket` for HTTP), connects to the workers and waits
    a moment for their first reports.

    Raises InvalidArgument (files) and FailedPrecondition (ports)."""
    if listener is None:
        listener = await listen(config, reuse_port=config.server.reuse_port)
    health = listener.health
    workers: Workers | None = None
    try:
        membership = open_membership(config.workers_from) if config.workers_from else None
        members = parse_members(config.workers) if membership is None else membership.first()

        def show_health() -> None:
            health.set_ready(listener.serves and replicas.num_routable > 0)

        replicas = Replicas(on_change=show_health, slow_start_s=config.policy.slow_start_s)
        shown = follow_worker_credentials(
            listener.files,
            config.worker_token or config.worker_token_file,
            config.worker_ca,
            config.worker_client_cert,
            config.worker_client_key,
            config.worker_flags,
        )
        watcher = Watcher(replicas, config.watch)
        workers = Workers(replicas, watcher, lambda member: Upstream(member, config.server, shown))
        workers.update(members)
        registry = listener.registry or new_registry()
        describe_process(registry, "router", loraplex_proto.__version__)
        listener.refusals.show_in(registry, "router")
        metrics = RouterMetrics(registry)
        activity = Activity(time.monotonic())
        calls = Calls(config.max_in_flight, metrics, replicas.adapter_names, activity, listener.tracing)
        relay = InferenceRelay(config, replicas, workers.upstreams, metrics, activity)
        adapters = AdapterFanOut(config.policy, replicas, workers.upstreams)
        load = LoadService(replicas)
        handlers = _handlers(calls, relay, adapters)
        handlers.append(grpc.method_handlers_generic_handler(WORKER, load.handlers()))
        status = StatusService(
            replicas,
            calls,
            served_names=config.served_model_names,
            is_draining=lambda: listener.health.is_draining,
        )
        handlers.append(grpc.method_handlers_generic_handler(STATUS, status.handlers()))
        WorkersCollector(registry, replicas)
        http_socket = http_socket or bind_http_port(config)
    except BaseException:
        if workers is not None:
            await workers.stop()
        await listener.stop(0.0)
        raise
    workers.start(membership)
    await watcher.settled(SETTLE_S)
    listener.serve(handlers)  # not earlier: until workers have reported, each call would find none
    show_health()
    router = Router(config, replicas, calls, listener, load, workers)
    if http_socket is not None:
        try:
            router.http = await _start_http(router, relay, adapters, status, registry, http_socket)
        except BaseException:
            await router.drain(0.0)
            raise
    return router


async def _start_http(
    router: Router,
    relay: InferenceRelay,
    adapters: AdapterFanOut,
    status: StatusService,
    registry: CollectorRegistry,
    http_socket: socket.socket,
) -> HttpServer:
    from loraplex_router.http.app import make_app
    from loraplex_router.http.middleware import HostNames
    from loraplex_router.http.router_calls import RouterCalls
    from loraplex_router.http.server import HttpServer

    config, listener = router.config, router.listener
    calls = RouterCalls(
        calls=router.calls,
        relay=relay,
        adapters=adapters,
        status=status,
        replicas=router.replicas,
        is_ready=lambda: listener.health.is_ready,
        credentials=listener.credentials,
        registry=registry,
        served_names=config.served_model_names,
        options=config.http,
        refusals=listener.refusals,
    )
    tls = None if config.tls_cert is None or config.tls_key is None else (config.tls_cert, config.tls_key)
    host = config.http_host or config.host
    if host != config.host:
        asks_credentials = config.auth_file is not None or config.tls_client_ca is not None
        for sentence in exposure_warnings(host, asks_credentials=asks_credentials, has_tls=config.tls_cert is not None):
            log.warning("%s", sentence)
    allowed_hosts = HostNames(config.http.allowed_hosts, host)
    app = make_app(calls, allowed_hosts)
    return await HttpServer.start(app, http_socket, host, listener.files, tls, listener.refusals, config.tls_client_ca)


async def run_router(config: RouterConfig, on_ready: Callable[[Router], None]) -> None:
    """Runs a router until SIGTERM, SIGINT or SIGHUP, then drains it. A second signal ends it at once."""
    router = await start_router(config)
    ending = Ending()
    ending.listen()
    gc.freeze()  # what a router has by now it keeps; collections that go through it hold up every stream
    on_ready(router)
    await ending.asked.wait()
    log.info("draining: %d requests are under way; %s", len(router.calls), HOW_TO_HURRY)
    announce_s = ending.announce_s(config.announce_s)
    await ending.drain(router.drain(announce_s=announce_s), lambda: router.drain(0.0))


def _handlers(calls: Calls, relay: InferenceRelay, adapters: AdapterFanOut) -> list[grpc.GenericRpcHandler]:
    services: dict[str, dict[str, Callable[[Call, bytes], Awaitable[Any]]]] = {
        INFERENCE: {
            "Generate": relay.generate,
            "GenerateStream": relay.generate_stream,
            "Tokenize": relay.tokenize,
            "Detokenize": relay.detokenize,
            "GetTokenizerInfo": relay.get_tokenizer_info,
            "GetInfo": relay.get_info,
        },
        POOLING: {
            "Embed": relay.embed,
            "Classify": relay.classify,
            "Score": relay.score,
        },
        ADAPTERS: {
            "LoadAdapter": adapters.load,
            "UnloadAdapter": adapters.unload,
            "GetAdapter": adapters.get,
            "ListAdapters": adapters.list,
        },
    }
    found: list[grpc.GenericRpcHandler] = []
    for service, methods in services.items():
        handlers: dict[str, Any] = {}
        for name, body in methods.items():
            is_stream = name == "GenerateStream"
            make = grpc.unary_stream_rpc_method_handler if is_stream else grpc.unary_unary_rpc_method_handler
            handlers[name] = make(calls.handler(name, body))  # no (de)serializers: from bytes to bytes
        found.append(grpc.method_handlers_generic_handler(service, handlers))
    return found
