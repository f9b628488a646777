"""Typed errors as `google.rpc.Status` with its standard details, and back.

Owns how an error travels (which detail carries which attribute, how long a message may get) and what becomes of an
exception that is not one of ours. Statuses of gRPC itself carry no details, so their words are all there is to tell
them apart by; words that are not known here leave a status as it is. Knows nothing of the calls that fail.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from typing import Any, Final, NoReturn, cast

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from loraplex_contracts import errors
from loraplex_contracts.errors import Code, LoraplexError

DOMAIN: Final = "loraplex.dev"
DETAILS_KEY: Final = "grpc-status-details-bin"

# A status travels in HTTP/2 trailers, which gRPC bounds at 8 KiB by default; a longer error would arrive as another.
MAX_MESSAGE_BYTES: Final = 1024
MAX_METADATA_BYTES: Final = 1024

# The part of a caller's wait that a hop leaves for its answer to arrive: so many seconds, and at most this share.
MARGIN_S: Final = 0.05
MARGIN_SHARE: Final = 0.05

# Errors for statuses that carry no reason of ours: a proxy's, the transport's own, another server's.
_BY_CODE: Final[dict[Code, type[LoraplexError]]] = {
    Code.CANCELLED: errors.Cancelled,
    Code.INVALID_ARGUMENT: errors.InvalidArgument,
    Code.OUT_OF_RANGE: errors.InvalidArgument,
    Code.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    Code.NOT_FOUND: errors.AdapterNotFound,  # nothing else can be missing here
    Code.PERMISSION_DENIED: errors.PermissionDenied,
    Code.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    Code.FAILED_PRECONDITION: errors.FailedPrecondition,
    Code.ABORTED: errors.Unavailable,
    Code.UNIMPLEMENTED: errors.Unimplemented,
    Code.UNAVAILABLE: errors.Unavailable,
    Code.UNAUTHENTICATED: errors.Unauthenticated,
}


# --- to the wire ----------------------------------------------------------------------------------------------------


def to_status(error: BaseException) -> status_pb2.Status:
    """The error as a `google.rpc.Status`: ErrorInfo always, the other details where the error has what they carry."""
    typed = errors.as_typed(error, "answering a call")
    message = _bounded(typed.message, MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=int(typed.code), message=message)
    for detail in _details(typed, message):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _details(error: LoraplexError, message: str) -> Iterable[Message]:
    metadata = dict(error.metadata)
    request_id = metadata.pop("request_id", "")
    yield error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=_bounded_metadata(metadata))
    if request_id:
        yield error_details_pb2.RequestInfo(request_id=_bounded(request_id, 256))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_bounded(error.field, 256))
        yield error_details_pb2.BadRequest(field_violations=[violation])
    if error.resource is not None:
        resource = _bounded(error.resource, 256)
        if isinstance(error, errors.ResourceExhausted):
            subject = error_details_pb2.QuotaFailure.Violation(subject=resource, description=message[:256])
            yield error_details_pb2.QuotaFailure(violations=[subject])
        else:
            kind = "adapter" if isinstance(error, (errors.AdapterNotFound, errors.AdapterInvalid)) else ""
            yield error_details_pb2.ResourceInfo(resource_type=kind, resource_name=resource)
    if error.retry_after_s is not None:
        info = error_details_pb2.RetryInfo()
        info.retry_delay.FromNanoseconds(round(max(error.retry_after_s, 0.0) * 1e9))
        yield info


def _bounded(text: str, max_bytes: int) -> str:
    """The text cut to `max_bytes` of UTF-8, in whole characters; those that cannot be encoded become "?"."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    return raw[: max_bytes - 3].decode("utf-8", "ignore") + "..."


def _bounded_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """The first entries, as many as fit."""
    kept: dict[str, str] = {}
    room = MAX_METADATA_BYTES
    for key, value in metadata.items():
        key, value = _bounded(key, 64), _bounded(value, 256)
        room -= len(key.encode()) + len(value.encode())
        if room < 0:
            break
        kept[key] = value
    return kept


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """Ends the call with `error`. Cancellation, and a call that was aborted already, go on as they came."""
    if isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
        raise error
    status = rpc_status.to_status(to_status(error))
    await abort_with(context, status.code, status.details, status.trailing_metadata)


