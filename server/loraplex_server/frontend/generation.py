"""One request from submission to its terminal event, as text.

Leaving the `async for` early cancels the request in the engine, which frees its KV blocks.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    PromptLogprobs,
    Request,
    RequestFailed,
    TokenLogprob,
    Tokens,
)
from loraplex_server.engine.client import EngineClient, RequestStream
from loraplex_server.frontend.completion import CompletionAssembler, Delta
from loraplex_server.text.tokenizer import TextTokenizer


@dataclass(slots=True)
class Progress:
    """Facts about a request beside its text, filled while it runs."""

    adapter_digest: str = ""
    queue_s: float = 0.0
    first_token_s: float | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    started_s: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


async def generate(
    engine: EngineClient,
    request: Request,
    tokenizer: TextTokenizer,
    eos_token_ids: Collection[int],
    progress: Progress,
) -> AsyncGenerator[list[Delta], None]:
    """Yields the deltas of the events since the last ones, until every completion has ended.

    Raises the request's typed error. `progress` is filled before the first yield that it concerns.
    """
    assemblers = [CompletionAssembler.of(request, index, tokenizer, eos_token_ids) for index in range(request.n)]
    stream = engine.submit(request)
    try:
        while True:
            events = await stream.next()
            deltas = _coalesce(_take(engine, stream, assemblers, events, progress))
            if deltas:
                yield deltas
            # Events before a failure are delivered before it.
            if isinstance(events[-1], RequestFailed):
                raise events[-1].error
            if stream.is_read:
                return
    finally:
        if not stream.is_over:
            engine.cancel(stream, Cancelled("the client went away"))


def _take(
    engine: EngineClient,
    stream: RequestStream,
    assemblers: list[CompletionAssembler],
    events: list[Event],
    progress: Progress,
) -> list[Delta]:
    deltas: list[Delta] = []
    for event in events:
        match event:
            case Tokens():
                if progress.first_token_s is None:
                    progress.first_token_s = progress.elapsed_s()
                assembler = assemblers[event.index]
                was_stopped = assembler.is_stopped
                deltas.append(assembler.push(event))
                if assembler.is_stopped and not was_stopped:
                    engine.stop_completion(stream, event.index)
            case CompletionEnd():
                deltas.append(assemblers[event.index].end(event))
            case Admitted():
                progress.adapter_digest = event.adapter_digest
                progress.queue_s = event.queue_s
            case PromptLogprobs():
                progress.prompt_logprobs = tuple(assemblers[0].with_text(one) for one in event.logprobs)
            case RequestFailed():
                pass  # always the last; `generate` raises it
    return deltas


def _coalesce(deltas: list[Delta]) -> list[Delta]:
    """One delta per completion and proposer: cost on the wire is per message, not per byte. Empty ones are dropped."""
    done: list[Delta] = []
    merged: dict[int, Delta] = {}
    for delta in deltas:
        before = merged.get(delta.index)
        if before is not None and before.proposer and delta.proposer and before.proposer != delta.proposer:
            done.append(before)  # a delta counts the drafts of one proposer
            before = None
        merged[delta.index] = delta if before is None else _join(before, delta)
    return [d for d in (*done, *merged.values()) if d.text or d.token_ids or d.end is not None]


def _join(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.index,
        first.text + second.text,
        first.token_ids + second.token_ids,
        first.logprobs + second.logprobs,
        first.num_drafted + second.num_drafted,
        first.num_accepted + second.num_accepted,
        first.proposer or second.proposer,
        second.end,
    )
