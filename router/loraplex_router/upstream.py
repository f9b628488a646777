"""Connections to workers, and the meaning of their failures."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from loraplex_contracts.errors import (
    AdapterLoadsBusy,
    AdapterMemoryFull,
    AdapterVersionNotFound,
    Cancelled,
    Code,
    ConnectionLost,
    DeadlineExceeded,
    DiskFull,
    EngineLost,
    Internal,
    InvalidArgument,
    LoraplexError,
    NoWorker,
    Overloaded,
    QueueFull,
    ServerUnreachable,
    Unimplemented,
    WorkerLost,
)
from loraplex_proto.status import DETAILS_KEY, from_rpc_error
from loraplex_router.config import ServerOptions
from loraplex_router.membership import Member
from loraplex_runtime.auth import ADAPTER_BYTES_KEY, AUTHORIZATION_KEY, TENANT_KEY, Identity
from loraplex_runtime.listener import KEEPALIVE_S, KEEPALIVE_TIMEOUT_S
from loraplex_runtime.reload import Followed, Reloader, authorities, client_pair
from loraplex_runtime.tracing import CONTEXT_KEYS

log = logging.getLogger(__name__)

Metadata = tuple[tuple[str, str | bytes], ...]


# Metadata of clients that workers get. A client's own credential and its own idea of a tenant stay here.
FORWARDED_KEYS: Final = CONTEXT_KEYS

_NO_METADATA: Final = grpc.aio.Metadata()

# Unread bytes of each answer that a worker may have sent: thousands of tokens, and 64 MB/s at a millisecond's distance.
LOOKAHEAD_BYTES: Final = 64 << 10


# What another worker may have: room, a version that this one never loaded, or a field or method of a newer release.
_OF_ONE_WORKER: Final = (
    Overloaded,
    QueueFull,
    AdapterLoadsBusy,
    AdapterMemoryFull,
    DiskFull,
    AdapterVersionNotFound,
    Unimplemented,
)


# gRPC's words on a peer that takes a connection and closes it at once.
_HUNG_UP: Final = ("Socket closed", "Connection reset by peer")


class FailureKind(enum.Enum):
    """The meaning of a failed call for the worker."""

    ANSWERED = "answered"  # the worker's own verdict on this request; another worker would say the same
    DECLINED = "declined"  # a live worker that cannot take it now; another one may
    UNREACHED = "unreached"  # never sent
    LOST = "lost"  # the worker, or its engine, went away while it had the request


# After these another worker may have the request.
RETRY_CAUSES: Final = tuple(kind for kind in FailureKind if kind is not FailureKind.ANSWERED)


class UpstreamFailure(Exception):
    """A call to a worker that did not end well, with everything that the client is to see of it."""

    def __init__(self, worker_id: str, error: grpc.aio.AioRpcError) -> None:
        self.worker_id = worker_id
        self.code = error.code()
        self.details = error.details() or ""
        self.trailing_metadata = passed_on(error.trailing_metadata())
        # Our workers' errors carry google.rpc.Status; what does not comes from the transport.
        is_typed = any(key == DETAILS_KEY for key, _ in self.trailing_metadata)
        self._error = from_rpc_error(error)
        self.typed = self._error if is_typed else None
        self.kind = self._kind()
        super().__init__(f"{worker_id}: {self.code.name}: {self.details}")

    def _kind(self) -> FailureKind:
        if self.typed is not None:
            if isinstance(self.typed, (EngineLost, WorkerLost)):
                return FailureKind.LOST
            is_declined = self.typed.code is Code.UNAVAILABLE or isinstance(self.typed, _OF_ONE_WORKER)
            return FailureKind.DECLINED if is_declined else FailureKind.ANSWERED
        match self._error:
            case ServerUnreachable():
                return FailureKind.UNREACHED
            case ConnectionLost() | Cancelled():  # what this side cancels never comes here
                return FailureKind.LOST
            case Unimplemented():
                return FailureKind.DECLINED
            case _:
                return FailureKind.ANSWERED

    @property
    def is_unimplemented(self) -> bool:
        """True where the worker lacks what the request needs, and will as long as it runs."""
        return self.code is grpc.StatusCode.UNIMPLEMENTED

    @property
    def weight(self) -> int:
        """Of several workers' failures the client is told the one with the most: a verdict on the request weighs more
        than a worker that is missing, and that more than one that lacks what the request needs."""
        if self.is_unimplemented:
            return 0
        is_missing = self.kind in (FailureKind.LOST, FailureKind.UNREACHED)
        return 1 if is_missing or self.code is grpc.StatusCode.UNAVAILABLE else 2

    @property
    def may_retry(self) -> bool:
        """True if another worker may have this request, provided that the client has seen nothing of it."""
        return self.kind in RETRY_CAUSES

    def for_client(self, num_tokens_sent: int | None = 0, num_messages_sent: int = 0) -> LoraplexError | None:
        """The error to answer with in place of the transport's; None: pass on what the worker said.

        `num_tokens_sent` is None where the answer does not show its tokens.
        """
        if self.typed is not None:
            return None
        shown = f"{num_messages_sent} messages" if num_tokens_sent is None else f"{num_tokens_sent} tokens"
        when = f"after {shown} of the answer" if num_messages_sent else "before the answer"
        metadata = {"messages_sent": str(num_messages_sent)}
        if num_tokens_sent is not None:
            metadata["tokens_sent"] = str(num_tokens_sent)
        if self.kind is FailureKind.UNREACHED:
            return NoWorker("no worker could be reached; try again", retry_after_s=1.0)
        if self.kind is FailureKind.LOST:
            return WorkerLost(
                f"the worker went away {when}; send the request again",
                retry_after_s=0.0,
                metadata=metadata,
            )
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(f"the deadline passed {when}", metadata=metadata)
        if isinstance(self._error, Internal):
            # Not an error that a worker meant to send: it may quote secrets.
            return Internal(self._logged())
        kept = {key: value for key, value in self._error.metadata.items() if not key.startswith("grpc_")}
        message = self._error.message.replace("the server", "the worker")
        return type(self._error)(message, field=self._error.field, metadata=kept)

    def _logged(self) -> str:
        error_id = uuid.uuid4().hex[:12]
        log.error("internal error %s: %s", error_id, self)
        return f"internal error {error_id}; the router's log says more"


def passed_on(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """A worker's metadata without the entries that belong to that hop alone."""
    return tuple((k, v) for k, v in metadata or () if k == DETAILS_KEY or not k.startswith(("grpc-", ":")))


