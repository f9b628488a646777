"""Calls of the SDK: connection settings, headers, deadline, answer and error.

Both clients send these calls; they differ only in how they wait. Nothing here opens a connection by itself.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message as ProtobufMessage

import loraplex_proto
from loraplex import _messages
from loraplex._messages import AdapterPage, ChunkReader, call_options
from loraplex.types import (
    Adapter,
    AdapterState,
    CallOptions,
    Chunk,
    GenerateOptions,
    Generation,
    Message,
    ServerInfo,
    Tls,
    Tokenization,
)
from loraplex_contracts.errors import (
    Cancelled,
    ConnectionLost,
    DeadlineExceeded,
    InvalidArgument,
    LoraplexError,
    ServerUnreachable,
)
from loraplex_proto.status import from_rpc_error
from loraplex_proto.v1 import adapter_pb2, inference_pb2

_Answer = TypeVar("_Answer")

DEFAULT_PORT: Final = 50051
DEFAULT_TIMEOUT_S: Final = 120.0
MIN_TIMEOUT_S: Final = 0.001  # of a late page of a listing, which then ends with DeadlineExceeded
CLOCK_SLACK_S: Final = 0.05  # both sides end a call at its deadline, each by its own timer
MAX_PAGE_SIZE: Final = 1000  # the largest that servers give

_INFERENCE: Final = "/loraplex.v1.InferenceService/"
_ADAPTERS: Final = "/loraplex.v1.AdapterService/"
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", _checked_target(self.target))
        checked_timeout(self.timeout_s)
        given: Any = self  # a caller without a type checker gives anything
        if given.token is not None and not (isinstance(given.token, str) and _TOKEN.match(given.token)):
            raise InvalidArgument("the token must be printable ASCII without spaces", field="token")
        if given.tls is not None and not isinstance(given.tls, Tls):
            raise InvalidArgument(f"tls takes True, False or a loraplex.Tls, not {given.tls!a}", field="tls")

    def metadata(self, adapter_id: str) -> tuple[tuple[str, str], ...]:
        """Headers of a call. The adapter's name lets a proxy route without parsing the message."""
        pairs: list[tuple[str, str]] = []
        if adapter_id:
            pairs.append(("x-adapter-id", adapter_id))
        if self.token is not None:
            pairs.append(("authorization", f"Bearer {self.token}"))
        return tuple(pairs)

    def channel_options(self) -> list[tuple[str, int | str]]:
        options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
        if self.tls is not None and self.tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def channel(self, library: Any) -> Any:
        """A new channel of `library`, which is `grpc` or `grpc.aio`."""
        tls, options = self.tls, self.channel_options()
        if tls is None:
            return library.insecure_channel(self.target, options)
        credentials = grpc.ssl_channel_credentials(tls.root_certificates, tls.client_key, tls.client_certificate)
        return library.secure_channel(self.target, credentials, options)


def checked_timeout(timeout_s: float | None) -> float | None:
    """Seconds, or None for no deadline. Raises InvalidArgument."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    given: Any = timeout_s
    if not (isinstance(given, (int, float)) and given > 0):  # NaN too
        raise InvalidArgument(
            f"timeout_s must be above 0, or None for no deadline; it is {timeout_s!a}", field="timeout_s"
        )
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


@dataclass(frozen=True, slots=True)
class Call(Generic[_Answer]):
    """One call. `read` converts the answer; of a stream, each message."""

    path: str
    request: bytes
    read: Callable[[bytes], _Answer]
    metadata: tuple[tuple[str, str], ...]
    timeout_s: float | None
    target: str
    request_id: str | None = None
    allowed_s: float | None = None  # by the caller, for all calls of a listing
    started_s: float = field(default_factory=time.monotonic)

    def start(self, kind: Callable[[str], Any]) -> Any:
        """gRPC's own call. `kind` is the method `unary_unary` or `unary_stream` of a channel."""
        return kind(self.path)(self.request, timeout=self.timeout_s, metadata=self.metadata)

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
                message = (
                    f"{message.replace('the server', f'the server at {self.target}', 1)}; see that one runs there, and "
                    "that both sides use TLS or neither does"
                )
            case ConnectionLost() if self._is_overdue():
                # The server's timer fired first.
                return DeadlineExceeded(self._too_late(), metadata=metadata)
            case ConnectionLost():
                message = message.replace("the server", f"the server at {self.target}", 1)
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


