"""`loraplex worker MODEL`: one engine behind gRPC."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_contracts.errors import LoraplexError
from loraplex_runtime.config import explained, silence_grpc, with_settings
from loraplex_runtime.flags import LOGS, configure, flags_of, with_raw_flags
from loraplex_runtime.open_files import raise_file_limit
from loraplex_runtime.shutdown import END, end_with_supervisor, exit_at_once, orphan_drain_s
from loraplex_runtime.supervision import OnOrphan, Supervised
from loraplex_server.cli.placement import apply_placement, parse_placement
from loraplex_server.cli.report import Report
from loraplex_server.config import WorkerConfig

if TYPE_CHECKING:
    from loraplex_server.grpc.server import Worker

FLAGS = list(flags_of(WorkerConfig))

ModelArgument = Annotated[str, typer.Argument(help="Directory of a Hugging Face checkpoint, or its Hub id.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Report progress as JSON lines.", rich_help_panel=LOGS)]


def worker_config(model: str, params: dict[str, Any], router_digest: str = "") -> WorkerConfig:
    """The configuration of a worker. Raises InvalidArgument, with a sentence that names the flag."""
    fixed = {("engine", "model", "model"): model, ("router_digest",): router_digest}
    return configure(WorkerConfig, FLAGS, params, fixed)


def _read_config(
    *, model: str | None, supervised: bool, on_orphan: str, router_digest: str, **params: Any
) -> tuple[WorkerConfig, float]:
    """The configuration, and the seconds of --on-orphan."""
    drain_s = orphan_drain_s(on_orphan, is_supervised=supervised)
    return worker_config(model or "", params, router_digest), drain_s


@with_settings("worker", _read_config)
@with_raw_flags(FLAGS)
def worker(
    ctx: typer.Context,
    model: ModelArgument,
    json: JsonFlag = False,
    supervised: Supervised = False,
    on_orphan: OnOrphan = END,
    router_digest: Annotated[
        str, typer.Option("--router-digest", hidden=True, help="SHA-256 of the token of the one router that may call.")
    ] = "",
    placement: Annotated[
        str, typer.Option("--placement", hidden=True, help="INDEX/COUNT: which of the workers of this machine it is.")
    ] = "0/1",
    **params: Any,
) -> None:
    """Start one worker: a base model with its adapters behind gRPC.

    Clients may talk to it directly; a router (`loraplex router`) spreads requests over several.
    """
    report = Report("worker", as_json=json)
    try:
        config, drain_s = _read_config(
            model=model, supervised=supervised, on_orphan=on_orphan, router_digest=router_digest, **params
        )
        if supervised:
            end_with_supervisor(drain_s)
        index, num_workers = parse_placement(placement)
        raise_file_limit()
        if config.engine.log_format == "json":
            silence_grpc()
        # Late: what only prints help needs neither gRPC nor torch.
        from loraplex_runtime.logs import setup_logging
        from loraplex_server.grpc.server import run_worker  # not in the loop, which would put Ctrl-C off until its end

        setup_logging(config.engine.log_level, config.engine.log_format, requests=config.request_log)
        if config.engine.log_format == "json":
            report.use_log()
        if num_workers > 1:
            config = apply_placement(config, index, num_workers)
        with report:
            code = asyncio.run(_run(run_worker, config, report))
        exit_at_once(code)
    except KeyboardInterrupt:  # while it started; gRPC's server would miss the loop when the interpreter ends
        exit_at_once(128 + signal.SIGINT)
    except LoraplexError as error:
        code = report.failed(explained(ctx, error))
    sys.exit(code)


async def _run(run_worker: Callable[..., Awaitable[int]], config: WorkerConfig, report: Report) -> int:
    alive = asyncio.create_task(report.stay_alive())

    def ready(running: Worker) -> None:
        alive.cancel()  # from here on the router hears the worker itself
        _report_ready(report, running)

    return await run_worker(config, report.progress, ready, report.draining)


def _report_ready(report: Report, running: Worker) -> None:
    metrics = running.listener.metrics
    ports = [] if metrics is None else [metrics.port]
    report.ready(running.address, running.info.model_id, ports)