@dataclass(frozen=True, slots=True)
class WorkerCredentials:
    """The token that this router shows its workers, the authorities that it trusts, and its key and certificate."""

    token: str = ""
    ca: bytes | None = None
    pair: tuple[bytes, bytes] | None = field(default=None, repr=False)
    flags: str = "--worker"  # what the flags of these begin with

    def why_hung_up(self) -> str:
        """The likely reason why a worker hangs up at once, and the flag for it."""
        if self.ca is None:
            return f"it may want TLS: {self.flags}-ca"
        asks = "ask for a certificate" if self.pair is None else "refuse the certificate shown"
        return f"it may {asks}: {self.flags}-client-cert"

    def metadata(self, caller: Identity, client: Iterable[tuple[str, str | bytes]] = ()) -> Metadata:
        """Metadata of a call on behalf of `caller`, with the client's own that are forwarded."""
        kept = tuple((key, value) for key, value in client if key in FORWARDED_KEYS)
        if not self.token:
            return kept  # a worker that asks for no credential believes no tenant either
        max_bytes = caller.limits.max_resident_adapter_bytes
        limits = () if max_bytes is None else ((ADAPTER_BYTES_KEY, str(max_bytes)),)
        return (*kept, (AUTHORIZATION_KEY, f"Bearer {self.token}"), (TENANT_KEY, caller.tenant), *limits)


def follow_worker_credentials(
    files: Reloader,
    token: str | Path | None,
    ca_file: Path | None,
    cert: Path | None = None,
    key: Path | None = None,
    flags: str = "--worker",
) -> Callable[[], WorkerCredentials]:
    """The files' content at any time; a token may be given as it is. `flags`: what their flags begin with. Raises
    InvalidArgument where files cannot be used."""
    token_flag, ca_flag = f"{flags}-token-file", f"{flags}-ca"
    pair_flags = f"{flags}-client-cert", f"{flags}-client-key"
    read: Followed[str] | None = None
    ca: Followed[bytes] | None = None
    pair: Followed[tuple[bytes, bytes]] | None = None
    if isinstance(token, Path):
        read = files.follow([(token, token_flag)], lambda raw: _token(raw, token, token_flag))
    given = token if isinstance(token, str) else ""
    if ca_file is not None:
        ca = files.follow([(ca_file, ca_flag)], authorities(ca_file, ca_flag))
    if cert is not None and key is not None:
        pair = files.follow(list(zip((cert, key), pair_flags, strict=True)), client_pair(cert, key, pair_flags))
    return lambda: WorkerCredentials(
        read.value if read else given, ca.value if ca else None, pair.value if pair else None, flags
    )


def _token(raw: bytes, path: Path, flag: str) -> str:
    token = raw.decode("ascii", "replace").strip()
    if not token:
        raise InvalidArgument(f"{flag} {path} is empty", field=flag)
    if not token.isprintable() or not token.isascii():  # gRPC sends nothing else as metadata
        raise InvalidArgument(f"{flag} {path} must hold one line of plain ASCII", field=flag)
    return token


