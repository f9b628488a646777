"""Conversion of the SDK's options to the wire's messages.

Pure: no channel, no clock, and the only state is a random id.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from loraplex.types import (
    AdapterState,
    AnySpeculation,
    CallOptions,
    DraftModel,
    GenerateOptions,
    Medusa,
    Message,
    PromptLookup,
    Speculation,
)
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.ids import check_adapter_id
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.enums import ADAPTER_STATES
from loraplex_proto.v1 import adapter_pb2, inference_pb2

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
    "max_draft_tokens": "speculation.max_draft_tokens",
    "fixed_draft_length": "speculation.fixed_length",
    "priority": "priority",
    "request_id": "request_id",
    "cache_salt": "cache_salt",
}
_OTHER_OPTIONS: Final = frozenset({"messages", "omit_generation_prompt", "adapters", "speculation", "timeout_s"})

_AboutAdapter = TypeVar(
    "_AboutAdapter",
    adapter_pb2.LoadAdapterRequest,
    adapter_pb2.UnloadAdapterRequest,
    adapter_pb2.GetAdapterRequest,
)

_WITHOUT_MESSAGES: Final = "omit_generation_prompt goes with messages"


def generate_request(prompt: str | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument for a value that the wire cannot carry, TypeError for an option that there is not."""
    given = _with_speculation(_given(options, _OTHER_OPTIONS | _FIELDS.keys()))
    request = inference_pb2.GenerateRequest()
    inputs = [name for name in ("token_ids", "messages") if name in given]
    if prompt is not None:
        inputs.insert(0, "prompt")
        _assign(request, "text", prompt)
    if len(inputs) != 1:
        what = " and ".join(inputs) or "nothing"
        raise InvalidArgument(f"give one of prompt, token_ids and messages; given: {what}", field="input")
    if "token_ids" in given:
        request.token_ids.SetInParent()  # an empty list is still the prompt that was meant
    if "messages" in given:
        _put_messages(request.chat, given["messages"], given.get("omit_generation_prompt"))
    elif given.get("omit_generation_prompt"):
        raise InvalidArgument(_WITHOUT_MESSAGES, field="chat.omit_generation_prompt")
    for name, path in _FIELDS.items():
        if name in given:
            _assign(request, path, given[name])
    mixture: Any = given.get("adapters", {})
    if not isinstance(mixture, Mapping):
        raise InvalidArgument(f"adapters takes {{name: weight}}, not {_shown(mixture)}", field="adapters")
    for adapter_id, weight in cast("Mapping[str, float]", mixture).items():
        entry = request.adapters.add()
        _assign(entry, "id", adapter_id, shown_as="adapters.id")
        _assign(entry, "weight", weight, shown_as="adapters.weight")
    if "speculation" in given:
        _put_speculation(request.speculation, given["speculation"])
    if request.adapter_id:
        check_adapter_id(request.adapter_id)  # here already, because it goes into a header as well
    if not request.request_id:
        request.request_id = uuid.uuid4().hex  # known even when no answer comes
    return request


def tokenize_request(
    text: str | None, messages: Sequence[Message] | None, omit_generation_prompt: bool, omit_special_tokens: bool
) -> inference_pb2.TokenizeRequest:
    """Raises InvalidArgument."""
    request = inference_pb2.TokenizeRequest(omit_special_tokens=omit_special_tokens)
    if (text is None) == (messages is None):
        raise InvalidArgument("give one of text and messages", field="input")
    if omit_generation_prompt and messages is None:
        raise InvalidArgument(_WITHOUT_MESSAGES, field="chat.omit_generation_prompt")
    if text is not None:
        _assign(request, "text", text)
    if messages is not None:
        _put_messages(request.chat, messages, omit_generation_prompt)
    return request


def load_request(adapter_id: str, pin: bool) -> adapter_pb2.LoadAdapterRequest:
    request = adapter_pb2.LoadAdapterRequest()
    _assign(request, "pin", pin)
    return _naming(request, adapter_id)