async def abort_with(context: Any, code: grpc.StatusCode, details: str, trailing_metadata: Any) -> NoReturn:
    """Ends the call with a status. It is cancelled where a deadline or its client has ended it meanwhile: gRPC cannot
    send the status then, and would log its own failure as an error of the handler."""
    try:
        await context.abort(code, details, trailing_metadata)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error
    raise AssertionError("abort returned")


def answer_within_s(remaining_s: float) -> float:
    """The time in which to answer a caller that waits for `remaining_s` more. gRPC itself ends a call at its deadline
    with a code without details; a server that ends it just before can still say why."""
    return remaining_s - min(MARGIN_S, MARGIN_SHARE * remaining_s)


# --- from the wire --------------------------------------------------------------------------------------------------


def from_rpc_error(error: grpc.RpcError) -> LoraplexError:
    """The typed error that the server raised, or the nearest one where the status is not one of ours.

    Never fails: what arrives may come from any server or proxy. Where no server of ours said it, `grpc_code` is in the
    metadata.
    """
    call = cast("grpc.Call", error)  # what a client catches is both, and so is grpc.aio's AioRpcError
    code = _code(cast("tuple[int, str]", call.code().value)[0])
    words = call.details() or ""
    status = _status_in(call.trailing_metadata() or ())
    if status is None or status.code != code:
        own = from_transport(code, words)
        if own is None:
            return _foreign(code, words, reason="")
        own.metadata |= {"grpc_code": code.name, "grpc_message": words}
        return own
    return from_status(status)


def from_status(status: status_pb2.Status) -> LoraplexError:
    """Rebuilds the error from the details; the class by ErrorInfo's reason."""
    reason, metadata = "", dict[str, str]()
    field: str | None = None
    resource: str | None = None
    retry_after_s: float | None = None
    for detail in _unpacked(status):
        match detail:
            case error_details_pb2.ErrorInfo() if detail.domain == DOMAIN:
                reason = detail.reason
                metadata.update(detail.metadata)
            case error_details_pb2.RequestInfo():
                metadata["request_id"] = detail.request_id
            case error_details_pb2.BadRequest() if detail.field_violations:
                field = detail.field_violations[0].field
            case error_details_pb2.QuotaFailure() if detail.violations:
                resource = detail.violations[0].subject
            case error_details_pb2.ResourceInfo():
                resource = detail.resource_name
            case error_details_pb2.RetryInfo():
                retry_after_s = detail.retry_delay.ToNanoseconds() / 1e9
            case _:
                pass
    cls = errors.by_reason().get(reason)
    if cls is None or int(cls.code) != status.code:
        rebuilt = _foreign(_code(status.code), status.message, reason)
        metadata = {**metadata, **rebuilt.metadata}
        cls = type(rebuilt)
    return cls(status.message, field=field, resource=resource, retry_after_s=retry_after_s, metadata=metadata)


_DETAIL_TYPES: Final = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.RequestInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.QuotaFailure,
    error_details_pb2.ResourceInfo,
    error_details_pb2.RetryInfo,
)


def _unpacked(status: status_pb2.Status) -> Iterable[Message]:
    """The details that are known and well-formed."""
    for packed in status.details:
        for cls in _DETAIL_TYPES:
            if packed.TypeName() == cls.DESCRIPTOR.full_name:
                detail = cls()
                try:
                    packed.Unpack(detail)
                except DecodeError:
                    break
                yield detail


def _status_in(metadata: Iterable[tuple[str, str | bytes]]) -> status_pb2.Status | None:
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _code(number: int) -> Code:
    try:
        return Code(number)
    except ValueError:
        return Code.UNKNOWN


