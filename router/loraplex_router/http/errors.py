"""Typed errors as HTTP statuses, headers and OpenAI's error objects."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from starlette.types import Scope

from loraplex_contracts.adapters import name_in
from loraplex_contracts.errors import (
    AdapterNotFound,
    Code,
    ContextLengthExceeded,
    InvalidAdapterId,
    InvalidArgument,
    ListingTooLarge,
    LoraplexError,
    MessageTooLarge,
    QuotaExceeded,
    RequestTimeout,
    Unimplemented,
)
from loraplex_proto.v1 import inference_pb2
from loraplex_router.http.names import ADAPTER_NAMES, field_name, naming_fields
from loraplex_runtime.refusals import Refusals

# Status, type and code of OpenAI's error object. UNIMPLEMENTED is not 501 where a field of the request is at fault:
# clients try again at 500 and above.
_BY_CODE: Final[Mapping[Code, tuple[int, str, str]]] = {
    Code.INVALID_ARGUMENT: (400, "invalid_request_error", "invalid_value"),
    Code.UNIMPLEMENTED: (400, "invalid_request_error", "not_implemented"),
    Code.FAILED_PRECONDITION: (400, "invalid_request_error", "failed_precondition"),
    Code.UNAUTHENTICATED: (401, "authentication_error", "invalid_api_key"),
    Code.PERMISSION_DENIED: (403, "permission_error", "permission_denied"),
    Code.NOT_FOUND: (404, "NotFoundError", "model_not_found"),
    Code.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "overloaded"),
    Code.CANCELLED: (499, "invalid_request_error", "cancelled"),
    Code.UNAVAILABLE: (503, "service_unavailable_error", "unavailable"),
    Code.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}
_INTERNAL: Final = (500, "server_error", "internal_error")
_OLD_WORKERS: Final = (501, "server_error", "not_implemented")
_CONTEXT_WORDS: Final = "maximum context length"  # clients look for them, and cut the prompt


def with_names_of(error: LoraplexError, scope: Scope) -> LoraplexError:
    """The error of a call, with names of fields as the request has them. Without a field where a worker does not know
    what this version of the router asks it for: a field of the wire, by its number, or a method."""
    if isinstance(error, Unimplemented) and (error.field is None or "#" in error.field or error.field == "method"):
        what = "the workers are of an older version than this server and cannot do what the request needs"
        return Unimplemented(what, metadata=error.metadata)
    given, is_tgi = scope.get("state", {}).get("fields", ()), dialect_of(scope) == "tgi"
    if error.field is not None:
        name = field_name(error.field, given, is_tgi=is_tgi)
        message = error.message
        if message.startswith(f"{error.field} "):  # as errors of names begin
            message = f"`{name}`" + message.removeprefix(error.field)
        error.message, error.field = message.replace(f"`{error.field}`", f"`{name}`"), name
    error.message = naming_fields(error.message, given, is_tgi=is_tgi)
    return error


def model_not_found(model: str) -> AdapterNotFound:
    """One answer for an unknown name, a name that is not well-formed, and another tenant's adapter."""
    shown = _shown(model)
    return AdapterNotFound(f"The model `{shown}` does not exist.", field="model", resource=shown)


def _shown(name: str) -> str:
    return (name if len(name) <= 128 else name[:125] + "...").encode(errors="replace").decode()


def is_missing_model(error: LoraplexError) -> bool:
    """True when the adapter that `model` names is unknown, forbidden, or not a valid name."""
    return isinstance(error, InvalidAdapterId | AdapterNotFound) and error.field in (None, *ADAPTER_NAMES)


def naming_model(error: LoraplexError, model: str) -> LoraplexError:
    """The error; where the adapter that was asked for is missing, the one answer that names it as `model`. Without
    `model` it is the one that the error names, of a mixture."""
    return model_not_found(model or error.resource or "") if is_missing_model(error) else error


def naming_missing(error: LoraplexError, model: str, request: inference_pb2.GenerateRequest) -> LoraplexError:
    """Does what `naming_model` does, for a request that may name Medusa heads apart from its adapter."""
    heads = request.speculation.medusa.adapter_id
    named, missing = name_in(heads), name_in(error.resource or "")
    if heads and is_missing_model(error) and missing == named != name_in(request.adapter_id):
        what = f"The Medusa heads `{_shown(heads)}` do not exist."
        return AdapterNotFound(what, field="speculation.adapter_id", resource=heads)
    return naming_model(error, model)


def status_of(error: LoraplexError) -> int:
    match error:
        case RequestTimeout():
            return 408
        case MessageTooLarge() | ListingTooLarge():
            return 413
        case _:
            return _row_of(error)[0]


def _row_of(error: LoraplexError) -> tuple[int, str, str]:
    if isinstance(error, Unimplemented) and error.field is None:
        return _OLD_WORKERS
    return _BY_CODE.get(error.code, _INTERNAL)


