"""Help of a command: panels of related options with their full names.

Tables of typer's own cut long names off in a terminal of 80 columns.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

import loraplex_proto
from loraplex_runtime.flags import LOGS, NETWORK, STARTING

OPTIONS: Final = "Options"
_LAST: Final = (NETWORK, LOGS, STARTING)
# Below this width an option's text is under its name.
MIN_COLUMNS: Final = 72


class Command(TyperCommand):
    """A command with this help."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The usage line's parts, which errors of wrong command lines show too."""
        arguments = [one for one in self.get_params(ctx) if one.param_type_name == "argument"]
        return ["[OPTIONS]", *(_name(one) if one.required else f"[{_name(one)}]" for one in arguments)]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console  # late: most runs print no help
        from rich.padding import Padding
        from rich.panel import Panel
        from rich.text import Text

        console = Console(highlight=False)
        usage = " ".join([ctx.command_path, *self.collect_usage_pieces(ctx)])
        console.print(Text.assemble("\n ", ("Usage: ", "yellow"), (usage, "bold"), "\n"))
        for paragraph in paragraphs(self.help or ""):
            console.print(Padding(Text(paragraph), (0, 1, 1, 1)))
        for title, parameters in panels(self.get_params(ctx)).items():
            rows = [row(one, ctx) for one in parameters]
            console.print(Panel(_table(rows, console.width), title=title, title_align="left", border_style="dim"))


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"loraplex {loraplex_proto.__version__}")
        raise typer.Exit


def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """The options of `loraplex` without a command."""


def paragraphs(text: str) -> list[str]:
    """Paragraphs on a line each; examples keep their own lines."""
    apart = re.sub(r"\n\s*Example:", "\n\nExample:", inspect.cleandoc(text)).split("\n\n")
    return [" ".join(one.split()) for one in apart if one.strip()]


def panels(parameters: Iterable[Any]) -> dict[str, list[Any]]:
    """Arguments, options that matter first, the other panels in the order of their first options, and at the end those
    that all servers have."""
    found: dict[str, list[Any]] = {"Arguments": [], OPTIONS: []}
    for one in parameters:
        if not getattr(one, "hidden", False):
            usual = "Arguments" if one.param_type_name == "argument" else OPTIONS
            found.setdefault(one.rich_help_panel or usual, []).append(one)
    order = sorted(found, key=lambda title: _LAST.index(title) if title in _LAST else -1)
    return {title: found[title] for title in order if found[title]}


def row(parameter: Any, ctx: typer.Context) -> tuple[str, str]:
    """Names with the kind of value, and text."""
    text = getattr(parameter, "help", None) or ""
    if parameter.param_type_name == "argument":
        return _name(parameter), text + _default(parameter, ctx)
    long = [name for name in parameter.opts if name.startswith("--")]
    short = [name for name in parameter.opts if name not in long]
    off = parameter.secondary_opts[:1]
    first = long[0] if long else short.pop(0)
    if off:
        first = f"--[no-]{first[2:]}" if off[0] == f"--no-{first[2:]}" else f"{first} / {off[0]}"
    kind = "" if parameter.is_flag else f" {parameter.metavar or _kind(parameter)}"
    also = f" Also {', '.join(long[1:])}." if long[1:] else ""
    variable = f" [env var: {parameter.envvar}]" if parameter.envvar else ""
    return ", ".join([*short, first]) + kind, text + also + variable + _default(parameter, ctx)


def _name(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _kind(parameter: Any) -> str:
    name = str(getattr(getattr(parameter, "type_descriptor", None), "annotation", None) or parameter.type)
    kinds = {"int": "N", "float": "X", "ath": "PATH"}
    return next((kind for part, kind in kinds.items() if part in name), "TEXT")


def _default(parameter: Any, ctx: typer.Context) -> str:
    default = parameter.get_default(ctx)
    if not parameter.show_default or default in (None, False, "", (), []):
        return ""
    return f" [default: {'on' if default is True else f'{default:g}' if isinstance(default, float) else default}]"


def _table(rows: Iterable[tuple[str, str]], width: int) -> Any:
    from rich.table import Table
    from rich.text import Text

    if width < MIN_COLUMNS:
        table = Table.grid(padding=(0, 1))
        for names, text in rows:
            table.add_row(Text(names, style="cyan"))
            table.add_row(Text(f"  {text}"))
        return table
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(ratio=1)
    for names, text in rows:
        table.add_row(Text(names), Text(text))
    return table
