"""Validation of requests off the wire: bytes, known fields, allowed values, the model's limits.

A worker validates a message in full: it must be one (`parse`), every field that is set must be one that this version
knows (any other is refused, never silently ignored), every value one that some model could take, and the whole must fit
this model (`check_for_model`). A router checks the names only that it routes by (`check_names`). Owns the limits. Knows
nothing of tokenizers, adapters' files or server state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from loraplex_contracts.adapters import (
    MAX_TEMPLATE_BYTES,
    AdapterId,
    check_adapter_id,
    check_adapter_ref,
    check_adapter_source,
    check_digest,
    check_hub_token,
    check_id,
    check_on_hub,
    check_revision,
    check_role,
)
from loraplex_contracts.errors import ContextLengthExceeded, InvalidAdapterId, InvalidArgument, Unimplemented
from loraplex_contracts.mixtures import MAJORITY_SIGNS, MAX_MEMBERS, MAX_WEIGHT, MERGE_STRATEGIES, mixture_name
from loraplex_contracts.request import MAX_DRAFT_TOKENS
from loraplex_contracts.sampling import SAMPLING_OPTIONS, SamplingOption
from loraplex_proto.paging import ListQuery, list_query
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2, worker_pb2

MAX_COMPLETIONS: Final = 64
MAX_NEW_TOKENS: Final = 1 << 24  # beyond any context there is; the model's own limit is checked apart
MAX_TOP_LOGPROBS: Final = 20
MAX_STOP_STRINGS: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_STOP_TOKEN_IDS: Final = 128
MAX_CHAT_MESSAGES: Final = 4096
MAX_TOOL_CALLS: Final = 128  # of one message
MAX_POOLING_INPUTS: Final = 2048
MAX_CHAT_JSON_BYTES: Final = 1 << 20
MAX_GRAMMAR_BYTES: Final = 1 << 18
MAX_WATCH_INTERVAL_S: Final = 60.0
MIN_WATCH_INTERVAL_S: Final = 0.02
DEFAULT_WATCH_INTERVAL_S: Final = 0.2
DEFAULT_STATUS_ADAPTERS: Final = 100
MAX_STATUS_ADAPTERS: Final = 1000
HEARTBEAT_INTERVALS: Final = 10  # of a watch in which nothing changes
MAX_NGRAM: Final = 64
MAX_UNKNOWN_BYTES: Final = 1 << 16  # of fields that each get a look
_IDS_AT_ONCE: Final = 1 << 14

M = TypeVar("M", bound=Message)

PoolingRequest = pooling_pb2.EmbedRequest | pooling_pb2.ClassifyRequest | pooling_pb2.ScoreRequest
HasOrigin = inference_pb2.GenerateRequest | inference_pb2.AdapterWeight | inference_pb2.TokenizeRequest | PoolingRequest
AdapterRequest = adapter_pb2.LoadAdapterRequest | adapter_pb2.UnloadAdapterRequest | adapter_pb2.GetAdapterRequest


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """The loaded model's bounds on a request."""

    vocab_size: int
    max_context_tokens: int


# --- messages and their fields --------------------------------------------------------------------------------------


def parse(cls: type[M], raw: bytes) -> M:
    """The message in these bytes. Raises InvalidArgument where there is none."""
    try:
        return cls.FromString(raw)
    except DecodeError as error:
        name = cls.DESCRIPTOR.full_name
        # Which of the two it is, earlier releases of protobuf do not tell.
        raise InvalidArgument(
            f"the request's bytes are not a {name}, or a text in it is not UTF-8; use the published .proto files"
        ) from error


def refuse_unhandled(request: Message) -> None:
    """Raises Unimplemented for a field, or for a value of an enum, that this version does not know."""
    for path, number in _unknown_numbers(request, ""):
        raise Unimplemented(
            f"`{path}` has the value {number}, which this version of the server does not know", field=path
        )
    refuse_unknown(request)


