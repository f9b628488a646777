"""Command `loraplex adapters`: list, load, unload, verify and convert adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from loraplex import Adapter, InvalidArgument, LoraplexError
from loraplex.cli import terminal
from loraplex.cli.options import DEFAULT_SERVER, Connection, HubTokenOption, JsonOption, NameArgument, ServerOption
from loraplex.types import AdapterState
from loraplex_contracts.adapters import HUB_SOURCE
from loraplex_proto.enums import ADAPTER_STATES
from loraplex_runtime.flags import parse_bytes, with_flags
from loraplex_runtime.near_words import did_you_mean

adapters = typer.Typer(
    help="List, load, unload, verify and convert adapters.\n\n"
    "A server loads an adapter by itself at the first request that names it; `load` does it ahead of time.",
    no_args_is_help=True,
)


def check_state(state: str | None) -> None:
    """Raises InvalidArgument for a state that there is not, with the one that it may stand for."""
    if state is None or state in ADAPTER_STATES:
        return
    hint = did_you_mean(state, ADAPTER_STATES) or f"there are {', '.join(ADAPTER_STATES)}"
    raise InvalidArgument(f"--state: there is no state {state!a}; {hint}", field="--state")


@adapters.command("list")
@with_flags
def list_(
    *,
    server: ServerOption = DEFAULT_SERVER,
    show_all: Annotated[
        bool, typer.Option("--all/--loaded", help="Also those that were never loaded, or only those that are.")
    ] = True,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    state: Annotated[
        str | None, typer.Option(help=f"Only those in this state: {', '.join(ADAPTER_STATES)}.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """List the adapters that a server has or could load, with their states and last errors."""
    check_state(state)
    with connection.client(server) as client:
        rows = client.adapters.list(include_unloaded=show_all, prefix=prefix, state=cast("AdapterState | None", state))
        _show(rows, as_json=as_json)


@adapters.command()
@with_flags
def load(
    name: NameArgument,
    *,
    server: ServerOption = DEFAULT_SERVER,
    pin: Annotated[bool, typer.Option("--pin", help="Keep it in memory until it is unloaded.")] = False,
    source: Annotated[
        str,
        typer.Option(
            metavar="SOURCE",
            help="Where its files are, if not at NAME: a folder on the server, hub:ORG/NAME or s3:BUCKET/PREFIX.",
        ),
    ] = "",
    revision: Annotated[str, typer.Option(help="Of a source on the Hub: a branch, a tag or a commit.")] = "",
    hub_token: HubTokenOption = "",
    expected_digest: Annotated[str, typer.Option("--digest", help="Load only contents with this digest.")] = "",
    if_absent: Annotated[
        bool, typer.Option("--if-absent", help="Keep what the name is loaded with, whatever its files are now.")
    ] = False,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """Load an adapter ahead of its first request, or again after its files have changed."""
    with connection.client(server) as client:
        rows = client.adapters.load(
            name,
            pin=pin,
            source=source,
            revision=revision,
            hub_token=hub_token if source.startswith(HUB_SOURCE) else "",  # it may be in the environment for others
            expected_digest=expected_digest,
            if_absent=if_absent,
        )
        _show(rows, as_json=as_json)


@adapters.command()
@with_flags
def unload(
    name: NameArgument,
    *,
    server: ServerOption = DEFAULT_SERVER,
    if_unused: Annotated[bool, typer.Option("--if-unused", help="Refuse while requests use it.")] = False,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """Unload an adapter. Requests that use it end as they began."""
    with connection.client(server) as client:
        _show(client.adapters.unload(name, if_unused=if_unused), as_json=as_json)


@adapters.command()
@with_flags
def show(
    name: NameArgument,
    *,
    server: ServerOption = DEFAULT_SERVER,
    as_json: JsonOption = False,
    connection: Connection,
) -> None:
    """Show all that a server knows of one adapter, on each worker."""
    with connection.client(server) as client:
        rows = client.adapters.get(name)
    if as_json:
        terminal.write_json([asdict(row) for row in rows])
        return
    for row in rows:
        info = {key: value for key, value in asdict(row).items() if value not in ("", (), 0)}
        terminal.write_table(("WHAT", "VALUE"), [(key.replace("_", " "), _words(value)) for key, value in info.items()])


@adapters.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the adapter's files.")],
    base: Annotated[str, typer.Option("--base", "-b", help="The base model: a directory or a Hub id.")],
    dtype: Annotated[str, typer.Option(help="As the server's --dtype; the digest depends on it.")] = "auto",
    max_rank: Annotated[
        int | None, typer.Option("--max-lora-rank", help="As the server's. Default: the server's default.")
    ] = None,
    against_peft: Annotated[
        bool,
        typer.Option("--against-peft", help="Compare logits and texts with PEFT's; loads the base model twice."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check an adapter's files against a base model, without a server.

    Does what a server does when it loads the adapter, up to the last byte: what passes here will load there. Loads the
    base model into memory, and needs loraplex[server]. Exits with 1 where the adapter cannot be served, or differs from
    PEFT's, and with 2 for a wrong command line.
    """
    try:
        report = _verify(folder, base, dtype, max_rank, against_peft=against_peft)
    except LoraplexError as error:
        if not as_json:
            raise
        terminal.write_json({"valid": False, "reason": error.reason, "message": error.message})
        raise typer.Exit(error.exit_code) from error
    if as_json:
        terminal.write_json(report)
    else:
        terminal.write_table(("WHAT", "VALUE"), [(key, _words(value)) for key, value in report.items()])
    if against_peft and not report["peft"]["equal"]:
        raise typer.Exit(1)


