"""Embeddings, classes and scores over HTTP, in six dialects."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.services import POOLING, path_of
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_proto.validate import MAX_CHAT_MESSAGES, MAX_POOLING_INPUTS
from loraplex_router.calls import Call
from loraplex_router.http.errors import naming_model
from loraplex_router.http.fields import (
    MAX_PROMPTS,
    AdapterFields,
    OriginFields,
    Uint32,
    adapter_in,
    are_token_ids,
    harmless_fields,
    header_names,
    truncate_of,
    unicode_text,
)
from loraplex_router.http.openai.fields import ChatMessage, ChatTemplateInput, ignored_fields
from loraplex_router.http.openai.requests import chat_of, refuse_chat_fields
from loraplex_router.http.origins import put_origin
from loraplex_router.http.router_calls import RouterCalls, request_id_of
from loraplex_router.http.tgi.fields import BASE_MODEL

# The method of gRPC whose roles a route asks for.
METHODS: Final[Mapping[str, str]] = {
    "/v1/embeddings": path_of(POOLING, "Embed"),
    "/embed": path_of(POOLING, "Embed"),
    **dict.fromkeys(("/classify", "/classify_batch"), path_of(POOLING, "Classify")),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), path_of(POOLING, "Score")),
}
# LoRAX's names of the base model, beside its id.
_LORAX_BASE: Final = ("", BASE_MODEL)
_POOLINGS: Final[Mapping[str | None, pooling_pb2.Pooling.ValueType]] = {
    None: pooling_pb2.POOLING_UNSPECIFIED,
    "last_token": pooling_pb2.POOLING_LAST_TOKEN,
    "mean": pooling_pb2.POOLING_MEAN,
}
_METHODS_OF_SCORES: Final[Mapping[str, pooling_pb2.ScoreMethod.ValueType]] = {
    "classifier": pooling_pb2.SCORE_METHOD_CLASSIFIER,
    "cosine": pooling_pb2.SCORE_METHOD_COSINE,
    "next_token": pooling_pb2.SCORE_METHOD_NEXT_TOKEN,
}

_PoolingRequest = TypeVar(
    "_PoolingRequest", pooling_pb2.EmbedRequest, pooling_pb2.ClassifyRequest, pooling_pb2.ScoreRequest
)
_Response = TypeVar("_Response", pooling_pb2.EmbedResponse, pooling_pb2.ClassifyResponse, pooling_pb2.ScoreResponse)


# --- bodies ---------------------------------------------------------------------------------------------------------


class PoolingFields(AdapterFields):
    """Fields that all routes but /embed have."""

    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 24)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] | None = None
    request_id: str | None = None
    cache_salt: str | None = None


class InputFields(PoolingFields, ChatTemplateInput):
    """`input`, or vLLM's `messages`, one chat."""

    input: Any = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_CHAT_MESSAGES)] | None = None


class EmbeddingsRequest(InputFields):
    """Body of POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    pooling: Literal["last_token", "mean"] | None = None
    normalize: bool | None = None


class Parameters(OriginFields):
    """`parameters` of LoRAX's bodies. Those of generation have no effect here and are named as ignored."""

    adapter_id: str | None = None
    merged_adapters: Any = None
    truncate: Annotated[int, Field(ge=1, le=1 << 24)] | None = None


class EmbedBody(AdapterFields):
    """Body of POST /embed, LoRAX's or TEI's."""

    inputs: Any = None
    parameters: Parameters | None = None
    stream: bool | None = None
    normalize: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=(1 << 32) - 1)] | None = None
    prompt_name: str | None = None


class ClassifyBody(InputFields):
    """Body of POST /classify and /classify_batch: vLLM's `input` or `messages`, or LoRAX's `inputs`."""

    inputs: Any = None
    parameters: Parameters | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    stream: bool | None = None


class ScoringFields(PoolingFields):
    """Fields that /score and /rerank have in common; `method` and what belongs to it are ours."""

    method: Literal["classifier", "cosine", "next_token"] | None = None
    template: str | None = None
    true_token: str | None = None
    false_token: str | None = None
    pooling: Literal["last_token", "mean"] | None = None
    activation: bool | None = None
    use_activation: bool | None = None


class ScoreBody(ScoringFields):
    """Body of POST /score."""

    text_1: Any = None
    text_2: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None


class RerankBody(ScoringFields):
    """Body of POST /rerank: Jina's and Cohere's `documents`, or TEI's `texts`."""

    query: Any = None
    documents: Any = None
    texts: Any = None
    top_n: Annotated[int, Field(ge=0, le=(1 << 32) - 1)] | None = None
    return_documents: bool | None = None
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    max_tokens_per_doc: Uint32 | None = None


