"""Command `loraplex generate`: one prompt, printed or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any, cast

import typer

from loraplex import (
    Chunk,
    Client,
    GenerateOptions,
    Generation,
    Grammar,
    Hub,
    InvalidArgument,
    Member,
    Merge,
    Message,
    Timings,
    Usage,
)
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
    complete_adapter,
    options_of,
    parse_ids,
    parse_members,
    parse_tool_choice,
    read_json,
    read_text,
)
from loraplex_runtime.flags import option, with_flags

_parse_stop_ids = partial(parse_ids, flag="--stop-token-ids")
_chatting = partial(option, panel="Chat")


@dataclass(frozen=True, slots=True)
class RequestFlags:
    """Options of the request, under their names in the SDK."""

    adapter_id: str = option(
        "", "Adapter to use, by name. Default: none, the base model.", "--adapter", "-a", complete=complete_adapter
    )
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
    min_tokens: int | None = option(None, "Write this many tokens at least.", "--min-tokens")
    stop_token_ids: Any = option(
        None, "End with one of these tokens.", "--stop-token-ids", metavar="ID,...", parse=_parse_stop_ids
    )
    include_stop: bool = option(False, "Keep the string of --stop that ended the text.", "--include-stop")
    keep_special_tokens: bool = option(False, "Show special tokens in the text.", "--keep-special-tokens")
    omit_special_tokens: bool = option(
        False, "Send the prompt without the tokenizer's own special tokens.", "--omit-special-tokens"
    )
    echo: bool = option(False, "Put the prompt before the text.", "--echo")
    n: int = option(1, "How many answers to the same prompt.", "-n")
    priority: int | None = option(None, "Higher is served first, -100 to 100.", "--priority")
    request_id: str = option("", "Name of the request, in the server's log too. Default: a random one.", "--request-id")
    cache_salt: str = option("", "Share cached prompts only with requests of the same salt.", "--cache-salt")
    logprobs: bool = option(False, "With --json: log probability of each token.", "--logprobs")
    top_logprobs: int | None = option(
        None, "With --logprobs: so many alternatives at each position, 20 at most.", "--top-logprobs"
    )
    prompt_logprobs: bool = option(
        False, "With --json: log probability of each token of the prompt.", "--prompt-logprobs"
    )
    prompt_tokens: bool = option(False, "With --json: the prompt's tokens.", "--prompt-tokens")
    token_bytes: bool = option(False, "With --json: the bytes of each token.", "--token-bytes")
    omit_token_ids: bool = option(False, "With --json: leave the token ids out.", "--omit-token-ids")

    def __post_init__(self) -> None:
        if self.n < 1:
            raise InvalidArgument("-n must be at least 1", field="-n")


@dataclass(frozen=True, slots=True)
class Chatting:
    """Options of a chat, under their names in the SDK."""

    messages: Any = _chatting(
        None,
        "JSON file with the conversation so far, a list of messages as in OpenAI's API; `-` is standard input. A "
        "prompt becomes its next message.",
        "--messages",
        metavar="FILE",
        parse=partial(read_json, flag="--messages"),
    )
    tools: Any = _chatting(
        None, "JSON file with the tools.", "--tools", metavar="FILE", parse=partial(read_json, flag="--tools")
    )
    tool_choice: Any = _chatting(
        None,
        "none, auto, required, or the name of the tool to call.",
        "--tool-choice",
        metavar="CHOICE",
        parse=parse_tool_choice,
    )
    documents: Any = _chatting(
        None,
        "JSON file with documents for the template.",
        "--documents",
        metavar="FILE",
        parse=partial(read_json, flag="--documents"),
    )
    template_kwargs: Any = _chatting(
        None,
        "JSON file with the template's own arguments.",
        "--template-kwargs",
        metavar="FILE",
        parse=partial(read_json, flag="--template-kwargs"),
    )
    chat_template: Any = _chatting(
        None,
        "File with a template (Jinja) in the place of the model's.",
        "--chat-template",
        metavar="FILE",
        parse=partial(read_text, flag="--chat-template"),
    )
    one_tool_call: bool = _chatting(False, "Call one tool at most.", "--one-tool-call")
    parse_chat: bool = _chatting(
        False, "With --json: the answer as a message, with reasoning and tool calls apart.", "--parse-chat"
    )
    continue_final_message: bool = _chatting(
        False, "Go on from the end of the last message.", "--continue-final-message"
    )
    omit_generation_prompt: bool = _chatting(False, "Do not open the assistant's turn.", "--omit-generation-prompt")


@dataclass(frozen=True, slots=True)
class Merging:
    """Merge of the adapters of --adapters into one."""

    strategy: str = option(
        "", "Merge them into one: linear, ties, dare_linear, dare_ties or magnitude_prune.", "--merge"
    )
    density: float | None = option(None, "With --merge: share of values that are kept.", "--merge-density")
    majority_sign: str | None = option(None, "With --merge ties: total or frequency.", "--merge-majority-sign")
    merge_seed: int | None = option(None, "With --merge dare_*: seed of what is dropped.", "--merge-seed")

    def merge(self) -> Merge | None:
        """The merge that the flags ask for. Raises InvalidArgument for parameters without a strategy."""
        if self.strategy:
            return Merge(self.strategy, self.density, self.majority_sign, self.merge_seed)
        if any(one is not None for one in (self.density, self.majority_sign, self.merge_seed)):
            raise InvalidArgument("--merge-density, --merge-majority-sign and --merge-seed need --merge", field="merge")
        return None


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin that the adapter, or each one of --adapters, is fetched from, with the caller's own access."""

    on_hub: bool = option(False, "The adapter is the repository ORG/NAME on the Hub.", "--hub")
    revision: str | None = option(None, "Of that repository: a branch, a tag or a commit. Implies --hub.", "--revision")
    token: str | None = option(
        None, HUB_TOKEN_HELP + " Not sent without --hub or --revision.", "--hub-token", env=HUB_TOKEN_VARIABLE
    )
    in_bucket: bool = option(False, "The adapter is the folder BUCKET/NAME of a bucket.", "--in-bucket")

    def put(self, options: GenerateOptions) -> None:
        """Puts the origin into the options. A token alone puts none: it may be in the environment for other calls."""
        hub = Hub(self.revision or "", self.token or "") if self.on_hub or self.revision else None
        if hub is None and not self.in_bucket:
            return
        if mixture := options.get("adapters"):
            options["adapters"] = {
                name: Member(weight, hub, self.in_bucket)
                for name, weight in mixture.items()
                if not isinstance(weight, Member)
            }
        else:
            options["hub"], options["in_bucket"] = hub, self.in_bucket


