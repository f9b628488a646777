"""Requests of the SDK: options as protobuf messages.

Values that do not fit their field raise InvalidArgument, which names the field; unknown options raise TypeError.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar, cast

from loraplex.options import near_option, taken_by
from loraplex.types import (
    PROPOSERS,
    AdapterState,
    CallOptions,
    ChatOptions,
    GenerateOptions,
    Grammar,
    Hub,
    Member,
    Merge,
    Message,
    PoolingInputs,
    PoolingKind,
    PoolingOptions,
    ScoreMethod,
    Speculation,
    ToolCall,
    Truncate,
)
from loraplex_contracts.adapters import check_adapter_ref, check_adapter_source, check_digest
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.enums import ADAPTER_STATES, POOLINGS, SCORE_METHODS
from loraplex_proto.speculation import put_kind
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2

_AboutAdapter = TypeVar(
    "_AboutAdapter", adapter_pb2.LoadAdapterRequest, adapter_pb2.UnloadAdapterRequest, adapter_pb2.GetAdapterRequest
)
_Pooling = TypeVar("_Pooling", pooling_pb2.EmbedRequest, pooling_pb2.ClassifyRequest, pooling_pb2.ScoreRequest)

# Option -> path in GenerateRequest, for options whose value is the field's.
_FIELDS: Final[dict[str, str]] = {
    "token_ids": "token_ids.ids",
    "adapter_id": "adapter_id",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop": "stopping.include_stop",
    **{name: option.path for name, option in SAMPLING_OPTIONS.items()},
    "n": "n",
    "logprobs": "output.logprobs",
    "top_logprobs": "output.top_logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "omit_token_ids": "output.omit_token_ids",
    "prompt_tokens": "output.prompt_tokens",
    "keep_special_tokens": "output.keep_special_tokens",
    "parse_chat": "output.parse_chat",
    "token_bytes": "output.token_bytes",
    "omit_special_tokens": "omit_special_tokens",
    "max_draft_tokens": "speculation.max_draft_tokens",
    "fixed_draft_length": "speculation.fixed_length",
    "priority": "priority",
    "request_id": "request_id",
    "cache_salt": "cache_salt",
}
# Option -> field of Chat, which takes it as JSON.
_CHAT_JSON: Final = {"tools": "tools_json", "documents": "documents_json", "template_kwargs": "template_kwargs_json"}
# Texts of a message that may be left out: field, key. The second for reasoning is that of other servers.
_MESSAGE_TEXTS: Final = (
    ("name", "name"),
    ("tool_call_id", "tool_call_id"),
    ("reasoning", "reasoning_content"),
    ("reasoning", "reasoning"),
)
_MESSAGE_KEYS: Final = frozenset({*Message.__annotations__, *(key for _, key in _MESSAGE_TEXTS)})
_CHAT_OPTIONS: Final = frozenset({"continue_final_message", "chat_template", *_CHAT_JSON})
_OTHER_OPTIONS: Final = _CHAT_OPTIONS | frozenset(
    {
        *("messages", "omit_generation_prompt", "tool_choice", "parallel_tool_calls", "grammar", "truncate_prompt"),
        *("hub", "in_bucket", "adapters", "merge", "speculation", "timeout_s"),
    }
)

_POOLING_FIELDS: Final = ("adapter_id", "omit_special_tokens", "priority", "request_id", "cache_salt")


def generate_request(prompt: str | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request for texts. Raises InvalidArgument for a value that the wire cannot carry, TypeError for other
    options."""
    given = _with_speculation(_given(options, _OTHER_OPTIONS | _FIELDS.keys()))
    request = inference_pb2.GenerateRequest()
    inputs = [name for name in ("token_ids", "messages") if name in given]
    if prompt is not None:
        inputs.insert(0, "prompt")
        _assign(request, "text", prompt, shown_as="prompt")
    if len(inputs) != 1:
        what = " and ".join(inputs) or "nothing"
        raise InvalidArgument(f"give one of prompt, token_ids and messages; given: {what}", field="input")
    if "token_ids" in given:
        request.token_ids.SetInParent()  # an empty list is a prompt too
    _put_chat(request, given)
    for name, path in _FIELDS.items():
        if name in given:
            _assign(request, path, given[name])
    _put_origin(request, given)
    mixture: Any = given.get("adapters", {})
    if not isinstance(mixture, Mapping):
        raise InvalidArgument(f"adapters takes {{name: weight}}, not {_shown(mixture)}", field="adapters")
    if "adapters" in given and not mixture:
        raise InvalidArgument("`adapters` is empty: name at least one adapter", field="adapters")
    for adapter_id, given_as in cast("Mapping[str, float | Member]", mixture).items():
        member = given_as if isinstance(given_as, Member) else Member(given_as)
        entry = request.adapters.add()
        _assign(entry, "id", adapter_id, shown_as="adapters.id")
        _assign(entry, "weight", member.weight, shown_as="adapters.weight")
        origin = {"hub": member.hub, "in_bucket": member.in_bucket}
        _put_origin(entry, {name: value for name, value in origin.items() if value is not None})
    if "merge" in given:
        merge = given["merge"]
        if not isinstance(merge, Merge):
            raise InvalidArgument(f"merge takes a Merge, not {_shown(merge)}", field="merge")
        for one in fields(merge):
            if getattr(merge, one.name) is not None:
                _assign(request, f"merge.{one.name}", getattr(merge, one.name))
    if "grammar" in given:
        _put_grammar(request.grammar, given["grammar"])
    _put_truncation(request, given)
    if "speculation" in given:
        _put_speculation(request.speculation, given["speculation"])
    _put_ids(request)
    return request


