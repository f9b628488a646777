"""Calls of the SDK: settings, messages, deadline, answer and error.

Both clients send these calls; they differ only in how they wait. Nothing here opens a connection by itself. Values that
do not fit their field raise InvalidArgument.
"""

from __future__ import annotations

import json
import logging
import math
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import grpc
from google.protobuf.message import Message as ProtobufMessage

import loraplex_proto
from loraplex._tracing import client_span
from loraplex.config import retries_in_force, server_in_force, token_in_force
from loraplex.options import near_option
from loraplex.retries import wait_before_retry
from loraplex.types import (
    Activity,
    Adapter,
    AdapterPlaces,
    AdapterState,
    AdapterTier,
    AnySpeculation,
    CallOptions,
    CallRecord,
    ChatDelta,
    ChatOptions,
    Chunk,
    Classification,
    Classifications,
    Completion,
    DraftModel,
    Embeddings,
    FailedCall,
    GenerateOptions,
    Generation,
    Grammar,
    Hub,
    Medusa,
    Member,
    Merge,
    Message,
    PoolingInputs,
    PoolingKind,
    PoolingOptions,
    PromptLookup,
    PromptToken,
    ProposerUsage,
    RouterStatus,
    ScoreMethod,
    Scores,
    ServerInfo,
    SpecialToken,
    Speculation,
    Timings,
    Tls,
    Tokenization,
    TokenizerInfo,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Truncate,
    Usage,
    WorkerStatus,
)
from loraplex_contracts.adapters import check_adapter_ref, check_adapter_source, check_digest, name_in
from loraplex_contracts.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    ServerUnreachable,
)
from loraplex_contracts.sampling import SAMPLING_OPTIONS
from loraplex_proto.enums import ADAPTER_STATES, ADAPTER_TIERS, FINISH_REASONS
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2, pooling_pb2, status_pb2

_Answer = TypeVar("_Answer")
_AboutAdapter = TypeVar(
    "_AboutAdapter", adapter_pb2.LoadAdapterRequest, adapter_pb2.UnloadAdapterRequest, adapter_pb2.GetAdapterRequest
)

_Pooling = TypeVar("_Pooling", pooling_pb2.EmbedRequest, pooling_pb2.ClassifyRequest, pooling_pb2.ScoreRequest)

DEFAULT_PORT: Final = 50051
DEFAULT_TIMEOUT_S: Final = 120.0
DEFAULT_CONNECT_TIMEOUT_S: Final = 10.0
MIN_TIMEOUT_S: Final = 0.001  # of a late page of a listing, which then ends with DeadlineExceeded
CLOCK_SLACK_S: Final = 0.05  # both sides end a call at its deadline, each by its own timer
MAX_PAGE_SIZE: Final = 1000  # the largest that servers give

_LOG = logging.getLogger("loraplex")

_INFERENCE: Final = "/loraplex.v1.InferenceService/"
_POOLING: Final = "/loraplex.v1.PoolingService/"
_ADAPTERS: Final = "/loraplex.v1.AdapterService/"
_STATUS: Final = "/loraplex.v1.StatusService/"
_BARE_HOST = re.compile(r"[A-Za-z0-9._-]+\Z")
_WEB_ADDRESS = re.compile(r"(https?|grpcs?|wss?)://", re.IGNORECASE)
_TOKEN = re.compile(r"[\x21-\x7e]+\Z")

CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.primary_user_agent", f"loraplex/{loraplex_proto.__version__}"),
    # A dead peer is noticed within 40 s of silence. Servers must allow pings that often: Loraplex's do, a stock gRPC
    # server closes the connection of a client that pings more than every five minutes.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Only while a call is open: balancers in between may count pings on idle connections as abuse.
    ("grpc.keepalive_permit_without_calls", 0),
    # Between two attempts to connect: gRPC's own second would make the first tries of a call fail without an attempt.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),  # a request that waits in the queue sends no data
    ("grpc.max_receive_message_length", 64 << 20),  # logprobs of a long prompt with alternatives
)

# Option -> path in GenerateRequest, for options whose value is the field's.
_FIELDS: Final[dict[str, str]] = {
    "token_ids": "token_ids.ids",
    "adapter_id": "adapter_id",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "stop": "stopping.stop",
    "stop_token_ids": "stopping.stop_token_ids",
    "ignore_eos": "stopping.ignore_eos",
    "include_stop": "stopping.include_stop",
    **{name: option.path for name, option in SAMPLING_OPTIONS.items()},
    "n": "n",
    "logprobs": "output.logprobs",
    "top_logprobs": "output.top_logprobs",
    "prompt_logprobs": "output.prompt_logprobs",
    "echo": "output.echo",
    "omit_token_ids": "output.omit_token_ids",
    "prompt_tokens": "output.prompt_tokens",
    "keep_special_tokens": "output.keep_special_tokens",
    "parse_chat": "output.parse_chat",
    "token_bytes": "output.token_bytes",
    "omit_special_tokens": "omit_special_tokens",
    "max_draft_tokens": "speculation.max_draft_tokens",
    "fixed_draft_length": "speculation.fixed_length",
    "priority": "priority",
    "request_id": "request_id",
    "cache_salt": "cache_salt",
}
# Option -> field of Chat, which takes it as JSON.
_CHAT_JSON: Final = {"tools": "tools_json", "documents": "documents_json", "template_kwargs": "template_kwargs_json"}
_CHAT_OPTIONS: Final = frozenset({"continue_final_message", "chat_template", *_CHAT_JSON})
_OTHER_OPTIONS: Final = _CHAT_OPTIONS | frozenset(
    {
        *("messages", "omit_generation_prompt", "tool_choice", "parallel_tool_calls", "grammar", "truncate_prompt"),
        *("hub", "in_bucket", "adapters", "merge", "speculation", "timeout_s"),
    }
)

