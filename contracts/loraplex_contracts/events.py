"""What the engine tells the front end. Plain data, picklable; one batch of events per step crosses the process
border."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.plan import TokenLogprobs


class FinishReason(Enum):
    EOS = "eos"
    STOP = "stop"  # a stop token id; stop strings are found by the front end
    LENGTH = "length"


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
    logprobs: tuple[TokenLogprobs, ...] = ()
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
    logprobs: tuple[TokenLogprobs, ...]


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
