"""`loraplex worker MODEL`: one engine behind gRPC."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.flags import configure, flags_of, with_raw_flags
from loraplex_runtime.shutdown import exit_at_once
from loraplex_server.cli.placement import apply_placement, parse_placement
from loraplex_server.cli.report import Report
from loraplex_server.config import WorkerConfig
from loraplex_server.parent import END, end_with_supervisor, orphan_drain_s

if TYPE_CHECKING:
    from loraplex_server.grpc.server import Worker

FLAGS = list(flags_of(WorkerConfig))

ModelArgument = Annotated[str, typer.Argument(help="Directory of a Hugging Face checkpoint, or its Hub id.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Report progress as JSON lines.")]


def worker_config(model: str, given: dict[str, Any], router_digest: str = "") -> WorkerConfig:
    """Raises InvalidArgument, with a sentence that names the flag."""
    fixed = {("engine", "model", "model"): model, ("router_digest",): router_digest}
    return configure(WorkerConfig, FLAGS, given, fixed)


@with_raw_flags(FLAGS)
def worker(
    model: ModelArgument,
    json: JsonFlag = False,
    supervised: Annotated[
        bool, typer.Option("--supervised", help="End when standard input closes, as it does when a supervisor dies.")
    ] = False,
    on_orphan: Annotated[
        str,
        typer.Option(
            "--on-orphan",
            metavar="end|drain=SECONDS",
            help="With --supervised, what running requests get when standard input closes: nothing, or SECONDS to end.",
        ),
    ] = END,
    router_digest: Annotated[
        str, typer.Option("--router-digest", hidden=True, help="SHA-256 of the token of the one router that may call.")
    ] = "",
    placement: Annotated[
        str, typer.Option("--placement", hidden=True, help="INDEX/COUNT: which of the workers of this machine it is.")
    ] = "0/1",
    **given: Any,
) -> None:
    """Start one worker: a base model with its adapters behind gRPC.

    Clients may talk to it directly; a router (`loraplex router`) spreads requests over several.
    """
    report = Report("worker", as_json=json)
    try:
        drain_s = orphan_drain_s(on_orphan)
        if supervised:
            end_with_supervisor(drain_s)
        elif on_orphan != END:
            raise InvalidArgument("--on-orphan goes with --supervised", field="--on-orphan")
        config = worker_config(model, given, router_digest)
        index, num_workers = parse_placement(placement)
        # Late: what only prints help needs neither gRPC nor torch.
        from loraplex_runtime.telemetry import setup_logging
        from loraplex_server.grpc.server import run_worker

        setup_logging(config.engine.log_level)
        if num_workers > 1:
            config = apply_placement(config, index, num_workers)
        with report:
            code = asyncio.run(run_worker(config, report.progress, partial(_ready, report), report.draining))
        exit_at_once(code)
    except LoraplexError as error:
        code = report.failed(error)
    sys.exit(code)


def _ready(report: Report, running: Worker) -> None:
    metrics = running.listener.metrics
    ports = [] if metrics is None else [metrics.port]
    report.ready(running.address, running.info.model_id, ports)