def embed_request(
    inputs: PoolingInputs, pooling: PoolingKind | None, dimensions: int, normalize: bool, options: PoolingOptions
) -> pooling_pb2.EmbedRequest:
    request = _pooling_request(pooling_pb2.EmbedRequest(), inputs, options)
    _assign(request, "dimensions", dimensions)
    request.omit_normalization = not normalize
    _put_choice(request, "pooling", pooling, POOLINGS)
    return request


def classify_request(inputs: PoolingInputs, logits: bool, options: PoolingOptions) -> pooling_pb2.ClassifyRequest:
    request = _pooling_request(pooling_pb2.ClassifyRequest(), inputs, options)
    _assign(request, "logits", logits)
    return request


def score_request(
    query: str | Sequence[int],
    documents: PoolingInputs,
    method: ScoreMethod | None,
    pooling: PoolingKind | None,
    how: Mapping[str, Any],
    options: PoolingOptions,
) -> pooling_pb2.ScoreRequest:
    """The request for scores. `how`: other fields of the request."""
    request = _pooling_request(pooling_pb2.ScoreRequest(), documents, options)
    _put_input(request.query, query, "query")
    for name, value in how.items():
        _assign(request, name, value)
    _put_choice(request, "method", method, SCORE_METHODS)
    _put_choice(request, "pooling", pooling, POOLINGS)
    return request


def _pooling_request(request: _Pooling, inputs: PoolingInputs, options: PoolingOptions) -> _Pooling:
    """The request with the fields that all three kinds have."""
    given = _given(options, frozenset({*_POOLING_FIELDS, "hub", "in_bucket", "truncate_prompt", "timeout_s"}))
    several: Any = inputs
    if isinstance(several, str) or (isinstance(several, Sequence) and several and isinstance(several[0], int)):
        several = [several]
    if not isinstance(several, Iterable):
        raise InvalidArgument(f"`inputs` takes texts or lists of token ids, not {_shown(inputs)}", field="inputs")
    for one in cast("Iterable[Any]", several):
        _put_input(request.inputs.add(), one, "inputs")
    for name in _POOLING_FIELDS:
        if name in given:
            _assign(request, name, given[name])
    _put_origin(request, given)
    _put_truncation(request, given)
    _put_ids(request)
    return request


def _put_ids(
    request: (
        inference_pb2.GenerateRequest
        | pooling_pb2.EmbedRequest
        | pooling_pb2.ClassifyRequest
        | pooling_pb2.ScoreRequest
    ),
) -> None:
    """Checks the adapter's name and gives the request an id, where it has none."""
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)  # it also goes into a header
    if not request.request_id:
        request.request_id = uuid.uuid4().hex  # known even when no answer comes