def refuse_unknown(request: Message) -> None:
    """Raises Unimplemented for a field whose number this version does not know."""
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_bytes = request.ByteSize() - known.ByteSize()
    if num_bytes > MAX_UNKNOWN_BYTES:  # a look at each would take seconds
        raise Unimplemented(
            f"{num_bytes} bytes of the request are fields that are not known to this version of the server; leave them "
            "out"
        )
    if num_bytes:
        path = next(_unknown_paths(request, ""))
        raise Unimplemented(f"`{path}` is not known to this version of the server; leave it out", field=path)


def _unknown_numbers(message: Message, prefix: str) -> Iterator[tuple[str, int]]:
    """The dotted path and the number of every value that its enum does not have."""
    for field, value in message.ListFields():
        path = prefix + field.name
        if field.enum_type is not None:
            numbers = cast("Sequence[int]", [value] if isinstance(value, int) else value)
            yield from ((path, number) for number in numbers if number not in field.enum_type.values_by_number)
        for one in _messages(field, value) or ():
            yield from _unknown_numbers(one, path + ".")


def _unknown_paths(message: Message, prefix: str) -> Iterator[str]:
    """The dotted path of every field whose number this version does not know."""
    for field, value in message.ListFields():
        for one in _messages(field, value) or ():
            yield from _unknown_paths(one, f"{prefix}{field.name}.")
    for unknown in UnknownFieldSet(message):
        yield f"{prefix}#{unknown.field_number}"


def _messages(field: FieldDescriptor, value: Any) -> Sequence[Message] | None:
    """The messages in a field; None in a scalar or a map."""
    if field.message_type is None or field.message_type.GetOptions().map_entry:
        return None
    return [value] if field.has_presence else value  # of messages, only repeated ones have no presence


# --- values that no model takes -------------------------------------------------------------------------------------


# Path, least and most of a number, and the end of the error's sentence.
_BOUNDS: Final = (
    ("n", 0, MAX_COMPLETIONS, ""),
    ("priority", -100, 100, ""),
    ("stopping.max_tokens", 1, MAX_NEW_TOKENS, ""),
    ("stopping.min_tokens", 0, MAX_NEW_TOKENS, ""),
    ("speculation.max_draft_tokens", 0, MAX_DRAFT_TOKENS, "; 0 leaves it to the server"),
    ("output.top_logprobs", 0, MAX_TOP_LOGPROBS, ""),
    ("truncate_prompt.max_tokens", 0, MAX_NEW_TOKENS, "; 0 is what the context has room for"),
)


def check_generate(request: inference_pb2.GenerateRequest) -> None:
    """All checks that need no model. Raises InvalidArgument or Unimplemented with the field's path."""
    _check_counts(request)
    refuse_unhandled(request)
    _check_names(request)
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("the request has no prompt: set `text`, `token_ids` or `chat`", field="input")
    if kind == "token_ids" and not request.token_ids.ids:
        raise InvalidArgument("`token_ids.ids` is empty: give at least one token", field="token_ids.ids")
    if kind == "chat":
        _check_chat(request.chat)
    elif request.output.parse_chat:
        raise InvalidArgument(
            f"`output.parse_chat` goes with `chat`, not with `{kind}`; leave it out", field="output.parse_chat"
        )
    _check_omits_special(request)
    if request.cache_salt:
        check_id(request.cache_salt, field="cache_salt")
    for bound in _BOUNDS:
        _check_bound(request, *bound)
    _check_merge(request)
    _check_origin(request, request.adapter_id)
    _check_stopping(request.stopping)
    if request.HasField("grammar"):
        _check_grammar(request)
    _check_forced_calls(request)
    _check_sampling(request.sampling)
    _check_speculation(request.speculation)


