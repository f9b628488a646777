"""Connection options of the commands that talk to a server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from loraplex import AsyncClient, Client, InvalidArgument, Tls
from loraplex_runtime.flags import option

_PANEL = "Connection"
_ADDRESS_VARIABLE = "LORAPLEX_SERVER"
_option = partial(option, panel=_PANEL)

DEFAULT_SERVER = "localhost:50051"

ServerOption = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        envvar=_ADDRESS_VARIABLE,
        help="Address of a router or worker, as host:port.",
        rich_help_panel=_PANEL,
    ),
]
ServerArgument = Annotated[
    str, typer.Argument(metavar="ADDR", envvar=_ADDRESS_VARIABLE, help="Address of a router or worker.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Connection:
    """How a server is spoken to, whichever it is."""

    token: str | None = _option(
        None,
        "Token, where the server asks for one. Better in the environment than on the command line, where others on "
        "this machine can read it.",
        "--token",
        env="LORAPLEX_TOKEN",
    )
    timeout_s: float = _option(120.0, "Give up after this many seconds; 0 waits for ever.", "--timeout")
    tls: bool = _option(False, "Encrypt the connection.", "--tls")
    ca_cert: Path | None = _option(
        None, "File with the certificate that the server's is checked against. Implies --tls.", "--ca-cert"
    )

    def __post_init__(self) -> None:
        if not self.timeout_s >= 0:  # NaN too
            raise InvalidArgument("--timeout must be 0, for ever, or above", field="--timeout")

    def client(self, server: str) -> Client:
        """Raises InvalidArgument."""
        return Client(server, token=self.token or None, timeout_s=self.timeout_s or None, tls=self._certificates())

    def async_client(self, server: str) -> AsyncClient:
        """Raises InvalidArgument."""
        return AsyncClient(server, token=self.token or None, timeout_s=self.timeout_s or None, tls=self._certificates())

    def _certificates(self) -> bool | Tls:
        if self.ca_cert is None:
            return self.tls
        try:
            return Tls(root_certificates=self.ca_cert.read_bytes())
        except OSError as error:
            raise InvalidArgument(f"cannot read {self.ca_cert}: {error.strerror}", field="--ca-cert") from error