_FINISH_REASONS: Final = {number: reason for reason, number in FINISH_REASONS.items()}
_STATES: Final[dict[int, AdapterState]] = {number: state for state, number in ADAPTER_STATES.items()}
_TIERS: Final[dict[int, AdapterTier]] = {number: tier for tier, number in ADAPTER_TIERS.items()}

_POOLING_KINDS: Final = {"last_token": pooling_pb2.POOLING_LAST_TOKEN, "mean": pooling_pb2.POOLING_MEAN}
_SCORE_METHODS: Final = {
    "classifier": pooling_pb2.SCORE_METHOD_CLASSIFIER,
    "cosine": pooling_pb2.SCORE_METHOD_COSINE,
    "next_token": pooling_pb2.SCORE_METHOD_NEXT_TOKEN,
}
_POOLING_FIELDS: Final = ("adapter_id", "omit_special_tokens", "priority", "request_id", "cache_salt")

# Class of parameters -> field of the message, with fields of the same names.
_PROPOSERS: Final[dict[type, str]] = {Medusa: "medusa", PromptLookup: "prompt_lookup", DraftModel: "draft_model"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a connection. Raises InvalidArgument."""

    target: str
    token: str | None = field(default=None, repr=False)
    timeout_s: float | None = DEFAULT_TIMEOUT_S
    tls: Tls | None = None
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S
    retries: int = 0  # times that a call is sent again
    headers: Callable[[], Mapping[str, str]] | None = None  # asked for each try
    on_call: Callable[[CallRecord], None] | None = None  # told of each try that has ended

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", _checked_target(self.target))
        checked_timeout(self.timeout_s)
        if checked_timeout(self.connect_timeout_s, "connect_timeout_s") is None:
            raise InvalidArgument("connect_timeout_s must be a number of seconds", field="connect_timeout_s")
        given: Any = self  # a caller without a type checker gives anything
        if given.token is not None and not (isinstance(given.token, str) and _TOKEN.match(given.token)):
            raise InvalidArgument("the token must be printable ASCII without spaces", field="token")
        if given.tls is not None and not isinstance(given.tls, Tls):
            raise InvalidArgument(f"tls takes True, False or a loraplex.Tls, not {given.tls!a}", field="tls")

    def metadata(self, adapter_id: str) -> tuple[tuple[str, str], ...]:
        """Headers of a call. The adapter's name lets a proxy route without parsing the message."""
        pairs: list[tuple[str, str]] = []
        if adapter_id:
            pairs.append(("x-adapter-id", name_in(adapter_id)))
        if self.token is not None:
            pairs.append(("authorization", f"Bearer {self.token}"))
        return tuple(pairs)

    def channel_options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        # Named for a pause, it is the time that an attempt to connect may take, handshakes included.
        options.append(("grpc.min_reconnect_backoff_ms", max(1, round(self.connect_timeout_s * 1000))))
        return options

    def channel(self, library: Any) -> Any:
        """A new channel of `library`, which is `grpc` or `grpc.aio`."""
        tls, options = self.tls, self.channel_options()
        if tls is None:
            return library.insecure_channel(self.target, options)
        credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.client_key, tls.client_certificate)
        return library.secure_channel(self.target, credentials, options)