def check_names(request: inference_pb2.GenerateRequest) -> None:
    """The part that a router checks: the names that it authorizes, routes and logs by. Unknown fields are refused,
    because they could name adapters unseen. Raises InvalidArgument or Unimplemented with the field's path."""
    refuse_unknown(request)
    _check_names(request)


def _check_names(request: inference_pb2.GenerateRequest) -> None:
    _check_members(request)
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)
    if medusa_id := request.speculation.medusa.adapter_id:
        check_adapter_ref(medusa_id, field="speculation.medusa.adapter_id")
    if request.request_id:
        check_id(request.request_id, field="request_id")


def _check_members(request: inference_pb2.GenerateRequest) -> None:
    if request.adapters and request.adapter_id:
        raise InvalidArgument("give `adapter_id` or `adapters`, not both", field="adapters")
    if len(request.adapters) > MAX_MEMBERS:
        raise InvalidArgument(
            f"`adapters` takes {MAX_MEMBERS} adapters; there are {len(request.adapters)}", field="adapters"
        )
    for member in request.adapters:
        check_adapter_id(member.id, field="adapters.id")
        if not math.isfinite(member.weight) or not 0 < abs(member.weight) <= MAX_WEIGHT:
            raise InvalidArgument(
                f"`adapters.weight` must be a finite number other than 0 and at most {MAX_WEIGHT:g} in size; that of "
                f"{member.id!a} is {member.weight:g}",
                field="adapters.weight",
            )
        _check_origin(member, member.id, "adapters.")


def _check_merge(request: inference_pb2.GenerateRequest) -> None:
    if not request.HasField("merge"):
        return
    merge = request.merge
    if not request.adapters:
        raise InvalidArgument("`merge` goes with `adapters`: name those to merge", field="merge")
    for path, value, known in (
        ("merge.strategy", merge.strategy, MERGE_STRATEGIES),
        ("merge.majority_sign", merge.majority_sign or "total", MAJORITY_SIGNS),
    ):
        if value not in known:
            raise InvalidArgument(
                f"`{path}` must be one of {', '.join(known)}; it is {value[:40]!a}"
                + ("; leave `merge` out for the exact sum" if value in ("", "cat") else ""),
                field=path,
            )
    if merge.strategy != "linear" and not merge.HasField("density"):
        raise InvalidArgument(f"`merge.density` is needed for {merge.strategy}", field="merge.density")
    if merge.HasField("density") and not 0 < merge.density <= 1:
        raise InvalidArgument(
            f"`merge.density` must be above 0 and at most 1; it is {merge.density:g}", field="merge.density"
        )
    prunes, signs = merge.strategy != "linear", merge.strategy in ("ties", "dare_ties")
    for name, is_set, is_used in (
        ("density", merge.HasField("density"), prunes),
        ("majority_sign", bool(merge.majority_sign), signs),
        ("seed", merge.HasField("seed"), merge.strategy in ("dare_linear", "dare_ties")),
    ):
        if is_set and not is_used:
            raise InvalidArgument(f"`merge.{name}` is not for {merge.strategy}; leave it out", field=f"merge.{name}")


def _check_origin(message: HasOrigin, adapter_id: str, path: str = "") -> None:
    """Checks an adapter's origin. `path` stands in front of the names of its fields."""
    beside = f"{path}id" if path else "adapter_id"
    if message.in_bucket and ("/" not in adapter_id or "@" in adapter_id or message.HasField("hub")):
        raise InvalidArgument(
            f"`{path}in_bucket` goes with `{beside}` BUCKET/NAME, without a version and without `{path}hub`",
            field=f"{path}in_bucket",
        )
    if not message.HasField("hub"):
        return
    if "/" not in adapter_id or "@" in adapter_id:
        raise InvalidArgument(
            f"`{path}hub` goes with `{beside}` ORG/NAME, a repository; a version of it is `{path}hub.revision`",
            field=f"{path}hub",
        )
    if message.hub.revision:
        check_revision(message.hub.revision, field=f"{path}hub.revision")
    if message.hub.token:
        check_hub_token(message.hub.token, field=f"{path}hub.token")


