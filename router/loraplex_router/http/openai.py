"""OpenAI requests as messages of the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.backend import MAX_CHOICES, MAX_PROMPTS, adapter_of, unicode_text
from loraplex_router.http.models import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Generation,
    TokenizeRequest,
    ignored_fields,
)

DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, of completions

_MAX_TOKEN_ID: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request as calls, and what its answer depends on."""

    requests: tuple[pb.GenerateRequest, ...]  # one for each prompt
    request_id: str
    model: str  # as asked
    adapter_id: str
    n: int
    created: int
    is_chat: bool
    is_streamed: bool
    wants_usage: bool
    num_top_logprobs: int | None  # None: no logprobs
    echo: bool
    with_token_ids: bool
    tokens_as_ids: bool
    ignored: tuple[str, ...]


def completion_job(body: CompletionRequest, base_names: Sequence[str], request_id: str, created: int) -> Job:
    """Raises InvalidArgument, Unimplemented and AdapterNotFound with the field's name in OpenAI's request."""
    ignored = ignored_fields(body)
    if body.add_special_tokens is False:
        raise Unimplemented("`add_special_tokens` is not available: send token ids instead", field="add_special_tokens")
    request = _common(body, base_names)
    request.stopping.max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        request.output.logprobs = True
        request.output.top_logprobs = body.logprobs
    if body.echo:
        request.output.echo = True
        request.output.prompt_logprobs = body.logprobs is not None
    prompts = _prompts(body.prompt)
    return _job(body, request, prompts, request_id, created, body.logprobs, ignored=ignored, echo=bool(body.echo))