class Upstream:
    """The connection to one worker. Requests and answers are bytes, except where the router itself reads them."""

    def __init__(self, member: Member, options: ServerOptions, credentials: Callable[[], WorkerCredentials]) -> None:
        """`credentials` returns those that are in force now."""
        self.worker_id = member.worker_id
        self._address = member.address
        self._options = options
        self._credentials = credentials
        self._shown = credentials()
        self._channel = self._connect()
        # When the worker last sent anything at all, on any call.
        self.heard_s = time.monotonic()
        self._excused_s = 0.0
        self._under_way: set[Any] = set()

    def has_spoken(self) -> None:
        """Notes that the worker has sent something, on whatever call."""
        self.heard_s, self._excused_s = time.monotonic(), 0.0

    def excuse(self, pause_s: float) -> None:
        """Notes a pause of this process itself, in which it heard no worker."""
        self._excused_s += pause_s

    @property
    def silent_s(self) -> float:
        """Seconds since the worker last sent something, pauses of this process left out."""
        return time.monotonic() - self.heard_s - self._excused_s

    @property
    def credentials(self) -> WorkerCredentials:
        return self._credentials()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel with the authorities and the certificate of now: a new one after they have changed. Running calls
        keep theirs, which gRPC closes with the last of them."""
        shown, self._shown = self._shown, self._credentials()
        if (shown.ca, shown.pair) != (self._shown.ca, self._shown.pair):
            self._channel = self._connect()
        return self._channel

    def _connect(self) -> grpc.aio.Channel:
        arguments = _channel_options(self._options)
        ca, pair = self._shown.ca, self._shown.pair
        if ca is None:
            return grpc.aio.insecure_channel(self._address, options=arguments)
        tls = grpc.ssl_channel_credentials(ca, *(pair or ()))
        return grpc.aio.secure_channel(self._address, tls, options=arguments)

    def stream(self, path: str, raw: bytes, timeout_s: float | None, metadata: Metadata) -> Any:
        """The call of `path`, "/package.Service/Method", whose answer is a stream of bytes; see `failures_of`."""
        method: Any = self.channel.unary_stream(path)
        return method(raw, timeout=timeout_s, metadata=metadata)

    async def ask(self, path: str, raw: bytes, timeout_s: float | None, metadata: Metadata) -> bytes:
        """One unary call. Raises UpstreamFailure."""
        method: Any = self.channel.unary_unary(path)
        call = method(raw, timeout=timeout_s, metadata=metadata)
        with self.failures_of(call):
            answer = await call
            self.has_spoken()
            return answer

    @contextlib.contextmanager
    def failures_of(self, call: Any) -> Generator[None]:
        """Turns the errors of `call`, which is awaited inside, into UpstreamFailure; `give_up` and `close` end it."""
        self._under_way.add(call)
        try:
            yield
        except grpc.aio.AioRpcError as error:
            failure = UpstreamFailure(self.worker_id, error)
            if failure.typed is not None:
                self.has_spoken()
            raise failure from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            reason = "the connection was closed" if call in self._under_way else "it went silent"
            error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, _NO_METADATA, _NO_METADATA, reason)
            raise UpstreamFailure(self.worker_id, error) from None
        finally:
            self._under_way.discard(call)

    def give_up(self) -> int:
        """Ends every call under way as lost; returns how many there were. For a worker that gives no sign of life."""
        given_up, self._under_way = self._under_way, set()
        for call in given_up:
            call.cancel()
        return len(given_up)

    def reason_of(self, failure: UpstreamFailure) -> str:
        """The sentence of a log on why a call to this worker did not end well."""
        hung_up = failure.kind is FailureKind.UNREACHED and any(words in failure.details for words in _HUNG_UP)
        hint = f" ({self._shown.why_hung_up()})" if hung_up else ""
        return f"{failure.code.name}: {failure.details}{hint}"

    async def close(self, grace_s: float | None = None) -> None:
        """Closes the connection; calls under way get `grace_s` to end."""
        await self._channel.close(grace_s)


def _channel_options(options: ServerOptions) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", options.max_answer_bytes),
        ("grpc.max_send_message_length", -1),  # the server side has bounded it already
        ("grpc.keepalive_time_ms", int(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # Only the router knows whether a request may be sent twice.
        ("grpc.enable_retries", 0),
        # A worker that comes back is wanted at once.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # What a worker may send ahead of a client that does not read. gRPC would measure the connection and let every
        # stream send megabytes, which the router then holds; a message that is larger is let through as it is read.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
        # A connection of this router's own, whatever else this process connects to.
        ("grpc.use_local_subchannel_pool", 1),
        # Workers are reached directly: http_proxy and its like are for what is fetched from outside.
        ("grpc.enable_http_proxy", 0),
    ]
