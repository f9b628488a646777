"""Typed errors that a user can cause, in one tree of classes.

Each class has a gRPC code and a `google.rpc.ErrorInfo` reason; the message says what to do. Errors are plain data that
the engine's process can pickle for the gRPC process, where `status.py` maps them to the wire. Imports only the standard
library, because the engine runs without gRPC.
"""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, Final

log = logging.getLogger(__name__)

# What the texts of torch's and Triton's errors of a device begin with.
_DEVICE_ERRORS: Final = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]")


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


_CLASSES: dict[str, type[LoraplexError]] = {}  # by reason


class LoraplexError(Exception):
    """Base of the tree. `field` names the request field at fault, `resource` the thing that is missing or full,
    `retry_after_s` when another try makes sense, `metadata` further strings for ErrorInfo."""

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    exit_code: ClassVar[int] = 1  # of a command that ends with it; 2 as for any invalid command line

    def __init_subclass__(cls, *, reason: str, code: Code | None = None, exit_code: int | None = None) -> None:
        cls.reason = reason
        cls.code = cls.code if code is None else code
        cls.exit_code = cls.exit_code if exit_code is None else exit_code
        _CLASSES[reason] = cls

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
        names = ("field", "resource", "retry_after_s", "metadata")
        return partial(type(self), **{name: getattr(self, name) for name in names}), (self.message,)


# --- the request is wrong -------------------------------------------------------------------------------------------


class InvalidArgument(LoraplexError, code=Code.INVALID_ARGUMENT, reason="INVALID_ARGUMENT", exit_code=2):
    """A field of the request has a value that is never valid."""


class InvalidAdapterId(InvalidArgument, reason="INVALID_ADAPTER_ID"):
    """An adapter id that is not a plain name. Ids are never paths or addresses."""


class ContextLengthExceeded(InvalidArgument, reason="CONTEXT_LENGTH_EXCEEDED"):
    """The prompt leaves no room in the model's context."""


class Unimplemented(LoraplexError, code=Code.UNIMPLEMENTED, reason="UNIMPLEMENTED"):
    """A field of the wire that this server does not support yet. Such fields are never ignored silently."""


class Unauthenticated(LoraplexError, code=Code.UNAUTHENTICATED, reason="UNAUTHENTICATED"):
    """A missing or unknown credential."""


class PermissionDenied(LoraplexError, code=Code.PERMISSION_DENIED, reason="PERMISSION_DENIED"):
    """A known credential without this permission."""


# --- the adapter is missing or unusable -----------------------------------------------------------------------------


class AdapterNotFound(LoraplexError, code=Code.NOT_FOUND, reason="ADAPTER_NOT_FOUND"):
    """No adapter of this name for this tenant. The answer is the same for another tenant's adapter."""


NEAR_KEY: Final = "near_names"  # in the metadata of AdapterNotFound


def adapter_not_found(adapter_id: str, near: Sequence[str] = ()) -> AdapterNotFound:
    """One message for an unknown adapter and for another tenant's, so that it does not tell which. `near` are names
    to suggest."""
    question = f"did you mean {' or '.join(map(ascii, near))}? " if near else ""
    return AdapterNotFound(
        f"there is no adapter {adapter_id!a} on this server; {question}`loraplex adapters list` shows those that exist",
        field="adapter_id",
        resource=adapter_id,
        metadata={NEAR_KEY: ",".join(near)} if near else None,
    )


def no_such_folder(source: str, adapter_id: str) -> AdapterNotFound:
    """One message for a folder that is not there and for another tenant's."""
    return AdapterNotFound(
        f"there is no folder {source!a} in the server's directory of adapters", field="source", resource=adapter_id
    )


class AdapterOutsideRoot(AdapterNotFound, reason="ADAPTER_OUTSIDE_ROOT"):
    """An adapter whose folder or files are links that lead out of the server's directory of adapters."""


class AdapterVersionNotFound(AdapterNotFound, reason="ADAPTER_VERSION_NOT_FOUND"):
    """A version of an adapter, asked for by digest, that this server does not have any more, or never had."""


def adapter_version_not_found(adapter_id: str) -> AdapterVersionNotFound:
    return AdapterVersionNotFound(
        f"this server does not have the version {adapter_id!a}: it was never loaded here, or has left memory and store",
        field="adapter_id",
        resource=adapter_id,
    )


