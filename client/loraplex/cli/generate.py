"""Command `loraplex generate`: one prompt, printed or streamed."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from loraplex import Chunk, Client, GenerateOptions, Generation, Grammar, Hub, InvalidArgument, Timings, Usage
from loraplex.cli import terminal
from loraplex.cli.options import (
    DEFAULT_SERVER,
    HUB_TOKEN_HELP,
    HUB_TOKEN_VARIABLE,
    Connection,
    Drafting,
    JsonOption,
    Sampling,
    ServerOption,
    options_of,
    parse_members,
)
from loraplex_runtime.flags import option, with_flags


@dataclass(frozen=True, slots=True)
class Wanted:
    """Options of the request, under their names in the SDK."""

    adapter_id: str = option("", "Adapter to use, by name. Default: none, the base model.", "--adapter", "-a")
    adapters: Any = option(
        None,
        "Use the sum of these adapters instead, each times its weight (1 where none is given).",
        "--adapters",
        metavar="NAME:WEIGHT,...",
        parse=parse_members,
    )
    max_tokens: int | None = option(
        None, "Stop after this many tokens. Default: when the context is full.", "--max-tokens"
    )
    stop: tuple[str, ...] = option((), "End before this string. May be given several times.", "--stop")
    ignore_eos: bool = option(False, "Go on where the model would end.", "--ignore-eos")
    truncate_prompt: int | None = option(
        None,
        "Shorten the prompt to its last so many tokens; 0: to what the context has room for.",
        "--truncate-prompt",
    )
    n: int = option(1, "How many answers to the same prompt.", "-n")
    logprobs: bool = option(False, "With --json: log probability of each token.", "--logprobs")

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgument("-n must be at least 1", field="-n")


@dataclass(frozen=True, slots=True)
class FromHub:
    """The caller's own access to the adapter's repository."""

    on_hub: bool = option(False, "The adapter is the repository ORG/NAME on the Hub.", "--hub")
    revision: str | None = option(None, "Of that repository: a branch, a tag or a commit. Implies --hub.", "--revision")
    token: str | None = option(None, HUB_TOKEN_HELP, "--hub-token", env=HUB_TOKEN_VARIABLE)

    def hub(self) -> Hub | None:
        """A token alone may be in the environment for other calls."""
        return Hub(self.revision or "", self.token or "") if self.on_hub or self.revision else None


@dataclass(frozen=True, slots=True)
class Form:
    """The form that the text must have; one of these at most."""

    json_schema: str = option("", "Write a JSON value that follows the schema in this file.", "--json-schema")
    json_object: bool = option(False, "Write a JSON object.", "--json-object")
    regex: str = option("", "Write a text that matches this regular expression.", "--regex")
    choice: tuple[str, ...] = option((), "Write one of these texts. May be given several times.", "--choice")
    lark: str = option("", "Write a text of the Lark grammar in this file.", "--lark")

    def grammar(self) -> Grammar | None:
        """Raises InvalidArgument for more than one, or for a file that cannot be read."""
        said = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}
        if len(said) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in said)
            raise InvalidArgument(f"a text has one form; give one of {flags}", field="grammar")
        for name in said.keys() & {"json_schema", "lark"}:
            try:
                said[name] = Path(said[name]).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                flag = f"--{name.replace('_', '-')}"
                raise InvalidArgument(f"the file of {flag} cannot be read: {error}", field=flag) from error
        return Grammar(**said) if said else None


@with_flags
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; `-` reads it from standard input.")],
    *,
    server: ServerOption = DEFAULT_SERVER,
    wanted: Wanted,
    from_hub: FromHub,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message in a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of it. Implies --chat.")] = None,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print as it is made. Default: on a terminal.")
    ] = None,
    as_json: JsonOption = False,
    form: Form,
    sampling: Sampling,
    drafting: Drafting,
    connection: Connection,
) -> None:
    """Send a prompt to a server and print what it writes.

    The text goes to standard output, everything about it to standard error.
    """
    # Several streamed texts would mix; JSON lines carry an index.
    is_stream = stream if stream is not None else terminal.is_terminal() and not as_json and wanted.n == 1
    if is_stream and wanted.n > 1 and not as_json:
        raise InvalidArgument("--stream prints one answer only; take -n 1, or add --json", field="--stream")
    if wanted.logprobs and not as_json:
        raise InvalidArgument("--logprobs has nowhere to go; add --json", field="--logprobs")
    text: str | None = _read(prompt)
    options = options_of(wanted, sampling, drafting)
    if (hub := from_hub.hub()) is not None:
        options["hub"] = hub
    if (grammar := form.grammar()) is not None:
        options["grammar"] = grammar
    if chat or system is not None:
        before = [] if system is None else [("system", system)]
        options["messages"] = [{"role": role, "content": said} for role, said in (*before, ("user", text))]
        text = None
    with connection.client(server) as client:
        if is_stream:
            _stream(client, text, options, as_json=as_json)
        else:
            _whole(client.generate(text, **options), as_json=as_json)


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidArgument("standard input is not text in UTF-8", field="prompt") from error
    return text.removesuffix("\n")  # as the shell's $(...) does


def _stream(client: Client, prompt: str | None, options: GenerateOptions, *, as_json: bool) -> None:
    last: Chunk | None = None
    try:
        with client.stream(prompt, **options) as chunks:
            for chunk in chunks:
                if as_json:
                    terminal.write_json(asdict(chunk), is_line=True)
                else:
                    terminal.write(chunk.text)
                last = chunk
    finally:
        if not as_json and last is not None:
            terminal.write("\n")  # the next output, possibly an error, begins a line
    if as_json or last is None:
        return
    _remark(last.usage or Usage(), last.timings or Timings(), last)


def _whole(answer: Generation, *, as_json: bool) -> None:
    if as_json:
        terminal.write_json(asdict(answer))
        return
    for completion in answer.completions:
        if len(answer.completions) > 1:
            terminal.remark(f"--- {completion.index + 1} of {len(answer.completions)}")
        terminal.write(completion.text + "\n")
    _remark(answer.usage, answer.timings, answer)


def _remark(usage: Usage, timings: Timings, answer: Generation | Chunk) -> None:
    speed = usage.completion_tokens / timings.total_s if timings.total_s > 0 else 0.0
    terminal.remark(
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s ({speed:.0f}/s), first after "
        f"{timings.time_to_first_token_s:.2f} s, ended by {answer.finish_reason or ''}, request {answer.request_id}"
        + ("" if answer.seed is None else f", seed {answer.seed}")
    )
    if usage.drafted_tokens:
        terminal.remark(_drafts(usage))


def _drafts(usage: Usage) -> str:
    """Acceptance of draft tokens, in one sentence."""
    text = f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted"
    if usage.proposers:
        shares = [f"{one.name} {one.accepted_tokens}/{one.drafted_tokens}" for one in usage.proposers]
        text += f" ({', '.join(shares)})"
    if usage.tokens_per_step is not None:
        text += f", {usage.tokens_per_step:.1f} tokens per step"
    return text