def unload_request(adapter_id: str) -> adapter_pb2.UnloadAdapterRequest:
    return _naming(adapter_pb2.UnloadAdapterRequest(), adapter_id)


def get_request(adapter_id: str) -> adapter_pb2.GetAdapterRequest:
    return _naming(adapter_pb2.GetAdapterRequest(), adapter_id)


def list_request(
    include_unloaded: bool, prefix: str, state: AdapterState | None, page_size: int
) -> adapter_pb2.ListAdaptersRequest:
    """For the first page."""
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


def _naming(request: _AboutAdapter, adapter_id: str) -> _AboutAdapter:
    _assign(request, "adapter_id", adapter_id)
    check_adapter_id(request.adapter_id)
    return request


def call_options(options: CallOptions) -> CallOptions:
    """The same, once it is sure that there is nothing else in it. Raises TypeError."""
    _given(options, frozenset({"timeout_s"}))
    return options


def _given(options: GenerateOptions | CallOptions, known: frozenset[str]) -> dict[str, Any]:
    for name in options:
        if name not in known:
            raise TypeError(f"there is no option {name!r}; there are {', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None}


def _put_messages(chat: inference_pb2.Chat, messages: Sequence[Message], omit_generation_prompt: bool | None) -> None:
    chat.SetInParent()
    given: Any = messages  # a caller without a type checker gives anything
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or not all(map(_is_mapping, messages)):
        raise InvalidArgument(
            f"messages takes a list of {{'role': ..., 'content': ...}}, not {_shown(messages)}", field="chat.messages"
        )
    for one in messages:
        message = chat.messages.add()
        for name in ("role", "content"):
            _assign(message, name, one.get(name), shown_as=f"chat.messages.{name}")
    if omit_generation_prompt:
        chat.omit_generation_prompt = True


def _with_speculation(given: dict[str, Any]) -> dict[str, Any]:
    """What a `Speculation` says, as the options that it stands for."""
    whole = given.get("speculation")
    if not isinstance(whole, Speculation):
        return given
    said = {
        "speculation": whole.kind,
        "max_draft_tokens": whole.max_draft_tokens,
        "fixed_draft_length": whole.fixed_length,
    }
    rest = {name: value for name, value in given.items() if name != "speculation"}
    for name, value in said.items():
        if value is None:
            continue
        if name in rest:
            raise InvalidArgument(f"{name} is given twice, as an option and in speculation", field=_FIELDS[name])
        rest[name] = value
    return rest


def _put_speculation(message: inference_pb2.Speculation, wanted: AnySpeculation) -> None:
    match wanted:
        case "off":
            message.off = True
        case "auto":
            message.auto = True
        case "medusa" | Medusa():
            message.medusa.SetInParent()
            if isinstance(wanted, Medusa):
                _assign(message, "medusa.adapter_id", wanted.adapter_id, shown_as="speculation.medusa.adapter_id")
        case "prompt_lookup" | PromptLookup():
            message.prompt_lookup.SetInParent()
            if isinstance(wanted, PromptLookup):
                for name, value in (("min_ngram", wanted.min_ngram), ("max_ngram", wanted.max_ngram)):
                    _assign(message.prompt_lookup, name, value, shown_as=f"speculation.prompt_lookup.{name}")
        case "draft_model" | DraftModel():
            message.draft_model.SetInParent()
            if isinstance(wanted, DraftModel):
                _assign(message, "draft_model.name", wanted.name, shown_as="speculation.draft_model.name")
        case _:  # pyright: ignore[reportUnnecessaryComparison] (a caller without a type checker)
            raise InvalidArgument(
                f"speculation cannot be {_shown(wanted)}: use 'off', 'auto', 'medusa', 'prompt_lookup', 'draft_model' "
                "or an object of one of their classes",
                field="speculation",
            )


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
        raise InvalidArgument(f"`{field}` cannot be {_shown(value)}", field=field) from error


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