# --- routes ---------------------------------------------------------------------------------------------------------


class PoolingRoutes:
    """The handlers, over one router."""

    def __init__(self, router: RouterCalls) -> None:
        self._router = router

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/embeddings", response_class=Response)(self.embeddings)
        app.post("/embed", response_class=Response)(self.embed)
        app.post("/classify", response_class=Response)(self.classify)
        app.post("/classify_batch", response_class=Response)(self.classify_batch)
        for path in ("/score", "/v1/score"):
            app.post(path, response_class=Response)(self.score)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            app.post(path, response_class=Response)(self.rerank)

    async def embeddings(self, body: EmbeddingsRequest, request: Request) -> Response:
        ignored = self._router.ignored(ignored_fields(body), harmless_fields(body))
        message = pooling_pb2.EmbedRequest(inputs=_inputs_or_chat(body))
        await self._put_fields(message, body, request)
        message.dimensions = body.dimensions or 0
        message.omit_normalization = body.normalize is False
        message.pooling = _POOLINGS[body.pooling]
        answer = await self._embed(message, request)
        to_json = _base64 if body.encoding_format == "base64" else _floats
        beside = {
            "id": f"embd-{message.request_id}",
            "object": "list",
            "model": body.model or self._router.base_names()[0],
            "usage": usage_of(answer.usage),
            "loraplex": _own(message.adapter_id, answer),
        }
        rows = (
            {"index": index, "object": "embedding", "embedding": to_json(one)}
            for index, one in enumerate(answer.embeddings)
        )
        raw = json.dumps(beside)[:-1].encode() + b', "data": ' + await _json_of(rows) + b"}"
        return Response(raw, media_type="application/json", headers=_headers(message, ignored))

    async def embed(self, body: EmbedBody, request: Request) -> Response:
        """LoRAX's form: one text beside `parameters`, `{"embeddings": [...]}`; TEI's form: a list for each input."""
        ignored = self._ignored(body)
        message = pooling_pb2.EmbedRequest(inputs=inputs_of(body.inputs, "inputs"), request_id=request_id_of(request))
        if body.prompt_name is not None:
            raise Unimplemented("`prompt_name` is not available: write the prompt into the text", field="prompt_name")
        message.adapter_id = await self._adapter_id(body, request, body.parameters)
        put_origin(message, _origin(body, body.parameters), message.adapter_id)
        message.omit_normalization = body.normalize is False
        message.dimensions = body.dimensions or 0
        if body.truncate:
            message.truncate_prompt.keep_start = (body.truncation_direction or "right").lower() == "right"
        _put_truncation(message, body.parameters)
        answer = await self._embed(message, request)
        of_tei = (body.normalize, body.truncate, body.truncation_direction, body.dimensions)
        has_tei = any(one is not None for one in of_tei)
        # LoRAX's client always sends the key, be it null, and TEI's clients never.
        is_tei = has_tei or not isinstance(body.inputs, str) or "parameters" not in body.model_fields_set
        headers = _headers(message, ignored)
        if not is_tei:
            return JSONResponse({"embeddings": _floats(answer.embeddings[0])}, headers=headers)
        raw = await _json_of(map(_floats, answer.embeddings))
        return Response(raw, media_type="application/json", headers=headers)

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """vLLM's form with `input`: the likeliest label of each input. LoRAX's with `inputs`: the entities of a text by
        a token classifier, the label of a text by another."""
        message, answer, ignored = await self._classify(body, request, of_many=False)
        if body.inputs is not None:
            return JSONResponse(_entities(message, answer, 0), headers=_headers(message, ignored))
        if answer.per_token:
            raise InvalidArgument(
                "the adapter classifies tokens: send a text as `inputs`, and get its entities",
                field="input",
                metadata={"request_id": message.request_id},  # the call has its line
            )
        data: list[dict[str, Any]] = []
        for index, one in enumerate(answer.classifications):
            values = list(one.rows[0].probabilities)
            best = max(range(len(values)), key=values.__getitem__)
            label = answer.labels[best]
            data.append({"index": index, "label": label, "probs": values, "num_classes": len(values)})
        content = {
            "id": f"classify-{message.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or self._router.base_names()[0],
            "data": data,
            "usage": usage_of(answer.usage),
            "loraplex": _own(message.adapter_id, answer) | {"labels": list(answer.labels)},
        }
        return JSONResponse(content, headers=_headers(message, ignored))

    async def classify_batch(self, body: ClassifyBody, request: Request) -> Response:
        """LoRAX's form: the entities of each text."""
        message, answer, ignored = await self._classify(body, request, of_many=True)
        rows = (_entities(message, answer, index) for index in range(len(answer.classifications)))
        return Response(await _json_of(rows), media_type="application/json", headers=_headers(message, ignored))

    async def _classify(
        self, body: ClassifyBody, request: Request, *, of_many: bool
    ) -> tuple[pooling_pb2.ClassifyRequest, pooling_pb2.ClassifyResponse, dict[str, str]]:
        ignored = self._ignored(body)
        if body.inputs is None and not of_many:
            message = pooling_pb2.ClassifyRequest(inputs=_inputs_or_chat(body))
        else:
            if body.input is not None or body.messages is not None:
                name = "input" if body.messages is None else "messages"
                raise InvalidArgument(f"give `inputs` or `{name}`, not both", field=name)
            if isinstance(body.inputs, str) is of_many:
                form = "a list of texts" if of_many else "one text; /classify_batch takes several"
                raise InvalidArgument(f"`inputs` must be {form}", field="inputs")
            message = pooling_pb2.ClassifyRequest(inputs=inputs_of(body.inputs, "inputs"))
        await self._put_fields(message, body, request, body.parameters)
        _put_truncation(message, body.parameters)
        message.logits = False in (body.activation, body.use_activation, body.softmax)
        relay = self._router.relay.classify
        answer = await self._ask("Classify", relay, message, pooling_pb2.ClassifyResponse, request)
        return message, answer, ignored

    async def score(self, body: ScoreBody, request: Request) -> Response:
        """One query to all documents, or as many queries as documents, pair by pair."""
        ignored = self._router.ignored(ignored_fields(body), harmless_fields(body))
        first, queries = _one_of(text_1=body.text_1, queries=body.queries, data_1=body.data_1)
        second, documents = _one_of(text_2=body.text_2, documents=body.documents, items=body.items, data_2=body.data_2)
        left, right = inputs_of(queries, first), inputs_of(documents, second)
        if len(left) not in (1, len(right)):
            raise InvalidArgument(
                f"`{first}` has {len(left)} texts for the {len(right)} of `{second}`: give one, or as many", field=first
            )
        pairs = (
            [(left[0], right)] if len(left) == 1 else [(one, [other]) for one, other in zip(left, right, strict=True)]
        )
        if len(pairs) > MAX_PROMPTS:
            raise InvalidArgument(f"`{first}` takes {MAX_PROMPTS} texts; there are {len(pairs)}", field=first)
        messages = [await self._score_request(body, query, several, request) for query, several in pairs]
        answers = await self._scores(messages, request)
        scores = [score for answer in answers for score in answer.scores]
        usage = inference_pb2.Usage(
            prompt_tokens=sum(one.usage.prompt_tokens for one in answers),
            cached_tokens=sum(one.usage.cached_tokens for one in answers),
        )
        content = {
            "id": f"score-{messages[0].request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or self._router.base_names()[0],
            "data": [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)],
            "usage": usage_of(usage),
            "loraplex": _own(messages[0].adapter_id, answers[0]),
        }
        return JSONResponse(content, headers=_headers(messages[0], ignored))

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """The documents, the best first."""
        ignored = self._router.ignored(ignored_fields(body), harmless_fields(body))
        name, documents = _one_of(documents=body.documents, texts=body.texts)
        if not isinstance(documents, list) or not documents:
            raise InvalidArgument(f"`{name}` must be a list of texts", field=name)
        texts = [_document(one, name) for one in cast("list[Any]", documents)]
        message = await self._score_request(body, input_of(body.query, "query"), inputs_of(texts, name), request)
        message.logits = message.logits or bool(body.raw_scores)
        if body.truncate or body.max_tokens_per_doc:
            message.truncate_prompt.max_tokens = body.max_tokens_per_doc or 0
            message.truncate_prompt.keep_start = (body.truncation_direction or "right").lower() == "right"
        (answer,) = await self._scores([message], request)
        order = sorted(range(len(texts)), key=lambda index: -answer.scores[index])
        headers = _headers(message, ignored)
        if name == "texts":
            rows = [
                {"index": index, "score": answer.scores[index]}
                | ({"text": texts[index]} if body.return_text or body.return_documents else {})
                for index in order
            ]
            return JSONResponse(rows[: body.top_n or None], headers=headers)
        results = [
            {"index": index, "relevance_score": answer.scores[index]}
            | ({} if body.return_documents is False else {"document": {"text": texts[index]}})
            for index in order[: body.top_n or None]
        ]
        content = {
            "id": f"rerank-{message.request_id}",
            "model": body.model or self._router.base_names()[0],
            "usage": usage_of(answer.usage),
            "results": results,
            "loraplex": _own(message.adapter_id, answer),
        }
        return JSONResponse(content, headers=headers)

    async def _score_request(
        self,
        body: ScoringFields,
        query: pooling_pb2.PoolingInput,
        documents: list[pooling_pb2.PoolingInput],
        request: Request,
    ) -> pooling_pb2.ScoreRequest:
        message = pooling_pb2.ScoreRequest(query=query, inputs=documents)
        await self._put_fields(message, body, request)
        if body.method is not None:
            message.method = _METHODS_OF_SCORES[body.method]
        for name in ("template", "true_token", "false_token"):
            setattr(message, name, unicode_text(getattr(body, name) or "", name))
        message.logits = False in (body.activation, body.use_activation)
        message.pooling = _POOLINGS[body.pooling]
        return message

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _embed(self, message: pooling_pb2.EmbedRequest, request: Request) -> pooling_pb2.EmbedResponse:
        return await self._ask("Embed", self._router.relay.embed, message, pooling_pb2.EmbedResponse, request)

    async def _scores(
        self, messages: Sequence[pooling_pb2.ScoreRequest], request: Request
    ) -> list[pooling_pb2.ScoreResponse]:
        """The answers in the order of the requests, or the first error."""
        handle = self._router.handler("Score", self._router.relay.score)
        try:
            found = await self._router.ask_all(handle, [one.SerializeToString() for one in messages], request)
        except LoraplexError as error:
            raise naming_model(error, messages[0].adapter_id) from error
        return [pooling_pb2.ScoreResponse.FromString(raw) for raw in found]

    async def _ask(
        self,
        method: str,
        body: Callable[[Call, bytes], Awaitable[bytes]],
        message: pooling_pb2.EmbedRequest | pooling_pb2.ClassifyRequest,
        cls: type[_Response],
        request: Request,
    ) -> _Response:
        """Makes the call. Raises its error; for an unknown adapter the one of an unknown model."""
        handle = self._router.handler(method, body)
        try:
            return cls.FromString(await self._router.ask(handle, message.SerializeToString(), request))
        except LoraplexError as error:
            raise naming_model(error, message.adapter_id) from error

    def _ignored(self, body: EmbedBody | ClassifyBody) -> dict[str, str]:
        """The header for fields and parameters that are ignored. Raises what `ignored_fields` raises."""
        of_parameters = () if body.parameters is None else body.parameters.extras()
        for name in ("adapters", "merge"):
            if name in of_parameters:
                raise _no_mixture(name)
        names = header_names([*ignored_fields(body), *(f"parameters.{name}" for name in of_parameters)])
        return self._router.ignored(names, harmless_fields(body))

    async def _adapter_id(self, body: AdapterFields, request: Request, parameters: Parameters | None = None) -> str:
        """The body's adapter. Raises AdapterNotFound, Unimplemented for a mixture, and InvalidArgument for two
        names."""
        names = {**body.adapter_names(), "parameters.adapter_id": _lorax_adapter(parameters)}
        return adapter_in(names, await self._router.names_for(body.model, request))

    async def _put_fields(
        self, message: _PoolingRequest, body: PoolingFields, request: Request, parameters: Parameters | None = None
    ) -> None:
        message.adapter_id = await self._adapter_id(body, request, parameters)
        put_origin(message, _origin(body, parameters), message.adapter_id)
        if body.request_id:
            message.request_id = check_id(body.request_id, field="request_id")
        else:
            message.request_id = request_id_of(request)
        if body.cache_salt:
            message.cache_salt = check_id(body.cache_salt, field="cache_salt")
        message.priority = -(body.priority or 0)  # lower is served first there
        message.omit_special_tokens = body.add_special_tokens is False
        if body.truncate_prompt_tokens is not None:
            message.truncate_prompt.CopyFrom(truncate_of(body.truncate_prompt_tokens, body.truncation_side))


