"""Events of the engine for the front end: picklable plain data.

Plain data, picklable.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import PositionLogprobs


class FinishReason(StrEnum):
    """Why a completion ended."""

    EOS = "eos"  # an end-of-sequence token
    STOP = "stop"  # a stop token, or a stop string, which the front end finds
    LENGTH = "length"  # max_tokens, or the end of the context


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability, and the alternatives that were asked for, most likely first."""

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
    """New tokens of one completion, those of one step or of several."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    proposer: str = ""  # of the drafted ones
    num_steps: int = 1
    # Neither the completion's first ones nor such as may end it by a stop string: nobody misses them for a moment.
    can_wait: bool = False

    def __reduce__(self) -> tuple[type[Tokens], tuple[object, ...]]:
        """They cross the process border by the thousand, and what dataclasses do to be pickled takes twice as long."""
        return Tokens, (
            *(self.request_id, self.index, self.token_ids, self.logprobs, self.num_drafted, self.num_accepted),
            *(self.proposer, self.num_steps, self.can_wait),
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Once per request that asked, before its first Tokens. Positions 1 .. num_prompt_tokens - 1."""

    request_id: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class CompletionEnd:
    """The completion ended well. The request's last one is its terminal event."""

    request_id: str
    index: int
    reason: FinishReason
    stop_token_id: int | None
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Terminal: the whole request ended with `error` (cancellation and deadline included); nothing follows."""

    request_id: str
    error: LoraplexError


Event = Admitted | Tokens | PromptLogprobs | CompletionEnd | RequestFailed