def checked_timeout(timeout_s: float | None, field: str = "timeout_s") -> float | None:
    """Seconds, or None for no deadline. Raises InvalidArgument."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    given: Any = timeout_s
    if not (isinstance(given, (int, float)) and given > 0):  # NaN too
        raise InvalidArgument(f"{field} must be above 0, or None for no deadline; it is {timeout_s!a}", field=field)
    return float(timeout_s)


def _checked_target(target: str) -> str:
    given: Any = target
    if not isinstance(given, str) or not given or _WEB_ADDRESS.match(given) or any(c.isspace() for c in given):
        shown = ascii(given if not isinstance(given, str) else given[:80])
        raise InvalidArgument(
            f"{shown} is not a server's address: write it as host:port, for example localhost:{DEFAULT_PORT}",
            field="target",
        )
    return f"{target}:{DEFAULT_PORT}" if _BARE_HOST.match(target) else target


# --- calls ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call(Generic[_Answer]):
    """One try of a call. `read` converts the answer; of a stream, each message."""

    path: str
    request: bytes = field(repr=False)  # it may have a token
    read: Callable[[bytes], _Answer]
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    settings: Settings
    adapter_id: str = ""
    request_id: str | None = None
    is_idempotent: bool = True
    num_retries: int = 0  # tries before this one
    allowed_s: float | None = None  # by the caller, for all calls of a listing
    started_s: float = field(default_factory=time.monotonic)

    def start(self, kind: Callable[[str], Any]) -> Any:
        """gRPC's own call. `kind` is the method `unary_unary` or `unary_stream` of a channel."""
        further = self.settings.headers() if self.settings.headers is not None else {}
        metadata = (*self.metadata, *((name.lower(), value) for name, value in further.items()))
        method = partial(kind(self.path), self.request, timeout=self.timeout_s)
        span = client_span(self.path, self.request_id)
        if span is None:
            return method(metadata=metadata)
        return span.run(partial(method, metadata=(*metadata, *span.headers)))

    def after(self, error: grpc.RpcError, *, may_retry: bool = True) -> tuple[float, Call[_Answer]]:
        """Seconds to wait, and the next try. Raises the typed error where there is none."""
        typed = self.error(error)
        now = time.monotonic()
        remaining_s = None if self.timeout_s is None else self.timeout_s - (now - self.started_s)
        wait_s = None
        if may_retry and self.num_retries < self.settings.retries:
            wait_s = wait_before_retry(
                typed,
                self.num_retries,
                is_idempotent=self.is_idempotent,
                remaining_s=remaining_s,
                draw=random.random(),
            )
        self.ended(typed, wait_s)
        if wait_s is None:
            raise typed from error
        return wait_s, replace(
            self,
            timeout_s=None if remaining_s is None else remaining_s - wait_s,
            allowed_s=self.allowed_s or self.timeout_s,
            started_s=now + wait_s,
            num_retries=self.num_retries + 1,
        )

    def ended(self, error: LoraplexError | None = None, retry_in_s: float | None = None) -> None:
        """Logs this try and tells the client's `on_call` of it."""
        record = CallRecord(
            method=self.path.rpartition("/")[2],
            target=self.settings.target,
            request_id=self.request_id or "",
            adapter_id=self.adapter_id,
            duration_s=time.monotonic() - self.started_s,
            num_retries=self.num_retries,
            error=error,
            retry_in_s=retry_in_s,
        )
        _LOG.log(logging.DEBUG if error is None else logging.INFO, "%s", record)
        if self.settings.on_call is not None:
            try:
                self.settings.on_call(record)
            except Exception:
                _LOG.exception("on_call failed; the call goes on")

    def error(self, error: grpc.RpcError) -> LoraplexError:
        """The typed error, with the request's id and the server's address added."""
        typed = from_rpc_error(error)
        if "grpc_code" in typed.metadata:  # not from a Loraplex server
            typed = self._seen_from_here(typed)
        if self.request_id is not None:
            typed.metadata.setdefault("request_id", self.request_id)
        return typed

    def _seen_from_here(self, error: LoraplexError) -> LoraplexError:
        message, metadata = error.message, error.metadata
        match error:
            case Cancelled():
                return self.closed()
            case ServerUnreachable():
                message = message.replace("the server", f"the server at {self.settings.target}", 1)
                message = _with_remedy(message)
            case ConnectionLost() if self._is_overdue():
                # The server's timer fired first.
                return DeadlineExceeded(self._too_late(), metadata=metadata)
            case ConnectionLost():
                message = message.replace("the server", f"the server at {self.settings.target}", 1)
            case DeadlineExceeded() if self.timeout_s is not None:
                message = self._too_late()
            case _:
                return error
        return type(error)(message, retry_after_s=error.retry_after_s, metadata=metadata)

    def _is_overdue(self) -> bool:
        return self.timeout_s is not None and time.monotonic() - self.started_s >= self.timeout_s - CLOCK_SLACK_S

    def _too_late(self) -> str:
        return f"no complete answer within {self.allowed_s or self.timeout_s:g} s; allow more (timeout_s, --timeout)"

    def closed(self) -> Cancelled:
        """The error of a call after its client was closed."""
        metadata = {"request_id": self.request_id} if self.request_id is not None else {}
        return Cancelled("the client was closed before the answer was complete", metadata=metadata)


# Words of gRPC's -> what is the matter, and what to do. The first that is found counts.
_REMEDIES: Final = (
    (
        "Hostname Verification Check failed",
        "its certificate has another name; use that name as the address, or as Tls(server_name=...) (--tls-name)",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "no authority known here vouches for its certificate; give the authority's own as Tls(root_certificates=...) "
        "(--ca-cert)",
    ),
    ("WRONG_VERSION_NUMBER", "it does not use TLS; leave out tls (--tls, --ca-cert)"),
    (
        "CERTIFICATE_REQUIRED",
        "it asks for a certificate of the client; give Tls(client_key=..., client_certificate=...)",
    ),
    (
        "HTTP proxy returned",
        "the proxy that grpc_proxy, https_proxy or http_proxy names refused to connect; name the server in no_proxy to "
        "go round it",
    ),
    ("Socket closed", "it hung up at once, as servers do that want TLS; try tls=True (--tls)"),
)


def _with_remedy(message: str) -> str:
    """The sentence on a server that cannot be reached, with a remedy in the place of the library's words."""
    for words, remedy in _REMEDIES:
        if words in message:
            return f"{message.split(': ')[0]}: {remedy}"
    return f"{message}; see that one runs there, and that both sides use TLS or neither does"


