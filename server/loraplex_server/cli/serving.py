"""A router in this process with its workers as children, as one context: what `serve` and `demo` both stand on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loraplex_runtime.shutdown import Ending
from loraplex_server.cli.child_processes import Children, ChildSpec
from loraplex_server.cli.worker import FLAGS
from loraplex_server.config import WorkerConfig

# The router listens, authenticates and terminates TLS; the workers behind it take the rest of the flags.
ROUTER_ONLY = {"host", "port", "metrics_port", "metrics_host", "auth_file", "tls_cert", "tls_key", "announce"}


@dataclass(frozen=True, slots=True)
class Serving:
    """What runs. The router's port for metrics comes first, then each worker's; none at all where they are off."""

    address: str
    metrics_ports: list[int]
    num_requests: Callable[[], int]


@asynccontextmanager
async def serving(
    config: WorkerConfig,
    spec: ChildSpec,
    num_workers: int,
    worker_token: str,
    on_progress: Callable[[str], None],
    ending: Ending,
) -> AsyncGenerator[Serving | None]:
    """Listens, starts workers, then the router; drains both at the end. Children that die meanwhile are started again.

    None when the end was asked for before everything ran. Raises what the router raises when it cannot listen, and what
    the first start of a worker raised.
    """
    from loraplex_router.config import ServerOptions  # late: printing help needs no gRPC
    from loraplex_router.server import listen, start_router

    listener = await listen(config, ServerOptions())
    children = Children(spec, num_workers, on_progress)
    try:
        addresses = await children.start(ending.asked)
        if addresses is None:
            yield None
            return
        router = await start_router(_router_config(config, addresses, worker_token), listener)
        watching = asyncio.gather(children.watch(), children.kill_silent(router.heard_s))
        try:
            ports = [] if listener.metrics is None else [listener.metrics.port, *children.metrics_ports]
            yield Serving(router.address, ports, lambda: len(router.calls))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            gently = router.drain(config.drain_s, announce_s=ending.announce_s(config.announce_s))
            await ending.drain(gently, lambda: router.drain(0.0))
    finally:
        await listener.stop(0.0)
        await ending.drain(children.stop(config.drain_s), lambda: children.stop(0.0, grace_s=2.0))


def child_spec(model: str, given: Mapping[str, Any], worker_token: str = "") -> ChildSpec:
    """How a worker for `model` is started with the flags as they were given. Its metrics are behind the router's. With
    a `worker_token` it believes nobody else."""
    command = (sys.executable, "-m", "loraplex", "worker", *worker_arguments(model, given))
    if worker_token:
        from loraplex_runtime.auth import token_digest  # late: it imports gRPC

        command += ("--router-digest", token_digest(worker_token))
    router_port: int | None = given["metrics_port"]
    return ChildSpec(command, router_port and router_port + 1)


def worker_arguments(model: str, given: Mapping[str, Any]) -> list[str]:
    """The command line of a child: the flags as given, without those that are the router's."""
    arguments = [model, "--json", "--host", "127.0.0.1", "--announce", "0"]
    arguments += ["--metrics-host", given["metrics_host"] or given["host"]]
    for flag in FLAGS:
        value = given[flag.parameter]
        if flag.parameter in ROUTER_ONLY or value is None:
            continue
        if isinstance(value, bool):
            if value is not flag.default:
                arguments.append(flag.flag if value else f"--no-{flag.flag[2:]}")
            continue
        for one in value if isinstance(value, (list, tuple)) else [value]:
            arguments += [flag.flag, str(one.absolute() if isinstance(one, Path) else one)]
    return arguments


def _router_config(config: WorkerConfig, addresses: list[str], worker_token: str) -> Any:
    from loraplex_router.config import RouterConfig

    return RouterConfig(
        workers=tuple(addresses),
        worker_token=worker_token,
        host=config.host,
        port=config.port,
        metrics_port=config.metrics_port,
        metrics_host=config.metrics_host,
        auth_file=config.auth_file,
        tls_cert=config.tls_cert,
        tls_key=config.tls_key,
        drain_s=config.drain_s,
        announce_s=config.announce_s,
    )
