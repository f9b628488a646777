"""The command `loraplex router`. Flags in, configuration out; everything else is server.py's."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex_proto.errors import InvalidArgument, LoraplexError

if TYPE_CHECKING:
    from loraplex_router.server import Router


def router(
    worker: Annotated[
        list[str] | None, typer.Option("--worker", help="A worker's host:port. Repeat the flag for each of them.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 takes a free one.")] = 50051,
    metrics_port: Annotated[
        int | None, typer.Option("--metrics-port", help="Serve Prometheus metrics on this port. Default: off.")
    ] = None,
    auth_file: Annotated[
        Path | None,
        typer.Option("--auth-file", help="Credentials (JSON or TOML). Default: everybody may do everything."),
    ] = None,
    worker_token_file: Annotated[
        Path | None, typer.Option("--worker-token-file", help="The token that this router shows its workers.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="TLS certificate chain (PEM).")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="TLS key (PEM).")] = None,
    worker_ca: Annotated[
        Path | None, typer.Option("--worker-ca", help="Connect to workers with TLS; their certificates' CA (PEM).")
    ] = None,
    max_message: Annotated[
        int, typer.Option("--max-message", min=1024, help="Largest request that is accepted, in bytes.")
    ] = 4 << 20,
    max_in_flight: Annotated[
        int, typer.Option("--max-in-flight", min=1, help="Requests that are relayed at the same time.")
    ] = 8192,
    homes: Annotated[
        int, typer.Option("--homes", min=1, help="Workers that share an adapter while it is not in great demand.")
    ] = 2,
    drain: Annotated[
        float, typer.Option("--drain", min=0, help="Seconds that running requests get to end on shutdown.")
    ] = 30.0,
    announce: Annotated[
        float, typer.Option("--announce", min=0, help="On SIGTERM, seconds of NOT_SERVING before requests are refused.")
    ] = 2.0,
    reuse_port: Annotated[
        bool, typer.Option("--reuse-port", help="Let several routers share the port (SO_REUSEPORT).")
    ] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option("--log-format", help="plain or json.")] = "plain",
) -> None:
    """Start a router: one address in front of several workers.

    It sends each request to a worker that has its adapter and is not too busy, and relays the answer.

    Example: loraplex router --worker 10.0.0.1:50051 --worker 10.0.0.2:50051
    """
    try:
        # Late: what only prints help needs no gRPC.
        from loraplex_proto.telemetry import setup_logging
        from loraplex_router.config import PolicyConfig, RouterConfig, ServerOptions, quieten_grpc

        quieten_grpc()
        from loraplex_router.server import run_router

        if log_format not in ("plain", "json"):
            raise InvalidArgument(f"--log-format takes plain or json, not {log_format!a}", field="--log-format")
        setup_logging(log_level, log_format)
        config = RouterConfig(
            workers=tuple(worker or ()),
            host=host,
            port=port,
            metrics_port=metrics_port,
            auth_file=auth_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            worker_token_file=worker_token_file,
            worker_ca=worker_ca,
            max_in_flight=max_in_flight,
            announce_s=announce,
            drain_s=drain,
            policy=PolicyConfig(num_homes=homes),
            server=ServerOptions(max_message_bytes=max_message, reuse_port=reuse_port),
        )
        asyncio.run(run_router(config, _print_ready))
    except LoraplexError as error:
        print(f"error: {error.message}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, InvalidArgument) else 1) from None


def _print_ready(running: Router) -> None:
    total = len(running.config.workers)
    line = f"router ready on {running.address} ({running.replicas.num_routable} of {total} workers available"
    if running.metrics_endpoint is not None:
        line += f", metrics on port {running.metrics_endpoint.port}"
    print(line + ")", flush=True)
