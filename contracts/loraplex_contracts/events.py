"""Events of the engine for the front end: picklable plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import PositionLogprobs


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    EOS = "eos"  # an end-of-sequence token
    STOP = "stop"  # a stop token, or a stop string (found by the front end)
    LENGTH = "length"  # max_tokens, or the end of the context


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and the requested alternatives, most likely first."""

    token_id: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue: its adapter is resolved and its first step is planned."""

    request_id: str
    adapter_digest: str
    queue_s: float


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of one completion, from one step or several."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""  # of the drafted ones
    num_steps: int = 1
    # May be sent together with later ones: not the completion's first tokens, and they cannot complete a stop string.
    can_wait: bool = False

    def __reduce__(self) -> tuple[type[Tokens], tuple[object, ...]]:
        """Pickles in half the time that a dataclass takes; thousands of these cross the process border."""
        return Tokens, (
            *(self.request_id, self.index, self.token_ids, self.logprobs, self.num_drafted, self.num_accepted),
            *(self.proposer, self.num_steps, self.can_wait),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of prompt positions 1 .. num_prompt_tokens - 1; sent once, before the request's first Tokens."""

    request_id: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    """The completion ended without an error. The last one of a request is its terminal event."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The whole request ended with `error`, cancellation and deadline included. Terminal event."""

    request_id: str
    error: LoraplexError


Event = Admitted | Tokens | PromptLogprobs | CompletionEnd | RequestFailed
