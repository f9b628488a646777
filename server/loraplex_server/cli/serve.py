"""`loraplex serve MODEL`: a router and its workers on this machine, started, watched and ended together.

This process is the router; each worker is a child, `loraplex worker`, on a free loopback port. No torch in here.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex_proto.errors import InvalidArgument, LoraplexError
from loraplex_server.cli.children import Children, ChildSpec
from loraplex_server.cli.options import command
from loraplex_server.cli.report import Report
from loraplex_server.cli.worker import FLAGS, JSON, MODEL, worker_config
from loraplex_server.config import WorkerConfig

# The router listens, authenticates and terminates TLS; the workers behind it take the rest of the flags.
ROUTER_ONLY = {"host", "port", "metrics_port", "auth_file", "tls_cert", "tls_key"}

WORKERS = inspect.Parameter(
    "workers",
    inspect.Parameter.KEYWORD_ONLY,
    default=1,
    annotation=Annotated[int, typer.Option("--workers", min=1, max=64, help="Worker processes; each loads the model.")],
)


def worker_arguments(model: str, given: dict[str, Any]) -> list[str]:
    """The command line of a child: the flags as given, without those that are the router's."""
    arguments = [model, "--json", "--host", "127.0.0.1"]
    for flag in FLAGS:
        value = given[flag.parameter]
        if flag.parameter in ROUTER_ONLY or value is None:
            continue
        if isinstance(value, bool):
            arguments.append(flag.flag if value else f"--no-{flag.flag[2:]}")
        else:
            arguments += [flag.flag, str(value.absolute() if isinstance(value, Path) else value)]
    return arguments


async def run_serve(
    config: WorkerConfig,
    spec: ChildSpec,
    num_workers: int,
    token_file: Path | None,
    on_progress: Callable[[str], None],
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> int:
    """Serves until SIGTERM, SIGINT or `stop`. Children that die are started again.

    Raises what the first start of a worker raised, and what the router raises when it cannot listen.
    """
    from loraplex_router.server import start_router  # late: prints of help need no gRPC

    stop = stop or asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    children = Children(spec, num_workers, on_progress)
    try:
        addresses = await children.start(stop)
        if addresses is None:
            return 130
        router = await start_router(_router_config(config, addresses, token_file))
        try:
            on_ready(router.address)
            watching = asyncio.ensure_future(children.watch())
            await stop.wait()
            watching.cancel()
        finally:
            await router.drain(config.drain_s)
    finally:
        await children.stop(config.drain_s)
    return 0


def _router_config(config: WorkerConfig, addresses: list[str], token_file: Path | None) -> Any:
    from loraplex_router.config import RouterConfig

    return RouterConfig(
        workers=tuple(addresses),
        worker_token_file=token_file,
        host=config.host,
        port=config.port,
        metrics_port=config.metrics_port,
        auth_file=config.auth_file,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        drain_s=config.drain_s,
    )


def _serve(*, model: str, json: bool, workers: int, **given: Any) -> None:
    report = Report("server", as_json=json)
    code = 1
    try:
        config = worker_config(model, given)
        if Path(config.engine.model.model).suffix in {".gguf", ".bin", ".pt"}:
            raise InvalidArgument("MODEL is the directory of a Hugging Face checkpoint or a Hub id, not a file")
        from loraplex_proto.telemetry import setup_logging

        setup_logging(config.engine.log_level)
        if workers > 1 and config.engine.adapters.store_dir is not None:
            raise InvalidArgument("--adapter-store belongs to one worker; leave it out with --workers above 1")
        with tempfile.TemporaryDirectory(prefix="loraplex-") as folder, report:
            token_file, extra = _shared_credential(config, Path(folder))
            arguments = [*worker_arguments(model, given), *extra]
            spec = ChildSpec((sys.executable, "-m", "loraplex", "worker", *arguments))
            ready = partial(report.ready, model_id=model)
            code = asyncio.run(run_serve(config, spec, workers, token_file, report.progress, ready))
    except LoraplexError as error:
        report.failed(error)
    sys.exit(code)


def _shared_credential(config: WorkerConfig, folder: Path) -> tuple[Path | None, list[str]]:
    """With credentials in front, the workers behind believe this router only. Returns the router's token file and the
    flags that tell the workers."""
    if config.auth_file is None:
        return None, []
    from loraplex_proto.auth import new_router_credential

    token_file, worker_credentials = new_router_credential(folder)
    return token_file, ["--auth-file", str(worker_credentials)]


serve = command(
    FLAGS,
    [MODEL, WORKERS, JSON],
    _serve,
    "Serve a base model with its adapters: a router and its workers on this machine.\n\n"
    "Example: loraplex serve Qwen/Qwen2.5-0.5B --adapters ./adapters",
)
