"""PoolingService of a worker: embeddings, classes, scores."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from loraplex_contracts.adapters import AdapterId, AdapterVersion
from loraplex_contracts.errors import FailedPrecondition, InvalidArgument, NoClassifier
from loraplex_contracts.request import PooledPositions, PoolingParams, Request, SpeculationParams, StoppingParams
from loraplex_proto import validate
from loraplex_proto.estimates import estimated_pooling_tokens
from loraplex_proto.v1 import inference_pb2, pooling_pb2, pooling_pb2_grpc
from loraplex_proto.validate import PoolingRequest
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.frontend.pooling import PooledAnswer, embedding, pool_all, probabilities, sigmoid
from loraplex_server.frontend.templates import Templates
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc import protobuf
from loraplex_server.grpc.middleware import RequestGate, begin_request, current_record, handles_errors
from loraplex_server.grpc.prompts import Prompts, refuse_early, seconds_left, within

Context = Any

# Of all prompts of a call with a query, which is in each: 160 MB. The message's own size bounds those of other calls.
MAX_PAIRED_TOKENS: Final = 1 << 22

_POSITIONS: Mapping[int, PooledPositions] = {
    pooling_pb2.POOLING_LAST_TOKEN: "last",
    pooling_pb2.POOLING_MEAN: "mean",
}  # else as the adapter says


class PoolingServicer(pooling_pb2_grpc.PoolingServiceServicer):
    """Serves embeddings, classes and scores."""

    def __init__(
        self,
        engine: EngineClient,
        info: ModelInfo,
        tokenizing: Tokenizing,
        gate: RequestGate,
        templates: Templates,
    ) -> None:
        self._engine = engine
        self._info = info
        self._tokenizing = tokenizing
        self._prompts = Prompts(tokenizing, templates)
        self._gate = gate

    @handles_errors
    async def Embed(self, request: pooling_pb2.EmbedRequest, context: Context) -> pooling_pb2.EmbedResponse:
        started_s = time.monotonic()
        request_id = begin_request(request.request_id, request.adapter_id)
        validate.check_pooling(request)
        size = self._info.hidden_size
        if request.dimensions > size:
            raise InvalidArgument(
                f"`dimensions` is {request.dimensions}; this model's embeddings have {size} values", field="dimensions"
            )
        answers = await self._pool(request, request_id, _embeds(request.pooling), request.inputs, context)
        embeddings: list[pooling_pb2.Embedding] = []
        for one in answers:
            vector = embedding(one.values[0], request.dimensions, normalizes=not request.omit_normalization)
            values = vector.astype(np.float32).tolist()
            embeddings.append(pooling_pb2.Embedding(values=values, prompt_tokens=one.num_prompt_tokens))
            await asyncio.sleep(0)  # other calls go on between the vectors of a large answer
        return pooling_pb2.EmbedResponse(
            request_id=request_id,
            embeddings=embeddings,
            usage=_usage(answers),
            timings=_timings(answers, started_s),
            adapter_digest=answers[0].adapter_digest,
        )

    @handles_errors
    async def Classify(self, request: pooling_pb2.ClassifyRequest, context: Context) -> pooling_pb2.ClassifyResponse:
        started_s = time.monotonic()
        request_id = begin_request(request.request_id, request.adapter_id)
        validate.check_pooling(request)
        answers = await self._pool(request, request_id, PoolingParams("classify"), request.inputs, context)
        first = answers[0]
        found: list[pooling_pb2.Classification] = []
        for one in answers:
            values = one.values if request.logits else probabilities(one.values)
            rows = [pooling_pb2.LabelProbabilities(probabilities=row) for row in values.tolist()]
            found.append(pooling_pb2.Classification(rows=rows))
            await asyncio.sleep(0)  # as above
        if first.per_token:
            await self._put_offsets(found, request)
        return pooling_pb2.ClassifyResponse(
            request_id=request_id,
            labels=first.labels,
            classifications=found,
            usage=_usage(answers),
            timings=_timings(answers, started_s),
            adapter_digest=first.adapter_digest,
            per_token=first.per_token,
        )

    @handles_errors
    async def Score(self, request: pooling_pb2.ScoreRequest, context: Context) -> pooling_pb2.ScoreResponse:
        started_s = time.monotonic()
        request_id = begin_request(request.request_id, request.adapter_id)
        validate.check_score(request)
        answers, scores = await self._score(request, request_id, context)
        return pooling_pb2.ScoreResponse(
            request_id=request_id,
            scores=scores,
            usage=_usage(answers),
            timings=_timings(answers, started_s),
            adapter_digest=answers[0].adapter_digest,
        )

    async def _score(
        self, request: pooling_pb2.ScoreRequest, request_id: str, context: Context
    ) -> tuple[list[PooledAnswer], list[float]]:
        """The engine's results, and the scores in the order of the documents."""
        method = request.method
        is_open = method == pooling_pb2.SCORE_METHOD_UNSPECIFIED
        if method == pooling_pb2.SCORE_METHOD_CLASSIFIER or (is_open and request.adapter_id):
            try:
                return await self._score_by_classifier(request, request_id, context)
            except NoClassifier:
                if not is_open:
                    raise
        if method == pooling_pb2.SCORE_METHOD_NEXT_TOKEN:
            tokenizer = self._tokenizing.tokenizer
            ids = (
                tokenizer.token_id(request.true_token or "yes", "true_token"),
                tokenizer.token_id(request.false_token or "no", "false_token"),
            )
            params = PoolingParams("next_token", token_ids=ids)
            answers = await self._pool(request, request_id, params, request.inputs, context, query=request.query)
            differences = [float(one.values[0, 0] - one.values[0, 1]) for one in answers]
            return answers, [one if request.logits else sigmoid(one) for one in differences]
        if request.template:  # no method was named, and there is no classifier
            raise InvalidArgument(
                "`template` is for query and document together, and without a classifier they are scored by the cosine "
                "of each by itself: leave it out, or set `method` to next_token",
                field="template",
            )
        inputs = [request.query, *request.inputs]
        answers = await self._pool(request, request_id, _embeds(request.pooling), inputs, context)
        query, *documents = [embedding(one.values[0], 0, normalizes=True) for one in answers]
        return answers, [float(query @ one) for one in documents]

    async def _score_by_classifier(
        self, request: pooling_pb2.ScoreRequest, request_id: str, context: Context
    ) -> tuple[list[PooledAnswer], list[float]]:
        params = PoolingParams("classify")
        answers = await self._pool(request, request_id, params, request.inputs, context, query=request.query)
        first = answers[0]
        if first.per_token or len(first.labels) != 1:
            what = "classifies tokens" if first.per_token else f"has {len(first.labels)} labels"
            raise FailedPrecondition(
                f"adapter {request.adapter_id!a} {what}: a score is made of one label of the whole text; ask Classify, "
                "or set `method`",
                field="adapter_id",
            )
        logits = [float(one.values[0, 0]) for one in answers]
        return answers, [one if request.logits else sigmoid(one) for one in logits]

    async def _pool(
        self,
        message: PoolingRequest,
        request_id: str,
        params: PoolingParams,
        inputs: Sequence[pooling_pb2.PoolingInput],
        context: Context,
        *,
        query: pooling_pb2.PoolingInput | None = None,
    ) -> list[PooledAnswer]:
        """The engine's answers, one for each input; with a `query` of query and input together. Raises typed errors."""
        requests = await self._accept(message, request_id, params, inputs, query, context)
        record = current_record()
        answers = await pool_all(self._engine, requests, record)
        record.adapter_digest = answers[0].adapter_digest
        record.num_cached_tokens = sum(one.num_cached_tokens for one in answers)
        return answers

    async def _put_offsets(
        self, found: Sequence[pooling_pb2.Classification], request: pooling_pb2.ClassifyRequest
    ) -> None:
        truncation, special = self._prompts.truncation(request, 0), not request.omit_special_tokens
        for one, given in zip(found, request.inputs, strict=True):
            if given.WhichOneof("input") == "text":
                offsets = await self._prompts.offsets(given.text, truncation, special=special)
                one.starts.extend(begin for begin, _ in offsets)
                one.ends.extend(end for _, end in offsets)

    async def _accept(
        self,
        message: PoolingRequest,
        request_id: str,
        params: PoolingParams,
        inputs: Sequence[pooling_pb2.PoolingInput],
        query: pooling_pb2.PoolingInput | None,
        context: Context,
    ) -> list[Request]:
        """The engine's requests, one for each input. Raises typed errors."""
        arrival_s, left_s = time.monotonic(), seconds_left(context)
        identity = self._gate.admit(*validate.pooling_adapters_in(message))
        async with within(left_s) as wait:
            num_estimated = estimated_pooling_tokens(inputs, query)
            flow = (identity.tenant, message.adapter_id)
            refuse_early(self._engine.state.load, flow, message.priority, num_estimated, 1, left_s)
            ticket = self._gate.take_pooling_quota(len(inputs), num_estimated)
            prompts: list[tuple[int, ...]] = []
            num_prompt_tokens = 0
            version: AdapterVersion | None = None
            origin = protobuf.adapter_origin(message, message.adapter_id)
            for one in inputs:
                with wait.fetch():
                    version = version or await self._prompts.version(one, message.adapter_id, origin)
                prompts.append(await self._prompt(message, one, query, version))
                num_prompt_tokens += len(prompts[-1])
                if query is not None and num_prompt_tokens > MAX_PAIRED_TOKENS:
                    raise InvalidArgument(
                        f"the documents, each with the query, have more than {MAX_PAIRED_TOKENS} tokens together: send "
                        "fewer at once, or shorten the query",
                        field="inputs",
                    )
                await asyncio.sleep(0)  # short texts are tokenized on the event loop
        ticket.set_prompt(num_prompt_tokens)
        current_record().num_prompt_tokens = num_prompt_tokens
        return [
            Request(
                request_id=self._engine.unique_id(request_id),
                prompt_token_ids=prompt,
                stopping=StoppingParams(max_tokens=1),
                speculation=SpeculationParams(kind="off"),
                pooling=params,
                adapter_id=AdapterId(message.adapter_id),
                adapter_origin=origin,
                adapter_digest="" if version is None else version.digest,
                tenant=identity.tenant,
                max_adapter_bytes=identity.limits.max_resident_adapter_bytes,
                cache_salt=message.cache_salt,
                priority=message.priority,
                arrival_s=arrival_s,
                deadline_s=None if left_s is None else arrival_s + left_s,
            )
            for prompt in prompts
        ]

    async def _prompt(
        self,
        message: PoolingRequest,
        one: pooling_pb2.PoolingInput,
        query: pooling_pb2.PoolingInput | None,
        version: AdapterVersion | None,
    ) -> tuple[int, ...]:
        """The token ids of one input. Raises typed errors for ids that this model does not have, and for a prompt that
        its context cannot hold."""
        limits, special = self._tokenizing.limits, not message.omit_special_tokens
        truncation = self._prompts.truncation(message, 0)
        parts = [one] if query is None else [query, one]
        num_ids = sum(len(part.token_ids.ids) for part in parts)
        if truncation is None and num_ids:
            validate.check_prompt_length(num_ids, limits, makes_tokens=False)  # before each id is looked at
        for part, field in zip(parts, ("inputs",) if query is None else ("query", "inputs"), strict=True):
            check = partial(validate.check_token_ids, part.token_ids.ids, f"{field}.token_ids.ids", limits)
            await self._tokenizing.off_loop(len(part.token_ids.ids), check)
        template = message.template if isinstance(message, pooling_pb2.ScoreRequest) else ""
        if query is None:
            prompt = await self._prompts.ids(one, truncation, special=special, version=version)
        elif template:
            text = _filled(template, {"{query}": query.text, "{document}": one.text})
            prompt = await self._prompts.ids(pooling_pb2.PoolingInput(text=text), truncation, special=special)
        elif query.WhichOneof("input") == "text":
            prompt = await self._prompts.pair_ids(query.text, one.text, truncation, special=special)
        else:
            ids = inference_pb2.TokenIds(ids=[*query.token_ids.ids, *one.token_ids.ids])
            prompt = await self._prompts.ids(pooling_pb2.PoolingInput(token_ids=ids), truncation, special=special)
        validate.check_prompt_length(len(prompt), limits, makes_tokens=False)
        return prompt


def _embeds(pooling: int) -> PoolingParams:
    return PoolingParams("embed", _POSITIONS.get(pooling))


def _filled(template: str, values: Mapping[str, str]) -> str:
    """The template with the values in their places; what looks like a place in a value is left alone."""
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match[0]], template)


def _usage(answers: Sequence[PooledAnswer]) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=sum(one.num_prompt_tokens for one in answers),
        cached_tokens=sum(one.num_cached_tokens for one in answers),
    )


def _timings(answers: Sequence[PooledAnswer], started_s: float) -> inference_pb2.Timings:
    return inference_pb2.Timings(queue_s=max(one.queue_s for one in answers), total_s=time.monotonic() - started_s)
