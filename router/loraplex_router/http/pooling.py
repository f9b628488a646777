"""Embeddings over HTTP: routes of OpenAI, LoRAX and Text Embeddings Inference (TEI)."""

from __future__ import annotations

import base64
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from fastapi import FastAPI, Request
from google.protobuf.message import Message
from pydantic import Field
from starlette.responses import JSONResponse, Response

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import MAX_POOLING_INPUTS
from loraplex_router.calls import Call
from loraplex_router.http.backend import Backend, adapter_of, ignored_header, request_id_of, unicode_text
from loraplex_router.http.errors import is_missing_model, model_not_found
from loraplex_router.http.models import Fields, ignored_fields

_SERVICE: Final = "/loraplex.v1.PoolingService/"
# The method of gRPC whose roles a route asks for.
METHODS: Final[Mapping[str, str]] = {
    "/v1/embeddings": _SERVICE + "Embed",
    "/embed": _SERVICE + "Embed",
}
# Fields of the wire that have another name here.
PARAMS: Final[Mapping[str, str]] = {
    "adapter_id": "model",
    "truncate_prompt.max_tokens": "truncate_prompt_tokens",
}
# LoRAX's names of the base model, beside its id.
_LORAX_BASE: Final = ("", "__base_model__")
_MAX_TOKEN_ID: Final = (1 << 32) - 1

_PoolingRequest = TypeVar(
    "_PoolingRequest", pooling_pb2.EmbedRequest, pooling_pb2.ClassifyRequest, pooling_pb2.ScoreRequest
)
_Response = TypeVar("_Response", pooling_pb2.EmbedResponse, pooling_pb2.ClassifyResponse, pooling_pb2.ScoreResponse)


# --- bodies ---------------------------------------------------------------------------------------------------------


class PoolingFields(Fields):
    """Fields that all routes of `model` have."""

    model: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class EmbeddingsRequest(PoolingFields):
    """Body of POST /v1/embeddings."""

    input: Any = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    pooling: Literal["last_token", "mean"] | None = None
    normalize: bool | None = None


class Parameters(Fields):
    """`parameters` of LoRAX's bodies; those of generation have no effect here."""

    adapter_id: str | None = None
    merged_adapters: Any = None


class EmbedBody(Fields):
    """Body of POST /embed, LoRAX's or TEI's."""

    inputs: Any = None
    parameters: Parameters | None = None
    stream: bool | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    prompt_name: str | None = None


# --- routes ---------------------------------------------------------------------------------------------------------


