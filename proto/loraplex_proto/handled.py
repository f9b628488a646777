"""Which fields of requests this version acts on: any other that is set is refused, never silently ignored.

Owns the tables. Knows nothing of what values are allowed (`validate.py` does).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from loraplex_contracts.errors import Unimplemented
from loraplex_contracts.sampling import SAMPLING_OPTIONS

MAX_UNKNOWN_BYTES: Final = 1 << 16  # of fields that each get a look

# Every leaf that this version acts on, by request message. A set field that is in neither table is refused as well, so
# a field that is added to the wire stays refused until somebody has made it work and written it down here.
HANDLED: Final[dict[str, frozenset[str]]] = {
    "GenerateRequest": frozenset(
        {
            "text",
            "token_ids.ids",
            "chat.messages.role",
            "chat.messages.content",
            "chat.omit_generation_prompt",
            "adapter_id",
            *(option.path for option in SAMPLING_OPTIONS.values()),
            "stopping.max_tokens",
            "stopping.min_tokens",
            "stopping.stop",
            "stopping.stop_token_ids",
            "stopping.ignore_eos",
            "stopping.include_stop",
            "speculation.off",
            "speculation.auto",
            "speculation.medusa.adapter_id",
            "speculation.prompt_lookup.min_ngram",
            "speculation.prompt_lookup.max_ngram",
            "speculation.draft_model.name",
            "speculation.max_draft_tokens",
            "speculation.fixed_length",
            "output.logprobs",
            "output.top_logprobs",
            "output.prompt_logprobs",
            "output.echo",
            "output.omit_token_ids",
            "n",
            "priority",
            "request_id",
            "cache_salt",
        }
    ),
    "TokenizeRequest": frozenset(
        {
            "text",
            "chat.messages.role",
            "chat.messages.content",
            "chat.omit_generation_prompt",
            "omit_special_tokens",
        }
    ),
    "LoadAdapterRequest": frozenset({"adapter_id", "pin"}),
    "UnloadAdapterRequest": frozenset({"adapter_id"}),
    "GetAdapterRequest": frozenset({"adapter_id"}),
    "ListAdaptersRequest": frozenset({"include_unloaded", "page_size", "page_token", "prefix", "state"}),
    "WatchLoadRequest": frozenset({"min_interval_s"}),
    "GetInfoRequest": frozenset(),
    "GetLoadRequest": frozenset(),
}

# What the wire has and this version refuses, with what to do instead. A path stands for everything below it.
NOT_BUILT: Final[dict[str, dict[str, str]]] = {
    "GenerateRequest": {
        "adapters": "mixtures of adapters are not served; name one adapter in `adapter_id`",
    },
}


def refuse_what_is_not_acted_on(request: Message) -> None:
    name = request.DESCRIPTOR.name
    handled, not_built = HANDLED[name], NOT_BUILT.get(name, {})
    for path in set_paths(request, "", not_built):
        if path in not_built:
            raise Unimplemented(f"`{path}` is not available in this version: {not_built[path]}", field=path)
        if path not in handled:
            raise _unknown(path)
    _refuse_many_unknown_fields(request)
    for path in _unknown_paths(request, ""):
        raise _unknown(path)


def _unknown(path: str) -> Unimplemented:
    return Unimplemented(f"`{path}` is not known to this version of the server; leave it out", field=path)


def _refuse_many_unknown_fields(request: Message) -> None:
    """Each by itself would take seconds."""
    if request.ByteSize() <= MAX_UNKNOWN_BYTES:
        return
    known = type(request)()
    known.CopyFrom(request)
    known.DiscardUnknownFields()
    num_bytes = request.ByteSize() - known.ByteSize()
    if num_bytes > MAX_UNKNOWN_BYTES:
        raise Unimplemented(
            f"{num_bytes} bytes of the request are fields that are not known to this version of the server; leave them "
            "out"
        )


def set_paths(message: Message, prefix: str, stop_at: dict[str, str]) -> Iterator[str]:
    """The dotted path of every leaf that is set."""
    for field, value in message.ListFields():
        path = prefix + field.name
        if not _is_message(field) or path in stop_at:
            yield path
            continue
        for one in _values(field, value):
            yield from set_paths(one, path + ".", stop_at)


def _unknown_paths(message: Message, prefix: str) -> Iterator[str]:
    """The dotted path of every field whose number this version does not know."""
    for field, value in message.ListFields():
        if _is_message(field):
            for one in _values(field, value):
                yield from _unknown_paths(one, f"{prefix}{field.name}.")
    for unknown in UnknownFieldSet(message):
        yield f"{prefix}#{unknown.field_number}"


def _is_message(field: FieldDescriptor) -> bool:
    """Or several; neither a scalar nor a map."""
    return field.message_type is not None and not field.message_type.GetOptions().map_entry


def _values(field: FieldDescriptor, value: Any) -> Any:
    return [value] if field.has_presence else value  # of messages, only repeated ones have no presence