def _verify(folder: Path, base: str, dtype: str, max_rank: int | None, *, against_peft: bool) -> dict[str, Any]:
    """The result of the check. Raises the error that a server would raise."""
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder", field="DIR")
    from loraplex_server.cli.verify import verify_adapter  # late: it imports torch

    return verify_adapter(folder, base, dtype, max_rank, terminal.progress, against_peft=against_peft)


@adapters.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder with the adapter's files.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to make; it must not exist yet.")],
    max_size: Annotated[str, typer.Option("--max-bytes", help="Largest size of a file, such as 8GiB.")] = "8GiB",
    as_json: JsonOption = False,
) -> None:
    """Make safetensors of pickled weights: of adapter_model.bin or medusa_lm_head.pt.

    A process of its own reads the pickle, with bounds of memory and time. It runs nothing of it and can open nothing.
    Needs loraplex[server].
    """
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a folder", field="DIR")
    max_bytes = parse_bytes(max_size, "--max-bytes")
    from loraplex_server.cli.convert import convert_adapter  # late: it imports torch

    report = convert_adapter(folder, out, max_bytes, progress=terminal.progress)
    if as_json:
        terminal.write_json(report)
        return
    for one in report["converted"]:
        terminal.remark(f"{one['from']} -> {one['to']}, {one['tensors']} tensors")
    terminal.remark(f"check it with: loraplex adapters verify {report['out']} --base MODEL")


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return "; ".join(str(one) for one in cast("list[object]", value)) or "none"
    if isinstance(value, dict):
        pairs = cast("dict[str, object]", value).items()
        return "; ".join(f"{key.replace('_', ' ')}: {_words(one)}" for key, one in pairs)
    return f"{value:.3g}" if isinstance(value, float) else str(value)


_COLUMNS = ("NAME", "KIND", "STATE", "TIER", "RANK", "SIZE", "RUNNING", "PINNED", "WORKER", "DIGEST", "ERROR")


def _show(rows: Sequence[Adapter], *, as_json: bool) -> None:
    if as_json:
        terminal.write_json([asdict(row) for row in rows])
        return
    terminal.write_table(_COLUMNS, [_cells(row) for row in rows])
    if not rows:
        terminal.remark("no adapters")


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def shown_name(adapter_id: str) -> str:
    """A version with as much of its digest as requests need."""
    name, at, digest = adapter_id.partition("@")
    return f"{name}{at}{digest[:12]}"


def _cells(row: Adapter) -> tuple[str, ...]:
    return (
        shown_name(row.adapter_id),
        row.kind,
        row.state,
        row.tier,
        str(row.rank),
        _size(row.num_bytes),
        str(row.running_requests),
        "yes" if row.pinned else "no",
        row.worker,
        row.digest[:12],
        f"{row.last_error_reason or row.error_reason}: {row.last_error or row.error}"
        if row.last_error or row.error
        else "",
    )
