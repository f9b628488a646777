"""Generation: one request from submission to its terminal event, as text.

Leaving the `async for` early cancels the request in the engine, which frees its KV blocks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from loraplex_contracts.errors import Cancelled
from loraplex_contracts.request import (
    Admitted,
    CompletionEnd,
    Event,
    FinishReason,
    Pooled,
    PositionLogprobs,
    PromptLogprobs,
    Request,
    RequestFailed,
    TokenLogprob,
    Tokens,
    TopLogprob,
)
from loraplex_runtime.request_record import RequestRecord
from loraplex_server.text.detokenizer import REPLACEMENT
from loraplex_server.text.responses import AsyncReader, MessagePart, ParsedMessage, ResponseParsing, with_tokens
from loraplex_server.text.tokenizer import TextTokenizer

if TYPE_CHECKING:  # the process that tokenizes long texts loads no torch
    from loraplex_server.engine.client import EngineClient, RequestStream


@dataclass(frozen=True, slots=True)
class Drafts:
    """Number of tokens that one proposer drafted, and that the model accepted."""

    proposer: str
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class CompletionSummary:
    """The end of a completion. `num_completion_tokens` counts up to the token that ended it."""

    index: int
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_steps: int  # that gave those tokens
    drafts: tuple[Drafts, ...]  # by proposer, in the order of their names
    message: ParsedMessage | None = None  # of an answer that is parsed
    num_reasoning_tokens: int = 0  # of it


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one completion. `end` is on its last delta only. `proposer` is empty without drafts.
    `parts`: of the message, where the answer is parsed; they may come later than their text."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""
    parts: tuple[MessagePart, ...] = ()
    end: CompletionSummary | None = None


class CompletionAssembler:
    """Assembles one completion from its first token to its end: events in, deltas out. Owns its detokenizer, stop
    matcher and reader."""

    def __init__(
        self,
        request: Request,
        index: int,
        tokenizer: TextTokenizer,
        eos_token_ids: Collection[int],
        parsing: ResponseParsing | None = None,
    ) -> None:
        """Assembles completion `index`. Raises FailedPrecondition for stop strings without a tokenizer."""
        stopping = request.stopping
        # The token that ends a completion is not part of its text.
        ending = stopping.ending_ids(eos_token_ids)
        dropped = frozenset[int]() if stopping.include_stop else ending
        keep_special = request.output.keep_special_tokens
        if parsing is not None and not keep_special and parsing.is_parsed:
            dropped, keep_special = dropped | parsing.unread_ids, True  # it looks for some of them
        self._index = index
        self._detokenizer = tokenizer.new_detokenizer(request.prompt_token_ids, dropped, keep_special=keep_special)
        if request.output.echo and self._detokenizer is not None:
            self._detokenizer.take_unfinished()  # it is left out of the echo
        self._reader = None if parsing is None or parsing.new_user_reader is not None else parsing.reader()
        self._stops = tokenizer.new_stop_matcher(stopping, ending)
        self._is_parsed = parsing is not None
        self._tokenizer = tokenizer
        self._with_bytes = request.output.token_bytes
        self._with_logprobs = request.output.logprobs
        self._num_tokens = 0
        self._num_chars = 0  # out of the detokenizer
        self.starts: list[int] = []  # of the tokens of an answer that is parsed, in those characters
        self._num_steps = 0
        self._drafts: dict[str, Drafts] = {}
        self.is_stopped = False  # by a stop string; only `end` is still to come
        self.has_ended = False

    def push(self, event: Tokens) -> Delta:
        """The delta of new tokens. When they complete a stop string, the tokens after it are dropped and `is_stopped`
        is set."""
        if self.is_stopped:
            return Delta(self._index)
        text, num_kept = self._text_of(event.token_ids)
        self._num_tokens += num_kept
        self._num_steps += event.num_steps
        num_accepted = min(event.num_accepted, num_kept)  # dropped tokens do not count
        if event.num_drafted:
            before = self._drafts.get(event.proposer, Drafts(event.proposer, 0, 0))
            self._drafts[event.proposer] = Drafts(
                event.proposer, before.num_drafted + event.num_drafted, before.num_accepted + num_accepted
            )
        return Delta(
            self._index,
            text=text,
            token_ids=event.token_ids[:num_kept],
            logprobs=tuple(self.with_text(one) for one in event.logprobs[:num_kept]),
            num_drafted=event.num_drafted,
            num_accepted=num_accepted,
            proposer=event.proposer if event.num_drafted else "",
            parts=() if self._reader is None else self.located(self._reader.push(text)),
        )

    def end(self, event: CompletionEnd) -> Delta:
        """The delta at the engine's end of the completion, with the text held back, unless a stop string had ended it
        before."""
        self.has_ended = True
        text, stop_string = "", None
        if not self.is_stopped and self._detokenizer is not None:
            text = self._through_stops(self._detokenizer.finish())
            if not self.is_stopped and self._stops is not None:
                text += self._stops.finish()
        if self.is_stopped and self._stops is not None:
            stop_string = self._stops.matched
        parts: list[MessagePart] = []
        if self._reader is not None:
            parts = [*self._reader.push(text), *self._reader.finish()]
        summary = CompletionSummary(
            index=self._index,
            reason=FinishReason.STOP if self.is_stopped else event.reason,
            stop_string=stop_string,
            stop_token_id=None if self.is_stopped else event.stop_token_id,
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            num_completion_tokens=self._num_tokens,
            num_steps=self._num_steps,
            drafts=tuple(self._drafts[name] for name in sorted(self._drafts)),
            message=None if self._reader is None else self._reader.message(),
            num_reasoning_tokens=0 if self._reader is None else self._reader.num_reasoning_tokens(self.starts),
        )
        return Delta(self._index, text=text, parts=self.located(parts), end=summary)

    def located(self, parts: Sequence[MessagePart]) -> tuple[MessagePart, ...]:
        """The parts, with their tokens where the request asks for logprobs."""
        return tuple(with_tokens(parts, self.starts) if self._with_logprobs else parts)

    def with_text(self, logprobs: PositionLogprobs) -> TokenLogprob:
        token_id = logprobs.token_id
        return TokenLogprob(
            token_id,
            self._tokenizer.token_text(token_id),
            logprobs.logprob,
            tuple(
                TopLogprob(one, self._tokenizer.token_text(one), value, self._bytes(one)) for one, value in logprobs.top
            ),
            self._bytes(token_id),
            self._tokenizer.is_special(token_id),
        )

    def _bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id) if self._with_bytes else b""

    def _text_of(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """Text that is safe to send, and the number of tokens that belong to the completion."""
        if self._detokenizer is None:
            return "", len(token_ids)
        if self._stops is None and not self._is_parsed:
            return self._detokenizer.push(token_ids), len(token_ids)
        text = ""
        for num_kept, token_id in enumerate(token_ids, start=1):
            new = self._detokenizer.push((token_id,))
            if self._is_parsed:
                self.starts.append(self._num_chars)
                self._num_chars += len(new)
            # In an invalid run of byte tokens the text has U+FFFD even for a byte that is a newline.
            read = new[:-1] + self._tokenizer.token_text(token_id)[-1:] if new.endswith(REPLACEMENT) else ""
            text += self._through_stops(new, num_kept, read)
            if not new:
                text += self._stop_without_text(token_id, num_kept)
            if self.is_stopped:
                return text, num_kept
        return text, len(token_ids)

    def _stop_without_text(self, token_id: int, num_before: int) -> str:
        """The rest of the text, where a token without text ends it: one that is a stop string, or that completes one
        which the detokenizer still holds."""
        if self._stops is None or self._detokenizer is None:
            return ""
        num_tokens = self._num_tokens + num_before
        is_stop = self._stops.is_stop(token_id, num_tokens=num_tokens)
        if not is_stop and not self._stops.ends_with(self._detokenizer.pending(), num_tokens=num_tokens):
            return ""
        text = self._through_stops(self._detokenizer.finish(), num_before)
        if not self.is_stopped:
            text += self._stops.stop_at(token_id)
            self.is_stopped = True
        return text

    def _through_stops(self, text: str, num_before: int = 0, read: str = "") -> str:
        if self._stops is None:
            return text
        safe = self._stops.push(text, num_tokens=self._num_tokens + num_before, read=read)
        self.is_stopped = self._stops.matched is not None
        return safe


@dataclass(slots=True)
class Progress:
    """Facts about a request beside its text, filled while it runs."""

    record: RequestRecord = field(default_factory=lambda: RequestRecord("Generate"))
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])


async def generate(
    engine: EngineClient,
    request: Request,
    tokenizer: TextTokenizer,
    eos_token_ids: Collection[int],
    progress: Progress,
    parsing: ResponseParsing | None = None,
) -> AsyncGenerator[list[Delta], None]:
    """Yields the deltas of the events since the last ones, until every completion has ended.

    Raises the request's typed error, unless stop strings had ended what was still open, and AdapterInvalid where an
    adapter's response template comes to its limits.
    `progress` is filled before the first yield that it concerns.
    """
    assemblers = [CompletionAssembler(request, index, tokenizer, eos_token_ids, parsing) for index in range(request.n)]
    new_reader = None if parsing is None else parsing.new_user_reader
    readers = [] if new_reader is None else [new_reader() for _ in range(request.n)]
    stream = engine.submit(request)
    try:
        while True:
            events = await stream.next()
            deltas = _coalesce(_take(engine, stream, assemblers, events, progress))
            if readers:
                deltas = [await _with_parts(delta, readers[delta.index], assemblers[delta.index]) for delta in deltas]
            if deltas:
                yield deltas
            # Events before a failure are delivered before it.
            if isinstance(events[-1], RequestFailed) and not all(one.has_ended for one in assemblers):
                raise events[-1].error
            if stream.is_read:
                return
    finally:
        if not stream.is_over:
            engine.cancel(stream, Cancelled("the client went away"))


async def _with_parts(delta: Delta, reader: AsyncReader, assembler: CompletionAssembler) -> Delta:
    parts = assembler.located(await reader.push(delta.text, is_end=delta.end is not None))
    if delta.end is None:
        return replace(delta, parts=parts)
    num_reasoning_tokens = reader.num_reasoning_tokens(assembler.starts)
    end = replace(delta.end, message=reader.message(), num_reasoning_tokens=num_reasoning_tokens)
    return replace(delta, parts=parts, end=end)


def _take(
    engine: EngineClient,
    stream: RequestStream,
    assemblers: list[CompletionAssembler],
    events: list[Event],
    progress: Progress,
) -> list[Delta]:
    deltas: list[Delta] = []
    record = progress.record
    for event in events:
        match event:
            case Tokens():
                if record.first_token_s is None:
                    record.first_token_s = record.elapsed_s()
                assembler = assemblers[event.index]
                was_stopped = assembler.is_stopped
                deltas.append(assembler.push(event))
                if assembler.is_stopped and not was_stopped:
                    engine.stop_completion(stream, event.index)
            case CompletionEnd():
                deltas.append(_ended(assemblers[event.index], event, record))
            case Admitted():
                record.adapter_digest = event.adapter_digest
                record.queue_s, record.adapter_wait_s = event.queue_s, event.adapter_wait_s
            case PromptLogprobs():
                progress.prompt_logprobs += [assemblers[0].with_text(one) for one in event.logprobs]
            case RequestFailed():  # always the last; `generate` raises it
                if event.queue_s is not None:
                    record.waited_s, record.adapter_wait_s = event.queue_s, event.adapter_wait_s
                deltas += _ends_behind_stops(stream.request, assemblers, record)
            case Pooled():
                pass  # of other requests
    return deltas


def _ends_behind_stops(request: Request, assemblers: list[CompletionAssembler], record: RequestRecord) -> list[Delta]:
    """The ends of a request that failed when stop strings had ended what was still open of it: what failed is a step
    behind them, which the engine took before it heard of them. None of another one."""
    if not all(one.is_stopped or one.has_ended for one in assemblers):
        return []
    num_prompt = len(request.prompt_token_ids)
    return [
        _ended(one, CompletionEnd(request.request_id, index, FinishReason.STOP, None, num_prompt, 0), record)
        for index, one in enumerate(assemblers)
        if not one.has_ended
    ]


def _ended(assembler: CompletionAssembler, event: CompletionEnd, record: RequestRecord) -> Delta:
    delta = assembler.end(event)
    if (end := delta.end) is not None:
        record.num_prompt_tokens, record.num_cached_tokens = end.num_prompt_tokens, end.num_cached_tokens
        for one in end.drafts:
            record.add_drafts(one.proposer, one.num_drafted, one.num_accepted)
    return delta


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
        first.parts + second.parts,
        second.end,
    )
