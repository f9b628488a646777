"""Command line flags out of configuration dataclasses, so that a setting is written down once.

`flags_of` lists the flags of a class and of the dataclasses in its fields; `configure` builds the instance from what
the command line gave. Pure; typer sees an ordinary signature.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import typer

from loraplex_proto.options import parse_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One flag: where it belongs in the configuration, and how it looks on the command line."""

    path: tuple[str, ...]  # field names from the root, ("engine", "kv", "block_size")
    flag: str
    help: str
    type: Any
    default: Any
    is_bytes: bool
    aliases: tuple[str, ...] = ()  # other names of the flag

    @property
    def parameter(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


def flags_of(cls: type, prefix: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every field with a flag, depth first, in the order of the source."""
    hints = typing.get_type_hints(cls)
    for one in dataclasses.fields(cls):
        kind = hints[one.name]
        if dataclasses.is_dataclass(kind):
            yield from flags_of(typing.cast(type, kind), (*prefix, one.name))
        elif "flag" in one.metadata:
            yield Flag(
                path=(*prefix, one.name),
                flag=one.metadata["flag"],
                help=one.metadata["help"],
                type=kind,
                default=one.default,
                is_bytes=one.metadata["is_bytes"],
                aliases=one.metadata["aliases"],
            )


def parameters_of(flags: list[Flag]) -> list[inspect.Parameter]:
    """The flags as keyword parameters that typer understands."""
    return [
        inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=_shown(flag),
            annotation=Annotated[_command_line_type(flag), typer.Option(*_names(flag), help=flag.help)],
        )
        for flag in flags
    ]


def configure(cls: type, flags: list[Flag], given: Mapping[str, Any], fixed: Mapping[tuple[str, ...], Any]) -> Any:
    """An instance of `cls` from what the command line gave, plus the values of `fixed` by path."""
    values: dict[tuple[str, ...], Any] = dict(fixed)
    for flag in flags:
        value = given[flag.parameter]
        if _is_repeated(flag):
            value = tuple(typing.cast(list[str], value or ()))
        values[flag.path] = parse_bytes(value) if flag.is_bytes and isinstance(value, str) else value
    return _build(cls, values, ())


def command(
    flags: list[Flag], own: list[inspect.Parameter], body: Callable[..., None], doc: str
) -> Callable[..., None]:
    """A function for typer with the parameters `own` and then one for each flag; all reach `body` by keyword."""

    def run(**given: Any) -> None:
        body(**given)

    parameters = [*own, *parameters_of(flags)]
    run.__doc__ = doc
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _names(flag: Flag) -> list[str]:
    names = [flag.flag, *flag.aliases]
    return [f"{name}/--no-{name[2:]}" for name in names] if flag.type is bool else names


def _command_line_type(flag: Flag) -> Any:
    if _is_repeated(flag):
        return list[str]
    if not flag.is_bytes:
        return flag.type
    return str | None if isinstance(flag.type, types.UnionType) else str


def _is_repeated(flag: Flag) -> bool:
    """Whether the flag may be given several times."""
    return typing.get_origin(flag.type) is tuple


def _shown(flag: Flag) -> Any:
    """The default as the help shows it."""
    if flag.default == ():
        return None
    if not flag.is_bytes or flag.default is None:
        return flag.default
    size, units = flag.default, ["", "KiB", "MiB", "GiB", "TiB"]
    while size % 1024 == 0 and len(units) > 1:
        size, units = size // 1024, units[1:]
    return f"{size}{units[0]}"


def _build(cls: type, values: Mapping[tuple[str, ...], Any], prefix: tuple[str, ...]) -> Any:
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for one in dataclasses.fields(cls):
        path = (*prefix, one.name)
        if dataclasses.is_dataclass(hints[one.name]):
            arguments[one.name] = _build(typing.cast(type, hints[one.name]), values, path)
        elif path in values:
            arguments[one.name] = values[path]
    return cls(**arguments)
