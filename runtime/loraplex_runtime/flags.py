"""Command line flags from configuration dataclasses.

`option` makes a field a flag too. `with_flags` makes a command of a function that takes such dataclasses; a command
that passes flags on uses `with_raw_flags` and `configure`. Imports typer only where a command is made, because
configurations travel to processes without a command line.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Final

from loraplex_contracts.errors import InvalidArgument

# Panels of the help that several commands have.
NETWORK: Final = "Network and credentials"
HTTP: Final = "HTTP"
LOGS: Final = "Logs, metrics and traces"
STARTING: Final = "Start and end"

_UNITS: Final = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_MAX_BYTES: Final = (1 << 63) - 1  # of a signed integer in C, as libraries take sizes


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """One flag: how it looks on the command line, and where it belongs in the configuration."""

    flag: str
    help: str
    aliases: tuple[str, ...] = ()  # other names of the flag
    is_bytes: bool = False  # an int here, '512MiB' on the command line
    parse: Callable[[str], Any] | None = None  # from the command line's text to the value
    off: str = ""  # the flag of a switch's opposite; without it, a switch that is on has --no-FLAG
    metavar: str | None = None
    env: str | None = None  # variable that may give the value
    panel: str | None = None  # heading of the help
    complete: Callable[..., list[str]] | None = None  # values that a shell may suggest; gets typer's context and text
    # Filled by `flags_of`.
    path: tuple[str, ...] = ()  # field names from the root, ("engine", "kv", "block_size")
    type: Any = None
    default: Any = None

    @property
    def parameter(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    @property
    def is_path(self) -> bool:
        """True if the command line's text is a path as it is."""
        return self.parse is None and self.type in (Path, Path | None)


def option(default: Any, text: str, flag: str, *aliases: str, **how: Any) -> Any:
    """A field that is a command line flag too. `how` has other fields of `Flag`."""
    return dataclasses.field(default=default, metadata={"flag": Flag(flag, text, aliases, **how)})


def parse_bytes(text: str, flag: str = "") -> int:
    """'512MiB', '8g', '1048576' -> bytes. Raises InvalidArgument, which names the flag where it is given."""
    found = re.fullmatch(r"\s*([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*([kmgt]?)i?b?\s*", text.lower())
    num_bytes = int(Fraction(found[1]) * _UNITS[found[2]]) if found else -1
    if not 0 <= num_bytes <= _MAX_BYTES:
        sentence = f"{flag} {text[:40]!r} is not a size; write it as 512MiB, 8GiB or a number of bytes"
        raise InvalidArgument(sentence.lstrip(), field=flag or None)
    return num_bytes


def _path(text: str, flag: str) -> Path:
    """Raises InvalidArgument for an empty text, such as a variable of a shell that is not set: as a path that would be
    the working directory."""
    check(bool(text), flag, "must not be empty; leave it out or give a path")
    return Path(text)


def check(is_ok: bool, flag: str, rule: str) -> None:
    """Raises InvalidArgument, which names the flag, where the rule does not hold."""
    if not is_ok:
        raise InvalidArgument(f"{flag} {rule}", field=flag)


def flags_of(cls: type, prefix: tuple[str, ...] = ()) -> Iterator[Flag]:
    """Every field with a flag, depth first, in the order of the source; a class's own go before those of its bases."""
    hints = typing.get_type_hints(cls)
    own = [inspect.get_annotations(base) for base in cls.__mro__]
    place = {one: next(idx for idx, names in enumerate(own) if one.name in names) for one in dataclasses.fields(cls)}
    for one in sorted(place, key=place.__getitem__):
        kind = hints[one.name]
        if "flag" in one.metadata:
            yield dataclasses.replace(one.metadata["flag"], path=(*prefix, one.name), type=kind, default=one.default)
        elif dataclasses.is_dataclass(kind):
            yield from flags_of(typing.cast(type, kind), (*prefix, one.name))


def parameters_of(flags: list[Flag]) -> list[inspect.Parameter]:
    """The flags as keyword parameters that typer understands."""
    import typer

    return [
        inspect.Parameter(
            flag.parameter,
            inspect.Parameter.KEYWORD_ONLY,
            default=_shown(flag),
            annotation=Annotated[
                _command_line_type(flag),
                typer.Option(
                    *_names(flag),
                    help=flag.help,
                    metavar=flag.metavar or ("PATH" if flag.is_path else None),
                    parser=functools.partial(_path, flag=flag.flag) if flag.is_path else None,
                    envvar=flag.env,
                    rich_help_panel=flag.panel,
                    autocompletion=flag.complete,
                ),
            ],
        )
        for flag in flags
    ]


