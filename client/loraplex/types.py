"""Types of the SDK: frozen dataclasses without protobuf or gRPC.

Optional fields of an answer are None, and counts are 0, where the server did not send them.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any, Final, Literal, Required, TypedDict

from loraplex_contracts.adapters import AdapterState, AdapterTier, check_hub_token
from loraplex_contracts.errors import InvalidArgument, LoraplexError
from loraplex_contracts.request import FinishReason, TokenLogprob
from loraplex_contracts.request import SpeculationKind as SpeculationKind
from loraplex_contracts.request import TopLogprob as TopLogprob

# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates in PEM. Without any, the server's certificate is checked against gRPC's own list of authorities."""

    root_certificates: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)
    client_certificate: bytes | None = None
    server_name: str | None = None  # the name in the server's certificate, where it is not the address

    def __post_init__(self) -> None:
        for name in ("root_certificates", "client_key", "client_certificate"):
            pem: Any = getattr(self, name)
            if pem is not None and not (isinstance(pem, bytes) and b"-----BEGIN" in pem):
                raise InvalidArgument(
                    f"Tls({name}=...) takes the bytes of a PEM file, which has a line -----BEGIN ...-----", field=name
                )


class Function(TypedDict, total=False):
    """A call of a tool: its name, and its arguments as JSON or as values."""

    name: Required[str]
    arguments: str | Mapping[str, Any]


class ToolCall(TypedDict, total=False):
    """A call of a tool, as OpenAI's clients write it; in the option `tool_choice` only its function's name."""

    function: Required[Function]
    id: str
    type: Literal["function"]


class Message(TypedDict, total=False):
    """One turn of a chat."""

    role: Required[str]  # "system", "user", "assistant", or another role of the base model's chat template
    content: str | None  # may be left out beside tool_calls
    name: str  # of the speaker, or of the tool
    tool_calls: Sequence[ToolCall]  # of the assistant
    tool_call_id: str  # of the call that this message answers
    reasoning: str  # the assistant's thoughts


@dataclass(frozen=True, slots=True)
class Medusa:
    """Speculate with Medusa heads."""

    adapter_id: str = ""  # of the heads; empty: those of the request's adapter, else the server's default


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Speculate by copying from the text so far."""

    min_ngram: int = 0  # bounds of the matching n-gram; 0: the server's choice
    max_ngram: int = 0


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Speculate with a smaller model."""

    name: str = ""  # one of ServerInfo.draft_models; empty: the only one


# The classes above by their fields of the wire, with parameters of the same names.
PROPOSERS: Final[dict[type, str]] = {Medusa: "medusa", PromptLookup: "prompt_lookup", DraftModel: "draft_model"}


@dataclass(frozen=True, slots=True)
class Speculation:
    """Parameters of speculation in one value. They change the speed, never the text."""

    # A kind as a text may have a name behind it, as in ServerInfo.speculation. None: the default of server and adapter.
    kind: SpeculationKind | str | Medusa | PromptLookup | DraftModel | None = None
    max_draft_tokens: int | None = None  # like the options `max_draft_tokens` and `fixed_draft_length`
    fixed_length: bool | None = None


AnySpeculation = SpeculationKind | str | Medusa | PromptLookup | DraftModel | Speculation
"""Values of the option `speculation`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form that a text must have: exactly one kind."""

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool | None = None  # True: any JSON object
    regex: str | None = None
    choice: Sequence[str] | None = None  # one of these texts
    lark: str | None = None
    gbnf: str | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    compact: bool = False  # JSON without spaces between its parts; else there may be one behind `,` and `:`


@dataclass(frozen=True, slots=True)
class Truncate:
    """Shortens a prompt to its last tokens. The special tokens that the tokenizer adds are kept, and count."""

    max_tokens: int = 0  # 0: as many as leave room for the option `max_tokens`, or for one new token without it
    keep_start: bool = False  # keep the first tokens instead


@dataclass(frozen=True, slots=True)
class Merge:
    """A merge of a mixture's adapters into one, as PEFT's `add_weighted_adapter` makes it."""

    strategy: str  # linear, ties, dare_linear, dare_ties or magnitude_prune
    density: float | None = None  # share of values that are kept; not for linear
    majority_sign: str | None = None  # total (the default) or frequency; of ties and dare_ties
    seed: int | None = None  # of what dare_* drop. Default: from the adapters and these options


