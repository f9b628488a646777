"""The options that say which server a command talks to, written down once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loraplex import AsyncClient, Client, InvalidArgument, Tls

_PANEL = "Connection"

ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        envvar="LORAPLEX_SERVER",
        help="Address of a router or worker, as host:port.",
        rich_help_panel=_PANEL,
    ),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        envvar="LORAPLEX_TOKEN",
        help="Token, where the server asks for one. Better in the environment than on the command line, where others "
        "on this machine can read it.",
        rich_help_panel=_PANEL,
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", help="Give up after this many seconds; 0 waits for ever.", rich_help_panel=_PANEL)
]
TlsOption = Annotated[bool, typer.Option("--tls", help="Encrypt the connection.", rich_help_panel=_PANEL)]
CaCertOption = Annotated[
    Path | None,
    typer.Option(
        "--ca-cert",
        help="File with the certificate that the server's is checked against. Implies --tls.",
        rich_help_panel=_PANEL,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_SERVER = "localhost:50051"
DEFAULT_TIMEOUT_S = 120.0


def connect(server: str, token: str | None, timeout_s: float, tls: bool, ca_cert: Path | None) -> Client:
    """Raises InvalidArgument."""
    return Client(server, token=token or None, timeout_s=timeout_s or None, tls=_certificates(tls, ca_cert))


def connect_async(server: str, token: str | None, timeout_s: float, tls: bool, ca_cert: Path | None) -> AsyncClient:
    """Raises InvalidArgument."""
    return AsyncClient(server, token=token or None, timeout_s=timeout_s or None, tls=_certificates(tls, ca_cert))


def _certificates(tls: bool, ca_cert: Path | None) -> bool | Tls:
    if ca_cert is None:
        return tls
    try:
        return Tls(root_certificates=ca_cert.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"cannot read {ca_cert}: {error.strerror}", field="--ca-cert") from error
