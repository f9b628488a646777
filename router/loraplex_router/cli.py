"""Commands `loraplex router` and `loraplex http`. Flags in, configuration out; everything else is server.py's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from loraplex_router.config import HttpServerConfig, RouterConfig, quieten_grpc
from loraplex_runtime.flags import with_flags
from loraplex_runtime.shutdown import unread_output_is_lost

if TYPE_CHECKING:
    from loraplex_router.server import Router


@with_flags
def router(config: RouterConfig) -> None:
    """Start a router: one address in front of several workers.

    It sends each request to a worker that has its adapter and is not too busy, and relays the answer.

    Example: loraplex router --worker 10.0.0.1:50051 --worker 10.0.0.2:50051
    Example: loraplex router --workers-from dns:loraplex-worker.default.svc:50051
    """
    _run(config, _print_ready)


@with_flags
def http(config: HttpServerConfig) -> None:
    """Serve HTTP in front of a server that runs: OpenAI's, LoRAX's and TGI's routes in a process of their own.

    It needs no model. Several of them may stand in front of one server.

    Example: loraplex http --server 127.0.0.1:50051 --port 8000
    """
    _run(config.router(), _print_http_ready)


def _run(config: RouterConfig, on_ready: Callable[[Router], None]) -> None:
    # Late: what only prints help needs no gRPC.
    from loraplex_runtime.telemetry import setup_logging

    quieten_grpc()
    from loraplex_router.server import run_router

    setup_logging(config.log_level, config.log_format)
    asyncio.run(run_router(config, on_ready))


def _print_ready(running: Router) -> None:
    total = len(running.replicas.all())
    line = f"router ready on {running.address} ({running.replicas.num_routable} of {total} workers available"
    if running.listener.metrics is not None:
        line += f", metrics on port {running.listener.metrics.port}"
    if running.http is not None:
        line += f", HTTP on {running.http.address}"
    with unread_output_is_lost():
        print(line + ")", flush=True)


def _print_http_ready(running: Router) -> None:
    assert running.http is not None
    (server,) = running.config.workers
    state = "" if running.replicas.num_routable else ", which is not available yet"
    with unread_output_is_lost():
        print(f"HTTP on {running.http.address}, in front of {server}{state} (Ctrl-C ends it)", flush=True)