def chat_job(body: ChatCompletionRequest, base_names: Sequence[str], request_id: str, created: int) -> Job:
    """As `completion_job`."""
    ignored = ignored_fields(body)
    if body.echo:
        raise Unimplemented("`echo` is not available: chats are not echoed", field="echo")
    if body.add_special_tokens:
        raise Unimplemented(
            "`add_special_tokens` is not available: the chat template writes them", field="add_special_tokens"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidArgument("`top_logprobs` needs `logprobs`: true", field="top_logprobs")
    request = _common(body, base_names)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if limit is not None:
        request.stopping.max_tokens = limit
    if body.logprobs:
        request.output.logprobs = True
        request.output.top_logprobs = body.top_logprobs or 0
    chat = _chat(body.messages, omit_generation_prompt=body.add_generation_prompt is False)
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return _job(body, request, (chat,), request_id, created, num_top, ignored=ignored, echo=False)


def with_model(job: Job, model: str) -> Job:
    """The job with the base model's name, for a request that names none."""
    return replace(job, model=model)


def tokenize_request(body: TokenizeRequest) -> pb.TokenizeRequest:
    """Raises as `completion_job`."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("give `prompt` or `messages`", field="prompt")
    request = pb.TokenizeRequest()
    if body.prompt is not None:
        request.text = unicode_text(body.prompt, "prompt")
        request.omit_special_tokens = body.add_special_tokens is False
    else:
        if body.add_special_tokens:
            raise Unimplemented(
                "`add_special_tokens` is not available: the chat template writes them", field="add_special_tokens"
            )
        omitted = body.add_generation_prompt is False
        request.chat.CopyFrom(_chat(body.messages or [], omit_generation_prompt=omitted))
    return request


def _job(
    body: Generation,
    request: pb.GenerateRequest,
    prompts: Sequence[str | list[int] | pb.Chat],
    request_id: str,
    created: int,
    num_top_logprobs: int | None,
    *,
    ignored: tuple[str, ...],
    echo: bool,
) -> Job:
    n = body.n or 1
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidArgument(
            f"the request asks for {len(prompts) * n} texts (prompts times `n`), and at most {MAX_CHOICES} are "
            "written for one request",
            field="n",
        )
    request_id = request_id if body.request_id is None else check_id(body.request_id, field="request_id")
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("`stream_options` goes with `stream`: true", field="stream_options")
    requests: list[pb.GenerateRequest] = []
    for index, prompt in enumerate(prompts):
        one = pb.GenerateRequest()
        one.CopyFrom(request)
        one.request_id = request_id if len(prompts) == 1 else f"{request_id[:120]}-{index}"
        match prompt:
            case str():
                one.text = unicode_text(prompt, "prompt")
            case list():
                one.token_ids.ids.extend(prompt)
            case _:
                one.chat.CopyFrom(prompt)
        requests.append(one)
    return Job(
        requests=tuple(requests),
        request_id=request_id,
        model=body.model or "",
        adapter_id=request.adapter_id,
        n=n,
        created=created,
        is_chat=isinstance(body, ChatCompletionRequest),
        is_streamed=bool(body.stream),
        wants_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        num_top_logprobs=num_top_logprobs,
        echo=echo,
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ignored=ignored,
    )


def _common(body: Generation, base_names: Sequence[str]) -> pb.GenerateRequest:
    request = pb.GenerateRequest(n=body.n or 1)
    sampling, stopping = request.sampling, request.stopping
    request.adapter_id = unicode_text(adapter_of(body.model, base_names), "model")
    sampling.temperature = 1.0 if body.temperature is None else body.temperature  # the wire's own default is greedy
    for name in ("top_p", "min_p", "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        value: float | None = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    if body.top_k is not None:
        sampling.top_k = max(0, body.top_k)  # -1 keeps all, too
    if body.seed is not None:
        sampling.seed = body.seed % (1 << 64)
    for key, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[_token_id(key)] = bias
    sampling.allowed_token_ids.extend(body.allowed_token_ids or ())
    sampling.bad_words.extend(unicode_text(word, "bad_words") for word in body.bad_words or ())
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stopping.stop.extend(unicode_text(text, "stop") for text in stop if text)  # clients send "" for none
    stopping.stop_token_ids.extend(body.stop_token_ids or ())
    if body.min_tokens:
        stopping.min_tokens = body.min_tokens
    stopping.ignore_eos = bool(body.ignore_eos)
    stopping.include_stop = bool(body.include_stop_str_in_output)
    request.priority = -(body.priority or 0)  # vLLM serves the lowest first, the wire the highest
    request.cache_salt = unicode_text(body.cache_salt or "", "cache_salt")
    if body.speculation is not None:
        request.speculation.CopyFrom(_speculation(body.speculation))
    return request


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= _MAX_TOKEN_ID):
        raise InvalidArgument(f"`logit_bias` has the key {key[:20]!a}, which is not a token id", field="logit_bias")
    return int(key)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts in each form that OpenAI takes: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        items = cast("list[Any]", prompt)
        if type(items[0]) is int:
            return [_ids(items)]
        if len(items) > MAX_PROMPTS:
            raise InvalidArgument(f"`prompt` takes {MAX_PROMPTS} prompts; there are {len(items)}", field="prompt")
        if all(isinstance(item, str) for item in items):
            return items
        if all(isinstance(item, list) for item in items):
            return [_ids(item) for item in items]
    raise InvalidArgument("`prompt` must be a text, a list of token ids, or a list of either", field="prompt")


def _ids(ids: list[Any]) -> list[int]:
    if not ids or not all(type(one) is int and 0 <= one <= _MAX_TOKEN_ID for one in ids):
        raise InvalidArgument("`prompt` must have token ids, at least one in each list", field="prompt")
    return ids


def _chat(messages: Iterable[ChatMessage], *, omit_generation_prompt: bool) -> pb.Chat:
    chat = pb.Chat(omit_generation_prompt=omit_generation_prompt)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        for name, value in message.extras().items():
            # An answer that comes back as a message has fields that are empty.
            if value not in ("", [], {}, False):
                shown = ascii(name[:40])[1:-1]
                raise Unimplemented(
                    f"`{where}.{shown}` is not available: a message has a role and a text", field=f"{where}.{shown}"
                )
        role = unicode_text(message.role, f"{where}.role")
        chat.messages.add(role=role, content=_content(message, f"{where}.content"))
    return chat


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return unicode_text(content, where)
    if content is None and message.role == "assistant":
        return ""
    if isinstance(content, list):
        texts: list[str] = []
        for part in cast("list[Any]", content):
            kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
            text = cast("dict[str, Any]", part).get("text") if kind == "text" else None
            if not isinstance(text, str):
                raise InvalidArgument(f"`{where}` takes parts of type text only", field=where)
            texts.append(unicode_text(text, where))
        return "".join(texts)
    raise InvalidArgument(f"`{where}` must be a text or a list of parts", field=where)


def _speculation(value: Any) -> pb.Speculation:
    """ "auto", "draft_model:NAME", or {"kind": "prompt_lookup", "max_ngram": 4, "max_draft_tokens": 8}."""
    options: dict[str, Any] = cast("dict[str, Any]", dict(value)) if isinstance(value, dict) else {"kind": value}
    kind: Any = options.pop("kind", None)
    found = pb.Speculation()
    where = "speculation"
    kinds = {"medusa": ("adapter_id",), "prompt_lookup": ("min_ngram", "max_ngram"), "draft_model": ("name",)}
    if isinstance(kind, str) and kind.startswith("draft_model:"):
        options["name"] = kind.partition(":")[2]
        kind = "draft_model"
    try:
        if kind in ("off", "auto"):
            setattr(found, kind, True)
        elif isinstance(kind, str) and kind in kinds:
            part: Any = getattr(found, kind)
            part.SetInParent()
            for name in kinds[kind]:
                if options.get(name) is not None:
                    setattr(part, name, options[name])
                options.pop(name, None)
        elif kind is not None:
            raise InvalidArgument(
                "`speculation` takes off, auto, medusa, prompt_lookup, draft_model or draft_model:NAME, or an object "
                "with such a `kind`",
                field=where,
            )
        for name in ("max_draft_tokens", "fixed_length"):
            if options.get(name) is not None:
                setattr(found, name, options[name])
            options.pop(name, None)
    except (TypeError, ValueError) as error:  # of protobuf
        raise InvalidArgument("`speculation` has a value of a wrong type or size", field=where) from error
    if options:
        name = ascii(str(next(iter(options)))[:40])[1:-1]
        raise InvalidArgument(f"`speculation.{name}` is not known for this kind", field=f"speculation.{name}")
    return found
