"""Requests to the engine, and the events that answer them: picklable plain data."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from loraplex_contracts.adapters import NO_ADAPTER, OWN_ORIGIN, AdapterId, AdapterOrigin, AdapterUser
from loraplex_contracts.errors import LoraplexError
from loraplex_contracts.mixtures import Mixture, mixture_name
from loraplex_contracts.sampling import SamplingParams

SpeculationKind = Literal["off", "auto", "medusa", "prompt_lookup", "draft_model"]
"""Kinds of speculation. With "auto" the server chooses the kind; with any kind it fills in parameters left out."""

PoolingTask = Literal["embed", "classify", "next_token"]
PooledPositions = Literal["last", "mean", "each"]

MAX_DRAFT_TOKENS = 64  # per step, in requests and by --max-draft-tokens
MAX_CLASS_VALUES = 1 << 20  # of the tokens of one input, and of one call: 8 MiB, copied and sent between steps


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """Conditions that end a completion. Stop *strings* are matched by the front end, after detokenization."""

    max_tokens: int  # always set; by default the rest of the context
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False

    def ending_ids(self, eos_token_ids: Collection[int]) -> frozenset[int]:
        """The tokens that end a completion of a model with these ends of sequence."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids.union(eos_token_ids)


@dataclass(frozen=True, slots=True)
class OutputParams:
    """Outputs of a request besides its tokens."""

    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    keep_special_tokens: bool = False  # the front end makes the text, and adds the bytes
    token_bytes: bool = False
    echo: bool = False  # the front end puts the prompt's text in front


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """Speculation of a request. It changes the speed, never the text."""

    # None: Medusa with the heads of the request's adapter, if it has any, else the server's --speculate.
    kind: SpeculationKind | None = None
    # Adapter id of the Medusa heads. Empty: those of the request's adapter, else the server's default heads.
    medusa_id: AdapterId = NO_ADAPTER
    min_ngram: int = 0  # 0: the server's choice, here and below
    max_ngram: int = 0
    draft_name: str = ""  # one of --draft-model; empty: the only one
    max_draft_tokens: int = 0  # per step
    fixed_length: bool = False  # always draft max_draft_tokens


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a text must have."""

    field: str  # of the request, for errors
    text: str  # as llguidance compiles it
    is_simple: bool = False  # of a kind and size that compile in well under a second, and without depth


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """A request for values instead of tokens: of the prompt's hidden states behind the last norm, of what the adapter's
    classifier makes of them, or of the logits of some next tokens."""

    task: PoolingTask
    # Hidden states that count; None: as the adapter says. It always says so of its classifier.
    positions: PooledPositions | None = None
    token_ids: tuple[int, ...] = ()  # of "next_token"
    labels: tuple[str, ...] = ()  # of a classifier, as its adapter says

    @property
    def needs_all(self) -> bool:
        """True where each of the prompt's tokens has to run: the prefix cache holds no hidden states."""
        return self.positions not in (None, "last")


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request of `n` completions, or for pooled values. Times are seconds of `time.monotonic()`, which
    processes share."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    stopping: StoppingParams
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: OutputParams = field(default_factory=OutputParams)
    speculation: SpeculationParams = field(default_factory=SpeculationParams)
    pooling: PoolingParams | None = None  # it makes no tokens then, and `n` is 1
    adapter_id: AdapterId = NO_ADAPTER
    adapter_origin: AdapterOrigin = OWN_ORIGIN  # of the adapter, for this caller; without a source that of its name
    mixture: Mixture | None = None  # in the place of one adapter
    adapter_digest: str = ""  # of the version that the prompt was made for; empty: any
    tenant: str = "default"
    max_adapter_bytes: int | None = None  # of the tenant, in memory
    cache_salt: str = ""
    grammar: Grammar | None = None
    n: int = 1
    priority: int = 0
    arrival_s: float = 0.0
    deadline_s: float | None = None

    @property
    def adapter_user(self) -> AdapterUser:
        return AdapterUser(self.tenant, self.max_adapter_bytes)

    @property
    def adapter_name(self) -> str:
        """Name of the request's adapter, or of the set of its adapters; empty for the base model."""
        return self.adapter_id if self.mixture is None else mixture_name(self.mixture.adapter_ids)


def seed_of_completion(seed: int, index: int) -> int:
    """The seed of completion `index`: the request's own for the first; the others are a golden ratio step apart."""
    return (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF


# --- events ---------------------------------------------------------------------------------------------------------


class FinishReason(StrEnum):
    """Reason for the end of a completion."""

    EOS = "eos"  # an end-of-sequence token
    STOP = "stop"  # a stop token, or a stop string (found by the front end)
    LENGTH = "length"  # max_tokens, or the end of the context


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Logprob of the token at one position, and the most likely alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a position."""

    token_id: int
    text: str
    logprob: float
    token_bytes: bytes = b""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and the requested alternatives, most likely first."""

    token_id: int
    text: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()
    token_bytes: bytes = b""  # empty unless asked for
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request left the queue: its adapter is resolved and its first step is planned."""

    request_id: str
    adapter_digest: str
    queue_s: float
    adapter_wait_s: float = 0.0  # of it, until the adapter's weights were fetched and on the device


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
    """The next logprobs of prompt positions 1 .. num_prompt_tokens - 1: those that a step has computed. All come before
    the request's first Tokens."""

    request_id: str
    logprobs: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The answer of a request with `pooling`, before its end. `values` [num_rows, num_columns] are float64."""

    request_id: str
    values: array[float]
    num_columns: int
    labels: tuple[str, ...]  # of a classifier's columns
    per_token: bool


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
    # Of a request that waited and did not begin, as in `Admitted`: the time until this end. None for others.
    queue_s: float | None = None
    adapter_wait_s: float = 0.0


Event = Admitted | Tokens | PromptLogprobs | Pooled | CompletionEnd | RequestFailed
