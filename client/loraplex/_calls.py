"""Calls of the SDK: settings, deadline, retries and errors.

Both clients send these calls; they differ only in how they wait. Nothing here opens a connection by itself. Values that
do not fit their field raise InvalidArgument.
"""

from __future__ import annotations

import codecs
import logging
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

import loraplex_proto
from loraplex import _answers as answers
from loraplex import _requests as requests
from loraplex._tracing import client_span
from loraplex.config import retries_in_force, server_in_force, token_in_force
from loraplex.retries import wait_before_retry
from loraplex.types import (
    Adapter,
    AdapterState,
    CallOptions,
    CallRecord,
    ChatOptions,
    Chunk,
    Classifications,
    Embeddings,
    GenerateOptions,
    Generation,
    Message,
    PoolingInputs,
    PoolingKind,
    PoolingOptions,
    RouterStatus,
    ScoreMethod,
    Scores,
    ServerInfo,
    Tls,
    Tokenization,
    TokenizerInfo,
)
from loraplex_contracts.adapters import name_in
from loraplex_contracts.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    LoraplexError,
    MessageTooLarge,
    ServerUnreachable,
)
from loraplex_proto.paging import MAX_PAGE_SIZE
from loraplex_proto.services import ADAPTERS, DEFAULT_PORT, INFERENCE, POOLING, STATUS, path_of
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2

_Answer = TypeVar("_Answer")

DEFAULT_TIMEOUT_S: Final = 120.0
DEFAULT_CONNECT_TIMEOUT_S: Final = 10.0
MIN_TIMEOUT_S: Final = 0.001  # of a late page of a listing, which then ends with DeadlineExceeded
MAX_TIMEOUT_S: Final = 1e9  # 32 years; above there is no deadline: gRPC's clock, 63 bits of nanoseconds, ends in 2262
CLOCK_SLACK_S: Final = 0.05  # both sides end a call at its deadline, each by its own timer

_LOG = logging.getLogger("loraplex")
_MAX_INT: Final = 2**31 - 1  # of a channel's options

# host:port, of which either part may be missing; an IPv6 address has brackets.
_ADDRESS = re.compile(r"([^\s:/\[\]]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\])(?::([0-9]{1,5}))?\Z")
_LOOPBACK = re.compile(r"((dns|ipv4|ipv6):(///)?)?(localhost|127(\.\d+){3}|\[::1\])(:\d+)?\Z", re.IGNORECASE)
_OF_GRPC = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds):\S+\Z")  # schemes of its names
_HEADER = re.compile(r"[A-Za-z0-9._-]+\Z")
_TOKEN = re.compile(r"[\x21-\x7e]+\Z")

