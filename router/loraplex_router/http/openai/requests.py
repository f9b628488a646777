"""OpenAI's requests as messages of the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http import dialects
from loraplex_router.http.errors import naming_missing
from loraplex_router.http.fields import (
    MAX_CHOICES,
    adapter_in,
    json_text,
    prompts_of,
    put_options,
    request_ids_of,
    speculation_of,
    truncate_of,
    unicode_text,
)
from loraplex_router.http.grammars import grammar_of
from loraplex_router.http.openai.fields import (
    REFUSED_IN_MESSAGES,
    THOUGHTS,
    ChatCompletionRequest,
    ChatMessage,
    ChatTemplateInput,
    CompletionRequest,
    DetokenizeRequest,
    Generation,
    StreamOptions,
    TokenizeRequest,
    ignored_fields,
)
from loraplex_router.http.openai.tools import put_tools
from loraplex_router.http.origins import put_adapters, put_tokenizer_origin
from loraplex_router.http.prompt_only import leave_out_new_text

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, of completions
NO_DEFAULTS: Final = pb.Sampling()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(dialects.Job):
    """A completion, or a chat."""

    request_id: str
    model: str  # as asked
    adapter_id: str
    n: int
    created: int
    is_chat: bool
    wants_usage: bool
    wants_running_usage: bool  # in each chunk
    num_top_logprobs: int | None  # None: no logprobs
    num_prompt_logprobs: int | None  # apart from those of an echo
    echo: bool
    is_prompt_only: bool  # the one token that the wire makes is dropped
    reasoning_fields: tuple[str, ...]  # names of the reasoning in messages
    with_token_ids: bool
    tokens_as_ids: bool

    @property
    def asked_name(self) -> str:
        """The adapter's name as the client wrote it: `model`, or what another field named. Empty for a mixture."""
        if self.requests[0].adapters:
            return ""
        return self.model if self.model.endswith(self.adapter_id) else self.adapter_id

    def named(self, error: LoraplexError) -> LoraplexError:
        return naming_missing(error, self.asked_name, self.requests[0])


def completion_job(
    body: CompletionRequest,
    base_names: Sequence[str],
    request_id: str,
    created: int,
    defaults: pb.Sampling = NO_DEFAULTS,
) -> Job:
    """The job of a completion. `defaults`: those of the base model's authors, for what the request leaves out.

    Raises InvalidArgument, Unimplemented and AdapterNotFound with the field's name in OpenAI's request."""
    ignored = ignored_fields(body)
    request = _common(body, base_names, defaults)
    is_prompt_only = body.max_tokens == 0
    if is_prompt_only and not body.echo and body.prompt_logprobs is None:
        raise InvalidArgument("`max_tokens` is 0, which goes with `echo` or `prompt_logprobs` only", field="max_tokens")
    # The wire makes at least one token.
    request.stopping.max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    if body.logprobs is not None:
        _ask_logprobs(request.output, body.logprobs)
    if body.echo:
        request.output.echo = True
        if body.logprobs is not None:
            request.output.prompt_tokens = request.output.prompt_logprobs = True
    if body.best_of is not None:
        _ask_best_of(request, body.best_of, is_streamed=bool(body.stream))
    prompts = prompts_of(body.prompt)
    job = _job(body, request, prompts, request_id, created, body.logprobs, ignored=ignored)
    if is_prompt_only:
        for one in job.requests:
            leave_out_new_text(one)
    if body.add_special_tokens is False:
        for one in job.requests:
            one.omit_special_tokens = one.HasField("text")  # ids have what they have
    return replace(job, echo=bool(body.echo), is_prompt_only=is_prompt_only)


