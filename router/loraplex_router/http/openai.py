"""OpenAI requests into messages of the wire, and the wire's answers into OpenAI's. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto import __version__
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.errors import model_not_found
from loraplex_router.http.models import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    Generation,
    TokenizeRequest,
    ignored_fields,
)

# Prompts of one request, and texts that they ask for together.
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 512
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's, of completions

_FINISH_REASONS: Final = {
    pb.FINISH_REASON_EOS: "stop",
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
_MIN_LOGPROB: Final = -9999.0  # for minus infinity, which JSON cannot write
_MAX_TOKEN_ID: Final = (1 << 32) - 1


# --- requests -------------------------------------------------------------------------------------------------------


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


def adapter_of(model: str | None, base_names: Sequence[str]) -> str:
    """The adapter that `model` names, "" for the base model: a name of the base, an adapter, or "base:adapter".

    Raises AdapterNotFound for a name after an unknown base. Whether there is such an adapter, a worker says."""
    if not model or model in base_names:
        return ""
    for base in base_names:
        if model.startswith(base + ":") and len(model) > len(base) + 1:
            return model[len(base) + 1 :]
    if ":" in model:  # never in the name of an adapter
        raise model_not_found(model)
    return model


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
        request.text = _text(body.prompt, "prompt")
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
                one.text = _text(prompt, "prompt")
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
    request.adapter_id = _text(adapter_of(body.model, base_names), "model")
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
    sampling.bad_words.extend(_text(word, "bad_words") for word in body.bad_words or ())
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    stopping.stop.extend(_text(text, "stop") for text in stop if text)  # clients send "" for none
    stopping.stop_token_ids.extend(body.stop_token_ids or ())
    if body.min_tokens:
        stopping.min_tokens = body.min_tokens
    stopping.ignore_eos = bool(body.ignore_eos)
    stopping.include_stop = bool(body.include_stop_str_in_output)
    request.priority = -(body.priority or 0)  # vLLM serves the lowest first, the wire the highest
    request.cache_salt = _text(body.cache_salt or "", "cache_salt")
    if body.speculation is not None:
        request.speculation.CopyFrom(_speculation(body.speculation))
    return request


def _text(text: str, name: str) -> str:
    """Raises InvalidArgument for lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"`{name}` is not valid Unicode text", field=name) from error
    return text


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
        role = _text(message.role, f"{where}.role")
        chat.messages.add(role=role, content=_content(message, f"{where}.content"))
    return chat


def _content(message: ChatMessage, where: str) -> str:
    content = message.content
    if isinstance(content, str):
        return _text(content, where)
    if content is None and message.role == "assistant":
        return ""
    if isinstance(content, list):
        texts: list[str] = []
        for part in cast("list[Any]", content):
            kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else None
            text = cast("dict[str, Any]", part).get("text") if kind == "text" else None
            if not isinstance(text, str):
                raise InvalidArgument(f"`{where}` takes parts of type text only", field=where)
            texts.append(_text(text, where))
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


# --- answers --------------------------------------------------------------------------------------------------------


def error_event(content: dict[str, Any]) -> bytes:
    return _event(content)


def fingerprint(digest: str) -> str:
    """Changes with the server's version and the adapter's content."""
    return f"lpx-{__version__}-{digest[:12] or 'base'}"


def response_of(job: Job, answers: Sequence[pb.GenerateResponse]) -> dict[str, Any]:
    """The body of an answer that is not streamed."""
    tally = Tally()
    choices: list[dict[str, Any]] = []
    for prompt, answer in enumerate(answers):
        tally.add_answer(answer)
        for completion in sorted(answer.completions, key=lambda one: one.index):
            choice = _choice(job, prompt, completion.index)
            text = completion.text
            if job.is_chat:
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            rows = Logprobs(job)
            if job.echo:
                rows.begin(text, answer.prompt_logprobs, completion.logprobs)
            choice["logprobs"] = rows.add(completion.logprobs)
            _end(choice, completion)
            if job.with_token_ids:
                choice["token_ids"] = list(completion.token_ids)
                choice["prompt_token_ids"] = list(job.requests[prompt].token_ids.ids) or None
            choices.append(choice)
    head = _head(job, "chat.completion" if job.is_chat else "text_completion", tally.digest)
    return {**head, "choices": choices, "usage": tally.usage(), "loraplex": tally.own(job)}