def configure(cls: type, flags: list[Flag], params: Mapping[str, Any], fixed: Mapping[tuple[str, ...], Any]) -> Any:
    """An instance of `cls` from click's parameters by name, plus the values of `fixed` by path."""
    values: dict[tuple[str, ...], Any] = dict(fixed)
    for flag in flags:
        value = params[flag.parameter]
        parse = functools.partial(parse_bytes, flag=flag.flag) if flag.is_bytes else flag.parse
        if _is_repeated(flag):
            value = tuple(typing.cast(list[str], value or ()))
        elif parse is not None and isinstance(value, str):
            value = parse(value)
        values[flag.path] = value
    return _build(cls, values, ())


def config_of(cls: type, /, **params: Any) -> Any:
    """An instance of `cls` from the parameters of all its flags; others are ignored."""
    return configure(cls, list(flags_of(cls)), params, {})


def arguments_of(config: Any) -> list[str]:
    """The command line that `configure` makes `config` of, as far as its fields are flags and not their defaults."""
    arguments: list[str] = []
    for flag in flags_of(type(config)):
        value = functools.reduce(getattr, flag.path, config)
        if value != flag.default:
            arguments += flag_arguments(flag, value)
    return arguments


def flag_arguments(flag: Flag, value: Any) -> list[str]:
    """The flag with its value on a command line: a path becomes absolute, and a repeated flag is there once for each of
    its values."""
    if isinstance(value, bool):
        return [flag.flag if value else flag.off or f"--no-{flag.flag[2:]}"]
    arguments: list[str] = []
    for one in value if _is_repeated(flag) else [value]:
        arguments += [flag.flag, str(one.absolute() if isinstance(one, Path) else one)]
    return arguments


def with_raw_flags(flags: list[Flag]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for typer: a parameter for each flag takes the place of the function's `**params`. Its values are not
    parsed yet."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        return with_signature(body, [*_own_parameters(body), *parameters_of(flags)])

    return decorate


def with_flags(body: Callable[..., None]) -> Callable[..., None]:
    """A decorator for typer: in the place of each parameter of `body` that is such a dataclass, its fields' flags. The
    command raises what the dataclasses raise for values that they do not take."""
    groups: dict[str, tuple[type, list[Flag]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in _own_parameters(body):
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind):
            flags = list(flags_of(typing.cast(type, kind)))
            groups[parameter.name] = typing.cast(type, kind), flags
            parameters += parameters_of(flags)
        else:
            parameters.append(parameter)

    def run(**params: Any) -> None:
        for name, (cls, flags) in groups.items():
            params[name] = configure(cls, flags, {flag.parameter: params.pop(flag.parameter) for flag in flags}, {})
        body(**params)

    run.__name__, run.__doc__ = body.__name__, body.__doc__
    return with_signature(run, parameters)


def _own_parameters(body: Callable[..., None]) -> list[inspect.Parameter]:
    """The parameters that have a name, as keyword parameters with resolved annotations."""
    hints = typing.get_type_hints(body, include_extras=True)
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[one.name])
        for one in inspect.signature(body).parameters.values()
        if one.kind is not inspect.Parameter.VAR_KEYWORD
    ]


def with_signature(body: Callable[..., None], parameters: list[inspect.Parameter]) -> Callable[..., None]:
    """`body` with the parameters that typer reads."""
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {one.name: one.annotation for one in parameters}
    return body


def _names(flag: Flag) -> list[str]:
    names = [flag.flag, *flag.aliases]
    if flag.off:
        return [f"{names[0]}/{flag.off}", *names[1:]]
    return [f"{name}/--no-{name[2:]}" for name in names] if flag.default is True else names


def _command_line_type(flag: Flag) -> Any:
    if _is_repeated(flag):
        return list[str]
    if not flag.is_bytes and flag.parse is None:
        return flag.type
    return str | None if flag.default is None else str


def _is_repeated(flag: Flag) -> bool:
    """True if the flag may be given several times."""
    return flag.parse is None and typing.get_origin(flag.type) is tuple


def _shown(flag: Flag) -> Any:
    """The default as the help shows it."""
    if flag.default == ():
        return None
    if flag.parse is not None and flag.default is not None:
        return str(flag.default)
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
        if path in values:
            arguments[one.name] = values[path]
        elif dataclasses.is_dataclass(hints[one.name]):
            arguments[one.name] = _build(typing.cast(type, hints[one.name]), values, path)
    return cls(**arguments)
