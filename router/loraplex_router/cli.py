"""Commands `loraplex router` and `loraplex http`: flags in, configuration out."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from loraplex_contracts.errors import LoraplexError
from loraplex_router.config import HttpServerConfig, RouterConfig, ServerFlags, import_grpc
from loraplex_runtime.config import with_settings
from loraplex_runtime.flags import LOGS, config_of, with_flags
from loraplex_runtime.open_files import raise_file_limit
from loraplex_runtime.reports import write_report
from loraplex_runtime.shutdown import END, end_with_supervisor, exit_at_once, orphan_drain_s, unread_output_is_lost
from loraplex_runtime.supervision import OnOrphan, Supervised

if TYPE_CHECKING:
    from loraplex_router.processes import Processes
    from loraplex_router.server import Router


log = logging.getLogger("loraplex.start")


@with_settings("router", partial(config_of, RouterConfig), needs=("--worker",))
@with_flags
def router(
    config: RouterConfig,
    json: Annotated[
        bool,
        typer.Option("--json", help="Report as JSON lines when it is ready, or why not.", rich_help_panel=LOGS),
    ] = False,
    supervised: Supervised = False,
    on_orphan: OnOrphan = END,
    alive_every: Annotated[
        float, typer.Option("--alive-every", hidden=True, help="With --json, seconds between two reports.")
    ] = 0.0,
    processes: Annotated[
        int,
        typer.Option("--processes", min=1, help="Processes that share the port, where one is at the end of its CPU."),
    ] = 1,
) -> None:
    """Start a router: one address in front of several workers.

    It sends each request to a worker that has its adapter and is not too busy, and relays the answer.

    Example: loraplex router --worker 10.0.0.1:50051 --worker 10.0.0.2:50051
    Example: loraplex router --workers-from dns:loraplex-worker.default.svc:50051
    """
    drain_s = orphan_drain_s(on_orphan, is_supervised=supervised)
    if supervised:
        end_with_supervisor(drain_s)
    try:
        if processes > 1:
            _run_processes(config, processes, _report_processes if json else partial(_say_processes, config))
        else:
            _run(config, _report_ready if json else partial(_say_ready, config), alive_every)
    except LoraplexError as error:
        if json:
            write_report(event="failed", reason=error.reason, message=error.message)
            sys.exit(error.exit_code)
        _fail(config, error)


@with_settings("http", partial(config_of, HttpServerConfig), needs=("--server",))
@with_flags
def http(config: HttpServerConfig) -> None:
    """Serve HTTP in front of a server that runs: OpenAI's, LoRAX's and TGI's routes in a process of their own.

    It needs no model. Several of them may stand in front of one server.

    Example: loraplex http --server 127.0.0.1:50051 --port 8000
    """
    try:
        _run(config.router(), partial(_say_http_ready, config))
    except LoraplexError as error:
        _fail(config, error)


def _run(config: RouterConfig, on_ready: Callable[[Router], None], alive_every_s: float = 0.0) -> None:
    raise_file_limit()
    import_grpc(config.log_format)
    # Late: what only prints help needs no gRPC.
    from loraplex_router.server import run_router
    from loraplex_runtime.logs import setup_logging

    setup_logging(config.log_level, config.log_format, requests=config.request_log)

    async def run() -> None:
        alive = asyncio.create_task(_report_alive(alive_every_s)) if alive_every_s > 0 else None
        try:
            await run_router(config, on_ready)
        finally:
            if alive is not None:
                alive.cancel()

    try:
        asyncio.run(run())
    except KeyboardInterrupt:  # while it started; gRPC's server would miss the loop when the interpreter ends
        exit_at_once(128 + signal.SIGINT)


def _run_processes(config: RouterConfig, num: int, on_ready: Callable[[Processes], None]) -> None:
    raise_file_limit()
    import_grpc(config.log_format)
    from loraplex_router.processes import run_processes
    from loraplex_runtime.logs import setup_logging

    setup_logging(config.log_level, config.log_format)
    if status := asyncio.run(run_processes(config, num, on_ready)):
        sys.exit(status)


def _say(config: ServerFlags, line: str) -> None:
    """Prints a line; with --log-format json, logs it, as all output is then lines of the log."""
    if config.log_format == "json":
        log.info("%s", line)
        return
    with unread_output_is_lost():
        print(line, flush=True)


def _fail(config: ServerFlags, error: LoraplexError) -> NoReturn:
    """Ends the command; `loraplex` prints the sentence of what is raised."""
    if config.log_format != "json":
        raise error
    log.error("%s", error.message, extra={"reason": error.reason})
    sys.exit(error.exit_code)


def _say_ready(config: ServerFlags, running: Router) -> None:
    total = len(running.replicas.all())
    line = f"router ready on {running.address} ({running.replicas.num_routable} of {total} workers available"
    if running.listener.metrics is not None:
        line += f", metrics on port {running.listener.metrics.port}"
    if running.http is not None:
        line += f", HTTP on {running.http.address}"
    _say(config, line + ")")


def _report_ready(running: Router) -> None:
    metrics = running.listener.metrics
    http = {} if running.http is None else {"http": running.http.address}
    ports = [] if metrics is None else [metrics.port]
    write_report(event="ready", address=running.address, metrics_ports=ports, **http)


def _say_processes(config: ServerFlags, running: Processes) -> None:
    line = f"router ready on {running.address} ({running.num} processes"
    if running.metrics_ports:
        line += f", metrics on ports {', '.join(map(str, running.metrics_ports))}"
    if running.http_address is not None:
        line += f", HTTP on {running.http_address}"
    _say(config, line + ")")


def _report_processes(running: Processes) -> None:
    http = {} if running.http_address is None else {"http": running.http_address}
    write_report(event="ready", address=running.address, metrics_ports=running.metrics_ports, **http)


async def _report_alive(every_s: float) -> None:
    """Reports that this process lives, for a supervisor that kills frozen ones. It runs in the event loop that serves,
    so that a frozen loop falls silent."""
    while True:
        await asyncio.sleep(every_s)
        write_report(event="alive")


def _say_http_ready(config: ServerFlags, running: Router) -> None:
    assert running.http is not None
    (server,) = running.config.workers
    state = "" if running.replicas.num_routable else ", which is not available yet"
    _say(config, f"HTTP on {running.http.address}, in front of {server}{state} (Ctrl-C ends it)")