def _head(job: Job, kind: str, digest: str) -> dict[str, Any]:
    return {
        "id": f"{'chatcmpl' if job.is_chat else 'cmpl'}-{job.request_id}",
        "object": kind,
        "created": job.created,
        "model": job.model,
        "system_fingerprint": fingerprint(digest),
    }


def _choice(job: Job, prompt: int, index: int) -> dict[str, Any]:
    return {"index": prompt * job.n + index}


def _end(choice: dict[str, Any], completion: pb.Completion | pb.GenerateStreamResponse) -> None:
    choice["finish_reason"] = _FINISH_REASONS.get(completion.finish_reason)
    choice["stop_reason"] = None
    if completion.HasField("stop_string"):
        choice["stop_reason"] = completion.stop_string
    elif completion.HasField("stop_token_id"):
        choice["stop_reason"] = completion.stop_token_id


@dataclass(slots=True)
class Tally:
    """Tokens, drafts and times of all prompts of a request."""

    digest: str = ""
    prompt_tokens: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])  # and cached ones
    completion_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    proposers: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    queue_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add_answer(self, answer: pb.GenerateResponse) -> None:
        self.digest = answer.adapter_digest or self.digest
        self._add(len(self.prompt_tokens), answer.usage, answer.timings)

    def add_end(self, prompt: int, chunk: pb.GenerateStreamResponse) -> None:
        """The last chunk of a completion."""
        self._add(prompt, chunk.usage, chunk.timings)

    def _add(self, prompt: int, usage: pb.Usage, timings: pb.Timings) -> None:
        of_prompt = self.prompt_tokens.get(prompt, (0, 0))
        self.prompt_tokens[prompt] = max(of_prompt[0], usage.prompt_tokens), max(of_prompt[1], usage.cached_tokens)
        self.completion_tokens += usage.completion_tokens
        self.drafted += usage.drafted_tokens
        self.accepted += usage.accepted_tokens
        self.steps += usage.steps
        for one in usage.proposers:
            row = self.proposers.setdefault(one.name, {"drafted_tokens": 0, "accepted_tokens": 0})
            row["drafted_tokens"] += one.drafted_tokens
            row["accepted_tokens"] += one.accepted_tokens
        self.queue_s = max(self.queue_s, timings.queue_s)
        self.first_token_s = max(self.first_token_s, timings.time_to_first_token_s)
        self.total_s = max(self.total_s, timings.total_s)

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(tokens for tokens, _ in self.prompt_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self.prompt_tokens.values())},
        }

    def own(self, job: Job) -> dict[str, Any]:
        """The object `loraplex` of an answer. Times are the largest of all prompts."""
        return {
            "adapter_id": job.adapter_id or None,
            "adapter_digest": self.digest or None,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "steps": self.steps,
            "proposers": self.proposers,
            "queue_s": self.queue_s,
            "time_to_first_token_s": self.first_token_s,
            "total_s": self.total_s,
        }


