"""Fields that several dialects have: their models, and their values on the wire."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Final, TypeVar, cast

from google.protobuf.message import Message
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument
from loraplex_contracts.mixtures import DEFAULT_WEIGHT
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.speculation import put_kind
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.errors import model_not_found
from loraplex_router.http.names import NAMES

# Prompts of one request, and texts that they ask for together.
MAX_PROMPTS: Final = 128
MAX_CHOICES: Final = 512
MAX_TOKEN_ID: Final = (1 << 32) - 1  # on the wire
MIN_LOGPROB: Final = -9999.0  # for minus infinity, which JSON cannot write
# Field names in the header of ignored fields.
MAX_IGNORED_NAMES: Final = 16
MAX_IGNORED_CHARS: Final = 40
# Fields that have no effect here and need none: for accounts, storage and billing.
HARMLESS: Final = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "spaces_between_special_tokens", "parallel_tool_calls"),
    }
)
Uint32 = Annotated[int, Field(ge=0, le=(1 << 32) - 1)]
Item = TypeVar("Item")
# A list that is refused at its first fault: a body has room for millions, and each would be an error of its own.
Items = Annotated[list[Item], Field(fail_fast=True)]


def _as_many_as_a_request_takes(given: Any) -> Any:
    most = SAMPLING_OPTIONS["logit_bias"].max_entries
    if isinstance(given, dict) and len(cast("dict[str, Any]", given)) > most:
        raise InvalidArgument(f"`logit_bias` takes {most} entries; there are {len(given)}", field="logit_bias")
    return given


# As `Items`; pydantic looks at all entries of a map before it counts them.
Biases = Annotated[dict[str, float], BeforeValidator(_as_many_as_a_request_takes)]


class Fields(BaseModel):
    """Fields off HTTP. Null counts as absent; numbers are not read out of strings. A whole number may be written with a
    point: languages with one type of numbers do so."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _with_integers(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        fields = cast("dict[str, Any]", given)
        whole = {name: int(one) for name, one in fields.items() if type(one) is float and one.is_integer()}
        return {**fields, **whole} if whole else fields

    def extras(self) -> dict[str, Any]:
        """Further fields that are not null."""
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}


class OriginFields(Fields):
    """Fields that say where the adapter comes from: LoRAX's, and a revision."""

    adapter_source: str | None = None
    adapter_revision: str | None = None
    api_token: str | None = Field(default=None, repr=False)


class NameFields(Fields):
    """Fields that name the adapter: OpenAI's, SGLang's and LoRAX'."""

    model: str | None = None
    lora_path: str | None = None
    adapter_id: str | None = None

    def adapter_names(self) -> dict[str, str | None]:
        """The fields that may name an adapter, for `adapter_in`."""
        return {"model": self.model, "lora_path": self.lora_path, "adapter_id": self.adapter_id}


class AdapterFields(NameFields, OriginFields):
    """Fields that name the adapter and its origin."""


class Member(OriginFields):
    """An adapter of a mixture."""

    id: str
    weight: float = DEFAULT_WEIGHT


class Merge(Fields):
    """A merge of a mixture's adapters into one."""

    strategy: str
    density: float | None = None
    majority_sign: str | None = None
    seed: Annotated[int, Field(ge=0, le=(1 << 64) - 1)] | None = None


class MergedAdapters(Fields):
    """LoRAX's mixtures."""

    ids: Items[str]
    weights: Items[float] | None = None
    merge_strategy: str | None = None
    density: float | None = None
    majority_sign_method: str | None = None


class MixtureFields(OriginFields):
    """Fields of a mixture, ours or LoRAX's, and of its adapters' origin."""

    adapters: Items[Member] | None = None
    merge: Merge | None = None
    merged_adapters: MergedAdapters | None = None


def harmless_fields(body: Fields) -> tuple[str, ...]:
    """Names of the fields that are given and need no effect."""
    return tuple(name for name in body.extras() if name in HARMLESS)


def header_names(names: Sequence[str]) -> tuple[str, ...]:
    """The names in characters that a header can have, MAX_IGNORED_NAMES at most."""
    return tuple(_for_header(name) for name in names[:MAX_IGNORED_NAMES])


def _for_header(name: str) -> str:
    """The name in printable ASCII without separators."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "_-.") else "?" for char in name)
    return kept[:MAX_IGNORED_CHARS] or "?"


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


def adapter_in(names: Mapping[str, str | None], base_names: Sequence[str]) -> str:
    """The adapter that fields of a request name, "" where all are null or the base model. `names` has their values.

    Raises as `adapter_of`, and InvalidArgument for two adapters."""
    found = found_in = ""
    for name, value in names.items():
        try:
            given = unicode_text(adapter_of(value, base_names), name.rpartition(".")[2])
        except AdapterNotFound as error:
            error.field = name
            raise
        if given and found and given != found:
            # Without backticks: names of fields in those are translated.
            raise InvalidArgument(f"{found_in} and {name} name two adapters: leave one of them out", field=name)
        if given:
            found, found_in = given, name
    return found


def request_ids_of(request_id: str, num_prompts: int) -> list[str]:
    """An id for the call of each prompt; with one prompt the request's own."""
    return [request_id] if num_prompts == 1 else [f"{request_id[:120]}-{index}" for index in range(num_prompts)]