class FailedPrecondition(LoraplexError, code=Code.FAILED_PRECONDITION, reason="FAILED_PRECONDITION"):
    """The state of the server or client does not allow this request; another try fails too."""


class NoChatTemplate(FailedPrecondition, reason="NO_CHAT_TEMPLATE"):
    """The base model's tokenizer has no chat template."""


class AdapterNotMixed(FailedPrecondition, reason="ADAPTER_NOT_MIXED"):
    """An adapter that cannot be in a mixture, or not in this one; the message names it and says why."""


class NoClassifier(FailedPrecondition, reason="NO_CLASSIFIER"):
    """The adapter, or the base model, has no classifier."""


class ClassifiesOnly(FailedPrecondition, reason="CLASSIFIES_ONLY"):
    """The adapter was trained to classify, and is asked for a text."""


class UnsupportedModel(FailedPrecondition, reason="UNSUPPORTED_MODEL"):
    """A base model that cannot be served correctly; raised while loading it."""


class DigestMismatch(FailedPrecondition, reason="DIGEST_MISMATCH"):
    """A load found another content than the caller expects; the name stays as it was."""


class AdapterInUse(FailedPrecondition, reason="ADAPTER_IN_USE"):
    """An adapter that was to be unloaded only if no request uses it."""


def adapter_in_use(adapter_id: str, num_requests: int) -> AdapterInUse:
    return AdapterInUse(
        f"adapter {adapter_id!a} is in use (requests: {num_requests}); unload it later, or without `if_unused` to let "
        "them end",
        resource=adapter_id,
    )


class AdapterInvalid(FailedPrecondition, reason="ADAPTER_INVALID"):
    """Files that are not a well-formed adapter: malformed safetensors, missing or unusable configuration."""


class AdapterUnsupported(AdapterInvalid, reason="ADAPTER_UNSUPPORTED"):
    """A well-formed adapter of a kind that is not served (yet); the message names the kind."""


class UnsafeFormat(AdapterInvalid, reason="UNSAFE_FORMAT"):
    """Weights in a pickle, which could run code."""


class RankLimit(AdapterInvalid, reason="RANK_LIMIT"):
    """A rank above the server's --max-lora-rank."""


class ShapeMismatch(AdapterInvalid, reason="SHAPE_MISMATCH"):
    """A tensor whose shape does not fit the base model's module."""


class BaseMismatch(AdapterInvalid, reason="BASE_MISMATCH"):
    """An adapter made for another base model: modules that this one does not have."""


class NonFinite(AdapterInvalid, reason="NON_FINITE"):
    """NaN or Inf among the weights."""


# --- the server cannot, at the moment -------------------------------------------------------------------------------


class ResourceExhausted(LoraplexError, code=Code.RESOURCE_EXHAUSTED, reason="RESOURCE_EXHAUSTED"):
    """Something is full; `retry_after_s` says when to try again."""


class QueueFull(ResourceExhausted, reason="QUEUE_FULL"):
    """More requests wait than the server admits."""


class Overloaded(ResourceExhausted, reason="OVERLOADED"):
    """The request would wait longer than its deadline, or the server's bound, allows."""


CONCURRENT_REQUESTS = "concurrent_requests"
TOKENS_PER_MINUTE = "tokens_per_minute"
RESIDENT_ADAPTER_BYTES = "resident_adapter_bytes"
QUOTAS = frozenset({CONCURRENT_REQUESTS, TOKENS_PER_MINUTE, RESIDENT_ADAPTER_BYTES})


class QuotaExceeded(ResourceExhausted, reason="QUOTA_EXCEEDED"):
    """The tenant has as much as it may have of what `quota` in the metadata names, one of QUOTAS. Without
    `retry_after_s` waiting does not help."""


def quota_exceeded(quota: str, message: str, retry_after_s: float | None = None) -> QuotaExceeded:
    return QuotaExceeded(message, resource=quota, retry_after_s=retry_after_s, metadata={"quota": quota})


class AdapterMemoryFull(ResourceExhausted, reason="ADAPTER_MEMORY_FULL"):
    """The adapter does not fit the byte budget even after all possible evictions."""


class AdapterLoadsBusy(ResourceExhausted, reason="ADAPTER_LOADS_BUSY"):
    """Too many adapter loads are waiting already."""


