"""Router processes that share one port: start, restart, end.

The kernel spreads connections over the processes that listen on a port (SO_REUSEPORT). Each of them is a whole router
that knows nothing of the others; quotas of tenants are divided among them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Final

from loraplex_contracts.errors import FailedPrecondition
from loraplex_router.config import RouterConfig
from loraplex_runtime.child_processes import Children, ChildSpec
from loraplex_runtime.flags import arguments_of
from loraplex_runtime.listener import bound_socket, check_free, join_address
from loraplex_runtime.reports import no_progress
from loraplex_runtime.shutdown import Ending

# A process says so often that it is alive: one that is frozen would keep its part of the port's connections.
ALIVE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class Processes:
    """Addresses and ports of the processes that were started."""

    address: str
    http_address: str | None
    metrics_ports: list[int]  # of each process
    num: int


async def run_processes(config: RouterConfig, num: int, on_ready: Callable[[Processes], None]) -> int:
    """Runs `num` processes of the router until SIGTERM, SIGINT or SIGHUP, then has them drain. One that dies is started
    again. Returns the exit status: 0 after a drain, 128 and the signal's number where one came before all were ready.
    Raises FailedPrecondition for ports that cannot be had, and the error of a process that does not start."""
    ending = Ending()
    ending.listen()
    with contextlib.ExitStack() as reserved:
        http_host, http_port, is_shared = config.http_host or config.host, config.http_port, config.server.reuse_port
        port = reserved.enter_context(reserved_port(config.host, config.port, "--port", is_shared=is_shared))
        if http_port is not None:
            http_port = reserved.enter_context(reserved_port(http_host, http_port, "--http-port", is_shared=is_shared))
        children = Children(spec_of(config, num, port, http_port), num, no_progress)
        try:
            if await children.start(ending.asked) is None:
                return ending.status
            watching = asyncio.gather(children.watch(), children.kill_silent())
            http_address = None if http_port is None else join_address(http_host, http_port)
            on_ready(Processes(join_address(config.host, port), http_address, children.metrics_ports, num))
            await ending.asked.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        finally:
            drain_s = config.announce_s + config.drain_s
            await ending.drain(children.stop(drain_s), lambda: children.stop(0.0, grace_s=2.0))
    return 0


def spec_of(config: RouterConfig, num: int, port: int, http_port: int | None) -> ChildSpec:
    server = replace(config.server, reuse_port=True)
    share = config.quota_share / num
    own = replace(config, port=0, http_port=http_port, metrics_port=None, server=server, quota_share=share)
    command = (sys.executable, "-m", "loraplex", "router", *arguments_of(own), "--json", "--alive-every", str(ALIVE_S))
    return ChildSpec(command, config.metrics_port, "router process", port, placement="")


@contextlib.contextmanager
def reserved_port(host: str, port: int, flag: str, *, is_shared: bool) -> Generator[int]:
    """The port, which other processes of this user may share as long as the context lasts; `is_shared`: they do so
    already. This process is bound to it and does not listen: it gets no connections. Raises FailedPrecondition."""
    if port and not is_shared:
        check_free(host, port, flag)
    try:
        holder = bound_socket(host, port, [socket.SO_REUSEPORT])
    except OSError as error:
        raise FailedPrecondition(
            f"cannot reserve {join_address(host, port)} for several processes: {error.strerror}", field=flag
        ) from error
    with holder:
        yield holder.getsockname()[1]
