"""Settings of server commands: a TOML file, environment variables, sources of values.

The command line goes before the environment, the environment before the file, the file before the default. typer
(click) does that by its `default_map` and `envvar`; this module reads the file and refuses what no option takes.
"""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_runtime.flags import with_signature
from loraplex_runtime.near_words import did_you_mean

# Commands with settings: sections of the file.
COMMANDS: Final = ("serve", "worker", "router", "http")
FILE_VARIABLE: Final = "LORAPLEX_CONFIG"
# Kubernetes sets these in its pods for each Service, by the Service's name: `loraplex-router` has LORAPLEX_ROUTER_PORT.
_OF_KUBERNETES: Final = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_ADDRESS_OF_KUBERNETES: Final = re.compile(r"(tcp|udp|sctp)://")
_PASSWORD: Final = re.compile(r"//[^/@\s]+@")


def prefix_of(command: str) -> str:
    """Prefix of the command's environment variables."""
    return f"LORAPLEX_{command.upper()}"


def with_settings(
    command: str, check: Callable[..., object], needs: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of typer commands: adds the option --config, and takes values of the other options from its file and
    from variables. Raises InvalidArgument for keys and variables that no option takes, and for values that it does not.

    `check` takes the values of all options and raises what the command raises for them; `needs` are options without
    which the command does not start. Both are for `check_settings`, which gets the command made here."""

    def read(ctx: typer.Context, value: Path | None) -> Path | None:
        if not ctx.resilient_parsing:
            _read_settings(ctx, command, value)
        return value

    parameter = inspect.Parameter(
        "config_file",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            Path | None,
            typer.Option(
                "--config",
                metavar="FILE",
                envvar=FILE_VARIABLE,
                help=f"TOML file with options, under [{command}]. A variable goes before it: "
                f"{prefix_of(command)}_LOG_LEVEL for --log-level. `loraplex config show {command}` shows what is in "
                "force.",
                callback=read,
                is_eager=True,
            ),
        ],
    )

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        own = [one for one in inspect.signature(body, eval_str=True).parameters.values() if one.name != context.name]
        takes_context = context.name in inspect.signature(body).parameters

        def run(ctx: typer.Context, **params: Any) -> None:
            del params[parameter.name]  # it was read
            try:
                body(**params, **({context.name: ctx} if takes_context else {}))
            except InvalidArgument as error:
                raise explained(ctx, error) from error

        run.__name__, run.__doc__ = body.__name__, body.__doc__
        run.settings_check = check, needs  # type: ignore[attr-defined]
        return with_signature(run, [context, *own, parameter])

    return decorate


def check_settings(ctx: typer.Context, command: Any) -> None:
    """Raises InvalidArgument for values in the context that a command of `with_settings` refuses. Options that it needs
    may be missing."""
    check, needs = command.settings_check
    try:
        check(**ctx.params)
    except InvalidArgument as error:
        if error.field not in needs or any(ctx.params[one.name] for one in settings_of(ctx) if error.field in one.opts):
            raise explained(ctx, error) from error


def setting_of(parameter: Any) -> str:
    """The name in the file: that of the long option, or of the argument."""
    names = [name for name in parameter.opts if name.startswith("--")] or [parameter.name]
    return names[0].lstrip("-").replace("_", "-").lower()


def settings_of(ctx: typer.Context) -> list[Any]:
    """The parameters that file and environment may set."""
    return [one for one in ctx.command.params if not (getattr(one, "hidden", False) or one.is_eager)]


def source_of(ctx: typer.Context, parameter: Any) -> tuple[str, str]:
    """Kind of source and, for a variable or the file, its name: ("environment", "LORAPLEX_SERVE_PORT")."""
    source = ctx.get_parameter_source(parameter.name)
    match "" if source is None else source.name:
        case "COMMANDLINE":
            return "command line", ""
        case "ENVIRONMENT":
            return "environment", parameter.envvar
        case "DEFAULT_MAP":
            return "file", str(ctx.obj or "")
        case _:
            return "default", ""


def value_shown(value: Any) -> Any:
    """The value in JSON's types, without passwords in addresses."""
    if isinstance(value, (list, tuple)):
        return [value_shown(one) for one in cast("Iterable[Any]", value)]
    return value if value is None or isinstance(value, (bool, int, float)) else _PASSWORD.sub("//***@", str(value))


def explained(ctx: typer.Context, error: LoraplexError) -> LoraplexError:
    """The error. Where it names an option whose value is from the environment or the file, it says so."""
    for parameter in settings_of(ctx):
        if error.field in parameter.opts and type(error) is InvalidArgument:
            _, where = source_of(ctx, parameter)
            if where:
                return InvalidArgument(f"{error.message} (its value is from {where})", field=error.field)
    return error


def silence_grpc() -> None:
    """Has gRPC's library write no lines, unless GRPC_VERBOSITY asks for them: they are no JSON. Before its import."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def child_environment() -> dict[str, str]:
    """Environment of a server's child, without the variables of settings: it gets its settings on the command line."""
    prefixes = tuple(f"{prefix_of(command)}_" for command in COMMANDS)
    return {
        name: value
        for name, value in os.environ.items()
        if name != FILE_VARIABLE and (not name.startswith(prefixes) or _is_of_kubernetes(name, value))
    }


def _read_settings(ctx: typer.Context, command: str, path: Path | None) -> None:
    """The settings of the context whose options are about to be read."""
    parameters = {setting_of(one): one for one in settings_of(ctx)}
    _check_variables(ctx, command, parameters)
    if path is None:
        return
    ctx.obj = path
    found: dict[str, Any] = {}
    for key, value in _section(path, command).items():
        name = key.replace("_", "-")
        where = f"{path}: [{command}] {key}"
        parameter = parameters.get(name) or _by_alias(ctx, name)
        if parameter is None:
            raise InvalidArgument(f"{path}: [{command}] has no key {key!a}; {near_name(name, parameters)}", field=key)
        if parameter.name in found:
            raise InvalidArgument(f"{where} is there twice, under another name", field=key)
        found[parameter.name] = _checked(ctx, parameter, value, where)
    ctx.default_map = found


def _by_alias(ctx: typer.Context, name: str) -> Any:
    return next((one for one in settings_of(ctx) if f"--{name}" in one.opts), None)


def _section(path: Path, command: str) -> Mapping[str, Any]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not text in UTF-8", field="--config") from error
    except (ValueError, RecursionError) as error:  # also of integers with thousands of digits
        raise InvalidArgument(f"{path} is not TOML: {error}", field="--config") from error
    except OSError as error:
        raise InvalidArgument(f"--config: {path} cannot be read: {error.strerror}", field="--config") from error
    for name, value in document.items():
        if not isinstance(value, dict):
            raise InvalidArgument(f"{path}: {name} must be in a section, such as [{command}]", field=name)
        if name not in COMMANDS:
            raise InvalidArgument(f"{path}: there is no section [{name}]; {near_name(name, COMMANDS)}", field=name)
    return cast("Mapping[str, Any]", document.get(command, {}))


def _checked(ctx: typer.Context, parameter: Any, value: Any, where: str) -> Any:
    """The value as the option takes it. Raises InvalidArgument."""
    if getattr(parameter, "is_flag", False):
        if not isinstance(value, bool):
            raise InvalidArgument(f"{where} must be true or false, not {value!a}", field=where)
        return value
    is_list = getattr(parameter, "multiple", False)
    values = cast("list[Any]", value) if isinstance(value, list) and is_list else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, (str, int, float)):
            kind = "a list of values" if is_list else "one value"
            raise InvalidArgument(f"{where} must be {kind}, not {value!a}", field=where)
    texts = [os.path.expanduser(str(one)) for one in values]  # no shell has done so
    made = texts if is_list else texts[0]
    _convert(ctx, parameter, made, where)
    return made