class DiskFull(ResourceExhausted, reason="DISK_FULL"):
    """No room in the adapter store."""


class OutOfMemory(ResourceExhausted, reason="OUT_OF_MEMORY"):
    """This request's step did not fit the memory; other requests continue."""


class ClientTooSlow(ResourceExhausted, reason="CLIENT_TOO_SLOW"):
    """The client reads its stream too slowly: the server's buffer is full."""


class RequestTimeout(InvalidArgument, reason="REQUEST_TIMEOUT"):
    """The body of an HTTP request did not arrive in time."""


class MessageTooLarge(ResourceExhausted, reason="MESSAGE_TOO_LARGE", exit_code=2):
    """A request, an answer or the metadata of a call (`field` says which) is over a limit of size. Waiting does not
    help: never retry it as it is."""


class ListingTooLarge(ResourceExhausted, reason="LISTING_TOO_LARGE", exit_code=2):
    """A listing without pages that does not fit a message; ask for pages. Another try fails too."""


class Unavailable(LoraplexError, code=Code.UNAVAILABLE, reason="UNAVAILABLE"):
    """A temporary state; another try, perhaps on another server, can succeed."""


class Draining(Unavailable, reason="DRAINING"):
    """The server is shutting down and takes no new work."""


def draining() -> Draining:
    """The error of requests to a worker that is about to end."""
    return Draining("this worker is shutting down; send the request to another one", retry_after_s=1.0)


class NoWorker(Unavailable, reason="NO_HEALTHY_WORKER"):
    """The router knows no healthy worker."""


class WorkerLost(Unavailable, reason="WORKER_LOST"):
    """The worker went away in the middle of the stream, or has missed a change of an adapter that it holds."""


class EngineLost(Unavailable, reason="ENGINE_LOST"):
    """The worker's engine process ended."""


class ServerUnreachable(Unavailable, reason="SERVER_UNREACHABLE"):
    """The connection to the server failed; the request was never sent."""


class ConnectionLost(Unavailable, reason="CONNECTION_LOST"):
    """The connection to the server ended before the answer was complete; the server may have done the work."""


class SourceUnavailable(Unavailable, reason="SOURCE_UNAVAILABLE"):
    """The adapter's source (Hub, directory) does not answer."""


class DeadlineExceeded(LoraplexError, code=Code.DEADLINE_EXCEEDED, reason="DEADLINE_EXCEEDED"):
    """The request's deadline passed, or had passed on arrival."""


class Cancelled(LoraplexError, code=Code.CANCELLED, reason="CANCELLED"):
    """The client went away or cancelled."""


class Internal(LoraplexError, code=Code.INTERNAL, reason="INTERNAL"):
    """A bug. Carries an opaque id that the server's log explains; never a traceback or a path."""


def unexpected(error: BaseException, doing: str) -> Internal:
    """Logs an unexpected exception under an opaque id. Returns an Internal that contains only the id."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s while %s", error_id, doing, exc_info=error)
    return Internal(f"internal error {error_id}; the server's log says more", metadata={"error_id": error_id})


def as_typed(error: BaseException, doing: str) -> LoraplexError:
    """`error` itself where it is one of ours. Anything else is a bug, and what `unexpected` makes of it."""
    return error if isinstance(error, LoraplexError) else unexpected(error, doing)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the host or the device had no memory for what was asked. Judged by name and text: torch is not imported
    here, and what its parts, Triton and the driver raise has no type of its own."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and "can't allocate memory" in text:  # of torch's allocator for CPUs
        return True
    is_of_device = type(error).__name__ == "AcceleratorError" or text.startswith(_DEVICE_ERRORS)
    # ALLOC_FAILED: a library could not allocate its handle.
    return is_of_device and any(part in text for part in ("out of memory", "ALLOC_FAILED"))


def is_disk_full(error: BaseException) -> bool:
    """True if there was no room on a disk, or none within the quota of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def without_frames(error: LoraplexError) -> LoraplexError:
    """The same error without the frames that it came through, which would keep what their variables hold."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class IllegalTransition(RuntimeError):
    """A step that a state machine's table does not have, which is a bug of the caller's. Nothing was changed."""


def by_reason() -> Mapping[str, type[LoraplexError]]:
    """Classes by reason, to rebuild a typed error from the wire. Reasons are unique (a test checks it)."""
    return _CLASSES