def _put_input(message: pooling_pb2.PoolingInput, given: Any, field: str) -> None:
    if isinstance(given, str):
        _assign(message, "text", given, shown_as=field)
    else:
        message.token_ids.SetInParent()
        _assign(message, "token_ids.ids", given, shown_as=f"{field}.token_ids.ids")


def _put_choice(request: Any, field: str, given: Any, known: Mapping[str, Any]) -> None:
    if given is None:
        return
    if given not in known:
        raise InvalidArgument(f"`{field}` must be one of {', '.join(known)}; it is {_shown(given)}", field=field)
    setattr(request, field, known[given])


def _put_origin(request: Any, given: Mapping[str, Any]) -> None:
    if "in_bucket" in given:
        _assign(request, "in_bucket", given["in_bucket"])
    if "hub" not in given:
        return
    hub = given["hub"]
    if not isinstance(hub, Hub):
        raise InvalidArgument("hub takes a Hub", field="hub")  # what was given may be a token
    request.hub.SetInParent()
    _assign(request, "hub.revision", hub.revision)
    request.hub.token = hub.token


def _put_truncation(request: Any, given: Mapping[str, Any]) -> None:
    if "truncate_prompt" in given:
        wanted = given["truncate_prompt"]
        truncate = wanted if isinstance(wanted, Truncate) else Truncate(wanted)
        request.truncate_prompt.SetInParent()
        for one in fields(truncate):
            _assign(request, f"truncate_prompt.{one.name}", getattr(truncate, one.name))


def tokenize_request(
    text: str | None,
    messages: Sequence[Message] | None,
    omit_generation_prompt: bool,
    omit_special_tokens: bool,
    *,
    offsets: bool = False,
    options: ChatOptions | None = None,
) -> inference_pb2.TokenizeRequest:
    """The request for tokens. Raises InvalidArgument, TypeError for an unknown option."""
    given = _given(options or {}, _CHAT_OPTIONS | {"adapter_id", "hub", "in_bucket", "timeout_s"})
    request = inference_pb2.TokenizeRequest(omit_special_tokens=omit_special_tokens, offsets=offsets)
    if adapter_id := given.pop("adapter_id", ""):
        _assign(request, "adapter_id", adapter_id)
    _put_origin(request, given)
    if (text is None) == (messages is None):
        raise InvalidArgument("give one of text and messages", field="input")
    if text is not None:
        _assign(request, "text", text)
    else:
        given["messages"] = messages
    _put_chat(request, {"omit_generation_prompt": omit_generation_prompt, **given})
    return request


def detokenize_request(token_ids: Sequence[int], omit_special_tokens: bool) -> inference_pb2.DetokenizeRequest:
    request = inference_pb2.DetokenizeRequest(omit_special_tokens=omit_special_tokens)
    _assign(request, "token_ids", token_ids)
    return request


def status_request(adapter_prefix: str, max_adapters: int) -> status_pb2.GetStatusRequest:
    request = status_pb2.GetStatusRequest()
    _assign(request, "adapter_prefix", adapter_prefix)
    _assign(request, "max_adapters", max_adapters)
    return request


def load_request(adapter_id: str, how: Mapping[str, object]) -> adapter_pb2.LoadAdapterRequest:
    """The request to load an adapter. `how`: other fields of the request, and `hub_token`."""
    request = adapter_pb2.LoadAdapterRequest(token=Hub(token=cast("str", how.get("hub_token", ""))).token)
    for name, value in how.items():
        if name != "hub_token":
            _assign(request, name, value)
    if request.source:
        check_adapter_source(request.source)
    if request.expected_digest:
        check_digest(request.expected_digest)
    return naming(request, adapter_id)


def unload_request(adapter_id: str, if_unused: bool) -> adapter_pb2.UnloadAdapterRequest:
    request = naming(adapter_pb2.UnloadAdapterRequest(), adapter_id)
    _assign(request, "if_unused", if_unused)
    return request


def naming(request: _AboutAdapter, adapter_id: str) -> _AboutAdapter:
    """The request with the adapter's name in it. Raises InvalidArgument."""
    _assign(request, "adapter_id", adapter_id)
    check_adapter_ref(request.adapter_id)
    return request


