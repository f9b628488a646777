"""`loraplex serve MODEL`: a router and its workers on this machine.

This process is the router; each worker is a child, `loraplex worker`, on a free loopback port. `serving` is the context
that `serve` and `demo` share. Imports no torch.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import typer

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_router.config import HttpOptions, RouterConfig, check_http, import_grpc
from loraplex_runtime.child_processes import Children, ChildSpec
from loraplex_runtime.config import explained, with_settings
from loraplex_runtime.flags import check, configure, flag_arguments, flags_of, with_raw_flags
from loraplex_runtime.listen_config import ListenConfig
from loraplex_runtime.open_files import raise_file_limit
from loraplex_runtime.reports import Progress
from loraplex_runtime.shutdown import Ending
from loraplex_server.cli.first_steps import first_steps
from loraplex_server.cli.report import Report
from loraplex_server.cli.worker import FLAGS, JsonFlag, ModelArgument, worker_config
from loraplex_server.config import WorkerConfig

# The router listens, authenticates and terminates TLS; the workers behind it take the rest of the flags.
ROUTER_ONLY = {flag.parameter for flag in flags_of(ListenConfig)} - {"drain", "max_message", "otlp_traces_endpoint"}


@dataclass(frozen=True, slots=True)
class Http:
    """The settings of RouterConfig that are about its HTTP port, by their names there."""

    http_port: int | None = None
    http_host: str | None = None
    served_model_names: tuple[str, ...] = ()
    http: HttpOptions = HttpOptions()  # frozen

    def __post_init__(self) -> None:
        check_http(self.http_port, self.served_model_names)


NO_HTTP = Http()
# The workers' --adapters is the root of paths in requests.
HTTP_FLAGS = [
    flag
    for flag in flags_of(RouterConfig)
    if flag.path[0] in {one.name for one in fields(Http)} and flag.path != ("http", "adapter_root")
]


@dataclass(frozen=True, slots=True)
class Serving:
    """Addresses and ports of what was started. The router's port for metrics comes first, then each worker's; none at
    all where they are off."""

    address: str
    metrics_ports: list[int]
    http_address: str | None
    num_requests: Callable[[], int]


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    spec: ChildSpec,
    num_workers: int,
    worker_token: str,
    on_progress: Progress,
    ending: Ending,
    http: Http = NO_HTTP,
) -> AsyncGenerator[Serving | None]:
    """Listens, starts workers, then the router; drains both at the end. Children that die meanwhile are started again.

    None when the end was asked for before everything ran. Raises what the router raises when it cannot listen, and what
    the first start of a worker raised.
    """
    from loraplex_router.server import bind_http_port, listen, start_router  # late: printing help needs no gRPC

    listener = await listen(config)
    children = Children(spec, num_workers, on_progress)
    http_socket = None
    try:
        # A port that is taken is noticed before models are loaded.
        http_socket = bind_http_port(_router_config(config, ["127.0.0.1:1"], worker_token, http))
        addresses = await children.start(ending.asked)
        if addresses is None:
            yield None
            return
        router = await start_router(_router_config(config, addresses, worker_token, http), listener, http_socket)
        http_socket = None  # the router's from here on
        watching = asyncio.gather(children.watch(), children.kill_silent(router.heard_s))
        try:
            ports = [] if listener.metrics is None else [listener.metrics.port, *children.metrics_ports]
            http_address = None if router.http is None else router.http.address
            yield Serving(router.address, ports, http_address, lambda: len(router.calls))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            gently = router.drain(config.drain_s, announce_s=ending.announce_s(config.announce_s))
            await ending.drain(gently, lambda: router.drain(0.0))
    finally:
        if http_socket is not None:
            http_socket.close()
        await listener.stop(0.0)
        await ending.drain(children.stop(config.drain_s), lambda: children.stop(0.0, grace_s=2.0))


def child_spec(model: str, params: Mapping[str, Any], worker_token: str = "") -> ChildSpec:
    """The command of a worker for `model` with the flags as they were given. Its port for metrics follows the router's.
    With a `worker_token` it accepts calls only with that token."""
    command = (sys.executable, "-m", "loraplex", "worker", *worker_arguments(model, params))
    if worker_token:
        from loraplex_runtime.auth import token_digest  # late: it imports gRPC

        command += ("--router-digest", token_digest(worker_token))
    router_port: int | None = params["metrics_port"]
    return ChildSpec(command, router_port and router_port + 1)


def worker_arguments(model: str, params: Mapping[str, Any]) -> list[str]:
    """The command line of a child: the flags as given, without those that are the router's."""
    # The router's line for a request says what the worker's would.
    arguments = [model, "--json", "--host", "127.0.0.1", "--announce", "0", "--no-request-log"]
    arguments += ["--metrics-host", params["metrics_host"] or params["host"]]
    for flag in FLAGS:
        value = params[flag.parameter]
        is_default_switch = isinstance(value, bool) and value is flag.default
        if flag.parameter not in ROUTER_ONLY and value is not None and not is_default_switch:
            arguments += flag_arguments(flag, value)
    return arguments


