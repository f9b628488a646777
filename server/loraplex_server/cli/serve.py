"""`loraplex serve MODEL`: a router and its workers on this machine, started, watched and ended together.

This process is the router; each worker is a child, `loraplex worker`, on a free loopback port. No torch in here.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Annotated, Any

import typer

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.flags import command
from loraplex_runtime.shutdown import Ending
from loraplex_server.cli.report import Report
from loraplex_server.cli.serving import Serving, child_spec, serving
from loraplex_server.cli.worker import FLAGS, JSON, MODEL, worker_config
from loraplex_server.config import WorkerConfig

WORKERS = inspect.Parameter(
    "workers",
    inspect.Parameter.KEYWORD_ONLY,
    default=1,
    annotation=Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=64,
            help="Worker processes. Each loads the model, on the next GPU (with --device cuda:N from that one on) or "
            "with its share of the cores.",
        ),
    ],
)


async def run_serve(
    start: Callable[[Ending], AbstractAsyncContextManager[Serving | None]],
    on_ready: Callable[[Serving], None],
    on_drain: Callable[[int], None],
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; a second one ends it at once. Returns the exit status."""
    ending = Ending()
    ending.listen()
    async with start(ending) as served:
        if served is None:
            return ending.status
        on_ready(served)
        await ending.asked.wait()
        on_drain(served.num_requests())
    return 0


def _serve(*, model: str, json: bool, workers: int, **given: Any) -> None:
    report = Report("server", as_json=json)
    try:
        config = worker_config(model, given)
        if workers > 1 and config.engine.adapters.store_dir is not None:
            raise InvalidArgument("--adapter-store belongs to one worker; leave it out with --workers above 1")
        from loraplex_router.config import quieten_grpc

        quieten_grpc()  # before gRPC is imported
        from loraplex_runtime.telemetry import setup_logging

        setup_logging(config.engine.log_level)
        with report:
            token = _router_token(config)
            start = partial(serving, config, child_spec(model, given, token), workers, token, report.progress)

            def on_ready(served: Serving) -> None:
                report.ready(served.address, model, served.metrics_ports)

            code = asyncio.run(run_serve(start, on_ready, report.draining))
    except LoraplexError as error:
        code = report.failed(error)
    sys.exit(code)


def _router_token(config: WorkerConfig) -> str:
    """With credentials in front, the workers behind believe this router only, by a token that never leaves it: they
    know its digest."""
    return "" if config.auth_file is None else secrets.token_urlsafe(32)


serve = command(
    FLAGS,
    [MODEL, WORKERS, JSON],
    _serve,
    "Serve a base model with its adapters: a router and its workers on this machine.\n\n"
    "Example: loraplex serve Qwen/Qwen2.5-0.5B --adapters ./adapters",
)
