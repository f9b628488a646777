"""Command `loraplex`: finds its subcommands, those of other packages by entry points.

Exit codes: 0; 1 with one sentence on stderr; 2 for a request that can never succeed; 130 for Ctrl-C. Only the called
command is imported, so that `loraplex --help` answers at once and needs no extra. What takes a while to import is
imported in functions: Ctrl-C before `main` would print a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from loraplex.cli.terminal import complain

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    import typer

    from loraplex_contracts.errors import LoraplexError

GROUP: Final = "loraplex.commands"

ABOUT: Final = """Serve one base model with thousands of LoRA adapters, a different one for every request.

Start a server with `loraplex serve MODEL --adapters DIR`, then ask it with
`loraplex generate "some text" --adapter NAME`. `loraplex demo` shows it all with a small model of its own."""


class Known(NamedTuple):
    """A command of Loraplex, listed without an import of its package."""

    target: str
    summary: str


# Errors of the user's disk, possible wherever a file is written.
_STORAGE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})

# Commands in the order of the help. All are listed, whichever of Loraplex's distributions are installed.
KNOWN: Final[dict[str, Known]] = {
    "serve": Known("loraplex_server.cli.serve:serve", "Serve a model on this machine: a router and its workers."),
    "generate": Known("loraplex.cli.generate:generate", "Send a prompt to a server and print what it writes."),
    "chat": Known("loraplex.cli.chat:chat", "Talk with a model line by line, and switch adapters in between."),
    "adapters": Known("loraplex.cli.adapters:adapters", "List, load, unload and verify adapters."),
    "top": Known("loraplex.cli.top:top", "Watch a router: workers, places of adapters, tokens/s, errors."),
    "demo": Known("loraplex_demo.cli:demo", "See it work: a small model, its adapters, one mixed batch."),
    "train-medusa": Known(
        "loraplex_training.cli:train_medusa", "Train Medusa heads, which make a model or adapter faster."
    ),
    "bench": Known("loraplex.cli.bench:bench", "Put a server under load and measure how soon it answers."),
    "config": Known("loraplex.cli.config:config", "Show the settings of server commands, and their sources."),
    "doctor": Known("loraplex.cli.doctor:doctor", "Show what is installed and what this machine can run."),
    "worker": Known("loraplex_server.cli.worker:worker", "Start one worker: the model behind gRPC, without a router."),
    "router": Known("loraplex_router.cli:router", "Start a router in front of workers that run already."),
    "up": Known("loraplex_fleet.cli:up", "Start a fleet on Ray from a file, or change it: workers and routers."),
    "down": Known("loraplex_fleet.cli:down", "End a fleet, once its requests have ended."),
    "status": Known("loraplex_fleet.cli:status", "Show a fleet: what runs where, what waits and why."),
    "http": Known("loraplex_router.cli:http", "Serve HTTP in a process of its own, in front of a server that runs."),
}

# Package -> the distribution that brings it, where that is another one than `loraplex`.
DISTRIBUTIONS: Final[dict[str, str]] = {
    "loraplex_adapters": "loraplex-server",
    "loraplex_server": "loraplex-server",
    "loraplex_training": "loraplex-server",
    "loraplex_demo": "loraplex-demo",
}

# Package of a command -> the extra with its dependencies.
EXTRAS: Final[dict[str, str]] = {
    "loraplex_server": "server",
    "loraplex_training": "server",
    "loraplex_demo": "demo",
    "loraplex_router": "router",
    "loraplex_fleet": "ray",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code. An error that a user can cause prints no traceback."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return 130


def _run(arguments: list[str]) -> int:
    from loraplex.config import PROGRAM, forget_no_columns, quiet_grpc, words_to_complete
    from loraplex_contracts.errors import LoraplexError

    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started the command
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    forget_no_columns()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 still gets the rest of the text
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # bytes that are no text are refused, whatever the locale
    commands = find_commands()
    completed = words_to_complete()  # there are no arguments then
    wanted = next((word for word in completed or arguments[:1] if word in commands), None)
    if wanted is not None and commands[wanted].module.startswith("loraplex.cli"):
        quiet_grpc()  # errors are one sentence each
    try:
        build_app(commands, wanted)(args=arguments, prog_name=PROGRAM)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except LoraplexError as error:
        complain(_sentence(error))
        return error.exit_code
    except OSError as error:
        if error.errno not in _STORAGE and error.filename is None:
            raise  # a bug of ours
        complain(_storage(error))
        return 1
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if wanted is None or not missing or missing.partition(".")[0] == "loraplex":
            raise  # a bug of ours
        if completed:
            return 1  # a shell waits; whoever calls the command gets the sentence
        complain(_missing(commands[wanted], missing))
        return 1
    return 0


def _sentence(error: LoraplexError) -> str:
    """The error's message, with the flag that mends it."""
    from loraplex_contracts.errors import Unauthenticated

    if isinstance(error, Unauthenticated):
        return f"{error.message}; give a token that the server knows, with LORAPLEX_TOKEN or --token"
    return error.message


def find_commands() -> dict[str, EntryPoint]:
    """Entry points by name: the commands of Loraplex first, then those of other packages."""
    from importlib.metadata import EntryPoint, entry_points

    found = {name: EntryPoint(name, known.target, GROUP) for name, known in KNOWN.items()}
    return found | {one.name: one for one in entry_points(group=GROUP)}


def build_app(commands: dict[str, EntryPoint], wanted: str | None) -> typer.Typer:
    """The command line: `wanted` in full, one line of help for each other. Raises ModuleNotFoundError."""
    import typer

    from loraplex.cli.help import Command, root

    app = typer.Typer(
        help=ABOUT,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},  # of all commands below
    )
    app.callback()(root)
    for name, entry in commands.items():
        if name != wanted:
            app.command(name, help=_summary(entry))(_listed_only)
            continue
        loaded: Any = entry.load()
        if isinstance(loaded, typer.Typer):
            for one in loaded.registered_commands:
                one.cls = Command
            app.add_typer(loaded, name=name)
        else:
            app.command(name, cls=Command)(loaded)
    return app


def _listed_only() -> None:
    raise AssertionError("a command that is called was loaded before")


def _summary(entry: EntryPoint) -> str:
    known = KNOWN.get(entry.name)
    if known is None:
        return f"From {entry.module}."
    package = entry.module.partition(".")[0]
    is_here = package not in DISTRIBUTIONS or find_spec(package) is not None
    return known.summary if is_here else f"{known.summary} Needs {DISTRIBUTIONS[package]}."


def _storage(error: OSError) -> str:
    where = "" if error.filename is None else f"{error.filename}: "
    advice = "make room, or name another place" if error.errno in _STORAGE else "name another place"
    return f"{where}{error.strerror or 'cannot be used'}; {advice}"


def _missing(entry: EntryPoint, module: str) -> str:
    if module in DISTRIBUTIONS:
        name = DISTRIBUTIONS[module]
        return f"`loraplex {entry.name}` needs {name}, which is not installed; get it with: pip install {name}"
    if module.startswith("loraplex"):
        return f"`loraplex {entry.name}` is not part of this installation: {module} is missing"
    package, module = entry.module.partition(".")[0], module.partition(".")[0]
    if package not in EXTRAS and package != "loraplex":
        return f"`loraplex {entry.name}` needs the Python package {module}, which is not installed"
    extra = EXTRAS.get(package, "server")
    return (
        f"`loraplex {entry.name}` needs the Python package {module}, which is not installed; "
        f"get it with: pip install 'loraplex[{extra}]'"
    )


if __name__ == "__main__":
    sys.exit(main())