def chat_job(
    body: ChatCompletionRequest,
    base_names: Sequence[str],
    request_id: str,
    created: int,
    defaults: pb.Sampling = NO_DEFAULTS,
    *,
    old_names: bool = False,
) -> Job:
    """Makes a job of a chat, as `completion_job` does of a prompt. `old_names`: answers also call the reasoning
    `reasoning_content`."""
    ignored = ignored_fields(body)
    if body.echo:
        raise Unimplemented("`echo` is not available: chats are not echoed", field="echo")
    _refuse_special_tokens(body.add_special_tokens)
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("`top_logprobs` needs `logprobs`: true", field="top_logprobs")
    request = _common(body, base_names, defaults)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit == 0:
        raise InvalidArgument("`max_tokens` must be at least 1", field="max_tokens")
    if limit is not None:
        request.stopping.max_tokens = limit
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    if num_top is not None:
        _ask_logprobs(request.output, num_top)
    job = _job(body, request, (chat_of(body.messages, body),), request_id, created, num_top, ignored=ignored)
    put_tools(job.requests[0], body)
    _prefer_tool(job.requests[0], body)
    if body.include_reasoning is False:
        return job
    return replace(job, reasoning_fields=("reasoning", "reasoning_content") if old_names else ("reasoning",))


def _prefer_tool(request: pb.GenerateRequest, body: ChatCompletionRequest) -> None:
    """Drops the grammar of `response_format` where a call is demanded: clients send both, and OpenAI makes the call.
    Other grammars beside it stay, and are refused."""
    fields = body.extras()
    if request.chat.tool_choice.WhichOneof("kind") in ("required", "name") and fields.pop("response_format", None):
        request.ClearField("grammar")
        if (grammar := grammar_of(fields)) is not None:
            request.grammar.CopyFrom(grammar)


def _ask_best_of(request: pb.GenerateRequest, best_of: int, *, is_streamed: bool) -> None:
    """Asks for `best_of` texts, and for the logprobs that they are ranked by. Raises InvalidArgument."""
    if best_of < request.n:
        raise InvalidArgument(f"`best_of` is {best_of} and below `n`, {request.n}", field="best_of")
    if best_of > request.n:
        if is_streamed:
            raise InvalidArgument("`best_of` above `n` does not go with `stream`: true", field="best_of")
        request.n = best_of
        request.output.logprobs = True


def _ask_logprobs(output: pb.Output, num_top: int) -> None:
    output.logprobs = output.token_bytes = True
    output.top_logprobs = max(num_top, output.top_logprobs)


def tokenize_request(body: TokenizeRequest, adapter_id: str = "") -> pb.TokenizeRequest:
    """The wire's request of a tokenization. Raises what `completion_job` raises."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("give `prompt` or `messages`", field="prompt")
    request = pb.TokenizeRequest(offsets=bool(body.return_offsets))
    if body.prompt is not None:
        refuse_chat_fields(body, "tools")
        request.text = unicode_text(body.prompt, "prompt")
        request.omit_special_tokens = body.add_special_tokens is False
    else:
        _refuse_special_tokens(body.add_special_tokens)
        request.chat.CopyFrom(chat_of(body.messages or [], body))
        request.adapter_id = adapter_id
        if body.tools:
            request.chat.tools_json = json_text(body.tools, "tools")
    put_tokenizer_origin(request, body, adapter_id)
    return request


def detokenize_request(body: DetokenizeRequest, *, omits_special: bool) -> pb.DetokenizeRequest:
    """The wire's request of a detokenization. `omits_special` counts where the request does not say."""
    skip = omits_special if body.skip_special_tokens is None else body.skip_special_tokens
    return pb.DetokenizeRequest(token_ids=body.tokens, omit_special_tokens=skip)


def _refuse_special_tokens(is_asked: bool | None) -> None:
    if is_asked:
        raise Unimplemented(
            "`add_special_tokens` is not available: the chat template writes them", field="add_special_tokens"
        )


