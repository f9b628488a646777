"""Command `loraplex chat`: a conversation at the terminal.

Lines that begin with a slash are for the command: they switch adapter and speculation, show or reset the history.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated, Any, Final

import typer

from loraplex import Chat, Chunk, InvalidArgument, LoraplexError, Timings, Usage
from loraplex.cli import terminal
from loraplex.cli.generate import summary_of
from loraplex.cli.options import (
    DEFAULT_SERVER,
    Connection,
    Drafting,
    JsonOption,
    Sampling,
    ServerOption,
    complete_adapter,
    options_of,
    parse_speculation,
)
from loraplex_runtime.flags import option, with_flags
from loraplex_runtime.near_words import did_you_mean

_HELP: Final = {
    "/adapter": "/adapter NAME: answer with this adapter from now on; without a name, with the base model",
    "/speculation": "/speculation KIND[:NAME]: as --speculation; without a kind, the server's choice",
    "/history": "/history: show the messages so far",
    "/reset": "/reset: begin again",
    "/help": "/help: show this",
    "/quit": "/quit: end; so does the end of the input",
}


@dataclass(frozen=True, slots=True)
class TurnFlags:
    """Options of every turn, under their names in the SDK."""

    adapter_id: str = option(
        "", "Adapter to begin with. Default: none, the base model.", "--adapter", "-a", complete=complete_adapter
    )
    max_tokens: int | None = option(None, "Stop an answer after this many tokens.", "--max-tokens")
    stop: tuple[str, ...] = option((), "End an answer before this string. May be given several times.", "--stop")


@with_flags
def chat(
    *,
    server: ServerOption = DEFAULT_SERVER,
    wanted: TurnFlags,
    system: Annotated[str | None, typer.Option(help="System message in front of the conversation.")] = None,
    as_json: JsonOption = False,
    sampling: Sampling,
    drafting: Drafting,
    connection: Connection,
) -> None:
    """Talk with a model, line by line; /help lists what else can be typed.

    An answer that fails, or that Ctrl-C ends, leaves the conversation as it was. Without a terminal each line of the
    input is a turn, and the first error ends the command.
    """
    with connection.client(server) as client:
        conversation = Conversation(client.chat(system, **options_of(wanted, sampling, drafting)), as_json=as_json)
        if not client.info().has_chat_template:
            raise InvalidArgument("this model has no chat template; use `loraplex generate`", field="messages")
        for line in _lines():
            if not conversation.take(line):
                return


class Conversation:
    """Takes lines, and prints what comes of each."""

    def __init__(self, chat: Chat, *, as_json: bool) -> None:
        self._chat = chat
        self._as_json = as_json

    def take(self, line: str) -> bool:
        """Takes a line; False where it ends the conversation. Raises a turn's error where nobody sits at a terminal."""
        try:
            if line.startswith("/"):
                return self._obey(line)
            if line.strip():
                self._say(line)
        except LoraplexError as error:
            if not sys.stdin.isatty():
                raise
            terminal.complain(error.message)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            terminal.remark("\n(left off; not part of the conversation)")
        return True

    def _say(self, line: str) -> None:
        if self._as_json:
            terminal.write_json(self._chat.send(line).to_dict(), is_line=True)
            return
        last: Chunk | None = None
        try:
            for last in self._chat.stream(line):
                terminal.write(last.text)
        finally:
            terminal.write("\n")
        if last is not None:
            for sentence in summary_of(last.usage or Usage(), last.timings or Timings(), last):
                terminal.remark(sentence)

    def _obey(self, line: str) -> bool:
        verb, _, argument = line.strip().partition(" ")
        options: Any = self._chat.options
        match verb:
            case "/quit":
                return False
            case "/adapter":
                options["adapter_id"] = argument.strip() or None
                _note(f"answers come from {argument.strip() or 'the base model'}")
            case "/speculation":
                options["speculation"] = parse_speculation(argument.strip()) if argument.strip() else None
                _note(f"speculation: {argument.strip() or 'as the server has it'}")
            case "/history":
                for one in self._chat.messages:
                    _note(f"{one['role']}: {one.get('content') or ''}")
            case "/reset":
                self._chat.reset()
                _note("begun again")
            case "/help":
                for sentence in _HELP.values():
                    _note(sentence)
            case _:
                hint = did_you_mean(verb, _HELP) or "/help lists what there is"
                raise InvalidArgument(f"there is no {verb}; {hint}", field=verb)
        return True


def _note(text: str) -> None:
    sys.stderr.write(terminal.without_control(text) + "\n")
    sys.stderr.flush()


def _lines() -> Iterator[str]:
    """Lines of standard input, with a prompt where it is a terminal."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ModuleNotFoundError):  # some builds of Python lack it
            import_module("readline")  # gives `input` editing and a history

    while True:
        try:
            yield input("> ") if is_terminal else _next_line()
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise InvalidArgument("standard input is not text in UTF-8", field="prompt") from error


def _next_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