@dataclass(frozen=True, slots=True)
class Hub:
    """The adapter is the repository `adapter_id` on the Hub, as the caller's own token shows it."""

    revision: str = ""  # a branch, a tag or a commit; empty: the newest commit
    token: str = field(default="", repr=False)  # for the Hub; empty: the server's own

    def __post_init__(self) -> None:
        given: Any = self.token
        if given != "" and not isinstance(given, str):
            raise InvalidArgument("hub.token takes a string", field="hub.token")
        if given:
            check_hub_token(given, field="hub.token")


@dataclass(frozen=True, slots=True)
class Member:
    """An adapter of a mixture that is not where the server's own adapters are."""

    weight: float
    hub: Hub | None = None  # the repository of its id, as the caller's own token shows it
    in_bucket: bool = False  # the folder BUCKET/NAME of its id, in a bucket that the server reads


class CallOptions(TypedDict, total=False):
    """Options of every call."""

    timeout_s: float | None
    """Seconds until the call ends with DeadlineExceeded; None: no deadline. Default: the client's."""


PoolingKind = Literal["last_token", "mean"]
ScoreMethod = Literal["classifier", "cosine", "next_token"]
# One text, its token ids, or a list of either.
PoolingInputs = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


class PoolingOptions(CallOptions, total=False):
    """Options of `embed`, `classify` and `score`; each may be left out. They mean what those of `generate` mean."""

    adapter_id: str
    hub: Hub | None
    in_bucket: bool | None
    truncate_prompt: Truncate | int | None
    omit_special_tokens: bool | None
    priority: int | None
    request_id: str | None
    cache_salt: str | None


class ChatOptions(CallOptions, total=False):
    """Options of calls with `messages`: what the chat template is told beside them."""

    continue_final_message: bool | None
    """Go on from the end of the last message instead of opening another turn."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tools in the form that the model's template wants, most often OpenAI's."""
    documents: Sequence[Mapping[str, Any]] | None
    """Documents that the template puts in front of the chat, in the form that it wants."""
    template_kwargs: Mapping[str, Any] | None
    """The template's own arguments, such as `{"enable_thinking": False}`."""
    chat_template: str | None
    """A template (Jinja) in the place of the model's or the adapter's, where the server allows that."""
    adapter_id: str | None
    """The adapter to use. Default: none, the base model."""
    hub: Hub | None
    """`adapter_id` is a repository on the Hub, and what the token in here fetches is for this caller alone."""
    in_bucket: bool | None
    """`adapter_id` is the folder BUCKET/NAME of a bucket that the server reads."""


