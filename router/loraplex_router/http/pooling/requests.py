"""Requests of the wire for embeddings, classes and scores."""

from __future__ import annotations

from typing import Any, Final, TypeVar, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.enums import POOLINGS, SCORE_METHODS
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import MAX_POOLING_INPUTS
from loraplex_router.http.fields import OriginFields, are_token_ids, truncate_of, unicode_text
from loraplex_router.http.openai.requests import chat_of, refuse_chat_fields
from loraplex_router.http.pooling.fields import InputFields, Parameters, PoolingFields, ScoringFields
from loraplex_router.http.tgi.fields import BASE_MODEL

# LoRAX's names of the base model, beside its id.
_LORAX_BASE: Final = ("", BASE_MODEL)

PoolingRequest = TypeVar(
    "PoolingRequest", pooling_pb2.EmbedRequest, pooling_pb2.ClassifyRequest, pooling_pb2.ScoreRequest
)


def inputs_or_chat(body: InputFields) -> list[pooling_pb2.PoolingInput]:
    """The inputs in `input`, or the chat in `messages`, whose generation prompt is left out by default, as vLLM does.
    Raises InvalidArgument for both, and for a chat's fields without `messages`."""
    if body.messages is None:
        refuse_chat_fields(body)
        return inputs_of(body.input, "input")
    if body.input is not None:
        raise InvalidArgument("give `input` or `messages`, not both", field="messages")
    chat = chat_of(body.messages, body)
    chat.omit_generation_prompt = not body.add_generation_prompt
    return [pooling_pb2.PoolingInput(chat=chat)]


def inputs_of(given: Any, name: str) -> list[pooling_pb2.PoolingInput]:
    """Inputs of a text, of token ids, or of a list of either. Raises InvalidArgument."""
    if isinstance(given, str):
        return [input_of(given, name)]
    if isinstance(given, list) and given:
        items = cast("list[Any]", given)
        if type(items[0]) is int:
            return [input_of(items, name)]
        if len(items) > MAX_POOLING_INPUTS:
            raise InvalidArgument(f"`{name}` takes {MAX_POOLING_INPUTS} inputs; there are {len(items)}", field=name)
        return [input_of(item, name) for item in items]
    raise InvalidArgument(f"`{name}` must be a text, a list of token ids, or a list of either", field=name)


def input_of(given: Any, name: str) -> pooling_pb2.PoolingInput:
    """Input of one text, or of its token ids. Raises InvalidArgument."""
    if isinstance(given, str):
        return pooling_pb2.PoolingInput(text=unicode_text(given, name))
    ids = cast("list[Any]", given) if isinstance(given, list) else []
    if not are_token_ids(ids):
        raise InvalidArgument(f"`{name}` must be a text, a list of token ids, or a list of either", field=name)
    return pooling_pb2.PoolingInput(token_ids=inference_pb2.TokenIds(ids=ids))


def one_of(**given: Any) -> tuple[str, Any]:
    """The one of these fields that is there, else the first, with its name. Raises InvalidArgument for two."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise InvalidArgument(f"give `{found[0][0]}` or `{found[1][0]}`, not both", field=found[1][0])
    return found[0] if found else next(iter(given.items()))


def document_text(given: Any, name: str) -> str:
    """The document's text: a text, or an object with one. Raises InvalidArgument."""
    text = cast("dict[str, Any]", given).get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise InvalidArgument(f"`{name}` takes texts, or objects with `text`", field=name)
    return text


def put_fields(message: PoolingRequest, body: PoolingFields, request_id: str) -> None:
    """Puts the fields that all routes except /embed have into the message, without the adapter. `request_id`: for a
    body without one."""
    message.request_id = check_id(body.request_id, field="request_id") if body.request_id else request_id
    if body.cache_salt:
        message.cache_salt = check_id(body.cache_salt, field="cache_salt")
    message.priority = -(body.priority or 0)  # lower is served first there
    message.omit_special_tokens = body.add_special_tokens is False
    if body.truncate_prompt_tokens is not None:
        message.truncate_prompt.CopyFrom(truncate_of(body.truncate_prompt_tokens, body.truncation_side))


def put_score_fields(message: pooling_pb2.ScoreRequest, body: ScoringFields) -> None:
    if body.method is not None:
        message.method = SCORE_METHODS[body.method]
    for name in ("template", "true_token", "false_token"):
        setattr(message, name, unicode_text(getattr(body, name) or "", name))
    message.logits = False in (body.activation, body.use_activation)
    if body.pooling is not None:
        message.pooling = POOLINGS[body.pooling]


def lorax_adapter(parameters: Parameters | None) -> str | None:
    """The name in LoRAX's `parameters`, None for the base model. Raises Unimplemented for a mixture."""
    if parameters is None:
        return None
    if parameters.merged_adapters is not None:
        raise no_mixture("merged_adapters")
    return None if parameters.adapter_id in _LORAX_BASE else parameters.adapter_id


def no_mixture(name: str) -> Unimplemented:
    return Unimplemented(f"`{name}` is not available here: mixtures write texts; name one adapter", field=name)


def put_truncation(
    message: pooling_pb2.EmbedRequest | pooling_pb2.ClassifyRequest, parameters: Parameters | None
) -> None:
    """Truncates to the last so many tokens, as `truncate` of LoRAX and TGI does."""
    if parameters is not None and parameters.truncate is not None:
        message.truncate_prompt.CopyFrom(inference_pb2.Truncate(max_tokens=parameters.truncate))


def origin_of(body: OriginFields, parameters: Parameters | None) -> OriginFields:
    """The fields that say where the adapter comes from: the parameters' where they name a source, else the body's."""
    return parameters if parameters is not None and parameters.adapter_source else body