@dataclass(frozen=True, slots=True)
class Form:
    """The form that the text must have; one of these at most."""

    json_schema: str = option("", "Write a JSON value that follows the schema in this file.", "--json-schema")
    json_object: bool = option(False, "Write a JSON object.", "--json-object")
    regex: str = option("", "Write a text that matches this regular expression.", "--regex")
    choice: tuple[str, ...] = option((), "Write one of these texts. May be given several times.", "--choice")
    lark: str = option("", "Write a text of the Lark grammar in this file.", "--lark")
    gbnf: str = option("", "Write a text of the GBNF grammar in this file.", "--gbnf")
    structural_tag: str = option("", "Write a text of the structural tag in this JSON file.", "--structural-tag")
    compact: bool = option(False, "With JSON: no spaces between its parts.", "--compact")

    def grammar(self) -> Grammar | None:
        """The grammar that the flags ask for. Raises InvalidArgument for two of them, or a file that cannot be read."""
        kinds: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name)}
        compact = kinds.pop("compact", False)
        if len(kinds) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in kinds)
            raise InvalidArgument(f"a text has one form; give one of {flags}", field="grammar")
        for name in kinds.keys() & {"json_schema", "lark", "gbnf", "structural_tag"}:
            kinds[name] = read_text(kinds[name], flag=f"--{name.replace('_', '-')}")
        return Grammar(**kinds, compact=compact) if kinds else None