# --- bodies to messages and back -----------------------------------------------------------------------------------


def _inputs_or_chat(body: InputFields) -> list[pooling_pb2.PoolingInput]:
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


def _one_of(**given: Any) -> tuple[str, Any]:
    """The one of these fields that is there, else the first, with its name. Raises InvalidArgument for two."""
    found = [(name, value) for name, value in given.items() if value is not None]
    if len(found) > 1:
        raise InvalidArgument(f"give `{found[0][0]}` or `{found[1][0]}`, not both", field=found[1][0])
    return found[0] if found else next(iter(given.items()))


def _document(given: Any, name: str) -> str:
    """The document's text: a text, or an object with one. Raises InvalidArgument."""
    text = cast("dict[str, Any]", given).get("text") if isinstance(given, dict) else given
    if not isinstance(text, str):
        raise InvalidArgument(f"`{name}` takes texts, or objects with `text`", field=name)
    return text


def _entities(
    message: pooling_pb2.ClassifyRequest, answer: pooling_pb2.ClassifyResponse, index: int
) -> list[dict[str, Any]]:
    """LoRAX's rows. Neighbouring tokens of one label are one entity: tags like `B-PER` and `I-PER` are the label `PER`,
    of which `B` begins another one; tokens of `O` are none. Of a text's classifier the one row is the whole text.

    Raises InvalidArgument for token ids that a token classifier has read."""
    one, text = answer.classifications[index], message.inputs[index].text
    if not answer.per_token:
        values = one.rows[0].probabilities
        best = max(range(len(values)), key=values.__getitem__)
        row = {"entity_group": answer.labels[best], "score": values[best], "word": text, "start": 0, "end": len(text)}
        return [row]
    if message.inputs[index].WhichOneof("input") != "text":  # the worker says no places of its tokens
        raise InvalidArgument(
            "the adapter classifies tokens: its entities are parts of a text; send texts as `inputs`, not token ids",
            field="inputs",
            metadata={"request_id": message.request_id},
        )
    found: list[dict[str, Any]] = []
    scores: list[float] = []
    group = ""
    for row, start, end in zip(one.rows, one.starts, one.ends, strict=True):
        if start == end:  # special, or a part of a character
            continue
        best = max(range(len(row.probabilities)), key=row.probabilities.__getitem__)
        tag, label = split_tag(answer.labels[best])
        if label == "O":
            group = ""
            continue
        if tag == "B" or label != group:
            group, scores = label, []
            found.append({"entity_group": label, "score": 0.0, "word": "", "start": start, "end": end})
        scores.append(row.probabilities[best])
        entity = found[-1]
        entity |= {"end": end, "score": sum(scores) / len(scores)}
        entity["word"] = text[entity["start"] : end].strip()
    return found


