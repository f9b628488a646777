"""Pooling: requests to the engine that are answered with values instead of tokens."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loraplex_contracts.errors import Cancelled, Internal, InvalidArgument, Unavailable
from loraplex_contracts.request import MAX_CLASS_VALUES, Admitted, CompletionEnd, Pooled, Request, RequestFailed
from loraplex_runtime.request_record import RequestRecord

if TYPE_CHECKING:  # tests of this module need no torch
    from loraplex_server.engine.client import EngineClient, RequestStream

Floats = NDArray[np.float64]

# Requests of one call that the engine has at a time: enough to fill its steps, few beside other callers'.
MAX_AT_ONCE = 32
RETRY_AFTER_S = 1.0
MIN_LENGTH = 1e-12  # of a vector that is divided by its length, as in torch.nn.functional.normalize


@dataclass(frozen=True, slots=True)
class PooledAnswer:
    """The values of one request, with its counts of tokens and its time in the queue."""

    values: Floats  # [num_rows, num_columns]
    labels: tuple[str, ...]  # of a classifier's columns
    per_token: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    adapter_digest: str
    queue_s: float


async def pool_all(engine: EngineClient, requests: Sequence[Request], record: RequestRecord) -> list[PooledAnswer]:
    """The answers in the order of the requests, all of one adapter; `record` gets the longest of their waits. Raises
    the first typed error of one, and ends the others then; InvalidArgument where tokens have more than MAX_CLASS_VALUES
    labels together, Unavailable where the answers are of two versions of the adapter."""
    turns = asyncio.Semaphore(MAX_AT_ONCE)
    num_values = 0

    async def one(request: Request) -> PooledAnswer:
        nonlocal num_values
        async with turns:
            answer = await _pool(engine, request, record)
            num_values += answer.values.size if answer.per_token else 0
            if num_values > MAX_CLASS_VALUES:
                raise InvalidArgument(
                    f"adapter {request.adapter_id!a} gives each token {len(answer.labels)} values, and the inputs have "
                    f"more than {MAX_CLASS_VALUES} together: send fewer or shorter inputs at once",
                    field="inputs",
                )
            return answer

    tasks = [asyncio.ensure_future(one(request)) for request in requests]
    try:
        answers = list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    if len({(one.adapter_digest, one.labels, one.per_token) for one in answers}) > 1:
        raise Unavailable("the adapter was replaced during this call; send it again", retry_after_s=RETRY_AFTER_S)
    return answers


async def _pool(engine: EngineClient, request: Request, record: RequestRecord) -> PooledAnswer:
    stream = engine.submit(request)
    try:
        return await _read(stream, record)
    finally:
        if not stream.is_over:
            engine.cancel(stream, Cancelled("the client went away"))


async def _read(stream: RequestStream, record: RequestRecord) -> PooledAnswer:
    pooled: Pooled | None = None
    digest, queue_s = "", 0.0
    while True:
        for event in await stream.next():
            match event:
                case Admitted():
                    digest, queue_s = event.adapter_digest, event.queue_s
                    record.queue_s = max(queue_s, record.queue_s or 0.0)
                    record.adapter_wait_s = max(event.adapter_wait_s, record.adapter_wait_s)
                case Pooled():
                    pooled = event
                case RequestFailed(_, error):
                    if event.queue_s is not None:
                        record.waited_s = max(event.queue_s, record.waited_s or 0.0)
                        record.adapter_wait_s = max(event.adapter_wait_s, record.adapter_wait_s)
                    raise error
                case CompletionEnd():
                    if pooled is None:
                        raise Internal("a request for pooled values ended without them; please report this")
                    values = np.frombuffer(pooled.values, dtype=np.float64).reshape(-1, pooled.num_columns)
                    return PooledAnswer(
                        values=values,
                        labels=pooled.labels,
                        per_token=pooled.per_token,
                        num_prompt_tokens=event.num_prompt_tokens,
                        num_cached_tokens=event.num_cached_tokens,
                        adapter_digest=digest,
                        queue_s=queue_s,
                    )
                case _:
                    pass  # requests for values get no tokens


def embedding(values: Floats, dimensions: int, *, normalizes: bool) -> Floats:
    """The first `dimensions` of `values` [num_columns] (0: all), and their length made 1."""
    kept = values[:dimensions] if dimensions else values
    if not normalizes:
        return kept
    return kept / max(float(np.linalg.norm(kept)), MIN_LENGTH)


def probabilities(logits: Floats) -> Floats:
    """Probabilities of the labels in each row [num_rows, num_labels]; a single label is a yes or no."""
    if logits.shape[1] == 1:
        return np.vectorize(sigmoid, otypes=[np.float64])(logits)
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def sigmoid(logit: float) -> float:
    """The probability of a yes, without overflow."""
    power = math.exp(-abs(logit))
    return 1 / (1 + power) if logit >= 0 else power / (1 + power)
