"""Command `loraplex config`: settings of server commands, and where each value comes from."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from loraplex import InvalidArgument
from loraplex.cli import terminal
from loraplex.cli.help import Command
from loraplex.cli.options import JsonOption
from loraplex_runtime.config import (
    COMMANDS,
    check_settings,
    near_name,
    setting_of,
    settings_of,
    source_of,
    value_shown,
)

config = typer.Typer(help="Show the settings of server commands.", no_args_is_help=True)


@config.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def show(
    ctx: typer.Context,
    command: Annotated[str, typer.Argument(help=f"One of {', '.join(COMMANDS)}.")],
    as_json: JsonOption = False,
) -> None:
    """Show which value each option of a server command would have, and where it comes from.

    Takes the command's own options behind its name. The command line goes before LORAPLEX_* variables, these before
    the file of --config (or LORAPLEX_CONFIG), the file before the default. Starts nothing.

    Example: loraplex config show serve --config loraplex.toml --port 50052
    """
    if command not in COMMANDS:
        raise InvalidArgument(f"{command!a} has no settings; {near_name(command, COMMANDS)}", field="command")
    rows = settings_in_force(command, ctx.args)
    if as_json:
        terminal.write_json(rows)
    else:
        terminal.write_table(("SETTING", "VALUE", "FROM"), [_cells(row) for row in rows])


def settings_in_force(command: str, arguments: list[str]) -> list[dict[str, Any]]:
    """Name, value and source of each setting. Raises what the command itself would raise for its options."""
    from loraplex.cli.main import KNOWN  # late: it finds this module

    module, _, name = KNOWN[command].target.partition(":")
    app = typer.Typer(add_completion=False)
    body = getattr(import_module(module), name)
    app.command(command, cls=Command)(body)
    found: Any = typer.main.get_command(app)
    for one in found.params:
        one.required = False  # MODEL
    with found.make_context(f"loraplex {command}", list(arguments)) as ctx:
        check_settings(ctx, body)
        rows: list[dict[str, Any]] = []
        for one in settings_of(ctx):
            source, where = source_of(ctx, one)
            value = value_shown(ctx.params.get(one.name))
            rows.append({"setting": setting_of(one), "value": value, "from": source, "where": where})
        return rows


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    match row["value"]:
        case None:
            value = "-"
        case bool() as is_on:
            value = "true" if is_on else "false"
        case list() as values:
            value = ", ".join(map(str, values)) or "-"
        case other:
            value = str(other)
    return row["setting"], value, row["where"] or row["from"]