class Logprobs:
    """Logprobs of one choice in OpenAI's two forms; keeps the offset in the text."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._offset = 0
        self._prompt: list[tuple[str, float | None, dict[str, float] | None]] = []

    def begin(self, text: str, prompt: Sequence[pb.TokenLogprob], new: Sequence[pb.TokenLogprob]) -> None:
        """The echoed prompt. Its first token has no logprob, and the wire no row for it: its text is what stands
        before all others."""
        rest = "".join(row.text for row in (*prompt, *new))
        first = text.removesuffix(rest) if text.endswith(rest) else ""
        self._prompt = [(first, None, None), *(self._row(row) for row in prompt)]

    def add(self, rows: Sequence[pb.TokenLogprob]) -> dict[str, Any] | None:
        """Of the next tokens; None where none were asked for."""
        if self._job.num_top_logprobs is None:
            return None
        if self._job.is_chat:
            return {"content": [self._chat_row(row) for row in rows], "refusal": None}
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt, self._prompt = self._prompt, []
        for text, logprob, top in (*prompt, *(self._row(row) for row in rows)):
            found["tokens"].append(text)
            found["token_logprobs"].append(logprob)
            found["top_logprobs"].append(top)
            found["text_offset"].append(self._offset)
            self._offset += len(text)
        return found

    def _row(self, row: pb.TokenLogprob) -> tuple[str, float | None, dict[str, float] | None]:
        top: dict[str, float] = {}
        for one in row.top:
            name = self._name(one)
            top[name] = max(_finite(one.logprob), top.get(name, _MIN_LOGPROB))
        name = self._name(row)
        top.pop(name, None)
        top[name] = _finite(row.logprob)  # in any case, and last
        return name, top[name], top

    def _chat_row(self, row: pb.TokenLogprob) -> dict[str, Any]:
        return {**self._one(row), "top_logprobs": [self._one(one) for one in row.top]}

    def _one(self, row: pb.TokenLogprob | pb.TopLogprob) -> dict[str, Any]:
        is_whole = "\ufffd" not in row.text  # a part of a character has no text
        return {
            "token": self._name(row),
            "logprob": _finite(row.logprob),
            "bytes": list(row.text.encode()) if is_whole else None,
        }

    def _name(self, row: pb.TokenLogprob | pb.TopLogprob) -> str:
        return f"token_id:{row.token_id}" if self._job.tokens_as_ids else row.text


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


class Chunks:
    """Events of one streamed answer, from the wire's messages of all its prompts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tally = Tally()
        self._logprobs: dict[int, Logprobs] = {}
        self._prompt_logprobs: dict[int, Sequence[pb.TokenLogprob]] = {}
        self._num_open = job.n * len(job.requests)
        self._has_begun = False

    def events(self, prompt: int, raw: bytes) -> Iterator[bytes]:
        """Of one message."""
        message = pb.GenerateStreamResponse.FromString(raw)
        self._tally.digest = message.adapter_digest or self._tally.digest
        if not self._has_begun:
            self._has_begun = True
            if self._job.is_chat:
                # All roles come first and in order: clients index choices by what they have seen.
                for index in range(self._num_open):
                    yield self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}})
        if message.prompt_logprobs:
            self._prompt_logprobs[prompt] = message.prompt_logprobs
        choice = _choice(self._job, prompt, message.index)
        rows = self._logprobs.get(choice["index"])
        if rows is None:
            rows = self._logprobs[choice["index"]] = Logprobs(self._job)
            if self._job.echo:
                rows.begin(message.text_delta, self._prompt_logprobs.get(prompt, ()), message.logprobs)
        if self._job.is_chat:
            choice["delta"] = {"content": message.text_delta} if message.text_delta else {}
        else:
            choice["text"] = message.text_delta
        logprobs = rows.add(message.logprobs) if message.logprobs or message.prompt_logprobs else None
        choice["logprobs"] = logprobs
        _end(choice, message)
        if self._job.with_token_ids:
            choice["token_ids"] = list(message.token_ids)
        is_last = message.finish_reason != pb.FINISH_REASON_UNSPECIFIED
        own: dict[str, Any] | None = None
        if is_last:
            self._tally.add_end(prompt, message)
            self._num_open -= 1
            if not self._num_open and not self._job.wants_usage:
                own = self._tally.own(self._job)
        yield self._chunk(choice, own)

    def end(self) -> Iterator[bytes]:
        """The chunk with usage, where it was asked for."""
        if self._job.wants_usage:
            head = _head(self._job, self._kind, self._tally.digest)
            yield _event({**head, "choices": [], "usage": self._tally.usage(), "loraplex": self._tally.own(self._job)})

    @property
    def _kind(self) -> str:
        return "chat.completion.chunk" if self._job.is_chat else "text_completion"

    def _chunk(self, choice: dict[str, Any], own: dict[str, Any] | None = None) -> bytes:
        choice.setdefault("logprobs", None)
        choice.setdefault("finish_reason", None)
        chunk = {**_head(self._job, self._kind, self._tally.digest), "choices": [choice]}
        if self._job.wants_usage:
            chunk["usage"] = None
        if own is not None:
            chunk["loraplex"] = own
        return _event(chunk)


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