def split_tag(label: str) -> tuple[str, str]:
    """`B` or `I` and the label of `B-PER` and `I-PER`; no tag and the label of others."""
    return (label[0], label[2:]) if label[:2] in ("B-", "I-") and len(label) > 2 else ("", label)


def _lorax_adapter(parameters: Parameters | None) -> str | None:
    """The name in LoRAX's `parameters`, None for the base model. Raises Unimplemented for a mixture."""
    if parameters is None:
        return None
    if parameters.merged_adapters is not None:
        raise _no_mixture("merged_adapters")
    return None if parameters.adapter_id in _LORAX_BASE else parameters.adapter_id


def _no_mixture(name: str) -> Unimplemented:
    return Unimplemented(f"`{name}` is not available here: mixtures write texts; name one adapter", field=name)


def _put_truncation(
    message: pooling_pb2.EmbedRequest | pooling_pb2.ClassifyRequest, parameters: Parameters | None
) -> None:
    """Truncates to the last so many tokens, as `truncate` of LoRAX and TGI does."""
    if parameters is not None and parameters.truncate is not None:
        message.truncate_prompt.CopyFrom(inference_pb2.Truncate(max_tokens=parameters.truncate))


def _origin(body: OriginFields, parameters: Parameters | None) -> OriginFields:
    """The fields that say where the adapter comes from: the parameters' where they name a source, else the body's."""
    return parameters if parameters is not None and parameters.adapter_source else body


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


def _headers(message: Any, ignored: dict[str, str]) -> dict[str, str]:
    return {"x-request-id": message.request_id, **ignored}


async def _json_of(rows: Iterable[Any]) -> bytes:
    """A list as JSON. Other requests go on between its rows: thousands of vectors take seconds."""
    parts: list[bytes] = []
    for row in rows:
        parts.append(json.dumps(row, allow_nan=False).encode())
        await asyncio.sleep(0)
    return b"[" + b", ".join(parts) + b"]"


def _floats(embedding: pooling_pb2.Embedding) -> list[float]:
    return list(embedding.values)


def _base64(embedding: pooling_pb2.Embedding) -> str:
    """Little-endian float32, as OpenAI's clients read it."""
    return base64.b64encode(struct.pack(f"<{len(embedding.values)}f", *embedding.values)).decode()