def adapter_name_in(request: inference_pb2.GenerateRequest) -> str:
    """Name of the adapter or mixture that the request runs with, as in `Request.adapter_name`. Reads no more members
    than a request may have, so it may come before the checks."""
    return request.adapter_id or mixture_name(one.id for one in request.adapters[:MAX_MEMBERS])


def adapters_in(request: inference_pb2.GenerateRequest) -> tuple[str, ...]:
    """Every adapter that a request names, anywhere in it, each once."""
    names = [request.adapter_id, *(one.id for one in request.adapters), request.speculation.medusa.adapter_id]
    return tuple(dict.fromkeys(name for name in names if name))


def _check_counts(request: inference_pb2.GenerateRequest) -> None:
    """Bounds the numbers of values, before any code looks at each of them."""
    _check_num_messages(request.chat)
    counts = (
        ("stopping.stop", len(request.stopping.stop), MAX_STOP_STRINGS, "strings"),
        ("stopping.stop_token_ids", len(request.stopping.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids"),
        *(
            (option.path, len(getattr(request.sampling, option.name)), option.max_entries, "entries")
            for option in SAMPLING_OPTIONS.values()
            if option.max_entries
        ),
    )
    for path, number, most, what in counts:
        if number > most:
            raise InvalidArgument(f"`{path}` takes {most} {what}; there are {number}", field=path)


def _check_bound(request: Message, path: str, least: int, most: int, beside: str) -> None:
    message: Any = request
    *parents, name = path.split(".")
    for parent in parents:
        message = getattr(message, parent)
    value: int = getattr(message, name)
    is_set = not message.DESCRIPTOR.fields_by_name[name].has_presence or message.HasField(name)
    if is_set and not least <= value <= most:
        rule = f"from {least} to {most}" if least else f"at most {most}"
        raise InvalidArgument(f"`{path}` must be {rule}{beside}; it is {value}", field=path)


def _check_num_messages(chat: inference_pb2.Chat, least: int = 0) -> None:
    if not least <= len(chat.messages) <= MAX_CHAT_MESSAGES:
        raise InvalidArgument(
            f"`chat.messages` must have 1 to {MAX_CHAT_MESSAGES} messages; it has {len(chat.messages)}",
            field="chat.messages",
        )


def _check_chat(chat: inference_pb2.Chat) -> None:
    _check_num_messages(chat, least=1)
    for name in ("tools_json", "documents_json", "template_kwargs_json", "template"):
        num_chars = len(getattr(chat, name))  # of ASCII, where it comes from a JSON library
        most = MAX_TEMPLATE_BYTES if name == "template" else MAX_CHAT_JSON_BYTES
        if num_chars > most:
            raise InvalidArgument(f"`chat.{name}` takes {most} characters; it has {num_chars}", field=f"chat.{name}")
    _check_tool_choice(chat)
    for message in chat.messages:
        check_role(message.role, field="chat.messages.role")
        for name in ("name", "tool_call_id"):
            if value := getattr(message, name):
                check_id(value, field=f"chat.messages.{name}")
        if len(message.tool_calls) > MAX_TOOL_CALLS:
            raise InvalidArgument(
                f"`chat.messages.tool_calls` takes {MAX_TOOL_CALLS} calls; there are {len(message.tool_calls)}",
                field="chat.messages.tool_calls",
            )
        for call in message.tool_calls:
            check_id(call.name, field="chat.messages.tool_calls.name")
            if call.id:
                check_id(call.id, field="chat.messages.tool_calls.id")


def _check_tool_choice(chat: inference_pb2.Chat) -> None:
    match chat.tool_choice.WhichOneof("kind"):
        case "none" | "auto" | "required" as kind if not getattr(chat.tool_choice, kind):
            raise InvalidArgument(
                f"`chat.tool_choice.{kind}` is true or left out, never false", field=f"chat.tool_choice.{kind}"
            )
        case "required" | "name" as kind if not chat.tools_json:
            raise InvalidArgument(
                f"`chat.tool_choice.{kind}` needs tools: set `chat.tools_json`", field=f"chat.tool_choice.{kind}"
            )
        case "name":
            check_id(chat.tool_choice.name, field="chat.tool_choice.name")
        case _:
            pass


def _check_stopping(stopping: inference_pb2.Stopping) -> None:
    if stopping.HasField("max_tokens") and stopping.min_tokens > stopping.max_tokens:
        raise InvalidArgument(
            f"`stopping.min_tokens` is {stopping.min_tokens} and above `stopping.max_tokens`, {stopping.max_tokens}",
            field="stopping.min_tokens",
        )
    for index, text in enumerate(stopping.stop):
        num_bytes = len(text.encode())
        if not 1 <= num_bytes <= MAX_STOP_BYTES:
            raise InvalidArgument(
                f"`stopping.stop` takes strings of 1 to {MAX_STOP_BYTES} bytes; number {index} has {num_bytes}",
                field="stopping.stop",
            )


def _check_grammar(request: inference_pb2.GenerateRequest) -> None:
    """Refuses grammars by their fields alone, before any is compiled."""
    grammar = request.grammar
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument("`grammar` has no kind: set one, such as `json_schema`, or leave it out", field="grammar")
    path = f"grammar.{kind}"
    if kind == "json_object" and not grammar.json_object:
        raise InvalidArgument("`grammar.json_object` is true or left out, never false", field=path)
    if kind == "choice" and not grammar.choice.texts:
        raise InvalidArgument("`grammar.choice.texts` is empty: give at least one", field=path)
    if grammar.ByteSize() > MAX_GRAMMAR_BYTES:
        raise InvalidArgument(f"`{path}` has more than the {MAX_GRAMMAR_BYTES} bytes that a grammar takes", field=path)
    if request.stopping.ignore_eos:
        raise InvalidArgument(
            "`stopping.ignore_eos` would go on behind the end of `grammar`; leave one of them out",
            field="stopping.ignore_eos",
        )


def _check_forced_calls(request: inference_pb2.GenerateRequest) -> None:
    """Refuses what contradicts a forced call of a tool, which holds by a grammar of its own."""
    kind = request.chat.tool_choice.WhichOneof("kind")
    if kind not in ("required", "name"):
        return
    for field, is_set in (
        ("grammar", request.HasField("grammar")),
        ("stopping.ignore_eos", request.stopping.ignore_eos),
    ):
        if is_set:
            raise InvalidArgument(
                f"`chat.tool_choice.{kind}` says what the whole answer is: leave `{field}` out", field=field
            )


def _check_sampling(sampling: inference_pb2.Sampling) -> None:
    for field, value in sampling.ListFields():
        option = SAMPLING_OPTIONS[field.name]
        if not option.max_entries:
            _check_option(option, value, "it is")
        elif isinstance(value, Mapping):
            for key, entry in cast("Mapping[int, float]", value).items():
                _check_option(option, entry, f"for token {key} it is")
        else:
            for index, entry in enumerate(value):
                _check_option(option, entry, f"number {index} is")


def _check_option(option: SamplingOption, value: Any, it_is: str) -> None:
    if not option.is_ok(value):
        shown = ascii(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        raise InvalidArgument(f"`{option.path}` {option.rule}; {it_is} {shown}", field=option.path)


def _check_speculation(speculation: inference_pb2.Speculation) -> None:
    """Refuses what no server could do. Whether this one has the heads or the draft model, the engine checks."""
    match speculation.WhichOneof("kind"):
        case "off" | "auto" as kind:
            if not getattr(speculation, kind):
                raise InvalidArgument(
                    f"`speculation.{kind}` is true or left out, never false", field=f"speculation.{kind}"
                )
            if kind == "off" and speculation.fixed_length:
                raise InvalidArgument(
                    "the kind `off` drafts nothing and `speculation.fixed_length` always: leave one of them out",
                    field="speculation.fixed_length",
                )
        case "prompt_lookup":
            _check_ngram(speculation.prompt_lookup)
        case "draft_model" if speculation.draft_model.name:
            check_id(speculation.draft_model.name, field="speculation.draft_model.name")
        case _:
            pass


def _check_ngram(lookup: inference_pb2.PromptLookupSpeculation) -> None:
    path = "speculation.prompt_lookup"
    for name in ("min_ngram", "max_ngram"):
        value: int = getattr(lookup, name)
        if value > MAX_NGRAM:
            raise InvalidArgument(
                f"`{path}.{name}` must be at most {MAX_NGRAM}; it is {value}; 0 leaves it to the server",
                field=f"{path}.{name}",
            )
    if lookup.max_ngram and lookup.min_ngram > lookup.max_ngram:
        raise InvalidArgument(
            f"`{path}.min_ngram` is {lookup.min_ngram} and above `{path}.max_ngram`, {lookup.max_ngram}",
            field=f"{path}.min_ngram",
        )


def check_tokenize(request: inference_pb2.TokenizeRequest) -> None:
    """Raises InvalidArgument or Unimplemented with the field's path."""
    _check_num_messages(request.chat)
    refuse_unhandled(request)
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidArgument("the request has nothing to tokenize: set `text` or `chat`", field="input")
    if kind == "chat":
        _check_chat(request.chat)
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)
    _check_origin(request, request.adapter_id)
    _check_omits_special(request)


def _check_omits_special(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest) -> None:
    if request.omit_special_tokens and request.WhichOneof("input") != "text":
        raise InvalidArgument(
            "`omit_special_tokens` goes with `text`: a chat's special tokens are its template's, which writes them "
            "all; leave it out with any other input",
            field="omit_special_tokens",
        )


def check_pooling(request: PoolingRequest) -> None:
    """All checks that need no model. Raises InvalidArgument or Unimplemented with the field's path."""
    num_inputs = len(request.inputs)
    if num_inputs > MAX_POOLING_INPUTS:  # before any code looks at each
        raise InvalidArgument(f"`inputs` takes {MAX_POOLING_INPUTS} inputs; there are {num_inputs}", field="inputs")
    refuse_unhandled(request)
    _check_pooling_names(request)
    if not num_inputs:
        raise InvalidArgument("`inputs` is empty: give at least one input", field="inputs")
    _check_origin(request, request.adapter_id)
    if request.cache_salt:
        check_id(request.cache_salt, field="cache_salt")
    for path, least, most, beside in _BOUNDS:
        if path in ("priority", "truncate_prompt.max_tokens"):
            _check_bound(request, path, least, most, beside)
    for one in request.inputs:
        check_pooling_input(one, "inputs")


def check_pooling_input(one: pooling_pb2.PoolingInput, field: str) -> None:
    """Raises InvalidArgument for an input without content, or a chat that no template takes."""
    kind = one.WhichOneof("input")
    if kind is None:
        raise InvalidArgument(f"an input of `{field}` has none of `text`, `token_ids` and `chat`", field=field)
    if kind == "token_ids" and not one.token_ids.ids:
        raise InvalidArgument(f"`{field}.token_ids.ids` is empty: give a token", field=f"{field}.token_ids.ids")
    if kind == "chat":
        _check_num_messages(one.chat)
        _check_chat(one.chat)


def check_pooling_names(request: PoolingRequest) -> None:
    """The part that a router checks, as `check_names`. Raises InvalidArgument or Unimplemented with the field."""
    refuse_unknown(request)
    _check_pooling_names(request)


def pooling_adapters_in(request: PoolingRequest) -> tuple[str, ...]:
    """Does what `adapters_in` does, for a request of PoolingService."""
    return (request.adapter_id,) if request.adapter_id else ()


def _check_pooling_names(request: PoolingRequest) -> None:
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)
    if request.request_id:
        check_id(request.request_id, field="request_id")


def check_score(request: pooling_pb2.ScoreRequest) -> None:
    """Checks what `check_pooling` does, and the fields that only this call has. Raises InvalidArgument."""
    check_pooling(request)
    if not request.HasField("query"):
        raise InvalidArgument("the request has no `query`: say what the documents are scored against", field="query")
    check_pooling_input(request.query, "query")
    kinds = {one.WhichOneof("input") for one in (request.query, *request.inputs)}
    if request.method != pooling_pb2.SCORE_METHOD_COSINE and ("chat" in kinds or len(kinds) > 1):
        raise InvalidArgument(
            "query and documents are one text where they are scored together: give all as `text`, or all as "
            "`token_ids`; chats only with `method` cosine",
            field="inputs",
        )
    _check_score_options(request)
    if not request.template:
        return
    if kinds != {"text"}:
        raise InvalidArgument("`template` goes with `text`: token ids are put together as they are", field="template")
    for name in ("{query}", "{document}"):
        if request.template.count(name) != 1:
            raise InvalidArgument(f"`template` must have {name} in it, once", field="template")


# Options that only some methods of scores read; without a method a score is by a classifier or the cosine.
_SCORE_OPTIONS: Final[Mapping[str, tuple[pooling_pb2.ScoreMethod.ValueType, ...]]] = {
    "template": (
        pooling_pb2.SCORE_METHOD_UNSPECIFIED,
        pooling_pb2.SCORE_METHOD_CLASSIFIER,
        pooling_pb2.SCORE_METHOD_NEXT_TOKEN,
    ),
    **dict.fromkeys(("true_token", "false_token"), (pooling_pb2.SCORE_METHOD_NEXT_TOKEN,)),
    "pooling": (pooling_pb2.SCORE_METHOD_UNSPECIFIED, pooling_pb2.SCORE_METHOD_COSINE),
}


def _check_score_options(request: pooling_pb2.ScoreRequest) -> None:
    """Raises InvalidArgument for an option that the method does not read."""
    for name, methods in _SCORE_OPTIONS.items():
        if getattr(request, name) and request.method not in methods:
            names = [pooling_pb2.ScoreMethod.Name(one).removeprefix("SCORE_METHOD_").lower() for one in methods if one]
            raise InvalidArgument(f"`{name}` goes with `method` {' or '.join(names)}", field=name)


def check_adapter_request(request: AdapterRequest) -> AdapterId:
    """The adapter that the request names. Raises InvalidAdapterId or Unimplemented."""
    refuse_unhandled(request)
    if not request.adapter_id:
        raise InvalidAdapterId("`adapter_id` is empty: name the adapter", field="adapter_id")
    if isinstance(request, adapter_pb2.LoadAdapterRequest):
        if request.source:
            check_adapter_source(request.source)
        if request.revision:
            check_on_hub(request.source, field="revision")
            check_revision(request.revision)
        if request.token:
            check_on_hub(request.source, field="token")
            check_hub_token(request.token, field="token")
        if request.expected_digest:
            check_digest(request.expected_digest)
        return check_adapter_id(request.adapter_id)  # a load makes versions
    return check_adapter_ref(request.adapter_id)


def check_list_adapters(request: adapter_pb2.ListAdaptersRequest) -> ListQuery:
    """The query of the request. Raises InvalidArgument or Unimplemented with the field."""
    refuse_unhandled(request)
    return list_query(request)


def check_watch_load(request: worker_pb2.WatchLoadRequest) -> None:
    """Raises InvalidArgument for an interval that is not a number of seconds from 0 to 60."""
    refuse_unhandled(request)
    interval_s = request.min_interval_s
    if not 0 <= interval_s <= MAX_WATCH_INTERVAL_S:  # NaN fails it too
        raise InvalidArgument(
            f"`min_interval_s` must be from 0 to {MAX_WATCH_INTERVAL_S:g}; it is {interval_s:g}", field="min_interval_s"
        )


def check_status(request: status_pb2.GetStatusRequest) -> None:
    """Raises InvalidArgument for more adapters than an answer has."""
    refuse_unhandled(request)
    if request.max_adapters > MAX_STATUS_ADAPTERS:
        raise InvalidArgument(
            f"`max_adapters` must be at most {MAX_STATUS_ADAPTERS}; it is {request.max_adapters}", field="max_adapters"
        )


def watch_interval_s(request: worker_pb2.WatchLoadRequest) -> float:
    """Seconds between two reports of a watch, at least."""
    return max(MIN_WATCH_INTERVAL_S, request.min_interval_s or DEFAULT_WATCH_INTERVAL_S)


# --- values that this model does not take ---------------------------------------------------------------------------


def check_for_model(request: inference_pb2.GenerateRequest, limits: ModelLimits) -> None:
    """Token ids against the vocabulary, lengths against the context. Call after `check_generate`; where the prompt is
    text or truncated, `check_prompt_length` follows once it is tokens. Raises InvalidArgument with the field's path."""
    if request.WhichOneof("input") == "token_ids" and not request.HasField("truncate_prompt"):
        check_prompt_length(len(request.token_ids.ids), limits, field="token_ids.ids")  # before each id is looked at
    check_token_ids(request.token_ids.ids, "token_ids.ids", limits)
    check_token_ids(request.stopping.stop_token_ids, "stopping.stop_token_ids", limits)
    for option in SAMPLING_OPTIONS.values():
        if option.has_token_ids:
            check_token_ids(list(getattr(request.sampling, option.name)), option.path, limits)
    for name in ("max_tokens", "min_tokens"):
        value: int = getattr(request.stopping, name)
        if value > limits.max_context_tokens:
            raise InvalidArgument(
                f"`stopping.{name}` is {value}; this model's context holds {limits.max_context_tokens} tokens",
                field=f"stopping.{name}",
            )
    if request.output.top_logprobs > limits.vocab_size:
        raise InvalidArgument(
            f"`output.top_logprobs` is above the vocabulary's {limits.vocab_size} tokens", field="output.top_logprobs"
        )


def check_token_ids(token_ids: Any, path: str, limits: ModelLimits) -> None:
    """Raises InvalidArgument for an id beyond the vocabulary."""
    # Unsigned on the wire, so this is the only bound. In steps, so that other threads go on in between.
    steps = range(0, len(token_ids), _IDS_AT_ONCE)
    largest = max((max(token_ids[start : start + _IDS_AT_ONCE]) for start in steps), default=0)
    if largest >= limits.vocab_size:
        raise InvalidArgument(
            f"`{path}` has token {largest}; this model's vocabulary ends at {limits.vocab_size - 1}", field=path
        )


def check_prompt_length(
    num_prompt_tokens: int, limits: ModelLimits, *, field: str = "input", makes_tokens: bool = True
) -> None:
    """A prompt needs a token to start from and, where it makes tokens, room for one. May raise
    ContextLengthExceeded."""
    if num_prompt_tokens == 0:
        raise InvalidArgument(
            "the prompt has no tokens, and this model's tokenizer adds none of its own: give some text", field=field
        )
    if num_prompt_tokens > limits.max_context_tokens - makes_tokens:
        at_least = ", at least one of them new" if makes_tokens else ""
        raise ContextLengthExceeded(
            f"the prompt is too long: this model's maximum context length is {limits.max_context_tokens} tokens"
            f"{at_least}, and the prompt has {num_prompt_tokens} tokens; shorten it",
            field=field,
        )
