"""PoolingService of a worker: embeddings, and typed refusals of what is not built."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from loraplex_contracts.adapters import AdapterId
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.request import PoolingParams, Request, SpeculationParams, StoppingParams
from loraplex_proto import validate
from loraplex_proto.v1 import inference_pb2, pooling_pb2, pooling_pb2_grpc
from loraplex_server.engine.client import EngineClient
from loraplex_server.engine.pipe import ModelInfo
from loraplex_server.frontend.pooling import PooledAnswer, embedding, pool_all
from loraplex_server.frontend.tokenizing import Tokenizing
from loraplex_server.grpc.middleware import RequestGate, begin_request, handles_errors
from loraplex_server.grpc.prompts import TOKEN_CHARS, PoolingRequest, Prompts, seconds_left, within
from loraplex_server.text.tokenizer import Truncation

Context = Any


class PoolingServicer(pooling_pb2_grpc.PoolingServiceServicer):
    """Owns the counter that makes the engine's request ids unique."""

    def __init__(self, engine: EngineClient, info: ModelInfo, tokenizing: Tokenizing, gate: RequestGate) -> None:
        self._engine = engine
        self._info = info
        self._tokenizing = tokenizing
        self._prompts = Prompts(tokenizing)
        self._gate = gate
        self._counter = itertools.count(1)

    @handles_errors
    async def Embed(self, request: pooling_pb2.EmbedRequest, context: Context) -> pooling_pb2.EmbedResponse:
        started_s = time.monotonic()
        request_id = begin_request(request.request_id)
        validate.check_pooling(request)
        size = self._info.hidden_size
        if request.dimensions > size:
            raise InvalidArgument(
                f"`dimensions` is {request.dimensions}; this model's embeddings have {size} values", field="dimensions"
            )
        params = PoolingParams("embed", "mean" if request.pooling == pooling_pb2.POOLING_MEAN else "last")
        requests = await self._accept(request, request_id, params, context)
        answers = await pool_all(self._engine, requests)
        made = [
            embedding(one.values[0], request.dimensions, normalizes=not request.omit_normalization) for one in answers
        ]
        return pooling_pb2.EmbedResponse(
            request_id=request_id,
            embeddings=[
                pooling_pb2.Embedding(values=vector.astype(np.float32).tolist(), prompt_tokens=one.num_prompt_tokens)
                for vector, one in zip(made, answers, strict=True)
            ],
            usage=_usage(answers),
            timings=_timings(answers, started_s),
            adapter_digest=answers[0].adapter_digest,
        )

    @handles_errors
    async def Classify(self, request: pooling_pb2.ClassifyRequest, context: Context) -> pooling_pb2.ClassifyResponse:
        validate.refuse_pooling(request)

    @handles_errors
    async def Score(self, request: pooling_pb2.ScoreRequest, context: Context) -> pooling_pb2.ScoreResponse:
        validate.refuse_pooling(request)

    async def _accept(
        self, message: PoolingRequest, request_id: str, params: PoolingParams, context: Context
    ) -> list[Request]:
        """The engine's requests, one for each input. Raises typed errors."""
        arrival_s, left_s = time.monotonic(), seconds_left(context)
        identity = self._gate.admit(*validate.pooling_adapters_in(message))
        async with within(left_s):
            self._refuse_early(message, identity.tenant, left_s)
            truncation = self._prompts.truncation(message, 0)
            prompts = [
                await self._prompt(one, truncation, special=not message.omit_special_tokens) for one in message.inputs
            ]
        return [
            Request(
                request_id=f"{request_id}/{next(self._counter)}",  # clients may choose equal ids
                prompt_token_ids=prompt,
                stopping=StoppingParams(max_tokens=1),
                speculation=SpeculationParams(kind="off"),
                pooling=params,
                adapter_id=AdapterId(message.adapter_id),
                tenant=identity.tenant,
                cache_salt=message.cache_salt,
                priority=message.priority,
                arrival_s=arrival_s,
                deadline_s=None if left_s is None else arrival_s + left_s,
            )
            for prompt in prompts
        ]

    async def _prompt(
        self, one: pooling_pb2.PoolingInput, truncation: Truncation | None, *, special: bool
    ) -> tuple[int, ...]:
        limits, ids = self._tokenizing.limits, one.token_ids.ids
        if truncation is None:
            validate.check_prompt_length(max(1, len(ids)), limits, makes_tokens=False)  # before each id is looked at
        check = partial(validate.check_token_ids, ids, "inputs.token_ids.ids", limits)
        await self._tokenizing.off_loop(len(ids), check)
        prompt = await self._prompts.ids(one, truncation, special=special)
        validate.check_prompt_length(len(prompt), limits, makes_tokens=False)
        return prompt

    def _refuse_early(self, message: PoolingRequest, tenant: str, left_s: float | None) -> None:
        """As of generation: Overloaded where the engine would refuse, by an estimate without tokens."""
        forecast = self._engine.state.load.forecast
        if forecast is None or message.priority > 0:
            return
        num_prompt = sum(
            len(one.token_ids.ids) or (len(one.text) + one.chat.ByteSize()) // TOKEN_CHARS for one in message.inputs
        )
        forecast.check((tenant, message.adapter_id), num_prompt, 1, left_s)


def _usage(answers: Sequence[PooledAnswer]) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=sum(one.num_prompt_tokens for one in answers),
        cached_tokens=sum(one.num_cached_tokens for one in answers),
    )


def _timings(answers: Sequence[PooledAnswer], started_s: float) -> inference_pb2.Timings:
    return inference_pb2.Timings(queue_s=max(one.queue_s for one in answers), total_s=time.monotonic() - started_s)
