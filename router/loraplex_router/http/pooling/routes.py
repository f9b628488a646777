"""Routes of embeddings, classes and scores."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.enums import POOLINGS
from loraplex_proto.services import POOLING, path_of
from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_router.calls import Call
from loraplex_router.http.errors import naming_model
from loraplex_router.http.fields import MAX_PROMPTS, AdapterFields, adapter_in, harmless_fields, header_names
from loraplex_router.http.openai.fields import ignored_fields
from loraplex_router.http.origins import put_origin
from loraplex_router.http.pooling.answers import (
    entities_of,
    floats,
    headers_of,
    json_of,
    labels_of,
    own_fields,
    to_base64,
    usage_of,
)
from loraplex_router.http.pooling.fields import (
    ClassifyBody,
    EmbedBody,
    EmbeddingsRequest,
    Parameters,
    PoolingFields,
    RerankBody,
    ScoreBody,
    ScoringFields,
)
from loraplex_router.http.pooling.requests import (
    PoolingRequest,
    document_text,
    input_of,
    inputs_of,
    inputs_or_chat,
    lorax_adapter,
    no_mixture,
    one_of,
    origin_of,
    put_fields,
    put_score_fields,
    put_truncation,
)
from loraplex_router.http.router_calls import RouterCalls, request_id_of

# The method of gRPC whose roles a route asks for.
METHODS: Final[Mapping[str, str]] = {
    "/v1/embeddings": path_of(POOLING, "Embed"),
    "/embed": path_of(POOLING, "Embed"),
    **dict.fromkeys(("/classify", "/classify_batch"), path_of(POOLING, "Classify")),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), path_of(POOLING, "Score")),
}
_Response = TypeVar("_Response", pooling_pb2.EmbedResponse, pooling_pb2.ClassifyResponse, pooling_pb2.ScoreResponse)


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
        message = pooling_pb2.EmbedRequest(inputs=inputs_or_chat(body))
        await self._put_fields(message, body, request)
        message.dimensions = body.dimensions or 0
        message.omit_normalization = body.normalize is False
        if body.pooling is not None:
            message.pooling = POOLINGS[body.pooling]
        answer = await self._embed(message, request)
        to_json = to_base64 if body.encoding_format == "base64" else floats
        beside = {
            "id": f"embd-{message.request_id}",
            "object": "list",
            "model": body.model or self._router.base_names()[0],
            "usage": usage_of(answer.usage),
            "loraplex": own_fields(message.adapter_id, answer),
        }
        rows = (
            {"index": index, "object": "embedding", "embedding": to_json(one)}
            for index, one in enumerate(answer.embeddings)
        )
        raw = json.dumps(beside)[:-1].encode() + b', "data": ' + await json_of(rows) + b"}"
        return Response(raw, media_type="application/json", headers=headers_of(message, ignored))

    async def embed(self, body: EmbedBody, request: Request) -> Response:
        """LoRAX's form: one text beside `parameters`, `{"embeddings": [...]}`; TEI's form: a list for each input."""
        ignored = self._ignored(body)
        message = pooling_pb2.EmbedRequest(inputs=inputs_of(body.inputs, "inputs"), request_id=request_id_of(request))
        if body.prompt_name is not None:
            raise Unimplemented("`prompt_name` is not available: write the prompt into the text", field="prompt_name")
        await self._put_adapter(message, body, request, body.parameters)
        message.omit_normalization = body.normalize is False
        message.dimensions = body.dimensions or 0
        if body.truncate:
            message.truncate_prompt.keep_start = (body.truncation_direction or "right").lower() == "right"
        put_truncation(message, body.parameters)
        answer = await self._embed(message, request)
        of_tei = (body.normalize, body.truncate, body.truncation_direction, body.dimensions)
        has_tei = any(one is not None for one in of_tei)
        # LoRAX's client always sends the key, be it null, and TEI's clients never.
        is_tei = has_tei or not isinstance(body.inputs, str) or "parameters" not in body.model_fields_set
        headers = headers_of(message, ignored)
        if not is_tei:
            return JSONResponse({"embeddings": floats(answer.embeddings[0])}, headers=headers)
        raw = await json_of(map(floats, answer.embeddings))
        return Response(raw, media_type="application/json", headers=headers)

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """vLLM's form with `input`: the likeliest label of each input. LoRAX's with `inputs`: the entities of a text by
        a token classifier, the label of a text by another."""
        message, answer, ignored = await self._classify(body, request, of_many=False)
        if body.inputs is not None:
            return JSONResponse(entities_of(message, answer, 0), headers=headers_of(message, ignored))
        if answer.per_token:
            raise InvalidArgument(
                "the adapter classifies tokens: send a text as `inputs`, and get its entities",
                field="input",
                metadata={"request_id": message.request_id},  # the call has its line
            )
        content = {
            "id": f"classify-{message.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": body.model or self._router.base_names()[0],
            "data": labels_of(answer),
            "usage": usage_of(answer.usage),
            "loraplex": own_fields(message.adapter_id, answer) | {"labels": list(answer.labels)},
        }
        return JSONResponse(content, headers=headers_of(message, ignored))

    async def classify_batch(self, body: ClassifyBody, request: Request) -> Response:
        """LoRAX's form: the entities of each text."""
        message, answer, ignored = await self._classify(body, request, of_many=True)
        rows = (entities_of(message, answer, index) for index in range(len(answer.classifications)))
        return Response(await json_of(rows), media_type="application/json", headers=headers_of(message, ignored))

    async def _classify(
        self, body: ClassifyBody, request: Request, *, of_many: bool
    ) -> tuple[pooling_pb2.ClassifyRequest, pooling_pb2.ClassifyResponse, dict[str, str]]:
        ignored = self._ignored(body)
        if body.inputs is None and not of_many:
            message = pooling_pb2.ClassifyRequest(inputs=inputs_or_chat(body))
        else:
            if body.input is not None or body.messages is not None:
                name = "input" if body.messages is None else "messages"
                raise InvalidArgument(f"give `inputs` or `{name}`, not both", field=name)
            if isinstance(body.inputs, str) is of_many:
                form = "a list of texts" if of_many else "one text; /classify_batch takes several"
                raise InvalidArgument(f"`inputs` must be {form}", field="inputs")
            message = pooling_pb2.ClassifyRequest(inputs=inputs_of(body.inputs, "inputs"))
        await self._put_fields(message, body, request, body.parameters)
        put_truncation(message, body.parameters)
        message.logits = False in (body.activation, body.use_activation, body.softmax)
        relay = self._router.relay.classify
        answer = await self._ask("Classify", relay, message, pooling_pb2.ClassifyResponse, request)
        return message, answer, ignored

    async def score(self, body: ScoreBody, request: Request) -> Response:
        """One query to all documents, or as many queries as documents, pair by pair."""
        ignored = self._router.ignored(ignored_fields(body), harmless_fields(body))
        first, queries = one_of(text_1=body.text_1, queries=body.queries, data_1=body.data_1)
        second, documents = one_of(text_2=body.text_2, documents=body.documents, items=body.items, data_2=body.data_2)
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
            "loraplex": own_fields(messages[0].adapter_id, answers[0]),
        }
        return JSONResponse(content, headers=headers_of(messages[0], ignored))

    async def rerank(self, body: RerankBody, request: Request) -> Response:
        """The documents, the best first."""
        ignored = self._router.ignored(ignored_fields(body), harmless_fields(body))
        name, documents = one_of(documents=body.documents, texts=body.texts)
        if not isinstance(documents, list) or not documents:
            raise InvalidArgument(f"`{name}` must be a list of texts", field=name)
        texts = [document_text(one, name) for one in cast("list[Any]", documents)]
        message = await self._score_request(body, input_of(body.query, "query"), inputs_of(texts, name), request)
        message.logits = message.logits or bool(body.raw_scores)
        if body.truncate or body.max_tokens_per_doc:
            message.truncate_prompt.max_tokens = body.max_tokens_per_doc or 0
            message.truncate_prompt.keep_start = (body.truncation_direction or "right").lower() == "right"
        (answer,) = await self._scores([message], request)
        order = sorted(range(len(texts)), key=lambda index: -answer.scores[index])
        headers = headers_of(message, ignored)
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
            "loraplex": own_fields(message.adapter_id, answer),
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
        put_score_fields(message, body)
        return message

    # --- calls -----------------------------------------------------------------------------------------------------

    async def _embed(self, message: pooling_pb2.EmbedRequest, request: Request) -> pooling_pb2.EmbedResponse:
        return await self._ask("Embed", self._router.relay.embed, message, pooling_pb2.EmbedResponse, request)

    async def _scores(
        self, messages: Sequence[pooling_pb2.ScoreRequest], request: Request
    ) -> list[pooling_pb2.ScoreResponse]:
        """The answers in the order of the requests, or the first error."""
        self._router.relay.check_together(messages)
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
                raise no_mixture(name)
        names = header_names([*ignored_fields(body), *(f"parameters.{name}" for name in of_parameters)])
        return self._router.ignored(names, harmless_fields(body))

    async def _put_adapter(
        self, message: PoolingRequest, body: AdapterFields, request: Request, parameters: Parameters | None
    ) -> None:
        """Puts the body's adapter and its origin into the message. Raises AdapterNotFound, Unimplemented for a mixture,
        and InvalidArgument for two names."""
        names = {**body.adapter_names(), "parameters.adapter_id": lorax_adapter(parameters)}
        message.adapter_id = adapter_in(names, await self._router.names_for(body.model, request))
        put_origin(message, origin_of(body, parameters), message.adapter_id)

    async def _put_fields(
        self, message: PoolingRequest, body: PoolingFields, request: Request, parameters: Parameters | None = None
    ) -> None:
        await self._put_adapter(message, body, request, parameters)
        put_fields(message, body, request_id_of(request))