class GenerateOptions(ChatOptions, total=False):
    """Options of `generate` and `stream`. An option that is missing or None has the server's default."""

    token_ids: Sequence[int] | None
    """The prompt as token ids, instead of text."""
    messages: Sequence[Message] | None
    """The prompt as a chat in the base model's template, instead of text."""
    parse_chat: bool | None
    """With `messages`: the answer as a message too, with its reasoning and tool calls apart from the content."""
    tool_choice: Literal["none", "auto", "required"] | ToolCall | None
    """Whether the answer may call `tools`: not at all, as the model likes (the default), in any case, or this one."""
    parallel_tool_calls: bool | None
    """False: at most one call."""
    omit_generation_prompt: bool | None
    """With `messages`: do not open the assistant's turn after the last one."""
    omit_special_tokens: bool | None
    """With text: without the tokenizer's own special tokens, such as a beginning-of-sequence token."""
    grammar: Grammar | None
    """The form that the text must have."""
    truncate_prompt: int | Truncate | None
    """Shorten the prompt to its last so many tokens, 0 to what the context has room for, instead of refusing it."""
    adapters: Mapping[str, float | Member] | None
    """A mixture: adapter id -> weight, instead of `adapter_id`. Their exact sum, unless `merge` says otherwise."""
    merge: Merge | None
    """With `adapters`: one adapter is made of them, once."""

    max_tokens: int | None
    """New tokens at most. Default: the rest of the context."""
    min_tokens: int | None
    """New tokens at least."""
    stop: str | Sequence[str] | None
    """The text ends before the first of these strings, also before a special token whose text is one of them."""
    stop_token_ids: Sequence[int] | None
    """The text ends with the first of these tokens."""
    ignore_eos: bool | None
    """Continue past the model's end-of-sequence tokens."""
    include_stop: bool | None
    """Keep the matched stop string in the text."""

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
    """Token id -> bias added to its logit."""
    bad_words: str | Sequence[str] | None
    """Texts that are never written."""
    allowed_token_ids: Sequence[int] | None
    """Only these tokens may be drawn."""

    n: int | None
    """Completions of the same prompt."""
    logprobs: bool | None
    """Log probability of each new token."""
    top_logprobs: int | None
    """Number of alternatives at each position."""
    prompt_logprobs: bool | None
    """Log probability of each token of the prompt."""
    echo: bool | None
    """Put the prompt before the text."""
    omit_token_ids: bool | None
    """Leave the token ids out of the answer."""
    prompt_tokens: bool | None
    """The prompt's tokens in the answer, with their log probabilities where `prompt_logprobs` is set."""
    keep_special_tokens: bool | None
    """Special tokens are part of the text."""
    token_bytes: bool | None
    """Bytes of each token in log probabilities and prompt tokens."""

    speculation: AnySpeculation | None
    """Kind of speculation: the same text, sooner. Default: that of the server and the adapter."""
    max_draft_tokens: int | None
    """Draft tokens per step at most. Default: the server's choice."""
    fixed_draft_length: bool | None
    """Always draft `max_draft_tokens`, whatever is accepted."""

    priority: int | None
    """Higher is served first, -100 to 100."""
    request_id: str | None
    """Repeated in the answer, in errors and in the server's log. Default: a random one."""
    cache_salt: str | None
    """Separates the prefix cache: only requests with the same salt share prompts."""


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One try of a call that has ended: the argument of a client's `on_call`."""

    method: str  # "Generate"
    target: str  # the server's address
    request_id: str
    adapter_id: str
    duration_s: float
    num_retries: int  # tries before this one
    error: LoraplexError | None  # None: it went well, or its stream was closed here
    retry_in_s: float | None  # until the next try; None: this was the last

    def __str__(self) -> str:
        how = "ok" if self.error is None else f"{self.error.reason}: {self.error.message}"
        then = "" if self.retry_in_s is None else f"; next try in {self.retry_in_s:.2f} s"
        named = "".join(f" {name}={value}" for name in ("adapter_id", "request_id") if (value := getattr(self, name)))
        return f"{self.method} at {self.target}{named} took {self.duration_s:.3f} s: {how}{then}"


# --- answers --------------------------------------------------------------------------------------------------------


class Answer:
    """A server's answer: short in a repr, whole in `to_dict`."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """The fields as values that `json.dumps` takes: lists, dicts, strings, numbers; bytes as numbers."""
        given: Any = self
        return {one.name: _plain(getattr(self, one.name)) for one in fields(given)}

    def __repr__(self) -> str:
        """Fields that say something, long values cut."""
        given: Any = self
        values = ((one.name, one.default, getattr(self, one.name)) for one in fields(given))
        shown = [
            f"{name}={_SHORT.repr(value)}" for name, default, value in values if value not in (default, (), "", None)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list, bytes)):
        return [_plain(one) for one in value]
    return value.value if isinstance(value, Enum) else value


class _Shortening(reprlib.Repr):
    """Values shortened for a repr at a prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxtuple = 4

    def repr_instance(self, x: Any, level: int) -> str:
        return repr(x) if isinstance(x, Answer) else super().repr_instance(x, level)

    def repr_FinishReason(self, x: Any, level: int) -> str:  # noqa: N802, reprlib's naming
        return repr(str(x))


_SHORT = _Shortening()


@dataclass(frozen=True, slots=True)
class ProposerUsage:
    """Draft tokens of one proposer."""

    name: str  # "medusa", "prompt_lookup", "draft_model" or, with a tokenizer of its own, "universal"
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def acceptance(self) -> float | None:
        """The accepted share of the drafted tokens, 0 to 1; None without draft tokens."""
        return _share(self.accepted_tokens, self.drafted_tokens)


