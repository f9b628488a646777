"""Typed errors that a user can cause, in one tree of classes.

Each class has a gRPC code and a `google.rpc.ErrorInfo` reason; the message says what to do. Errors are plain data that
the engine's process can pickle for the gRPC process, where `status.py` maps them to the wire. Imports only the standard
library, because the engine runs without gRPC.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, ClassVar

log = logging.getLogger(__name__)


class Code(IntEnum):
    """gRPC status codes, by number (https://grpc.io/docs/guides/status-codes/)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class LoraplexError(Exception):
    """Base of the tree. `field` names the request field at fault, `resource` the thing that is missing or full,
    `retry_after_s` when another try makes sense, `metadata` further strings for ErrorInfo."""

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1  # of a command that ends with it

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        resource: str | None = None,
        retry_after_s: float | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.resource = resource
        self.retry_after_s = retry_after_s
        self.metadata: dict[str, str] = dict(metadata or {})

    @property
    def retry_after(self) -> float | None:
        """Seconds; the same as `retry_after_s`."""
        return self.retry_after_s

    @property
    def request_id(self) -> str | None:
        """The request that failed, where it is known; the server's log has the same id."""
        return self.metadata.get("request_id")

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            "field": self.field,
            "resource": self.resource,
            "retry_after_s": self.retry_after_s,
            "metadata": self.metadata,
        }
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[LoraplexError], message: str, state: dict[str, Any]) -> LoraplexError:
    return cls(message, **state)


# --- the request is wrong -------------------------------------------------------------------------------------------


class InvalidArgument(LoraplexError):
    """A field of the request has a value that is never valid."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_ARGUMENT"
    exit_code = 2  # as for any invalid command line


class InvalidAdapterId(InvalidArgument):
    """An adapter id that is not a plain name. Ids are never paths or addresses."""

    reason = "INVALID_ADAPTER_ID"


class ContextLengthExceeded(InvalidArgument):
    """The prompt leaves no room in the model's context."""

    reason = "CONTEXT_LENGTH_EXCEEDED"


class Unimplemented(LoraplexError):
    """A field of the wire that this server does not support yet. Such fields are never ignored silently."""

    code = Code.UNIMPLEMENTED
    reason = "UNIMPLEMENTED"


class Unauthenticated(LoraplexError):
    """A missing or unknown credential."""

    code = Code.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(LoraplexError):
    """A known credential without this permission."""

    code = Code.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


# --- the adapter is missing or unusable -----------------------------------------------------------------------------


class AdapterNotFound(LoraplexError):
    """No adapter of this name for this tenant. The answer is the same for another tenant's adapter."""

    code = Code.NOT_FOUND
    reason = "ADAPTER_NOT_FOUND"


def adapter_not_found(adapter_id: str) -> AdapterNotFound:
    """One message for an unknown adapter and for another tenant's, so that it does not tell which."""
    return AdapterNotFound(
        f"there is no adapter {adapter_id!a} on this server; `loraplex adapters list` shows those that there are",
        field="adapter_id",
        resource=adapter_id,
    )


class AdapterOutsideRoot(AdapterNotFound):
    """An adapter whose folder or files are links that lead out of the server's directory of adapters."""

    reason = "ADAPTER_OUTSIDE_ROOT"


class FailedPrecondition(LoraplexError):
    """The state of the server or client does not allow this request; another try fails too."""

    code = Code.FAILED_PRECONDITION
    reason = "FAILED_PRECONDITION"


class NoChatTemplate(FailedPrecondition):
    """The base model's tokenizer has no chat template."""

    reason = "NO_CHAT_TEMPLATE"


class UnsupportedModel(FailedPrecondition):
    """A base model that cannot be served correctly; raised while loading it."""

    reason = "UNSUPPORTED_MODEL"


class AdapterInvalid(FailedPrecondition):
    """Files that are not a well-formed adapter: malformed safetensors, missing or unusable configuration."""

    reason = "ADAPTER_INVALID"


class AdapterUnsupported(AdapterInvalid):
    """A well-formed adapter of a kind that is not served (yet); the message names the kind."""

    reason = "ADAPTER_UNSUPPORTED"


class UnsafeFormat(AdapterInvalid):
    """Weights in a pickle, which could run code."""

    reason = "UNSAFE_FORMAT"