class Calls:
    """Makes the calls to one server. Raises InvalidArgument, and TypeError for an unknown option."""

    def __init__(
        self,
        target: str | None,
        token: str | None,
        timeout_s: float | None,
        tls: bool | Tls,
        *,
        retries: int | None = None,
        **further: Any,
    ) -> None:
        """`further`: other fields of Settings."""
        self.settings = Settings(
            server_in_force(target),
            token_in_force(token),
            timeout_s,
            Tls() if tls is True else tls or None,
            retries=retries_in_force(retries),
            **further,
        )

    def __repr__(self) -> str:
        return f"{self.settings.target!r}, timeout_s={self.settings.timeout_s}, retries={self.settings.retries}"

    def generate(self, prompt: str | None, options: GenerateOptions) -> Call[Generation]:
        request = generate_request(prompt, options)
        return self._call(_INFERENCE + "Generate", request, generation, options)

    def stream(self, prompt: str | None, options: GenerateOptions) -> Call[Chunk]:
        request = generate_request(prompt, options)
        return self._call(_INFERENCE + "GenerateStream", request, ChunkReader(request.request_id).read, options)

    def embed(
        self,
        inputs: PoolingInputs,
        pooling: PoolingKind | None,
        dimensions: int,
        normalize: bool,
        options: PoolingOptions,
    ) -> Call[Embeddings]:
        request = pooling_request(pooling_pb2.EmbedRequest(), inputs, options)
        _assign(request, "dimensions", dimensions)
        request.omit_normalization = not normalize
        _put_choice(request, "pooling", pooling, _POOLING_KINDS)
        return self._call(_POOLING + "Embed", request, embeddings, options)

    def classify(self, inputs: PoolingInputs, logits: bool, options: PoolingOptions) -> Call[Classifications]:
        request = pooling_request(pooling_pb2.ClassifyRequest(), inputs, options)
        _assign(request, "logits", logits)
        return self._call(_POOLING + "Classify", request, classifications, options)

    def score(
        self,
        query: str | Sequence[int],
        documents: PoolingInputs,
        method: ScoreMethod | None,
        pooling: PoolingKind | None,
        how: Mapping[str, Any],
        options: PoolingOptions,
    ) -> Call[Scores]:
        request = pooling_request(pooling_pb2.ScoreRequest(), documents, options)
        _put_input(request.query, query, "query")
        for name, value in how.items():
            _assign(request, name, value)
        _put_choice(request, "method", method, _SCORE_METHODS)
        _put_choice(request, "pooling", pooling, _POOLING_KINDS)
        return self._call(_POOLING + "Score", request, scores, options)

    def tokenize(
        self,
        text: str | None,
        messages: Sequence[Message] | None,
        omit_generation_prompt: bool,
        omit_special_tokens: bool,
        offsets: bool,
        options: ChatOptions,
    ) -> Call[Tokenization]:
        request = tokenize_request(
            text, messages, omit_generation_prompt, omit_special_tokens, offsets=offsets, options=options
        )
        return self._call(_INFERENCE + "Tokenize", request, tokenization, options)

    def detokenize(self, token_ids: Sequence[int], omit_special_tokens: bool, options: CallOptions) -> Call[str]:
        request = inference_pb2.DetokenizeRequest(omit_special_tokens=omit_special_tokens)
        _assign(request, "token_ids", token_ids)
        return self._call(_INFERENCE + "Detokenize", request, detokenized, call_options(options))

    def tokenizer_info(self, options: CallOptions) -> Call[TokenizerInfo]:
        request = inference_pb2.GetTokenizerInfoRequest()
        return self._call(_INFERENCE + "GetTokenizerInfo", request, tokenizer_info, call_options(options))

    def info(self, options: CallOptions) -> Call[ServerInfo]:
        request = inference_pb2.GetInfoRequest()
        return self._call(_INFERENCE + "GetInfo", request, server_info, call_options(options))

    def status(self, adapter_prefix: str, max_adapters: int, options: CallOptions) -> Call[RouterStatus]:
        request = status_pb2.GetStatusRequest()
        _assign(request, "adapter_prefix", adapter_prefix)
        _assign(request, "max_adapters", max_adapters)
        return self._call(_STATUS + "GetStatus", request, router_status, call_options(options))

    def load(self, adapter_id: str, how: Mapping[str, object], options: CallOptions) -> Call[tuple[Adapter, ...]]:
        """`how`: other fields of the request."""
        request = adapter_pb2.LoadAdapterRequest(token=Hub(token=cast("str", how.get("hub_token", ""))).token)
        for name, value in how.items():
            if name != "hub_token":
                _assign(request, name, value)
        if request.source:
            check_adapter_source(request.source)
        if request.expected_digest:
            check_digest(request.expected_digest, field="expected_digest")
        call = self._call(_ADAPTERS + "LoadAdapter", naming(request, adapter_id), _rows, call_options(options))
        return replace(call, is_idempotent=False)

    def unload(self, adapter_id: str, if_unused: bool, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = naming(adapter_pb2.UnloadAdapterRequest(), adapter_id)
        _assign(request, "if_unused", if_unused)
        call = self._call(_ADAPTERS + "UnloadAdapter", request, _rows, call_options(options))
        return replace(call, is_idempotent=False)

    def get(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = naming(adapter_pb2.GetAdapterRequest(), adapter_id)
        return self._call(_ADAPTERS + "GetAdapter", request, _rows, call_options(options))

    def list(
        self,
        include_unloaded: bool,
        prefix: str,
        state: AdapterState | None,
        options: CallOptions,
        *,
        page_size: int | None = None,
    ) -> Pages:
        """The calls of a listing. With a `page_size` the timeout is for each of them, without one for all."""
        request = list_request(include_unloaded, prefix, state, MAX_PAGE_SIZE if page_size is None else page_size)
        timeout_s = checked_timeout(call_options(options).get("timeout_s", self.settings.timeout_s))
        call = partial(self._call, _ADAPTERS + "ListAdapters")
        return Pages(call, request, timeout_s, is_whole=page_size is None)

    def _call(
        self,
        path: str,
        request: ProtobufMessage,
        read: Callable[[bytes], _Answer],
        options: CallOptions | GenerateOptions | PoolingOptions,
    ) -> Call[_Answer]:
        return Call(
            path=path,
            request=request.SerializeToString(),
            read=read,
            metadata=self.settings.metadata(getattr(request, "adapter_id", "")),
            timeout_s=checked_timeout(options.get("timeout_s", self.settings.timeout_s)),
            settings=self.settings,
            adapter_id=getattr(request, "adapter_id", ""),
            request_id=getattr(request, "request_id", None),
        )


class Pages:
    """The calls of one listing. As long as there is a `next_call`, send it."""

    def __init__(
        self,
        call: Callable[..., Call[tuple[Adapter, ...]]],
        request: adapter_pb2.ListAdaptersRequest,
        timeout_s: float | None,
        is_whole: bool,
    ) -> None:
        self._call = call
        self._request = request
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s if is_whole and timeout_s is not None else None
        self._has_more = True

    def next_call(self) -> Call[tuple[Adapter, ...]] | None:
        if not self._has_more:
            return None
        timeout_s = self._timeout_s
        if self._until_s is not None:
            timeout_s = max(self._until_s - time.monotonic(), MIN_TIMEOUT_S)
        return replace(self._call(self._request, self._read, {"timeout_s": timeout_s}), allowed_s=self._timeout_s)

    def _read(self, raw: bytes) -> tuple[Adapter, ...]:
        page = adapter_pb2.ListAdaptersResponse.FromString(raw)
        self._request.page_token = page.next_page_token
        self._has_more = bool(page.next_page_token)
        return adapters(page.adapters)


# --- requests ---------------------------------------------------------------------------------------------------------


def generate_request(prompt: str | None, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Raises InvalidArgument for a value that the wire cannot carry, TypeError for an unknown option."""
    given = _with_speculation(_given(options, _OTHER_OPTIONS | _FIELDS.keys()))
    request = inference_pb2.GenerateRequest()
    inputs = [name for name in ("token_ids", "messages") if name in given]
    if prompt is not None:
        inputs.insert(0, "prompt")
        _assign(request, "text", prompt)
    if len(inputs) != 1:
        what = " and ".join(inputs) or "nothing"
        raise InvalidArgument(f"give one of prompt, token_ids and messages; given: {what}", field="input")
    if "token_ids" in given:
        request.token_ids.SetInParent()  # an empty list is a prompt too
    _put_chat(request, given)
    for name, path in _FIELDS.items():
        if name in given:
            _assign(request, path, given[name])
    _put_place(request, given)
    mixture: Any = given.get("adapters", {})
    if not isinstance(mixture, Mapping):
        raise InvalidArgument(f"adapters takes {{name: weight}}, not {_shown(mixture)}", field="adapters")
    if "adapters" in given and not mixture:
        raise InvalidArgument("`adapters` is empty: name at least one adapter", field="adapters")
    for adapter_id, given_as in cast("Mapping[str, float | Member]", mixture).items():
        member = given_as if isinstance(given_as, Member) else Member(given_as)
        entry = request.adapters.add()
        _assign(entry, "id", adapter_id, shown_as="adapters.id")
        _assign(entry, "weight", member.weight, shown_as="adapters.weight")
        place = {"hub": member.hub, "in_bucket": member.in_bucket}
        _put_place(entry, {name: value for name, value in place.items() if value is not None})
    if "merge" in given:
        merge = given["merge"]
        if not isinstance(merge, Merge):
            raise InvalidArgument(f"merge takes a Merge, not {_shown(merge)}", field="merge")
        for one in fields(merge):
            if getattr(merge, one.name) is not None:
                _assign(request, f"merge.{one.name}", getattr(merge, one.name))
    if "grammar" in given:
        _put_grammar(request.grammar, given["grammar"])
    _put_truncation(request, given)
    if "speculation" in given:
        _put_speculation(request.speculation, given["speculation"])
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)  # it also goes into a header
    if not request.request_id:
        request.request_id = uuid.uuid4().hex  # known even when no answer comes
    return request


def pooling_request(request: _Pooling, inputs: PoolingInputs, options: PoolingOptions) -> _Pooling:
    """The request with the fields that all have. Raises InvalidArgument, TypeError for an unknown option."""
    given = _given(options, frozenset({*_POOLING_FIELDS, "hub", "in_bucket", "truncate_prompt", "timeout_s"}))
    several: Any = inputs
    if isinstance(several, str) or (isinstance(several, Sequence) and several and isinstance(several[0], int)):
        several = [several]
    if not isinstance(several, Iterable):
        raise InvalidArgument(f"`inputs` takes texts or lists of token ids, not {_shown(inputs)}", field="inputs")
    for one in cast("Iterable[Any]", several):
        _put_input(request.inputs.add(), one, "inputs")
    for name in _POOLING_FIELDS:
        if name in given:
            _assign(request, name, given[name])
    _put_place(request, given)
    _put_truncation(request, given)
    if request.adapter_id:
        check_adapter_ref(request.adapter_id)  # it also goes into a header
    if not request.request_id:
        request.request_id = uuid.uuid4().hex
    return request


def _put_input(message: pooling_pb2.PoolingInput, given: Any, field: str) -> None:
    if isinstance(given, str):
        _assign(message, "text", given, shown_as=field)
    else:
        message.token_ids.SetInParent()
        _assign(message, "token_ids.ids", given, shown_as=f"{field}.token_ids.ids")


def _put_choice(request: Any, field: str, given: Any, known: Mapping[str, Any]) -> None:
    if given is None:
        return
    if given not in known:
        raise InvalidArgument(f"`{field}` must be one of {', '.join(known)}; it is {_shown(given)}", field=field)
    setattr(request, field, known[given])


def _put_place(request: Any, given: Mapping[str, Any]) -> None:
    if "in_bucket" in given:
        _assign(request, "in_bucket", given["in_bucket"])
    if "hub" not in given:
        return
    hub = given["hub"]
    if not isinstance(hub, Hub):
        raise InvalidArgument("hub takes a Hub", field="hub")  # what was given may be a token
    request.hub.SetInParent()
    _assign(request, "hub.revision", hub.revision)
    request.hub.token = hub.token


def _put_truncation(request: Any, given: Mapping[str, Any]) -> None:
    if "truncate_prompt" in given:
        wanted = given["truncate_prompt"]
        truncate = wanted if isinstance(wanted, Truncate) else Truncate(wanted)
        request.truncate_prompt.SetInParent()
        for one in fields(truncate):
            _assign(request, f"truncate_prompt.{one.name}", getattr(truncate, one.name))


def tokenize_request(
    text: str | None,
    messages: Sequence[Message] | None,
    omit_generation_prompt: bool,
    omit_special_tokens: bool,
    *,
    offsets: bool = False,
    options: ChatOptions | None = None,
) -> inference_pb2.TokenizeRequest:
    """Raises InvalidArgument, TypeError for an unknown option."""
    given = _given(options or {}, _CHAT_OPTIONS | {"adapter_id", "hub", "in_bucket", "timeout_s"})
    request = inference_pb2.TokenizeRequest(omit_special_tokens=omit_special_tokens, offsets=offsets)
    if adapter_id := given.pop("adapter_id", ""):
        _assign(request, "adapter_id", adapter_id)
    _put_place(request, given)
    if (text is None) == (messages is None):
        raise InvalidArgument("give one of text and messages", field="input")
    if text is not None:
        _assign(request, "text", text)
    else:
        given["messages"] = messages
    _put_chat(request, {"omit_generation_prompt": omit_generation_prompt, **given})
    return request


def naming(request: _AboutAdapter, adapter_id: str) -> _AboutAdapter:
    """The request with the adapter's name in it. Raises InvalidArgument."""
    _assign(request, "adapter_id", adapter_id)
    check_adapter_ref(request.adapter_id)
    return request


def list_request(
    include_unloaded: bool, prefix: str, state: AdapterState | None, page_size: int
) -> adapter_pb2.ListAdaptersRequest:
    """For the first page."""
    request = adapter_pb2.ListAdaptersRequest()
    values = {"include_unloaded": include_unloaded, "page_size": page_size, "prefix": prefix}
    for name, value in values.items():
        _assign(request, name, value)
    if page_size < 1:
        raise InvalidArgument(f"`page_size` must be at least 1; it is {page_size}", field="page_size")
    if state is not None:
        if state not in ADAPTER_STATES:
            raise InvalidArgument(
                f"`state` must be one of {', '.join(ADAPTER_STATES)}; it is {_shown(state)}", field="state"
            )
        request.state = ADAPTER_STATES[state]
    return request


def call_options(options: CallOptions) -> CallOptions:
    """The same options. Raises TypeError where there is any but `timeout_s`."""
    _given(options, frozenset({"timeout_s"}))
    return options


def _given(options: GenerateOptions | CallOptions | PoolingOptions, known: frozenset[str]) -> dict[str, Any]:
    for name in options:
        if name not in known:
            near = near_option(name, known)
            raise TypeError(f"there is no option {name!r}; {near or 'there are ' + ', '.join(sorted(known))}")
    return {name: value for name, value in options.items() if value is not None}


def _put_chat(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, given: Mapping[str, Any]) -> None:
    """Messages and the options that go with them."""
    if "messages" not in given:
        for name in ("omit_generation_prompt", "parallel_tool_calls", "tool_choice", *sorted(_CHAT_OPTIONS)):
            if given.get(name):
                field = "chat.template" if name == "chat_template" else f"chat.{_CHAT_JSON.get(name, name)}"
                raise InvalidArgument(f"{name} goes with messages", field=field)
        return
    _put_messages(request.chat, given["messages"])
    for name in ("omit_generation_prompt", "continue_final_message"):
        if given.get(name):
            _assign(request, f"chat.{name}", given[name])
    if "chat_template" in given:
        _assign(request, "chat.template", given["chat_template"])
    if "parallel_tool_calls" in given:
        _assign(request, "chat.parallel_tool_calls", given["parallel_tool_calls"])
    if "tool_choice" in given:
        _put_tool_choice(request.chat.tool_choice, given["tool_choice"])
    for name, field in _CHAT_JSON.items():
        if name in given:
            setattr(request.chat, field, _as_json(given[name], f"chat.{field}"))


def _as_json(value: Any, field: str) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"`{field}` cannot be {_shown(value)}: it is not JSON", field=field) from error


def _put_messages(chat: inference_pb2.Chat, messages: Sequence[Message]) -> None:
    chat.SetInParent()
    given: Any = messages  # a caller without a type checker gives anything
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable) or not all(map(_is_mapping, messages)):
        raise InvalidArgument(
            f"messages takes a list of {{'role': ..., 'content': ...}}, not {_shown(messages)}", field="chat.messages"
        )
    for one in cast("Sequence[Mapping[str, Any]]", messages):
        message = chat.messages.add()
        _assign(message, "role", one.get("role"), shown_as="chat.messages.role")
        calls: Any = one.get("tool_calls") or ()
        if not calls or one.get("content") is not None:
            _assign(message, "content", one.get("content"), shown_as="chat.messages.content")
        for name in ("name", "tool_call_id", "reasoning"):
            if one.get(name) is not None:
                _assign(message, name, one[name], shown_as=f"chat.messages.{name}")
        for call in calls:
            _put_tool_call(message.tool_calls.add(), call)


def _put_tool_call(message: inference_pb2.ToolCall, call: ToolCall) -> None:
    path = "chat.messages.tool_calls"
    function: Any = call.get("function") if _is_mapping(call) else None
    if not _is_mapping(function):
        raise InvalidArgument(
            f"tool_calls takes a list of {{'function': {{'name': ..., 'arguments': ...}}}}, not {_shown(call)}",
            field=path,
        )
    _assign(message, "name", function.get("name"), shown_as=f"{path}.name")
    if call.get("id") is not None:
        _assign(message, "id", call.get("id"), shown_as=f"{path}.id")
    arguments = function.get("arguments") or ""
    text = arguments if isinstance(arguments, str) else _as_json(arguments, f"{path}.arguments_json")
    _assign(message, "arguments_json", text, shown_as=f"{path}.arguments_json")


def _put_tool_choice(message: inference_pb2.ToolChoice, wanted: Any) -> None:
    if wanted in ("none", "auto", "required"):
        setattr(message, wanted, True)
        return
    function: Any = wanted.get("function") if _is_mapping(wanted) else None
    if not _is_mapping(function):
        raise InvalidArgument(
            f"tool_choice cannot be {_shown(wanted)}: use 'none', 'auto', 'required' or "
            "{'function': {'name': ...}}",
            field="chat.tool_choice",
        )
    _assign(message, "name", function.get("name"), shown_as="chat.tool_choice.name")


def _with_speculation(given: dict[str, Any]) -> dict[str, Any]:
    """The options with the fields of a `Speculation` in its place."""
    whole = given.get("speculation")
    if not isinstance(whole, Speculation):
        return given
    said = {
        "speculation": whole.kind,
        "max_draft_tokens": whole.max_draft_tokens,
        "fixed_draft_length": whole.fixed_length,
    }
    rest = {name: value for name, value in given.items() if name != "speculation"}
    for name, value in said.items():
        if value is None:
            continue
        if name in rest:
            raise InvalidArgument(f"{name} is given twice, as an option and in speculation", field=_FIELDS[name])
        rest[name] = value
    return rest


def _put_speculation(message: inference_pb2.Speculation, wanted: AnySpeculation) -> None:
    kind = wanted if isinstance(wanted, str) else _PROPOSERS.get(type(wanted), "")
    if kind in ("off", "auto"):
        setattr(message, kind, True)
    elif kind in _PROPOSERS.values():
        parameters = getattr(message, kind)
        parameters.SetInParent()
        for one in () if isinstance(wanted, str) else fields(wanted):
            value = getattr(wanted, one.name)
            _assign(parameters, one.name, value, shown_as=f"speculation.{kind}.{one.name}")
    else:
        raise InvalidArgument(
            f"speculation cannot be {_shown(wanted)}: use 'off', 'auto', 'medusa', 'prompt_lookup', 'draft_model' "
            "or an object of one of their classes",
            field="speculation",
        )


# Kind of grammar -> field of the message.
_GRAMMARS: Final = {
    **{name: name for name in ("json_schema", "json_object", "regex", "lark", "gbnf")},
    "choice": "choice.texts",
    "structural_tag": "structural_tag_json",
}


def _put_grammar(message: inference_pb2.Grammar, wanted: Grammar) -> None:
    given: Any = wanted  # a caller without a type checker gives anything
    said = {kind: getattr(given, kind) for kind in _GRAMMARS} if isinstance(given, Grammar) else {}
    said = {kind: value for kind, value in said.items() if value is not None}
    if len(said) != 1:
        raise InvalidArgument(
            f"grammar takes a loraplex.Grammar of one kind ({', '.join(_GRAMMARS)}), not {_shown(given)}",
            field="grammar",
        )
    ((kind, value),) = said.items()
    path = _GRAMMARS[kind]
    if kind in ("json_schema", "structural_tag") and _is_mapping(value):
        value = _as_json(value, f"grammar.{path}")
    if kind == "choice":
        message.choice.SetInParent()
    _assign(message, path, value, shown_as=f"grammar.{path}")
    message.compact = wanted.compact


def _assign(message: Any, path: str, value: Any, *, shown_as: str = "") -> None:
    """Sets the field at `path`. Raises InvalidArgument naming it when the value does not fit its type."""
    *above, name = path.split(".")
    for part in above:
        message = getattr(message, part)
    current = getattr(message, name)
    try:
        if not hasattr(current, "MergeFrom"):
            setattr(message, name, value)
        elif isinstance(value, Mapping):
            current.update(value)
        else:
            current.extend([value] if isinstance(value, str) else value)
    except (TypeError, ValueError, AttributeError) as error:  # what protobuf raises; UnicodeEncodeError is a ValueError
        field = shown_as or path
        raise InvalidArgument(f"`{field}` cannot be {_shown(value)}", field=field) from error


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


# --- answers ----------------------------------------------------------------------------------------------------------


def generation(raw: bytes) -> Generation:
    message = inference_pb2.GenerateResponse.FromString(raw)
    return Generation(
        completions=tuple(_completion(one) for one in message.completions),
        usage=_usage(message.usage),
        timings=_record(Timings, message.timings),
        adapter_digest=message.adapter_digest,
        request_id=message.request_id,
        prompt_logprobs=_prompt_logprobs(message),
        prompt_tokens=_prompt_tokens(message),
        seed=message.seed if message.HasField("seed") else None,
    )


class ChunkReader:
    """Turns the messages of one stream into chunks. Keeps the fields that only the first message carries."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.adapter_digest = ""
        self.seed: int | None = None

    def read(self, raw: bytes) -> Chunk:
        message = inference_pb2.GenerateStreamResponse.FromString(raw)
        self.request_id = message.request_id or self.request_id
        self.adapter_digest = message.adapter_digest or self.adapter_digest
        self.seed = message.seed if message.HasField("seed") else self.seed
        return Chunk(
            index=message.index,
            text=message.text_delta,
            token_ids=tuple(message.token_ids),
            request_id=self.request_id,
            adapter_digest=self.adapter_digest,
            logprobs=_logprobs(message.logprobs),
            prompt_logprobs=_prompt_logprobs(message),
            prompt_tokens=_prompt_tokens(message),
            drafted_tokens=message.drafted_tokens,
            accepted_tokens=message.accepted_tokens,
            proposer=message.proposer,
            finish_reason=_FINISH_REASONS.get(message.finish_reason),
            stop_string=message.stop_string if message.HasField("stop_string") else None,
            stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
            usage=_usage(message.usage) if message.HasField("usage") else None,
            timings=_record(Timings, message.timings) if message.HasField("timings") else None,
            seed=self.seed,
            deltas=tuple(map(_chat_delta, message.deltas)),
            message=_message(message),
        )


def embeddings(raw: bytes) -> Embeddings:
    message = pooling_pb2.EmbedResponse.FromString(raw)
    return Embeddings(tuple(tuple(one.values) for one in message.embeddings), **_pooled(message))


def classifications(raw: bytes) -> Classifications:
    message = pooling_pb2.ClassifyResponse.FromString(raw)
    inputs = tuple(
        Classification(tuple(tuple(row.probabilities) for row in one.rows), tuple(one.starts), tuple(one.ends))
        for one in message.classifications
    )
    return Classifications(tuple(message.labels), inputs, message.per_token, **_pooled(message))


def scores(raw: bytes) -> Scores:
    message = pooling_pb2.ScoreResponse.FromString(raw)
    return Scores(tuple(message.scores), **_pooled(message))


def _pooled(
    message: pooling_pb2.EmbedResponse | pooling_pb2.ClassifyResponse | pooling_pb2.ScoreResponse,
) -> dict[str, Any]:
    """Fields of every answer of PoolingService."""
    return {
        "usage": _usage(message.usage),
        "timings": _record(Timings, message.timings),
        "adapter_digest": message.adapter_digest,
        "request_id": message.request_id,
    }


def tokenization(raw: bytes) -> Tokenization:
    return _record(Tokenization, inference_pb2.TokenizeResponse.FromString(raw))


def detokenized(raw: bytes) -> str:
    return inference_pb2.DetokenizeResponse.FromString(raw).text


def tokenizer_info(raw: bytes) -> TokenizerInfo:
    message = inference_pb2.GetTokenizerInfoResponse.FromString(raw)
    named = {
        name: _record(SpecialToken, getattr(message, name)) if message.HasField(name) else None
        for name in ("bos", "eos", "pad", "unk")
    }
    special = tuple(_record(SpecialToken, one) for one in message.special_tokens)
    return _record(TokenizerInfo, message, special_tokens=special, **named)


def server_info(raw: bytes) -> ServerInfo:
    message = inference_pb2.GetInfoResponse.FromString(raw)
    defaults = {field.name: value for field, value in message.generation_defaults.ListFields()}
    return _record(ServerInfo, message, generation_defaults=defaults)


def router_status(raw: bytes) -> RouterStatus:
    message = status_pb2.GetStatusResponse.FromString(raw)
    return _record(
        RouterStatus,
        message,
        workers=tuple(_worker_status(worker) for worker in message.workers),
        adapters=tuple(
            _record(AdapterPlaces, adapter, tiers=tuple(map(int, adapter.tiers))) for adapter in message.adapters
        ),
        activity=_record(Activity, message.activity),
        errors=tuple(_record(FailedCall, error) for error in message.errors),
    )


def _worker_status(message: status_pb2.WorkerStatus) -> WorkerStatus:
    prefix = "WORKER_STATE_"
    known = message.state in status_pb2.WorkerState.values()
    state = status_pb2.WorkerState.Name(message.state).removeprefix(prefix).lower() if known else "unknown"
    return _record(WorkerStatus, message, state=state, activity=_record(Activity, message.activity))


def _rows(raw: bytes) -> tuple[Adapter, ...]:
    """Every answer of AdapterService has its rows in the same field."""
    return adapters(adapter_pb2.ListAdaptersResponse.FromString(raw).adapters)


def adapters(rows: Iterable[adapter_pb2.Adapter]) -> tuple[Adapter, ...]:
    return tuple(
        _record(
            Adapter,
            row,
            state=_STATES.get(row.state, "unknown"),
            tier=_TIERS.get(row.tier, "unknown"),
            num_bytes=row.bytes,
        )
        for row in rows
    )


def _record(cls: type[_Answer], message: Any, **others: Any) -> _Answer:
    """A dataclass with the values of a message's fields of the same names, lists as tuples, and with `others`."""
    for one in fields(cast("Any", cls)):
        if one.name not in others:
            value = getattr(message, one.name)
            others[one.name] = value if isinstance(value, (str, int, float)) else tuple(value)
    return cls(**others)


def _completion(message: inference_pb2.Completion) -> Completion:
    return Completion(
        index=message.index,
        text=message.text,
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
        stop_string=message.stop_string if message.HasField("stop_string") else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        usage=_usage(message.usage),
        message=_message(message),
    )


def _message(answer: inference_pb2.Completion | inference_pb2.GenerateStreamResponse) -> Message | None:
    if not answer.HasField("message"):
        return None
    message = answer.message
    found: Message = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning"] = message.reasoning
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments_json}}
            for call in message.tool_calls
        ]
    return found