@dataclass(frozen=True, slots=True, repr=False)
class Usage(Answer):
    """Token counts of an answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    drafted_tokens: int = 0  # by speculation
    accepted_tokens: int = 0  # of those
    proposers: tuple[ProposerUsage, ...] = ()  # the same, by proposer
    steps: int = 0  # of the model for the completions' tokens; 0 if unknown
    reasoning_tokens: int = 0  # of the completions' tokens, with `parse_chat`

    @property
    def acceptance(self) -> float | None:
        """The accepted share of the drafted tokens, 0 to 1; None without draft tokens."""
        return _share(self.accepted_tokens, self.drafted_tokens)

    @property
    def tokens_per_step(self) -> float | None:
        """1 without speculation, more with accepted drafts; None where it is unknown."""
        return _share(self.completion_tokens, self.steps)


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


@dataclass(frozen=True, slots=True, repr=False)
class Timings(Answer):
    """Times in seconds, measured by the worker."""

    queue_s: float = 0.0
    time_to_first_token_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of a prompt."""

    token_id: int
    text: str
    logprob: float | None = None  # None for the first one, and where they were not asked for
    top: tuple[TopLogprob, ...] = ()
    token_bytes: bytes = b""
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of a call's arguments. The first one of a call has its id and name."""

    index: int  # of the call in its message
    arguments: str  # part of the JSON
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The next part of a message: text of its content or of its reasoning, or of a call."""

    content: str = ""
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Completion(Answer):
    """One text of a generation."""

    index: int
    text: str
    finish_reason: FinishReason | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage = Usage()
    message: Message | None = field(default=None, hash=False)  # with `parse_chat`; can go on in `messages` as it is


@dataclass(frozen=True, slots=True, repr=False)
class Generation(Answer):
    """The answer of `generate`."""

    completions: tuple[Completion, ...]
    usage: Usage
    timings: Timings
    adapter_digest: str  # of the adapter's weights; empty for the base model
    request_id: str
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's second token and those behind it
    prompt_tokens: tuple[PromptToken, ...] = ()
    seed: int | None = None  # that was used; None where nothing is drawn (temperature 0)

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def message(self) -> Message | None:
        """Message of the first completion, with `parse_chat`."""
        return self.completions[0].message

    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason of the first completion."""
        return self.completions[0].finish_reason


@dataclass(frozen=True, slots=True, repr=False)
class Chunk(Answer):
    """New tokens of one completion of a stream. Its last chunk has a finish reason, usage and timings."""

    index: int
    text: str  # the new part
    token_ids: tuple[int, ...]
    request_id: str
    adapter_digest: str
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # on the first chunk
    prompt_tokens: tuple[PromptToken, ...] = ()  # likewise
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    proposer: str = ""  # of the drafted tokens
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    seed: int | None = None  # on every chunk, as in a Generation
    deltas: tuple[ChatDelta, ...] = ()  # with `parse_chat`
    message: Message | None = field(default=None, hash=False)  # likewise, whole, on the last chunk of a completion


@dataclass(frozen=True, slots=True, repr=False)
class Embeddings(Answer):
    """The answer of `embed`: a vector for each input."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage
    timings: Timings
    adapter_digest: str
    request_id: str

    @property
    def vector(self) -> tuple[float, ...]:
        """The first input's embedding."""
        return self.vectors[0]


@dataclass(frozen=True, slots=True)
class Classification:
    """Classes of one input. `rows` has the values of all labels: one row of a text, one per token of a token
    classifier."""

    rows: tuple[tuple[float, ...], ...]
    # Begin and end of each token, in characters, of a token classifier where the input is text.
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class Classifications(Answer):
    """The answer of `classify`."""

    labels: tuple[str, ...]
    inputs: tuple[Classification, ...]
    per_token: bool
    usage: Usage
    timings: Timings
    adapter_digest: str
    request_id: str

    @property
    def best(self) -> tuple[str, ...]:
        """The likeliest label of each input. Of a token classifier: of its first token."""
        return tuple(self.labels[max(range(len(one.rows[0])), key=one.rows[0].__getitem__)] for one in self.inputs)


@dataclass(frozen=True, slots=True, repr=False)
class Scores(Answer):
    """The answer of `score`: one for each document, in their order."""

    scores: tuple[float, ...]
    usage: Usage
    timings: Timings
    adapter_digest: str
    request_id: str