def list_request(
    include_unloaded: bool, prefix: str, state: AdapterState | None, page_size: int
) -> adapter_pb2.ListAdaptersRequest:
    """The request for the first page of a listing. Raises InvalidArgument."""
    request = adapter_pb2.ListAdaptersRequest()
    values = {"include_unloaded": include_unloaded, "page_size": page_size, "prefix": prefix}
    for name, value in values.items():
        _assign(request, name, value)
    if page_size < 1:
        raise InvalidArgument(f"`page_size` must be at least 1; it is {page_size}", field="page_size")
    if state is not None:
        if state not in ADAPTER_STATES:
            raise InvalidArgument(
                f"`state` must be one of {', '.join(ADAPTER_STATES)}; it is {_shown(state)}", field="state"
            )
        request.state = ADAPTER_STATES[state]
    return request


def call_options(options: CallOptions) -> CallOptions:
    """The same options. Raises TypeError where there is any but `timeout_s`."""
    _given(options, frozenset({"timeout_s"}))
    return options


def _given(options: GenerateOptions | CallOptions | PoolingOptions, known: frozenset[str]) -> dict[str, Any]:
    for name in options:
        if name not in known:
            near = near_option(name, known)
            raise TypeError(f"there is no option {name!r}; {near or 'there are ' + ', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None}


def _put_chat(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, given: Mapping[str, Any]) -> None:
    """Messages and the options that go with them."""
    if "messages" not in given:
        for name in ("omit_generation_prompt", "parallel_tool_calls", "tool_choice", *sorted(_CHAT_OPTIONS)):
            if given.get(name):
                field = "chat.template" if name == "chat_template" else f"chat.{_CHAT_JSON.get(name, name)}"
                raise InvalidArgument(f"{name} goes with messages", field=field)
        return
    _put_messages(request.chat, given["messages"])
    for name in ("omit_generation_prompt", "continue_final_message"):
        if given.get(name):
            _assign(request, f"chat.{name}", given[name])
    if "chat_template" in given:
        _assign(request, "chat.template", given["chat_template"])
    if "parallel_tool_calls" in given:
        _assign(request, "chat.parallel_tool_calls", given["parallel_tool_calls"])
    if "tool_choice" in given:
        _put_tool_choice(request.chat.tool_choice, given["tool_choice"])
    for name, field in _CHAT_JSON.items():
        if name in given:
            setattr(request.chat, field, _as_json(given[name], f"chat.{field}"))


def _as_json(value: Any, field: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"`{field}` cannot be {_shown(value)}: it is not JSON", field=field) from error


def _put_messages(chat: inference_pb2.Chat, messages: Sequence[Message]) -> None:
    chat.SetInParent()
    given: Any = messages  # a caller without a type checker gives anything
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or not all(map(_is_mapping, messages)):
        raise InvalidArgument(
            f"messages takes a list of {{'role': ..., 'content': ...}}, not {_shown(messages)}", field="chat.messages"
        )
    for number, one in enumerate(cast("Sequence[Mapping[Any, Any]]", messages)):
        for name, value in one.items():
            # An answer of OpenAI's library that comes back as a message has keys without a value.
            is_empty = value is None or value is False or (isinstance(value, str | list | dict | tuple) and not value)
            if name not in _MESSAGE_KEYS and not is_empty:
                raise InvalidArgument(
                    f"`messages[{number}]` cannot have {_shown(name)}: leave it out; a message has "
                    f"{', '.join(Message.__annotations__)}",
                    field="chat.messages",
                )
        message = chat.messages.add()
        _assign(message, "role", one.get("role"), shown_as="chat.messages.role")
        calls: Any = one.get("tool_calls") or ()
        if not calls or one.get("content") is not None:
            _assign(message, "content", one.get("content"), shown_as="chat.messages.content")
        for name, key in _MESSAGE_TEXTS:
            if one.get(key) is not None:
                _assign(message, name, one[key], shown_as=f"chat.messages.{name}")
        for call in calls:
            _put_tool_call(message.tool_calls.add(), call)


def _put_tool_call(message: inference_pb2.ToolCall, call: ToolCall) -> None:
    path = "chat.messages.tool_calls"
    function: Any = call.get("function") if _is_mapping(call) else None
    if not _is_mapping(function):
        raise InvalidArgument(
            f"tool_calls takes a list of {{'function': {{'name': ..., 'arguments': ...}}}}, not {_shown(call)}",
            field=path,
        )
    _assign(message, "name", function.get("name"), shown_as=f"{path}.name")
    if call.get("id") is not None:
        _assign(message, "id", call.get("id"), shown_as=f"{path}.id")
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else _as_json(arguments, f"{path}.arguments_json")
    _assign(message, "arguments_json", text, shown_as=f"{path}.arguments_json")


def _put_tool_choice(message: inference_pb2.ToolChoice, wanted: Any) -> None:
    if wanted in ("none", "auto", "required"):
        setattr(message, wanted, True)
        return
    function: Any = wanted.get("function") if _is_mapping(wanted) else None
    if not _is_mapping(function):
        raise InvalidArgument(
            f"tool_choice cannot be {_shown(wanted)}: use 'none', 'auto', 'required' or "
            "{'function': {'name': ...}}",
            field="chat.tool_choice",
        )
    _assign(message, "name", function.get("name"), shown_as="chat.tool_choice.name")


def _with_speculation(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the fields of a `Speculation` in its place."""
    whole = given.get("speculation")
    if not isinstance(whole, Speculation):
        return given
    parts = {
        "speculation": whole.kind,
        "max_draft_tokens": whole.max_draft_tokens,
        "fixed_draft_length": whole.fixed_length,
    }
    rest = {name: value for name, value in given.items() if name != "speculation"}
    for name, value in parts.items():
        if value is None:
            continue
        if name in rest:
            raise InvalidArgument(f"{name} is given twice, as an option and in speculation", field=_FIELDS[name])
        rest[name] = value
    return rest


def _put_speculation(message: inference_pb2.Speculation, wanted: Any) -> None:
    kind = PROPOSERS.get(type(wanted))
    parameters = put_kind(message, kind or wanted)
    for one in fields(wanted) if kind else ():
        _assign(parameters, one.name, getattr(wanted, one.name), shown_as=f"speculation.{kind}.{one.name}")


# Kind of grammar -> field of the message.
_GRAMMARS: Final = {
    **{name: name for name in ("json_schema", "json_object", "regex", "lark", "gbnf")},
    "choice": "choice.texts",
    "structural_tag": "structural_tag_json",
}
# What fields take that hold JSON.
_TAKEN: Final = {
    "json_schema": "it takes a schema, as a mapping or as JSON",
    "structural_tag_json": "it takes a mapping, or one as JSON",
}


def _put_grammar(message: inference_pb2.Grammar, wanted: Grammar) -> None:
    given: Any = wanted  # a caller without a type checker gives anything
    kinds = {kind: getattr(given, kind) for kind in _GRAMMARS} if isinstance(given, Grammar) else {}
    kinds = {kind: value for kind, value in kinds.items() if value is not None}
    if len(kinds) != 1:
        raise InvalidArgument(
            f"grammar takes a loraplex.Grammar of one kind ({', '.join(_GRAMMARS)}), not {_shown(given)}",
            field="grammar",
        )
    ((kind, value),) = kinds.items()
    path = _GRAMMARS[kind]
    if kind in ("json_schema", "structural_tag") and _is_mapping(value):
        value = _as_json(value, f"grammar.{path}")
    if kind == "choice":
        message.choice.SetInParent()
    _assign(message, path, value, shown_as=f"grammar.{path}")
    message.compact = wanted.compact


def _assign(message: Any, path: str, value: Any, *, shown_as: str = "") -> None:
    """Sets the field at `path`. Raises InvalidArgument naming it when the value does not fit its type."""
    *above, name = path.split(".")
    for part in above:
        message = getattr(message, part)
    current = getattr(message, name)
    try:
        if not hasattr(current, "MergeFrom"):
            setattr(message, name, value)
        elif isinstance(value, Mapping):
            current.update(value)
        else:
            current.extend([value] if isinstance(value, str) else value)
    except (TypeError, ValueError, AttributeError) as error:  # what protobuf raises; UnicodeEncodeError is a ValueError
        field = shown_as or path
        takes = taken_by(name) or _TAKEN.get(path) or ("it takes a string" if isinstance(current, str) else "")
        why = ": it is not text in UTF-8" if isinstance(error, UnicodeEncodeError) else takes and f"; {takes}"
        raise InvalidArgument(f"`{field}` cannot be {_shown(value)}{why}", field=field) from error


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