def _job(
    body: Generation,
    request: pb.GenerateRequest,
    prompts: Sequence[str | list[int] | pb.Chat],
    request_id: str,
    created: int,
    num_top_logprobs: int | None,
    *,
    ignored: tuple[str, ...],
) -> Job:
    n = body.n or 1
    if len(prompts) * request.n > MAX_CHOICES:
        raise InvalidArgument(
            f"the request asks for {len(prompts) * request.n} texts (prompts times `n` or `best_of`), and at most "
            f"{MAX_CHOICES} are written for one request",
            field="n",
        )
    request_id = request_id if body.request_id is None else check_id(body.request_id, field="request_id")
    if not body.stream and body.stream_options is not None and any(body.stream_options.model_dump().values()):
        raise InvalidArgument("`stream_options` goes with `stream`: true", field="stream_options")
    if body.prompt_logprobs is not None:
        if body.stream:
            raise InvalidArgument("`prompt_logprobs` does not go with `stream`: true", field="prompt_logprobs")
        request.output.prompt_tokens = request.output.prompt_logprobs = True
        request.output.top_logprobs = max(body.prompt_logprobs, request.output.top_logprobs)
    options = body.stream_options or StreamOptions()
    wants_running_usage = bool(options.include_usage and options.continuous_usage_stats)
    if body.return_token_ids or wants_running_usage:
        request.output.prompt_tokens = True  # their number, too
    return Job(
        requests=tuple(_for_prompts(request, prompts, request_id)),
        request_id=request_id,
        model=body.model or "",
        adapter_id=request.adapter_id,
        n=n,
        created=created,
        is_chat=isinstance(body, ChatCompletionRequest),
        is_streamed=bool(body.stream),
        wants_usage=bool(options.include_usage),
        wants_running_usage=wants_running_usage,
        num_top_logprobs=num_top_logprobs,
        num_prompt_logprobs=body.prompt_logprobs,
        echo=False,
        is_prompt_only=False,
        reasoning_fields=(),
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ignored=ignored,
    )


def _for_prompts(
    request: pb.GenerateRequest, prompts: Sequence[str | list[int] | pb.Chat], request_id: str
) -> Iterator[pb.GenerateRequest]:
    """A copy of `request` for each prompt."""
    for prompt, one_id in zip(prompts, request_ids_of(request_id, len(prompts)), strict=True):
        one = pb.GenerateRequest()
        one.CopyFrom(request)
        one.request_id = one_id
        match prompt:
            case str():
                one.text = unicode_text(prompt, "prompt")
            case list():
                one.token_ids.ids.extend(prompt)
            case _:
                one.chat.CopyFrom(prompt)
        yield one


def _common(body: Generation, base_names: Sequence[str], defaults: pb.Sampling) -> pb.GenerateRequest:
    request = pb.GenerateRequest(n=body.n or 1)
    request.adapter_id = adapter_in(body.adapter_names(), base_names)
    put_adapters(request, body, base_names)
    request.sampling.CopyFrom(defaults)
    if not request.sampling.HasField("temperature"):
        request.sampling.temperature = 1.0  # the wire's own default is greedy
    put_options(request, body)
    if body.seed == -1:  # clients of vLLM and llama.cpp mean a random one
        request.sampling.ClearField("seed")
    request.output.keep_special_tokens = body.skip_special_tokens is False
    if body.truncate_prompt_tokens is not None:
        request.truncate_prompt.CopyFrom(truncate_of(body.truncate_prompt_tokens, body.truncation_side))
    if (grammar := grammar_of(body.extras())) is not None:
        request.grammar.CopyFrom(grammar)
    request.priority = -(body.priority or 0)  # vLLM serves the lowest first, the wire the highest
    request.cache_salt = unicode_text(body.cache_salt or "", "cache_salt")
    if body.speculation is not None:
        request.speculation.CopyFrom(speculation_of(body.speculation))
    return request


def refuse_chat_fields(given: ChatTemplateInput, *more: str) -> None:
    """Raises InvalidArgument for input of a chat template, or one of the fields `more`, beside a text."""
    for name in (*ChatTemplateInput.model_fields, *more):
        if name != "add_generation_prompt" and getattr(given, name) not in (None, False, "", [], {}):
            raise InvalidArgument(f"`{name}` goes with a chat: give `messages`, or leave it out", field=name)