CHANNEL_OPTIONS: Final[tuple[tuple[str, int | str], ...]] = (
    ("grpc.primary_user_agent", f"loraplex/{loraplex_proto.__version__}"),
    # A machine that is gone is noticed within 40 s of silence, a frozen process within 90 s: gRPC 1.85 waits a minute
    # for the answer to a ping. Servers must allow pings that often: Loraplex's do, a stock gRPC server closes the
    # connection of a client that pings more than every five minutes.
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
            raise InvalidArgument(
                f"connect_timeout_s takes a number of seconds, at most {MAX_TIMEOUT_S:g}", field="connect_timeout_s"
            )
        given: Any = self  # a caller without a type checker gives anything
        if given.token is not None and not (isinstance(given.token, str) and _TOKEN.match(given.token)):
            raise InvalidArgument("the token must be printable ASCII without spaces", field="token")
        if given.tls is not None and not isinstance(given.tls, Tls):
            raise InvalidArgument(f"tls takes True, False or a loraplex.Tls, not {given.tls!a}", field="tls")

        for name in ("headers", "on_call"):
            if (hook := getattr(self, name)) is not None and not callable(hook):
                raise InvalidArgument(f"{name} takes a function, not {hook!a:.80}", field=name)

    def metadata(self, adapter_id: str) -> tuple[tuple[str, str], ...]:
        """Headers of a call. The adapter's name lets a proxy route without parsing the message."""
        pairs: list[tuple[str, str]] = []
        if adapter_id:
            pairs.append(("x-adapter-id", name_in(adapter_id)))
        if self.token is not None:
            pairs.append(("authorization", f"Bearer {self.token}"))
        return tuple(pairs)

    def further_metadata(self) -> list[tuple[str, str]]:
        """Metadata of this try by the caller's `headers`. Raises InvalidArgument."""
        if self.headers is None:
            return []
        given: Any = self.headers()
        if not isinstance(given, Mapping):
            raise InvalidArgument(f"headers must give names and values, not {given!a:.80}", field="headers")
        pairs = [(name, value) for name, value in cast("Mapping[Any, Any]", given).items()]
        for name, value in pairs:
            is_name = isinstance(name, str) and _HEADER.match(name)
            if not is_name or name.lower().startswith("grpc-") or name.lower().endswith("-bin"):
                raise InvalidArgument(
                    f"headers gave the name {name!a:.80}; names are letters, digits, '-', '_' and '.', begin with no "
                    "'grpc-', which are gRPC's own, and end in no '-bin', which is for bytes",
                    field="headers",
                )
            if not (isinstance(value, str) and value.isascii() and value.isprintable()):
                raise InvalidArgument(f"the value of the header {name!a} must be printable ASCII", field="headers")
        return [(name.lower(), value) for name, value in pairs]

    def channel_options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        if _LOOPBACK.match(self.target):  # no proxy leads back to this machine
            options.append(("grpc.enable_http_proxy", 0))
        # Named for a pause, it is the time that an attempt to connect may take, handshakes included.
        options.append(("grpc.min_reconnect_backoff_ms", min(max(1, round(self.connect_timeout_s * 1000)), _MAX_INT)))
        return options

    def channel(self, library: Any, *further_options: tuple[str, int]) -> Any:
        """A new channel of `library`, which is `grpc` or `grpc.aio`."""
        tls, options = self.tls, [*self.channel_options(), *further_options]
        if tls is None:
            return library.insecure_channel(self.target, options)
        # gRPC does not see what stands behind a byte order mark.
        pems = (tls.root_certificates, tls.client_key, tls.client_certificate)
        credentials = grpc.ssl_channel_credentials(*(pem and pem.removeprefix(codecs.BOM_UTF8) for pem in pems))
        return library.secure_channel(self.target, credentials, options)


def checked_timeout(timeout_s: float | None, field: str = "timeout_s") -> float | None:
    """Seconds, or None for no deadline. Raises InvalidArgument."""
    if timeout_s is None:
        return None
    given: Any = timeout_s
    if not (isinstance(given, (int, float)) and given > 0):  # NaN too
        raise InvalidArgument(f"{field} must be above 0, or None for no deadline; it is {timeout_s!a}", field=field)
    return None if timeout_s > MAX_TIMEOUT_S else float(timeout_s)


def _checked_target(target: str) -> str:
    """The target, with the default port if it has none. Raises InvalidArgument."""
    given: Any = target
    found = _ADDRESS.match(given) if isinstance(given, str) else None
    if found is not None and (found[2] is None or 1 <= int(found[2]) <= 65535):
        return target if found[2] else f"{target}:{DEFAULT_PORT}"
    if not (isinstance(given, str) and _OF_GRPC.match(given)):
        shown = ascii(given if not isinstance(given, str) else given[:80])
        raise InvalidArgument(
            f"{shown} is not a server's address: write it as host:port, for example localhost:{DEFAULT_PORT}",
            field="target",
        )
    return target


# --- calls ------------------------------------------------------------------------------------------------------------

# The default of servers' --max-message, in bytes.
DEFAULT_MAX_MESSAGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Call(Generic[_Answer]):
    """One try of a call. `read` converts the answer; of a stream, each message. Use `answer` for it."""

    path: str
    request: bytes = field(repr=False)  # it may have a token
    read: Callable[[bytes], _Answer]
    metadata: tuple[tuple[str, str], ...] = field(repr=False)  # it may have the token
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
        metadata = (*self.metadata, *self.settings.further_metadata())
        method = partial(kind(self.path), self.request, timeout=self._remaining_s(time.monotonic()))
        span = client_span(self.path, self.request_id)
        if span is None:
            return method(metadata=metadata)
        return span.run(partial(method, metadata=(*metadata, *span.headers)))

    def answer(self, raw: bytes) -> _Answer:
        """The answer; of a stream, one message of it. Raises Internal where it cannot be read."""
        try:
            return self.read(raw)
        except DecodeError as error:
            raise Internal(
                f"the answer of the server at {self.settings.target} cannot be read; see that a Loraplex server of "
                "this version or a later one runs there",
                metadata=self._of_request(),
            ) from error

    def ended_with(self, raw: bytes) -> _Answer:
        """The whole answer. Raises Internal where it cannot be read."""
        try:
            answer = self.answer(raw)
        except LoraplexError as error:
            self.ended(error)
            raise
        self.ended()
        return answer

    def after(self, error: grpc.RpcError, *, may_retry: bool = True) -> tuple[float, Call[_Answer]]:
        """Seconds to wait, and the next try; `may_retry`: nothing of the answer has come. Raises the typed error where
        there is none."""
        typed = self.error(error)
        if may_retry and isinstance(typed, ConnectionLost):
            typed = self._too_large(typed) or typed
        now = time.monotonic()
        remaining_s = self._remaining_s(now)
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
                message = _with_remedy(message, self.settings.tls)
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

    def _too_large(self, error: ConnectionLost) -> MessageTooLarge | None:
        """The error of a request that servers refuse by default. HAProxy cancels such a call and does not say why."""
        if error.metadata.get("grpc_code") != "CANCELLED" or len(self.request) <= DEFAULT_MAX_MESSAGE_BYTES:
            return None
        return MessageTooLarge(
            f"the call was cut off; the request has {len(self.request)} bytes, and the server takes "
            f"{DEFAULT_MAX_MESSAGE_BYTES} by default; send less, or start the server with a larger --max-message",
            field="request",
            metadata=error.metadata,
        )

    def _remaining_s(self, now: float) -> float | None:
        """Seconds until the deadline, of which `headers` may have taken some; None without one."""
        return None if self.timeout_s is None else self.timeout_s - (now - self.started_s)

    def _is_overdue(self) -> bool:
        remaining_s = self._remaining_s(time.monotonic())
        return remaining_s is not None and remaining_s <= CLOCK_SLACK_S

    def _too_late(self) -> str:
        return f"no complete answer within {self.allowed_s or self.timeout_s:g} s; allow more (timeout_s, --timeout)"

    def closed(self) -> Cancelled:
        """The error of a call after its client was closed."""
        return Cancelled("the client was closed before the answer was complete", metadata=self._of_request())

    def cancelled(self) -> Cancelled:
        """The error of a call whose task was cancelled."""
        return Cancelled("its task was cancelled before the answer was complete", metadata=self._of_request())

    def _of_request(self) -> dict[str, str]:
        return {"request_id": self.request_id} if self.request_id is not None else {}


_NO_GRPC: Final = "it does not speak gRPC, as a router's HTTP port does not; use the gRPC port (target, --server)"
_HUNG_UP: Final = "it hung up at once, as servers do that want TLS; try tls=True (--tls)"
_HUNG_UP_ON_TLS: Final = (
    "it hung up at once, as servers do that ask for a certificate of the client, or for another one, or whose own key "
    "gRPC's clients do not take; give Tls(client_key=..., client_certificate=...) (--client-key, --client-cert), or "
    "the server a certificate whose key is RSA, P-256 or P-384"
)
_HUNG_UP_ON_A_CERTIFICATE: Final = (
    "it hung up at once, as servers do that do not accept the client's certificate (one of another authority, one that "
    "has expired, or one for servers alone), or whose own key gRPC's clients do not take; give one for clients that "
    "the server's authority for them has signed (client_certificate, --client-cert), or the server a certificate whose "
    "key is RSA, P-256 or P-384"
)
# Words of gRPC's -> what is the matter, and what to do. The first that is found counts.
_REMEDIES: Final = (
    ("errors resolving", "no address is known for this name; check it (target, --server)"),
    ("DNS resolution", "no address is known for this name; check it (target, --server)"),
    (
        "Hostname Verification Check failed",
        "its certificate has another name; use that name as the address, or as Tls(server_name=...) (--tls-name)",
    ),
    ("certificate has expired", "its certificate has expired, unless this machine's clock is wrong; renew it there"),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet, unless this machine's clock is wrong; see that both clocks are right",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "no authority known here vouches for its certificate; give the authority's own as Tls(root_certificates=...) "
        "(--ca-cert)",
    ),
    ("WRONG_VERSION_NUMBER", "it does not use TLS; leave out tls (--tls, --ca-cert)"),
    (
        "CERTIFICATE_REQUIRED",
        "it asks for a certificate of the client; give Tls(client_key=..., client_certificate=...) (--client-key, "
        "--client-cert)",
    ),
    (
        "NO_COMMON_SIGNATURE_ALGORITHMS",
        "it does not take the key of the client's certificate (--client-cert); use one that is RSA, P-256 or P-384, "
        "for gRPC's servers take no P-521 and no Ed25519",
    ),
    (
        "SSLV3_ALERT_HANDSHAKE_FAILURE",
        "it refused the handshake: it asks for a certificate of the client (--client-key, --client-cert), or has no "
        "key or cipher that gRPC's clients take (a certificate whose key is RSA, P-256 or P-384)",
    ),
    (
        "Failed to create security handshaker",
        "gRPC cannot use the certificates that were given: Tls(root_certificates=...) (--ca-cert) takes certificates, "
        "no key, and the client's own certificate (--client-cert) goes with its own key (--client-key)",
    ),
    ("missing selected ALPN property", _NO_GRPC),
    ("http1.x", _NO_GRPC),
    ("Expected SETTINGS frame", _NO_GRPC),
    (
        "HTTP proxy returned",
        "the proxy that grpc_proxy, https_proxy or http_proxy names refused to connect; name the server in no_proxy to "
        "go round it",
    ),
    ("Socket closed", _HUNG_UP),
    ("Connection reset by peer", _HUNG_UP),
)


