"""Command lines of Loraplex in files of operators, checked against the real commands."""

from __future__ import annotations

from typing import Any

import typer.main

from loraplex.cli.main import KNOWN, build_app, find_commands


def command_of(name: str) -> Any:
    """The real subcommand, with its real flags: a click command, from whichever click typer brings."""
    group: Any = typer.main.get_command(build_app(find_commands(), name))
    return group.commands[name]


def check_arguments(arguments: list[str]) -> dict[str, Any]:
    """Checks that the command takes `loraplex ARGUMENTS`. Returns the values of its parameters."""
    name, *rest = arguments
    assert name in KNOWN, f"loraplex has no command {name}"
    command = command_of(name)
    if "--help" in rest:
        rest.remove("--help")
    # Parses like the command itself: unknown flags, missing values and wrong types raise.
    return command.make_context(name, rest, resilient_parsing="--help" in arguments).params