class PoolingRoutes:
    """The handlers, over one router."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/embeddings", response_class=Response)(self.embeddings)
        app.post("/embed", response_class=Response)(self.embed)

    async def embeddings(self, body: EmbeddingsRequest, request: Request) -> Response:
        ignored = ignored_fields(body)
        message = pooling_pb2.EmbedRequest(inputs=inputs_of(body.input, "input"))
        self._put_fields(message, body, request)
        message.dimensions = body.dimensions or 0
        message.omit_normalization = body.normalize is False
        message.pooling = pooling_pb2.POOLING_MEAN if body.pooling == "mean" else pooling_pb2.POOLING_UNSPECIFIED
        answer = await self._embed(message, body.model, request)
        to_json = _base64 if body.encoding_format == "base64" else _floats
        data = [
            {"index": index, "object": "embedding", "embedding": to_json(one)}
            for index, one in enumerate(answer.embeddings)
        ]
        content = {
            "id": f"embd-{message.request_id}",
            "object": "list",
            "data": data,
            "model": body.model or self._backend.base_names()[0],
            "usage": usage_of(answer.usage),
            "loraplex": _own(message.adapter_id, answer),
        }
        return JSONResponse(content, headers=_headers(message, ignored))

    async def embed(self, body: EmbedBody, request: Request) -> Response:
        """LoRAX's form: one text, `{"embeddings": [...]}`; TEI's form: a list for each input."""
        ignored = ignored_fields(body)
        message = pooling_pb2.EmbedRequest(inputs=inputs_of(body.inputs, "inputs"), request_id=request_id_of(request))
        if body.prompt_name is not None:
            raise Unimplemented("`prompt_name` is not available: write the prompt into the text", field="prompt_name")
        message.adapter_id = lorax_adapter(body.parameters, self._backend)
        message.omit_normalization = body.normalize is False
        message.dimensions = body.dimensions or 0
        if body.truncate:
            message.truncate_prompt.keep_start = (body.truncation_direction or "right").lower() == "right"
        answer = await self._embed(message, message.adapter_id, request)
        rows = [_floats(one) for one in answer.embeddings]
        of_tei = (body.normalize, body.truncate, body.truncation_direction, body.dimensions)
        is_tei = not isinstance(body.inputs, str) or any(one is not None for one in of_tei)
        return JSONResponse(rows if is_tei else {"embeddings": rows[0]}, headers=_headers(message, ignored))

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _embed(
        self, message: pooling_pb2.EmbedRequest, model: str | None, request: Request
    ) -> pooling_pb2.EmbedResponse:
        return await self._ask("Embed", self._backend.relay.embed, message, pooling_pb2.EmbedResponse, model, request)

    async def _ask(
        self,
        method: str,
        body: Callable[[Call, bytes], Awaitable[bytes]],
        message: Message,
        cls: type[_Response],
        model: str | None,
        request: Request,
    ) -> _Response:
        """Raises the call's error; for an unknown adapter the one of an unknown model."""
        handle = self._backend.handler(method, body)
        try:
            return cls.FromString(await self._backend.ask(handle, message.SerializeToString(), request))
        except LoraplexError as error:
            if is_missing_model(error):
                raise model_not_found(model or "") from error
            raise

    def _put_fields(self, message: _PoolingRequest, body: PoolingFields, request: Request) -> None:
        message.adapter_id = adapter_of(body.model, self._backend.base_names())
        if body.request_id:
            message.request_id = check_id(body.request_id, field="request_id")
        else:
            message.request_id = request_id_of(request)
        if body.cache_salt:
            message.cache_salt = check_id(body.cache_salt, field="cache_salt")
        message.priority = -(body.priority or 0)  # lower is served first there
        message.omit_special_tokens = body.add_special_tokens is False
        if body.truncate_prompt_tokens is not None:
            message.truncate_prompt.SetInParent()
            message.truncate_prompt.max_tokens = max(0, body.truncate_prompt_tokens)


# --- bodies to messages and back -----------------------------------------------------------------------------------


def inputs_of(given: Any, name: str) -> list[pooling_pb2.PoolingInput]:
    """A text, token ids, or a list of either. Raises InvalidArgument."""
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
    """One text or its token ids. Raises InvalidArgument."""
    if isinstance(given, str):
        return pooling_pb2.PoolingInput(text=unicode_text(given, name))
    ids = cast("list[Any]", given) if isinstance(given, list) else []
    if not ids or not all(type(one) is int and 0 <= one <= _MAX_TOKEN_ID for one in ids):
        raise InvalidArgument(f"`{name}` must be a text, a list of token ids, or a list of either", field=name)
    return pooling_pb2.PoolingInput(token_ids=inference_pb2.TokenIds(ids=ids))


def lorax_adapter(parameters: Parameters | None, backend: Backend) -> str:
    """The adapter that LoRAX's `parameters` name, "" for the base model. Raises Unimplemented for a mixture."""
    if parameters is None:
        return ""
    if parameters.merged_adapters is not None:
        raise Unimplemented(
            "`merged_adapters` is not available: mixtures are not served; name one adapter", field="merged_adapters"
        )
    if parameters.adapter_id is None or parameters.adapter_id in _LORAX_BASE:
        return ""
    return adapter_of(parameters.adapter_id, backend.base_names())


def usage_of(usage: inference_pb2.Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "total_tokens": usage.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _own(adapter_id: str, answer: Any) -> dict[str, Any]:
    return {
        "adapter_id": adapter_id or None,
        "adapter_digest": answer.adapter_digest or None,
        "queue_s": answer.timings.queue_s,
        "total_s": answer.timings.total_s,
    }


def _headers(message: Any, ignored: tuple[str, ...]) -> dict[str, str]:
    return {"x-request-id": message.request_id, **ignored_header(ignored)}


def _floats(embedding: pooling_pb2.Embedding) -> list[float]:
    return list(embedding.values)


def _base64(embedding: pooling_pb2.Embedding) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode()