def _with_remedy(message: str, tls: Tls | None) -> str:
    """The sentence on a server that cannot be reached, with a remedy in the place of the library's words."""
    for words, remedy in _REMEDIES:
        if tls is not None and remedy == _HUNG_UP:
            remedy = _HUNG_UP_ON_TLS if tls.client_certificate is None else _HUNG_UP_ON_A_CERTIFICATE
        if words in message:
            return f"{message.split(': ')[0]}: {remedy}"
    if tls is not None and "Connection refused" in message:  # gRPC tells of one address only
        message += " (where the name has several addresses, one of them says so, and another may have the server, with "
        message += "a certificate for which no authority known here vouches: --ca-cert)"
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
        request = requests.generate_request(prompt, options)
        return self._call(path_of(INFERENCE, "Generate"), request, answers.generation, options)

    def stream(self, prompt: str | None, options: GenerateOptions) -> Call[Chunk]:
        request = requests.generate_request(prompt, options)
        read = answers.ChunkReader(request.request_id).read
        return self._call(path_of(INFERENCE, "GenerateStream"), request, read, options)

    def embed(
        self,
        inputs: PoolingInputs,
        pooling: PoolingKind | None,
        dimensions: int,
        normalize: bool,
        options: PoolingOptions,
    ) -> Call[Embeddings]:
        request = requests.embed_request(inputs, pooling, dimensions, normalize, options)
        return self._call(path_of(POOLING, "Embed"), request, answers.embeddings, options)

    def classify(self, inputs: PoolingInputs, logits: bool, options: PoolingOptions) -> Call[Classifications]:
        request = requests.classify_request(inputs, logits, options)
        return self._call(path_of(POOLING, "Classify"), request, answers.classifications, options)

    def score(
        self,
        query: str | Sequence[int],
        documents: PoolingInputs,
        method: ScoreMethod | None,
        pooling: PoolingKind | None,
        how: Mapping[str, Any],
        options: PoolingOptions,
    ) -> Call[Scores]:
        """The call of `score`. `how`: other fields of the request."""
        request = requests.score_request(query, documents, method, pooling, how, options)
        return self._call(path_of(POOLING, "Score"), request, answers.scores, options)

    def tokenize(
        self,
        text: str | None,
        messages: Sequence[Message] | None,
        omit_generation_prompt: bool,
        omit_special_tokens: bool,
        offsets: bool,
        options: ChatOptions,
    ) -> Call[Tokenization]:
        request = requests.tokenize_request(
            text, messages, omit_generation_prompt, omit_special_tokens, offsets=offsets, options=options
        )
        return self._call(path_of(INFERENCE, "Tokenize"), request, answers.tokenization, options)

    def detokenize(self, token_ids: Sequence[int], omit_special_tokens: bool, options: CallOptions) -> Call[str]:
        request = requests.detokenize_request(token_ids, omit_special_tokens)
        return self._plain_call(path_of(INFERENCE, "Detokenize"), request, answers.detokenized, options)

    def tokenizer_info(self, options: CallOptions) -> Call[TokenizerInfo]:
        request = inference_pb2.GetTokenizerInfoRequest()
        return self._plain_call(path_of(INFERENCE, "GetTokenizerInfo"), request, answers.tokenizer_info, options)

    def info(self, options: CallOptions) -> Call[ServerInfo]:
        return self._plain_call(
            path_of(INFERENCE, "GetInfo"), inference_pb2.GetInfoRequest(), answers.server_info, options
        )

    def status(self, adapter_prefix: str, max_adapters: int, options: CallOptions) -> Call[RouterStatus]:
        request = requests.status_request(adapter_prefix, max_adapters)
        return self._plain_call(path_of(STATUS, "GetStatus"), request, answers.router_status, options)

    def load(self, adapter_id: str, how: Mapping[str, object], options: CallOptions) -> Call[tuple[Adapter, ...]]:
        """The call that loads an adapter. `how`: other fields of the request, and `hub_token`."""
        request = requests.load_request(adapter_id, how)
        call = self._plain_call(path_of(ADAPTERS, "LoadAdapter"), request, answers.adapter_rows, options)
        return replace(call, is_idempotent=False)

    def unload(self, adapter_id: str, if_unused: bool, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = requests.unload_request(adapter_id, if_unused)
        call = self._plain_call(path_of(ADAPTERS, "UnloadAdapter"), request, answers.adapter_rows, options)
        return replace(call, is_idempotent=False)

    def get(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = requests.naming(adapter_pb2.GetAdapterRequest(), adapter_id)
        return self._plain_call(path_of(ADAPTERS, "GetAdapter"), request, answers.adapter_rows, options)

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
        request = requests.list_request(
            include_unloaded, prefix, state, MAX_PAGE_SIZE if page_size is None else page_size
        )
        timeout_s = checked_timeout(requests.call_options(options).get("timeout_s", self.settings.timeout_s))
        call = partial(self._call, path_of(ADAPTERS, "ListAdapters"))
        return Pages(call, request, timeout_s, is_whole=page_size is None)

    def _plain_call(
        self, path: str, request: ProtobufMessage, read: Callable[[bytes], _Answer], options: CallOptions
    ) -> Call[_Answer]:
        """A call whose one option is its timeout."""
        return self._call(path, request, read, requests.call_options(options))

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
        return answers.adapters(page.adapters)