def error_object(error: LoraplexError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`."""
    _, kind, code = _row_of(error)
    message = error.message
    if isinstance(error, ContextLengthExceeded):
        code = "context_length_exceeded"
        if _CONTEXT_WORDS not in message:  # of a cache that is too small, or of an older worker
            message = f"{message} (over this model's {_CONTEXT_WORDS})"
    elif isinstance(error, MessageTooLarge):
        kind, code = "invalid_request_error", "request_too_large"
    if isinstance(error, QuotaExceeded):
        code = "rate_limit_exceeded"  # OpenAI's
    content: dict[str, Any] = {"message": message, "type": kind, "param": error.field, "code": code}
    if error.reason not in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
        content["reason"] = error.reason
    return {"error": content}


def error_headers(error: LoraplexError) -> dict[str, str]:
    """Headers that say when to try again, and whether clients should do so on their own."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(max(0.0, error.retry_after_s)))
        headers["retry-after-ms"] = str(round(max(0.0, error.retry_after_s) * 1000))
    if status_of(error) in (500, 501) or (isinstance(error, QuotaExceeded) and error.retry_after_s is None):
        headers["x-should-retry"] = "false"
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


def note_refusal(error: LoraplexError, scope: Scope) -> None:
    """Counts and logs the error of an HTTP request, unless it or one that led to it is a call's, which has been counted
    and has its line."""
    if not any(isinstance(one, LoraplexError) and "request_id" in one.metadata for one in _causes(error)):
        refusals: Refusals = scope["state"]["refusals"]
        refusals.note(scope["state"]["record"], error)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that it was raised from or while handling, however far back."""
    found: dict[int, BaseException] = {}
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in found:
            found[id(one)] = one
            left += [one.__cause__, one.__context__]
            yield one


# --- LoRAX's and TGI's form -------------------------------------------------------------------------------------------

# Status and error_type. Their clients make ValidationError, GenerationError and OverloadedError of the types, other
# errors of the status.
_TGI_BY_CODE: Final[Mapping[Code, tuple[int, str]]] = {
    Code.INVALID_ARGUMENT: (422, "validation"),
    Code.UNIMPLEMENTED: (422, "validation"),
    Code.FAILED_PRECONDITION: (422, "validation"),
    Code.UNAUTHENTICATED: (401, "unauthenticated"),
    Code.PERMISSION_DENIED: (403, "permission_denied"),
    Code.NOT_FOUND: (404, "adapter_not_found"),
    Code.RESOURCE_EXHAUSTED: (429, "overloaded"),
    Code.CANCELLED: (499, "cancelled"),
    Code.UNAVAILABLE: (503, "unavailable"),
    Code.DEADLINE_EXCEEDED: (504, "timeout"),
}
_TGI_INTERNAL: Final = (424, "generation")


def tgi_error(error: LoraplexError) -> tuple[int, dict[str, str]]:
    """Status and `{"error", "error_type"}`."""
    status, kind = _TGI_BY_CODE.get(error.code, _TGI_INTERNAL)
    message = error.message
    match error:
        case RequestTimeout():
            status, kind = 408, "validation"
        case MessageTooLarge() | ListingTooLarge():
            status, kind = 413, "validation"
        case Unimplemented() if error.field is None:
            status, kind = 501, "generation"
        case InvalidArgument(field="host"):
            status = 400  # RFC 9112, 3.2
        case AdapterNotFound() if is_missing_model(error):
            message = f"the adapter `{error.resource or ''}` does not exist"
        case _:
            pass
    return status, {"error": message, "error_type": kind}


# --- dialects -------------------------------------------------------------------------------------------------------

_TGI_PATHS: Final = frozenset(
    {"/", "/info", "/generate", "/generate_stream", "/chat_tokenize", "/embed", "/classify_batch"}
)
_SHARED_PATHS: Final = frozenset({"/tokenize", "/classify"})


def body_dialect(path: str, body: Any) -> str:
    """The form of a request and its errors, "openai" or "tgi": by the keys of its body where a path has both.
    SGLang's form of /generate counts as the former."""
    keys: Any = body if isinstance(body, dict) else ()
    if path in _SHARED_PATHS:
        is_tgi = "inputs" in keys
    else:
        is_tgi = path in _TGI_PATHS and not (path == "/generate" and ("text" in keys or "input_ids" in keys))
    return "tgi" if is_tgi else "openai"


def dialect_of(scope: Scope) -> str:
    """The request's dialect: the one in its state once the body has been read, else that of its path."""
    return scope.get("state", {}).get("dialect") or body_dialect(scope["path"], None)


def fields_in(body: Any) -> frozenset[str]:
    """Names of a body's fields that are not null, of those in its objects of options, and Responses' `text.format`."""
    if not isinstance(body, dict):
        return frozenset()
    found = cast("dict[str, Any]", body)
    names = {name for name, value in found.items() if value is not None}
    for name in names & {"parameters", "sampling_params"}:
        names |= fields_in(found[name])
    names |= {"text.format"} if "format" in fields_in(found.get("text")) else set()
    return frozenset(names)