def _router_config(config: WorkerConfig, addresses: list[str], worker_token: str, http: Http) -> RouterConfig:
    return RouterConfig(
        workers=tuple(addresses),
        worker_token=worker_token,
        **{one.name: getattr(config, one.name) for one in fields(ListenConfig)},
        http_port=http.http_port,
        http_host=http.http_host,
        served_model_names=http.served_model_names,
        http=replace(http.http, adapter_root=config.engine.adapters.root),
    )


def _read_config(*, model: str | None, workers: int, **params: Any) -> tuple[WorkerConfig, Http]:
    http = configure(Http, HTTP_FLAGS, params, {})
    config = worker_config(model or "", params)
    if workers > 1 and config.engine.adapters.store_dir is not None:
        raise InvalidArgument("--adapter-store belongs to one worker; leave it out with --workers above 1")
    most = 65535 - workers
    rule = f"must be at most {most}: each worker takes the next port"
    check((config.metrics_port or 0) <= most, "--metrics-port", rule)
    return config, http


@with_settings("serve", _read_config)
@with_raw_flags([*FLAGS, *HTTP_FLAGS])
def serve(
    ctx: typer.Context,
    model: ModelArgument,
    workers: Annotated[
        int,
        typer.Option(
            "--workers",
            min=1,
            max=64,
            help="Worker processes. Each loads the model, on the next GPU (with --device cuda:N from that one on) or "
            "with its share of the cores.",
        ),
    ] = 1,
    json: JsonFlag = False,
    **params: Any,
) -> None:
    """Serve a base model with its adapters: a router and its workers on this machine.

    Example: loraplex serve Qwen/Qwen2.5-0.5B --adapters ./adapters
    """
    report = Report("server", as_json=json)
    try:
        config, http = _read_config(model=model, workers=workers, **params)
        raise_file_limit()
        import_grpc(config.engine.log_format)
        from loraplex_runtime.logs import setup_logging

        setup_logging(config.engine.log_level, config.engine.log_format, requests=config.request_log)
        if config.engine.log_format == "json":
            report.use_log()
        with report:
            code = asyncio.run(_serve(model, config, workers, params, report, http))
    except LoraplexError as error:
        code = report.failed(explained(ctx, error))
    sys.exit(code)


async def _serve(
    model: str, config: WorkerConfig, num_workers: int, params: Mapping[str, Any], report: Report, http: Http
) -> int:
    """Serves until SIGTERM, SIGINT or SIGHUP; a second one ends it at once. Returns the exit status."""
    # With credentials in front, the workers behind believe this router only, by a token that never leaves it: they know
    # its digest.
    token = "" if config.auth_file is None else secrets.token_urlsafe(32)
    ending = Ending()
    ending.listen()
    spec = child_spec(model, params, token)
    async with serving(config, spec, num_workers, token, report.progress, ending, http) as served:
        if served is None:
            return ending.status
        hints = first_steps(config, served.address, served.http_address)
        report.ready(served.address, model, served.metrics_ports, served.http_address, hints)
        await ending.asked.wait()
        report.draining(served.num_requests())
    return 0