def _foreign(code: Code, message: str, reason: str) -> LoraplexError:
    """The error for a status without a reason that this version knows; its words are kept in the metadata."""
    metadata = {"grpc_code": code.name}
    if reason:
        metadata["reason"] = reason
    message = message or f"the call ended with {code.name} and no message"
    return _BY_CODE.get(code, errors.Internal)(message, metadata=metadata)


# --- from gRPC itself -----------------------------------------------------------------------------------------------

RETRY_S: Final = 1.0

_OVER_LIMIT: Final = re.compile(r"(SERVER|CLIENT): (Received|Sent) message larger than max \((\d+) vs\. (\d+)\)")
_UNPACKED_OVER_LIMIT: Final = "Decompressed message larger than max"
_METADATA_OVER_LIMIT: Final = re.compile(r"received metadata size exceeds (hard|soft) limit")
# No connection came about: the request was certainly never sent.
_NEVER_SENT: Final = re.compile(
    "failed to connect to all addresses|connections to all backends failing|DNS resolution|errors resolving"
)
_WHY: Final = re.compile(r"last error: [A-Z_]+: (?:\w+:\S+: )?(?:Failed to connect to remote host: )?(.+)")
_NO_METHOD: Final = "Method not found!"
# The connection broke under the call: a stream reset, bytes that are no HTTP/2, a TLS record that cannot be read.
_BROKEN: Final = re.compile(r"Stream removed|.*RST_STREAM", re.DOTALL)
# A call that its own side has cancelled, or whose channel it has closed.
_OWN_DOING: Final = re.compile(r"[Ll]ocally cancelled|[Cc]hannel (is )?closed")


def from_transport(code: Code, words: str) -> LoraplexError | None:
    """The error of a call that gRPC itself ended, outside of the handlers; None where `words` are not gRPC's."""
    match code:
        case Code.RESOURCE_EXHAUSTED:
            return _too_large(words)
        case Code.UNIMPLEMENTED if words == _NO_METHOD:
            return errors.Unimplemented(
                "the server does not know this method; client and server are of different versions"
            )
        case Code.UNAVAILABLE if _NEVER_SENT.match(words):
            why = found[1] if (found := _WHY.search(words)) else words
            return errors.ServerUnreachable(f"the server cannot be reached: {why}", retry_after_s=RETRY_S)
        case Code.CANCELLED if _OWN_DOING.search(words):
            return errors.Cancelled("the call was cancelled on this side")
        # A server that is stopped hard resets or cancels what it has; other servers do not cancel on their own.
        case Code.UNAVAILABLE | Code.CANCELLED:
            return _connection_lost()
        case Code.INTERNAL | Code.UNKNOWN if _BROKEN.match(words):
            return _connection_lost()
        case _:
            return None


def _connection_lost() -> errors.ConnectionLost:
    return errors.ConnectionLost(
        "the connection to the server was lost, or cut by something in between, before the answer was complete; send "
        "the request again",
        retry_after_s=RETRY_S,
    )


def _too_large(words: str) -> errors.MessageTooLarge | None:
    """The error of a message that gRPC found too large; None for other words. It never says when to retry: waiting does
    not help."""
    if sizes := _OVER_LIMIT.search(words):
        side, verb, num_bytes, limit = sizes.groups()
        metadata = {"bytes": num_bytes, "limit_bytes": limit}
        if (side, verb) == ("SERVER", "Received"):
            return errors.MessageTooLarge(
                f"the request has {num_bytes} bytes, and the server takes {limit}; send less, or start the server "
                "with a larger --max-message",
                field="request",
                metadata=metadata,
            )
        return errors.MessageTooLarge(
            f"the answer has {num_bytes} bytes, and {limit} are taken; ask for less at a time",
            field="answer",
            metadata=metadata,
        )
    if _UNPACKED_OVER_LIMIT in words:
        return errors.MessageTooLarge(
            "a compressed message is larger than the limit once it is unpacked; send less, or start the server with a "
            "larger --max-message",
            field="request",
        )
    if _METADATA_OVER_LIMIT.search(words):
        return errors.MessageTooLarge(
            "the call's metadata is larger than gRPC takes (8 KiB are safe); send less of it", field="metadata"
        )
    return None
