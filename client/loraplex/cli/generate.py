"""`loraplex generate`: one prompt, one answer."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from loraplex import (
    Chunk,
    Client,
    GenerateOptions,
    Generation,
    InvalidArgument,
    Timings,
    Usage,
)
from loraplex.cli import terminal
from loraplex.cli.connection import (
    DEFAULT_SERVER,
    DEFAULT_TIMEOUT_S,
    CaCertOption,
    JsonOption,
    ServerOption,
    TimeoutOption,
    TlsOption,
    TokenOption,
    connect,
)
from loraplex.cli.speculation import parse_speculation

_SAMPLING = "Sampling"
_SPECULATION = "Speculation: the same text, sooner"


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from; `-` reads it from standard input.")],
    server: ServerOption = DEFAULT_SERVER,
    adapter: Annotated[
        str, typer.Option("--adapter", "-a", help="Adapter to use, by name. Default: none, the base model.")
    ] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Stop after this many tokens. Default: when the context is full.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt as a user's message in a chat.")] = False,
    system: Annotated[str | None, typer.Option(help="System message in front of it. Implies --chat.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this string. May be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model would end.")] = False,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Print as it is made. Default: on a terminal.")
    ] = None,
    as_json: JsonOption = False,
    n: Annotated[int, typer.Option("-n", help="How many answers to the same prompt.")] = 1,
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: log probability of each token.")] = False,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token, the default; higher varies more.", rich_help_panel=_SAMPLING),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Choose among the tokens that make up this share.", rich_help_panel=_SAMPLING)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Choose among this many tokens.", rich_help_panel=_SAMPLING)] = None,
    seed: Annotated[
        int | None, typer.Option(help="The same seed gives the same text again.", rich_help_panel=_SAMPLING)
    ] = None,
    speculation: Annotated[
        str | None,
        typer.Option(
            metavar="KIND[:NAME]",
            help="Who guesses the tokens that the model then checks: prompt_lookup (copies from the text so far), "
            "medusa (extra heads; with medusa:ADAPTER those of that adapter), draft_model (a smaller model; with "
            "draft_model:NAME one of several), auto or off. Default: as the server and the adapter have it.",
            rich_help_panel=_SPECULATION,
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int | None, typer.Option(help="Guess this many tokens at a time at most.", rich_help_panel=_SPECULATION)
    ] = None,
    fixed_length: Annotated[
        bool,
        typer.Option(
            "--fixed-length",
            help="Always guess as many, instead of fewer where guesses miss.",
            rich_help_panel=_SPECULATION,
        ),
    ] = False,
    token: TokenOption = None,
    timeout_s: TimeoutOption = DEFAULT_TIMEOUT_S,
    tls: TlsOption = False,
    ca_cert: CaCertOption = None,
) -> None:
    """Send a prompt to a server and print what it writes.

    The text goes to standard output, everything about it to standard error.
    """
    text = _read(prompt)
    options: GenerateOptions = {
        "adapter_id": adapter,
        "max_tokens": max_tokens,
        "stop": stop or None,
        "ignore_eos": ignore_eos or None,
        "n": n,
        "logprobs": logprobs or None,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": seed,
        "speculation": None if speculation is None else parse_speculation(speculation),
        "max_draft_tokens": max_draft_tokens,
        "fixed_draft_length": fixed_length or None,
    }
    if chat or system is not None:
        options["messages"] = [{"role": "user", "content": text}]
        if system is not None:
            options["messages"] = [{"role": "system", "content": system}, *options["messages"]]
    prompt_text = None if "messages" in options else text
    # Several texts at once would run into one another; as JSON lines they can be told apart.
    is_stream = stream if stream is not None else terminal.is_terminal() and not as_json and n == 1
    if is_stream and n > 1 and not as_json:
        raise InvalidArgument("--stream prints one answer only; take -n 1, or add --json", field="--stream")
    with connect(server, token, timeout_s, tls, ca_cert) as client:
        if is_stream:
            _stream(client, prompt_text, options, as_json=as_json)
        else:
            _whole(client.generate(prompt_text, **options), as_json=as_json)


def _read(prompt: str) -> str:
    if prompt != "-":
        return prompt
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidArgument("standard input is not text in UTF-8", field="prompt") from error
    return text.removesuffix("\n")  # as $(...) does: `echo text |` means the text


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
            terminal.write("\n")  # whatever follows, an error included, begins a line
    if as_json or last is None:
        return
    _remark(last.usage or Usage(), last.timings or Timings(), last.finish_reason or "", last.request_id)


def _whole(answer: Generation, *, as_json: bool) -> None:
    if as_json:
        terminal.write_json(asdict(answer))
        return
    for completion in answer.completions:
        if len(answer.completions) > 1:
            terminal.remark(f"--- {completion.index + 1} of {len(answer.completions)}")
        terminal.write(completion.text + "\n")
    _remark(answer.usage, answer.timings, answer.finish_reason or "", answer.request_id)


def _remark(usage: Usage, timings: Timings, finish_reason: str, request_id: str) -> None:
    speed = usage.completion_tokens / timings.total_s if timings.total_s > 0 else 0.0
    terminal.remark(
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s ({speed:.0f}/s), first after "
        f"{timings.time_to_first_token_s:.2f} s, ended by {finish_reason}, request {request_id}"
    )
    if usage.drafted_tokens:
        terminal.remark(_drafts(usage))


def _drafts(usage: Usage) -> str:
    """How speculation went."""
    text = f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted"
    if usage.proposers:
        shares = [f"{one.name} {one.accepted_tokens}/{one.drafted_tokens}" for one in usage.proposers]
        text += f" ({', '.join(shares)})"
    if usage.tokens_per_step is not None:
        text += f", {usage.tokens_per_step:.1f} tokens per step"
    return text
