"""`loraplex adapters`: what a server has loaded, and whether a directory would load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from loraplex import Adapter
from loraplex.cli import terminal
from loraplex.cli.connection import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    CaCertOption,
    JsonOption,
    ServerOption,
    TimeoutOption,
    TlsOption,
    TokenOption,
    connect,
)

adapters = typer.Typer(
    help="List, load, unload and verify adapters.\n\n"
    "A server loads an adapter by itself at the first request that names it; `load` does it ahead of time.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The adapter's name, as requests say it.")]


@adapters.command("list")
def list_(
    server: ServerOption = DEFAULT_SERVER,
    show_all: Annotated[bool, typer.Option("--all", help="Also those that were never loaded.")] = False,
    as_json: JsonOption = False,
    token: TokenOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    tls: TlsOption = False,
    ca_cert: CaCertOption = None,
) -> None:
    """List the adapters that a server has loaded."""
    with connect(server, token, timeout_s, tls, ca_cert) as client:
        _show(client.adapters.list(include_unloaded=show_all), as_json=as_json)


@adapters.command()
def load(
    name: NameArgument,
    server: ServerOption = DEFAULT_SERVER,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in memory until it is unloaded.")] = False,
    as_json: JsonOption = False,
    token: TokenOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    tls: TlsOption = False,
    ca_cert: CaCertOption = None,
) -> None:
    """Load an adapter ahead of its first request, or again after its files have changed."""
    with connect(server, token, timeout_s, tls, ca_cert) as client:
        _show(client.adapters.load(name, pin=pin), as_json=as_json)


@adapters.command()
def unload(
    name: NameArgument,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    token: TokenOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    tls: TlsOption = False,
    ca_cert: CaCertOption = None,
) -> None:
    """Unload an adapter. Requests that use it end as they began."""
    with connect(server, token, timeout_s, tls, ca_cert) as client:
        _show(client.adapters.unload(name), as_json=as_json)


_COLUMNS = ("NAME", "KIND", "STATE", "TIER", "RANK", "SIZE", "RUNNING", "PINNED", "WORKER", "DIGEST", "ERROR")


def _show(rows: Sequence[Adapter], *, as_json: bool) -> None:
    if as_json:
        terminal.write_json([asdict(row) for row in rows])
        return
    terminal.write_table(_COLUMNS, [_cells(row) for row in rows])
    if not rows:
        terminal.remark("no adapters")


def _cells(row: Adapter) -> tuple[str, ...]:
    return (
        row.adapter_id,
        row.kind,
        row.state,
        row.tier,
        str(row.rank),
        f"{row.num_bytes / 2**20:.1f} MiB",
        str(row.running_requests),
        "yes" if row.pinned else "no",
        row.worker,
        row.digest[:12],
        f"{row.error_reason}: {row.error}" if row.error else "",
    )
