"""`loraplex worker MODEL`: one engine behind gRPC."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loraplex_proto.ending import exit_at_once
from loraplex_proto.errors import LoraplexError
from loraplex_proto.flags import command, configure, flags_of
from loraplex_server.cli.report import Report
from loraplex_server.config import WorkerConfig

if TYPE_CHECKING:
    from loraplex_server.grpc.server import Worker

FLAGS = list(flags_of(WorkerConfig))

MODEL = inspect.Parameter(
    "model",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[str, typer.Argument(help="Directory of a Hugging Face checkpoint, or its Hub id.")],
)
JSON = inspect.Parameter(
    "json",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--json", help="Report progress as JSON lines.")],
)

SUPERVISED = inspect.Parameter(
    "supervised",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--supervised", hidden=True, help="End when standard input closes.")],
)


def worker_config(model: str, given: dict[str, Any]) -> WorkerConfig:
    """Raises InvalidArgument, with a sentence that names the flag."""
    return configure(WorkerConfig, FLAGS, given, {("engine", "model", "model"): model})


def _worker(*, model: str, json: bool, supervised: bool, **given: Any) -> None:
    report = Report("worker", as_json=json)
    if supervised:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        config = worker_config(model, given)
        # Late: what only prints help needs neither gRPC nor torch.
        from loraplex_proto.telemetry import setup_logging
        from loraplex_server.grpc.server import run_worker

        setup_logging(config.engine.log_level)
        with report:
            code = asyncio.run(run_worker(config, report.progress, partial(_ready, report), report.draining))
        exit_at_once(code)
    except LoraplexError as error:
        code = report.failed(error)
    sys.exit(code)


def _ready(report: Report, running: Worker) -> None:
    ports = [] if running.metrics is None else [running.metrics.port]
    report.ready(running.address, running.info.model_id, ports)


def _end_with_parent() -> None:
    """A supervisor that dies closes the pipe; a worker that outlived it would hold port and memory for nobody."""
    while os.read(0, 4096):  # not sys.stdin: its lock would be held while the interpreter ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


worker = command(
    FLAGS,
    [MODEL, JSON, SUPERVISED],
    _worker,
    "Start one worker: a base model with its adapters behind gRPC.\n\n"
    "Clients may talk to it directly; a router (`loraplex router`) spreads requests over several.",
)
