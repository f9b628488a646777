"""First steps with a server that is ready: its adapters, and commands to try."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from loraplex_contracts.errors import LoraplexError
from loraplex_proto.services import DEFAULT_PORT
from loraplex_server.config import WorkerConfig

if TYPE_CHECKING:
    from loraplex_adapters.io.source_files import AdapterSource

MAX_NAMES: Final = 5  # of adapters, on the line of a server that is ready
MAX_TRIED: Final = 16  # folders that are looked into for one that the line may name


def first_steps(config: WorkerConfig, address: str, http_address: str | None) -> list[str]:
    """Lines for a person who has just started the server: adapters, and commands to try."""
    adapters = config.engine.adapters
    names: Sequence[str] = ()
    to_try: str | None = None
    if adapters.root is not None:
        from loraplex_adapters.sources.directory import DirectorySource  # late: printing help needs no files

        source = DirectorySource(adapters.root)
        with contextlib.suppress(LoraplexError, OSError):
            names = source.list()
        to_try = next((name for name in names[:MAX_TRIED] if _is_readable(source, name)), None)
    hints: list[str] = []
    if adapters.root is not None:
        shown = ", ".join(names[:MAX_NAMES]) + (", …" if len(names) > MAX_NAMES else "")
        more = "; more may be added at any time"
        hints.append(f"  adapters in {adapters.root}: " + (f"{len(names)} ({shown})" if names else "none yet") + more)
    address = _from_here(address)
    command = "" if address == f"127.0.0.1:{DEFAULT_PORT}" else f" --server {address}"
    command += " --tls" if config.tls_cert is not None else ""
    command += " --client-cert CERT --client-key KEY" if config.tls_client_ca is not None else ""
    command += " --token TOKEN" if config.auth_file is not None else ""
    command += f" --adapter {to_try}" if to_try else ""
    hints.append(f'  try it: loraplex generate "Hello"{command}')
    if http_address is not None:
        hints.append(
            f"  or open http{'s' if config.tls_cert is not None else ''}://{_from_here(http_address)}/ in a browser"
        )
    return hints


def _from_here(address: str) -> str:
    """The host:port by which this machine reaches a server that listens on `address`: nobody connects to 0.0.0.0."""
    from loraplex_runtime.listener import ip_address  # late: it imports gRPC

    host, _, port = address.rpartition(":")
    ip = ip_address(host)
    return f"127.0.0.1:{port}" if ip is not None and ip.is_unspecified else address


def _is_readable(source: AdapterSource, name: str) -> bool:
    from loraplex_adapters.formats.files import check_files

    try:
        with source.open(name) as files:
            check_files(files)
    except LoraplexError:
        return False
    return True
