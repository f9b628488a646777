"""Types of the SDK: frozen dataclasses without protobuf or gRPC.

Optional answers are None where the server did not send them; counts that it did not send are 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Required, TypedDict

from loraplex_contracts.adapters import AdapterState, AdapterTier
from loraplex_contracts.errors import InvalidArgument
from loraplex_contracts.events import FinishReason, TokenLogprob
from loraplex_contracts.events import TopLogprob as TopLogprob

# --- what a caller may ask for --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates in PEM. Without any, the server's certificate is checked against gRPC's own list of authorities."""

    root_certificates: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)
    client_certificate: bytes | None = None
    server_name: str | None = None  # the name in the server's certificate, where it is not the address

    def __post_init__(self) -> None:
        for name in ("root_certificates", "client_key", "client_certificate"):
            pem = getattr(self, name)
            if pem is not None and b"-----BEGIN" not in pem:
                raise InvalidArgument(f"{name} is not PEM: it has no line -----BEGIN ...-----", field=name)


class Message(TypedDict):
    """One turn of a chat."""

    role: Required[str]  # "system", "user", "assistant", or what else the base model's chat template knows
    content: Required[str]


@dataclass(frozen=True, slots=True)
class Medusa:
    """Speculate with Medusa heads."""

    adapter_id: str = ""  # whose heads; empty: those of the request's adapter, else the server's default ones


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Speculate by copying from the text so far."""

    min_ngram: int = 0  # bounds of what must match; 0: the server's choice
    max_ngram: int = 0


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Speculate with a smaller model."""

    name: str = ""  # one of ServerInfo.draft_models; empty: the only one


SpeculationKind = Literal["off", "auto", "medusa", "prompt_lookup", "draft_model"]
"""What the kinds are called. "auto" leaves it to the server, and so do the others what they do not say."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """All about speculation in one value, for callers that keep it or hand it on.

    The text is the same whatever it says; only the speed differs.
    """

    kind: SpeculationKind | Medusa | PromptLookup | DraftModel | None = None  # None: as server and adapter have it
    max_draft_tokens: int | None = None  # as the options of these names
    fixed_length: bool | None = None


AnySpeculation = SpeculationKind | Medusa | PromptLookup | DraftModel | Speculation
"""What the option `speculation` takes."""


class CallOptions(TypedDict, total=False):
    """What every call takes."""

    timeout_s: float | None
    """Seconds until the call ends as DeadlineExceeded; None: never. Default: the client's."""


class GenerateOptions(CallOptions, total=False):
    """What `generate` and `stream` take besides the prompt. What is left out, or None, has the server's default."""

    token_ids: Sequence[int] | None
    """The prompt as token ids, instead of text."""
    messages: Sequence[Message] | None
    """The prompt as a chat, laid out by the base model's template, instead of text."""
    omit_generation_prompt: bool | None
    """With `messages`: do not open the assistant's turn after the last one."""
    adapter_id: str | None
    """The adapter to use. Default: none, the base model."""
    adapters: Mapping[str, float] | None
    """A mixture: adapter id -> weight, instead of `adapter_id`."""

    max_tokens: int | None
    """New tokens at most. Default: what is left of the context."""
    min_tokens: int | None
    """No end before this many new tokens."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    """Go on past the model's end-of-sequence tokens."""
    include_stop: bool | None
    """Leave the stop string that was met in the text."""

    temperature: float | None
    """0 is greedy, the default."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    seed: int | None
    """The same seed gives the same text."""
    logit_bias: Mapping[int, float] | None
    """Token id -> what is added to its logit."""
    bad_words: str | Sequence[str] | None
    """Texts that are never written."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens may be drawn."""

    n: int | None
    """Completions of the same prompt."""
    logprobs: bool | None
    """Log probability of each new token."""
    top_logprobs: int | None
    """That many alternatives at each position, too."""
    prompt_logprobs: bool | None
    echo: bool | None
    """Put the prompt in front of the text."""
    omit_token_ids: bool | None

    speculation: AnySpeculation | None
    """How to speculate: the same text, sooner. Default: as the server and the adapter have it."""
    max_draft_tokens: int | None
    """Draft tokens per step at most. Default: the server's choice."""
    fixed_draft_length: bool | None
    """Always draft as many, whatever is accepted."""

    priority: int | None
    """Higher is served first, -100 to 100."""
    request_id: str | None
    """Found again in the answer, in errors and in the server's log. Default: a random one."""
    cache_salt: str | None
    """Keeps this prompt out of other requests' prefix cache hits."""


# --- what comes back ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProposerUsage:
    """What one way of speculation did."""

    name: str  # "medusa", "prompt_lookup", "draft_model" or, with a tokenizer of its own, "universal"
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """The accepted share of the drafted tokens, 0 to 1; None where nothing was drafted."""
        return _share(self.accepted_tokens, self.drafted_tokens)


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens, and how they came to be."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, out of the prefix cache
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of those
    proposers: tuple[ProposerUsage, ...] = ()  # the same by who proposed them
    steps: int = 0  # of the model, that gave the completions' tokens; 0 where the server does not say

    @property
    def acceptance(self) -> float | None:
        """The accepted share of the drafted tokens, 0 to 1; None where nothing was drafted."""
        return _share(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_step(self) -> float | None:
        """1 without speculation, more the better it works; None where it is not known."""
        return _share(self.completion_tokens, self.steps)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds, as the worker measured them."""

    queue_s: float = 0.0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """One text out of a generation."""

    index: int
    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer of `generate`."""

    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    adapter_digest: str  # of the weights that were used; empty for the base model
    request_id: str
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """Of the first completion, which with n = 1 is the only one."""
        return self.completions[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first completion."""
        return self.completions[0].finish_reason


@dataclass(frozen=True, slots=True)
class Chunk:
    """News of one completion, out of `stream`. Its last chunk has a finish reason, usage and timings."""

    index: int
    text: str  # what is new
    token_ids: tuple[int, ...]
    request_id: str
    adapter_digest: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first chunk
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    proposer: str = ""  # of the drafted tokens
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The answer of `tokenize`."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as one worker has it."""

    adapter_id: str
    kind: str  # "lora", "medusa" or "combined"
    digest: str
    state: AdapterState
    tier: AdapterTier
    num_bytes: int
    rank: int  # the largest of its modules
    running_requests: int
    pinned: bool
    error: str  # where the state is "failed": why
    error_reason: str
    worker: str  # filled by a router


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What answers at an address."""

    model_id: str
    model_type: str
    version: str
    role: str  # "router" or "worker"
    max_context_tokens: int
    vocab_size: int
    dtype: str
    device: str
    max_lora_rank: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    speculation: tuple[str, ...]  # the kinds that it can do now; a draft model as "draft_model:NAME"
    draft_models: tuple[str, ...] = ()  # their names