def _chat_delta(delta: inference_pb2.ChatDelta) -> ChatDelta:
    call = delta.tool_call
    called = ToolCallDelta(call.index, call.arguments_json, call.id, call.name) if delta.HasField("tool_call") else None
    return ChatDelta(delta.content, delta.reasoning, called)


def _usage(message: inference_pb2.Usage) -> Usage:
    proposers = tuple(_record(ProposerUsage, one) for one in message.proposers)
    return _record(Usage, message, proposers=proposers)


def _logprobs(messages: Iterable[inference_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob,
            top=_top(one),
            token_bytes=one.bytes,
            is_special=one.is_special,
        )
        for one in messages
    )


def _top(message: inference_pb2.TokenLogprob | inference_pb2.PromptToken) -> tuple[TopLogprob, ...]:
    return tuple(TopLogprob(one.token_id, one.text, one.logprob, one.bytes) for one in message.top)


def _prompt_tokens(
    message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse,
) -> tuple[PromptToken, ...]:
    return tuple(
        PromptToken(
            token_id=one.token_id,
            text=one.text,
            logprob=one.logprob if one.HasField("logprob") else None,
            top=_top(one),
            token_bytes=one.bytes,
            is_special=one.is_special,
        )
        for one in message.prompt_tokens
    )


def _prompt_logprobs(
    message: inference_pb2.GenerateResponse | inference_pb2.GenerateStreamResponse,
) -> tuple[TokenLogprob, ...]:
    """The server sends them once: in the prompt's tokens, where those are sent."""
    if not message.prompt_tokens:
        return _logprobs(message.prompt_logprobs)
    return tuple(
        TokenLogprob(one.token_id, one.text, one.logprob, _top(one), one.bytes, one.is_special)
        for one in message.prompt_tokens
        if one.HasField("logprob")
    )