@dataclass(frozen=True, slots=True, repr=False)
class Tokenization(Answer):
    """The answer of `tokenize`."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    # With `offsets`: begin and end of each token, in characters of the text; and the text of a chat.
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    rendered: str = ""


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is not part of a text."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True, repr=False)
class TokenizerInfo(Answer):
    """The answer of `tokenizer_info`. Tokens are None where the base model's tokenizer has none."""

    bos: SpecialToken | None
    eos: SpecialToken | None
    pad: SpecialToken | None
    unk: SpecialToken | None
    special_tokens: tuple[SpecialToken, ...]  # all, by id
    chat_template: str  # in Jinja; empty: there is none


@dataclass(frozen=True, slots=True, repr=False)
class Adapter(Answer):
    """State of an adapter on one worker."""

    adapter_id: str
    kind: str  # "lora", "medusa" or "combined"
    digest: str
    state: AdapterState
    tier: AdapterTier
    num_bytes: int
    rank: int  # the largest of its modules
    running_requests: int
    pinned: bool
    error: str  # reason of the state "failed"
    error_reason: str
    worker: str  # filled by a router
    labels: tuple[str, ...] = ()  # of its classifier, if it has one
    per_token: bool = False  # it classifies tokens, not texts
    source: str = ""  # that a load named
    base: str = ""  # the base model that its files name
    tasks: tuple[str, ...] = ()  # such as "generate"
    uses: int = 0  # requests for this name
    last_error: str = ""  # of the last load under this name, where that failed
    last_error_reason: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class ServerInfo(Answer):
    """Description of a router or worker."""

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
    speculation: tuple[str, ...]  # available kinds; draft models as "draft_model:NAME"
    draft_models: tuple[str, ...] = ()  # their names
    served_names: tuple[str, ...] = ()  # that mean the base model
    generation_defaults: Mapping[str, float] = field(default_factory=dict[str, float], hash=False)
    """Options of `generate` that the model's authors recommend; servers do not apply them."""
    tasks: tuple[str, ...] = ()  # such as "generate"
    kv_block_tokens: int = 0
    max_device_adapters: int = 0  # on the device at the same time


@dataclass(frozen=True, slots=True)
class Activity:
    """Tokens, requests and latencies that a router relayed in its last minute, of one worker or of all."""

    window_s: float  # shorter after a start
    tokens: int
    drafted_tokens: int
    accepted_tokens: int
    requests: int  # that ended, whatever the way
    failed_requests: int
    time_to_first_p50_s: float  # to the first message of streams; 0 where there were none
    time_to_first_p99_s: float


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as a router sees it."""

    worker_id: str
    state: str  # "serving", "starting", "draining", "stalled", "leaving" or "unreachable"
    error: str  # why it does not take requests
    running_requests: int
    queued_requests: int
    max_running_requests: int
    pending_tokens: int
    total_kv_blocks: int
    free_kv_blocks: int
    requests_in_flight: int  # of the router, at this worker
    adapters: int  # in its report: those nearest to the device, 1024 at most
    device_adapters: int
    max_device_adapters: int
    activity: Activity


@dataclass(frozen=True, slots=True)
class AdapterPlaces:
    """An adapter on the workers of a router."""

    adapter_id: str
    tiers: tuple[int, ...]  # of each worker: 2 disk, 3 host, 4 device, 0 not there
    work_tokens: int  # of requests that the router has under way
    waiting: bool  # requests or a load wait for a worker to fetch it


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call that ended with an error at a router."""

    age_s: float
    method: str
    code: str
    reason: str
    message: str
    request_id: str
    tenant: str
    worker_id: str  # that said it; empty where the router did


@dataclass(frozen=True, slots=True, repr=False)
class RouterStatus(Answer):
    """A router with its workers, the places of adapters, its last minute and its last errors."""

    router_id: str
    version: str
    model_id: str
    uptime_s: float
    draining: bool
    requests_in_flight: int
    workers: tuple[WorkerStatus, ...]
    adapters: tuple[AdapterPlaces, ...]
    total_adapters: int  # in the workers' reports, with the prefix
    activity: Activity
    tokens_by_second: tuple[int, ...]  # the oldest first
    errors: tuple[FailedCall, ...]  # the newest first
