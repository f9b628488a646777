"""Text of one completion: detokenization, stop strings, logprob texts, counts.

Pure: events in, deltas out. Owns the detokenizer and the stop matcher of its completion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from loraplex_contracts.request import (
    CompletionEnd,
    FinishReason,
    PositionLogprobs,
    Request,
    StoppingParams,
    TokenLogprob,
    Tokens,
    TopLogprob,
)
from loraplex_server.text.detokenizer import Detokenizer
from loraplex_server.text.stops import StopMatcher
from loraplex_server.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class Drafts:
    """Number of tokens that one proposer drafted, and that the model accepted."""

    proposer: str
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class CompletionSummary:
    """How a completion ended. `num_completion_tokens` counts up to the token that ended it."""

    index: int
    reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    num_steps: int  # that gave those tokens
    drafts: tuple[Drafts, ...]  # by proposer, in the order of their names


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and tokens of one completion. `end` is on its last delta only. `proposer` is empty without drafts."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""
    end: CompletionSummary | None = None


class CompletionAssembler:
    """One completion from its first token to its end."""

    def __init__(
        self,
        index: int,
        stopping: StoppingParams,
        detokenizer: Detokenizer | None,
        stops: StopMatcher | None,
        token_text: Callable[[int], str],
    ) -> None:
        self._index = index
        self._stopping = stopping
        self._detokenizer = detokenizer
        self._stops = stops
        self._token_text = token_text
        self._num_tokens = 0
        self._num_steps = 0
        self._drafts: dict[str, Drafts] = {}
        self.is_stopped = False  # by a stop string; only `end` is still to come

    @classmethod
    def of(
        cls, request: Request, index: int, tokenizer: TextTokenizer, eos_token_ids: Collection[int]
    ) -> CompletionAssembler:
        """For completion `index`. Raises FailedPrecondition for stop strings without a tokenizer."""
        stopping = request.stopping
        # The token that ends a completion is not part of its text.
        ending = stopping.stop_token_ids | (frozenset() if stopping.ignore_eos else frozenset(eos_token_ids))
        return cls(
            index,
            stopping,
            tokenizer.new_detokenizer(request.prompt_token_ids, frozenset() if stopping.include_stop else ending),
            tokenizer.new_stop_matcher(stopping),
            tokenizer.token_text,
        )

    def push(self, event: Tokens) -> Delta:
        """New tokens. When they complete a stop string, the tokens after it are dropped and `is_stopped` is set."""
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
        )

    def end(self, event: CompletionEnd) -> Delta:
        """At the engine's end of the completion. Gives the text held back, unless a stop string had ended it before."""
        text, stop_string = "", None
        if not self.is_stopped and self._detokenizer is not None:
            text = self._through_stops(self._detokenizer.finish())
            if not self.is_stopped and self._stops is not None:
                text += self._stops.finish()
        if self.is_stopped and self._stops is not None:
            stop_string = self._stops.matched
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
        )
        return Delta(self._index, text=text, end=summary)

    def with_text(self, logprobs: PositionLogprobs) -> TokenLogprob:
        top = tuple(TopLogprob(token_id, self._token_text(token_id), value) for token_id, value in logprobs.top)
        return TokenLogprob(logprobs.token_id, self._token_text(logprobs.token_id), logprobs.logprob, top)

    def _text_of(self, token_ids: tuple[int, ...]) -> tuple[str, int]:
        """Text that is safe to send, and the number of tokens that belong to the completion."""
        if self._detokenizer is None:
            return "", len(token_ids)
        if self._stops is None:
            return self._detokenizer.push(token_ids), len(token_ids)
        text = ""
        for num_kept, token_id in enumerate(token_ids, start=1):
            text += self._through_stops(self._detokenizer.push((token_id,)), num_before=num_kept)
            if self.is_stopped:
                return text, num_kept
        return text, len(token_ids)

    def _through_stops(self, text: str, num_before: int = 0) -> str:
        if self._stops is None:
            return text
        safe = self._stops.push(text, num_tokens=self._num_tokens + num_before)
        self.is_stopped = self._stops.matched is not None
        return safe