@with_flags
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(
            help="The text to go on from; `-` reads it from standard input. May be left out beside --messages and "
            "--token-ids.",
            show_default=False,
        ),
    ] = None,
    *,
    server: ServerOption = DEFAULT_SERVER,
    wanted: RequestFlags,
    origin: Origin,
    token_ids: Annotated[
        str | None, typer.Option(metavar="ID,...", help="The prompt as token ids, instead of text.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Send the prompt as a user's message in a chat.", rich_help_panel="Chat"),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message in front of it. Implies --chat.", rich_help_panel="Chat")
    ] = None,
    chatting: Chatting,
    merging: Merging,
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
    for name in ("logprobs", "prompt_logprobs", "prompt_tokens", "token_bytes"):
        if getattr(wanted, name) and not as_json:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag} has nowhere to go; add --json", field=flag)
    text = None if prompt is None else _read(prompt)
    options = options_of(wanted, chatting, sampling, drafting)
    if options.pop("one_tool_call", False):  # type: ignore[typeddict-item]
        options["parallel_tool_calls"] = False
    if token_ids is not None:
        options["token_ids"] = parse_ids(token_ids, flag="--token-ids")
    if (merge := merging.merge()) is not None:
        options["merge"] = merge
    origin.put(options)
    if (grammar := form.grammar()) is not None:
        options["grammar"] = grammar
    if chat or system is not None or "messages" in options:
        options["messages"] = _conversation(system, options.get("messages", ()), text)
        text = None
    elif text is None and token_ids is None:
        raise InvalidArgument("give a PROMPT, --messages or --token-ids", field="prompt")
    with connection.client(server) as client:
        if is_stream:
            _stream(client, text, options, as_json=as_json)
        else:
            _whole(client.generate(text, **options), as_json=as_json)


def _conversation(system: str | None, messages: Any, text: str | None) -> list[Message]:
    """The messages of a chat. Raises InvalidArgument for a file that has no list."""
    if not isinstance(messages, (list, tuple)):
        raise InvalidArgument("the file of --messages must have a list of messages", field="--messages")
    conversation: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    conversation += cast("Sequence[Message]", messages)
    return conversation if text is None else [*conversation, {"role": "user", "content": text}]


def _read(prompt: str) -> str:
    return prompt if prompt != "-" else read_text("-", flag="prompt").removesuffix("\n")  # as the shell's $(...) does


def _stream(client: Client, prompt: str | None, options: GenerateOptions, *, as_json: bool) -> None:
    last: Chunk | None = None
    try:
        with client.stream(prompt, **options) as chunks:
            for chunk in chunks:
                if as_json:
                    terminal.write_json(chunk.to_dict(), is_line=True)
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
        terminal.write_json(answer.to_dict())
        return
    for completion in answer.completions:
        if len(answer.completions) > 1:
            terminal.remark(f"--- {completion.index + 1} of {len(answer.completions)}")
        terminal.write(completion.text + "\n")
    _remark(answer.usage, answer.timings, answer)


def _remark(usage: Usage, timings: Timings, answer: Generation | Chunk) -> None:
    for sentence in summary_of(usage, timings, answer):
        terminal.remark(sentence)


def summary_of(usage: Usage, timings: Timings, answer: Generation | Chunk) -> tuple[str, ...]:
    """A line with the time, the end and the draft tokens."""
    speed = usage.completion_tokens / timings.total_s if timings.total_s > 0 else 0.0
    text = (
        f"{usage.completion_tokens} tokens in {timings.total_s:.2f} s ({speed:.0f}/s), first after "
        f"{timings.time_to_first_token_s:.2f} s, ended by {answer.finish_reason or ''}, request {answer.request_id}"
        + ("" if answer.seed is None else f", seed {answer.seed}")
    )
    return (text, _drafts(usage)) if usage.drafted_tokens else (text,)


def _drafts(usage: Usage) -> str:
    """Acceptance of draft tokens, in one sentence."""
    text = f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted tokens accepted"
    if usage.proposers:
        shares = [f"{one.name} {one.accepted_tokens}/{one.drafted_tokens}" for one in usage.proposers]
        text += f" ({', '.join(shares)})"
    if usage.tokens_per_step is not None:
        text += f", {usage.tokens_per_step:.1f} tokens per step"
    return text