def chat_of(messages: Iterable[ChatMessage], given: ChatTemplateInput) -> pb.Chat:
    if given.continue_final_message and given.add_generation_prompt:
        raise InvalidArgument(
            "`continue_final_message` goes on with the last turn, and `add_generation_prompt` opens a new one: leave "
            "one of them out",
            field="continue_final_message",
        )
    chat = pb.Chat(
        omit_generation_prompt=given.add_generation_prompt is False,
        continue_final_message=bool(given.continue_final_message),
    )
    if given.chat_template is not None:
        chat.template = unicode_text(given.chat_template, "chat_template")
    arguments = dict(given.chat_template_kwargs or {})
    for name, text in (("reasoning_effort", _effort_of(given)), ("verbosity", given.verbosity)):
        if text is not None:
            arguments.setdefault(name, unicode_text(text, name))
    if arguments:
        chat.template_kwargs_json = json_text(arguments, "chat_template_kwargs")
    if given.documents:
        chat.documents_json = json_text(given.documents, "documents")
    for index, message in enumerate(messages):
        chat.messages.append(_message(message, f"messages[{index}]"))
    return chat


def _effort_of(given: ChatTemplateInput) -> str | None:
    effort: Any = (given.reasoning or {}).get("effort")
    if effort is None:
        return given.reasoning_effort
    if not isinstance(effort, str):
        raise InvalidArgument("`reasoning.effort` must be a text", field="reasoning.effort")
    if given.reasoning_effort not in (None, effort):
        raise InvalidArgument("`reasoning_effort` is said in another way, too: leave it out", field="reasoning_effort")
    return unicode_text(effort, "reasoning.effort")


def _message(message: ChatMessage, where: str) -> pb.ChatMessage:
    given = message.extras()
    for name, instead in REFUSED_IN_MESSAGES.items():
        if given.get(name) not in (None, "", [], {}, False):
            raise Unimplemented(f"`{where}.{name}` is not available: {instead}", field=f"{where}.{name}")
    found = pb.ChatMessage(content=_content(message, f"{where}.content"))
    texts = {"reasoning": message.reasoning or message.reasoning_content}
    for name in ("role", "name", "tool_call_id"):
        texts[name] = getattr(message, name)
    for name, text in texts.items():
        setattr(found, name, unicode_text(text or "", f"{where}.{name}"))
    for number, call in enumerate(message.tool_calls or ()):
        within = f"{where}.tool_calls[{number}]"
        arguments = call.function.arguments
        if not isinstance(arguments, str):  # some clients send what it stands for
            arguments = "" if arguments is None else json_text(arguments, f"{within}.function.arguments")
        found.tool_calls.add(
            id=unicode_text(call.id or "", f"{within}.id"),
            name=unicode_text(call.function.name, f"{within}.function.name"),
            arguments_json=unicode_text(arguments, f"{within}.function.arguments"),
        )
    return found


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return unicode_text(content, where)
    if content is None and message.role in ("assistant", "tool"):
        return ""
    if isinstance(content, list):
        is_answer = message.role == "assistant"
        return "".join(_text_of(part, where, is_answer=is_answer) for part in cast("list[Any]", content))
    raise InvalidArgument(f"`{where}` must be a text or a list of parts", field=where)


def _text_of(part: Any, where: str, *, is_answer: bool) -> str:
    """The text of a part of a message. That of an answer may be a refusal, or a thought, which is left out."""
    given = cast("dict[str, Any]", part) if isinstance(part, dict) else {}
    kind = given.get("type")
    if is_answer and kind in THOUGHTS:
        return ""
    text = given.get(kind) if kind == "text" or (is_answer and kind == "refusal") else None
    if not isinstance(text, str):
        raise not_a_text(part, where)
    return unicode_text(text, where)


def not_a_text(part: Any, where: str) -> InvalidArgument:
    """The error for a part of a message's content, with what it is."""
    kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and not kind.endswith("text") and kind not in (*THOUGHTS, "refusal"):
        reason = (
            f"`{where}` has a part of type {ascii(kind)[:40]}: images, audio and files are not served, with any model"
        )
    else:
        reason = f"`{where}` takes a text, or parts of type text only"
    return InvalidArgument(reason, field=where)