def _convert(ctx: typer.Context, parameter: Any, value: Any, where: str) -> None:
    """Raises InvalidArgument where the option does not take the value."""
    try:
        parameter.process_value(ctx, value)
    except (typer.BadParameter, InvalidArgument) as error:
        raise InvalidArgument(f"{where}: {error.message.rstrip('.')}", field=where) from error


def _check_variables(ctx: typer.Context, command: str, parameters: Mapping[str, Any]) -> None:
    """Has each parameter read its variable. Raises InvalidArgument for variables of this command that none reads."""
    prefix = f"{prefix_of(command)}_"
    known = {prefix + name.upper().replace("-", "_"): parameter for name, parameter in parameters.items()}
    for name, parameter in known.items():
        if parameter.envvar is None and not _is_of_kubernetes(name, os.environ.get(name, "")):
            parameter.envvar = name
    for name, value in os.environ.items():
        if not name.startswith(prefix) or _is_of_kubernetes(name, value):
            continue
        if name not in known:
            raise InvalidArgument(f"no option reads the variable {name}; {near_name(name, known)}", field=name)
        if value:
            _convert(ctx, known[name], known[name].value_from_envvar(ctx), f"the variable {name}")


def _is_of_kubernetes(name: str, value: str) -> bool:
    return bool(_OF_KUBERNETES.search(name) or (name.endswith("_PORT") and _ADDRESS_OF_KUBERNETES.match(value)))


def near_name(name: str, known: Iterable[str]) -> str:
    known = list(known)
    instead = f"there are {', '.join(known)}" if len(known) <= len(COMMANDS) else "--help lists the options"
    return did_you_mean(name, known) or instead