def prompts_of(prompt: Any, name: str = "prompt") -> list[str | list[int]]:
    """The prompts in each form that OpenAI takes: a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        items = cast("list[Any]", prompt)
        if type(items[0]) is int:
            return [_ids(items, name)]
        if len(items) > MAX_PROMPTS:
            raise InvalidArgument(f"`{name}` takes {MAX_PROMPTS} prompts; there are {len(items)}", field=name)
        if all(isinstance(item, str) for item in items):
            return items
        if all(isinstance(item, list) for item in items):
            return [_ids(item, name) for item in items]
    raise InvalidArgument(f"`{name}` must be a text, a list of token ids, or a list of either", field=name)


def _ids(ids: list[Any], name: str) -> list[int]:
    if not are_token_ids(ids):
        raise InvalidArgument(f"`{name}` must have token ids, at least one in each list", field=name)
    return ids


def are_token_ids(ids: Sequence[Any]) -> bool:
    """True for a list of token ids, at least one."""
    return bool(ids) and all(type(one) is int and 0 <= one <= MAX_TOKEN_ID for one in ids)


def truncate_of(num_tokens: int, side: str | None) -> pb.Truncate:
    """The truncation to `num_tokens`; -1: to as many as the context has room for. Raises InvalidArgument for 0."""
    if num_tokens == 0:
        raise InvalidArgument("`truncate_prompt_tokens` must be -1 or at least 1", field="truncate_prompt_tokens")
    return pb.Truncate(max_tokens=max(0, num_tokens), keep_start=side == "right")


def put_options(request: pb.GenerateRequest, given: Fields) -> None:
    """Puts the options of sampling and stopping that `given` has into the request.

    Raises InvalidArgument for text that is not Unicode, and for a bias of what is no token id."""
    for part, option, name in _options_of(type(given)):
        message = getattr(request, part)
        message.SetInParent()
        if (value := getattr(given, name)) is not None:
            _put_option(message, option, value, name)


@cache
def _options_of(model: type[Fields]) -> tuple[tuple[str, str, str], ...]:
    """The options that are fields of the model: part and field of the wire's request, and the name in the model."""
    found: list[tuple[str, str, str]] = []
    for part, message in (("sampling", pb.Sampling), ("stopping", pb.Stopping)):
        for option in message.DESCRIPTOR.fields_by_name:
            names = NAMES.get(f"{part}.{option}", (option,))
            found += [(part, option, name) for name in names if name in model.model_fields][:1]
    return tuple(found)


def _put_option(part: Any, option: str, value: Any, name: str) -> None:
    match option:
        case "top_k":
            part.top_k = max(0, value)  # -1 keeps all, too
        case "seed":
            part.seed = value % (1 << 64)
        case "logit_bias":
            _put_logit_bias(part, value)
        case "stop":
            texts = [value] if isinstance(value, str) else value
            part.stop.extend(unicode_text(text, name) for text in texts if text)  # clients send "" for none
        case "bad_words":
            part.bad_words.extend(unicode_text(word, name) for word in value)
        case "allowed_token_ids" | "stop_token_ids":
            getattr(part, option).extend(value)
        case _:
            setattr(part, option, value)


def _put_logit_bias(sampling: pb.Sampling, biases: Mapping[str, float]) -> None:
    for key, bias in biases.items():
        token_id = _token_id(key)
        if token_id in sampling.logit_bias:
            raise InvalidArgument(f"`logit_bias` has token {token_id} twice", field="logit_bias")
        sampling.logit_bias[token_id] = bias


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) <= MAX_TOKEN_ID):
        raise InvalidArgument(f"`logit_bias` has the key {key[:20]!a}, which is not a token id", field="logit_bias")
    return int(key)


def speculation_of(value: Any) -> pb.Speculation:
    """The speculation of a kind as `put_kind` takes it, or of {"kind": "prompt_lookup", "max_ngram": 4, ...}."""
    options: dict[str, Any] = cast("dict[str, Any]", dict(value)) if isinstance(value, dict) else {"kind": value}
    kind: Any = options.pop("kind", None)
    found = pb.Speculation()
    places: dict[str, Message] = {"max_draft_tokens": found, "fixed_length": found}
    if kind is not None and (parameters := put_kind(found, kind)) is not None:
        places |= dict.fromkeys(parameters.DESCRIPTOR.fields_by_name, parameters)
    for name, place in places.items():
        if (given := options.pop(name, None)) is None:
            continue
        field = f"speculation.{name}"
        if place is not found and getattr(place, name) and getattr(place, name) != given:
            raise InvalidArgument(f"`speculation.kind` has another `{name}`: say it once", field=field)
        try:
            setattr(place, name, given)
        except (TypeError, ValueError) as error:  # of protobuf
            raise InvalidArgument(f"`{field}` has a value of a wrong type or size", field=field) from error
    if options:
        name = ascii(str(next(iter(options)))[:40])[1:-1]
        raise InvalidArgument(f"`speculation.{name}` is not known for this kind", field=f"speculation.{name}")
    return found


def unicode_text(text: str, name: str) -> str:
    """The text. Raises InvalidArgument for lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"`{name}` is not valid Unicode text", field=name) from error
    return text


def json_text(value: Any, name: str) -> str:
    """The value as JSON. Raises InvalidArgument for what is nested too deep, and for lone surrogates."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError as error:
        raise InvalidArgument(f"`{name}` is nested too deep", field=name) from error
    return unicode_text(text, name)


def finite(logprob: float) -> float:
    """The log probability as JSON can write it."""
    return max(logprob, MIN_LOGPROB)


def mean_logprob(completion: pb.Completion) -> float:
    """Mean logprob of a completion's tokens; minus infinity where there are none."""
    rows = completion.logprobs
    return sum(row.logprob for row in rows) / len(rows) if rows else -math.inf