class RankLimit(AdapterInvalid):
    """A rank above the server's --max-lora-rank."""

    reason = "RANK_LIMIT"


class ShapeMismatch(AdapterInvalid):
    """A tensor whose shape does not fit the base model's module."""

    reason = "SHAPE_MISMATCH"


class BaseMismatch(AdapterInvalid):
    """An adapter made for another base model: modules that this one does not have."""

    reason = "BASE_MISMATCH"


class NonFinite(AdapterInvalid):
    """NaN or Inf among the weights."""

    reason = "NON_FINITE"


# --- the server cannot, at the moment -------------------------------------------------------------------------------


class ResourceExhausted(LoraplexError):
    """Something is full; `retry_after_s` says when to try again."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "RESOURCE_EXHAUSTED"


class QueueFull(ResourceExhausted):
    """More requests wait than the server admits."""

    reason = "QUEUE_FULL"


class Overloaded(ResourceExhausted):
    """The request would wait longer than its deadline, or the server's bound, allows."""

    reason = "OVERLOADED"


class AdapterMemoryFull(ResourceExhausted):
    """The adapter does not fit the byte budget even after all possible evictions."""

    reason = "ADAPTER_MEMORY_FULL"


class AdapterLoadsBusy(ResourceExhausted):
    """Too many adapter loads are waiting already."""

    reason = "ADAPTER_LOADS_BUSY"


class DiskFull(ResourceExhausted):
    """No room in the adapter store."""

    reason = "DISK_FULL"


class OutOfMemory(ResourceExhausted):
    """This request's step did not fit the memory; other requests continue."""

    reason = "OUT_OF_MEMORY"


class ClientTooSlow(ResourceExhausted):
    """The client reads its stream too slowly: the server's buffer is full."""

    reason = "CLIENT_TOO_SLOW"


class MessageTooLarge(ResourceExhausted):
    """A request, an answer or the metadata of a call (`field` says which) is over a limit of size. Waiting does not
    help: never retry it as it is."""

    reason = "MESSAGE_TOO_LARGE"
    exit_code = 2


class ListingTooLarge(ResourceExhausted):
    """A listing without pages that does not fit a message; ask for pages. Another try fails too."""

    reason = "LISTING_TOO_LARGE"
    exit_code = 2


class Unavailable(LoraplexError):
    """A temporary state; another try, perhaps on another server, can succeed."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"


class Draining(Unavailable):
    """The server is shutting down and takes no new work."""

    reason = "DRAINING"


class NoWorker(Unavailable):
    """The router knows no healthy worker."""

    reason = "NO_HEALTHY_WORKER"


class WorkerLost(Unavailable):
    """The worker went away in the middle of the stream."""

    reason = "WORKER_LOST"


class EngineLost(Unavailable):
    """The worker's engine process ended."""

    reason = "ENGINE_LOST"


class ServerUnreachable(Unavailable):
    """The connection to the server failed; the request was never sent."""

    reason = "SERVER_UNREACHABLE"


class ConnectionLost(Unavailable):
    """The connection to the server ended before the answer was complete; the server may have done the work."""

    reason = "CONNECTION_LOST"


class SourceUnavailable(Unavailable):
    """The adapter's source (Hub, directory) does not answer."""

    reason = "SOURCE_UNAVAILABLE"


class DeadlineExceeded(LoraplexError):
    """The request's deadline passed, or had passed on arrival."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE_EXCEEDED"


class Cancelled(LoraplexError):
    """The client went away or cancelled."""

    code = Code.CANCELLED
    reason = "CANCELLED"


class Internal(LoraplexError):
    """A bug. Carries an opaque id that the server's log explains; never a traceback or a path."""

    code = Code.INTERNAL
    reason = "INTERNAL"


def unexpected(error: BaseException, doing: str) -> Internal:
    """Logs an unexpected exception under an opaque id. Returns an Internal that contains only the id."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s while %s", error_id, doing, exc_info=error)
    return Internal(f"internal error {error_id}; the server's log says more", metadata={"error_id": error_id})


def _leaves(cls: type[LoraplexError]) -> list[type[LoraplexError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


def by_reason() -> dict[str, type[LoraplexError]]:
    """Classes by reason, to rebuild a typed error from the wire. Reasons are unique (a test checks it)."""
    return {cls.reason: cls for cls in _leaves(LoraplexError) if cls is not LoraplexError}