class Calls:
    """Makes the calls to one server. Raises InvalidArgument, and TypeError for an unknown option."""

    def __init__(self, target: str, token: str | None, timeout_s: float | None, tls: bool | Tls) -> None:
        self.settings = Settings(target, token, timeout_s, Tls() if tls is True else tls or None)

    def generate(self, prompt: str | None, options: GenerateOptions) -> Call[Generation]:
        request = _messages.generate_request(prompt, options)
        return self._call(_INFERENCE + "Generate", request, _messages.generation, options)

    def stream(self, prompt: str | None, options: GenerateOptions) -> Call[Chunk]:
        request = _messages.generate_request(prompt, options)
        return self._call(_INFERENCE + "GenerateStream", request, ChunkReader(request.request_id).read, options)

    def tokenize(
        self,
        text: str | None,
        messages: Sequence[Message] | None,
        omit_generation_prompt: bool,
        omit_special_tokens: bool,
        options: CallOptions,
    ) -> Call[Tokenization]:
        request = _messages.tokenize_request(text, messages, omit_generation_prompt, omit_special_tokens)
        return self._call(_INFERENCE + "Tokenize", request, _messages.tokenization, call_options(options))

    def info(self, options: CallOptions) -> Call[ServerInfo]:
        request = inference_pb2.GetInfoRequest()
        return self._call(_INFERENCE + "GetInfo", request, _messages.server_info, call_options(options))

    def load(self, adapter_id: str, pin: bool, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _messages.load_request(adapter_id, pin)
        read = partial(_messages.adapters, adapter_pb2.LoadAdapterResponse)
        return self._call(_ADAPTERS + "LoadAdapter", request, read, call_options(options))

    def unload(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _messages.naming(adapter_pb2.UnloadAdapterRequest(), adapter_id)
        read = partial(_messages.adapters, adapter_pb2.UnloadAdapterResponse)
        return self._call(_ADAPTERS + "UnloadAdapter", request, read, call_options(options))

    def get(self, adapter_id: str, options: CallOptions) -> Call[tuple[Adapter, ...]]:
        request = _messages.naming(adapter_pb2.GetAdapterRequest(), adapter_id)
        read = partial(_messages.adapters, adapter_pb2.GetAdapterResponse)
        return self._call(_ADAPTERS + "GetAdapter", request, read, call_options(options))

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
        request = _messages.list_request(
            include_unloaded, prefix, state, MAX_PAGE_SIZE if page_size is None else page_size
        )
        timeout_s = checked_timeout(call_options(options).get("timeout_s", self.settings.timeout_s))
        return Pages(self.page, request, timeout_s, is_whole=page_size is None)

    def page(self, request: adapter_pb2.ListAdaptersRequest, timeout_s: float | None) -> Call[AdapterPage]:
        return self._call(_ADAPTERS + "ListAdapters", request, _messages.adapter_page, CallOptions(timeout_s=timeout_s))

    def _call(
        self,
        path: str,
        request: ProtobufMessage,
        read: Callable[[bytes], _Answer],
        options: CallOptions | GenerateOptions,
    ) -> Call[_Answer]:
        return Call(
            path=path,
            request=request.SerializeToString(),
            read=read,
            metadata=self.settings.metadata(getattr(request, "adapter_id", "")),
            timeout_s=checked_timeout(options.get("timeout_s", self.settings.timeout_s)),
            target=self.settings.target,
            request_id=getattr(request, "request_id", None),
        )


class Pages:
    """The calls of one listing. As long as there is a `next_call`, send it and `take` its answer."""

    def __init__(
        self,
        call: Callable[[adapter_pb2.ListAdaptersRequest, float | None], Call[AdapterPage]],
        request: adapter_pb2.ListAdaptersRequest,
        timeout_s: float | None,
        is_whole: bool,
    ) -> None:
        self._call = call
        self._request = request
        self._timeout_s = timeout_s
        self._until_s = time.monotonic() + timeout_s if is_whole and timeout_s is not None else None
        self._has_more = True

    def next_call(self) -> Call[AdapterPage] | None:
        if not self._has_more:
            return None
        timeout_s = self._timeout_s
        if self._until_s is not None:
            timeout_s = max(self._until_s - time.monotonic(), MIN_TIMEOUT_S)
        return replace(self._call(self._request, timeout_s), allowed_s=self._timeout_s)

    def take(self, page: AdapterPage) -> tuple[Adapter, ...]:
        self._request.page_token = page.next_page_token
        self._has_more = bool(page.next_page_token)
        return page.adapters
