"""Typed errors as HTTP statuses, headers and OpenAI's error objects."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from starlette.types import Scope

from loraplex_contracts.errors import (
    AdapterNotFound,
    Code,
    ContextLengthExceeded,
    InvalidAdapterId,
    ListingTooLarge,
    LoraplexError,
    MessageTooLarge,
    RequestTimeout,
)

# Status, type and code of OpenAI's error object. UNIMPLEMENTED is not 501: clients try again at 500 and above.
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

# Fields of the wire that have another name in OpenAI's requests; of all others the last part of the path is the name.
PARAMS: Final[Mapping[str, str]] = {
    "adapter_id": "model",
    "input": "prompt",
    "text": "prompt",
    "token_ids.ids": "prompt",
    "chat": "messages",
    "chat.tools_json": "tools",
    "chat.tool_choice.required": "tool_choice",
    "chat.tool_choice.name": "tool_choice",
    "chat.documents_json": "documents",
    "chat.template_kwargs_json": "chat_template_kwargs",
    "chat.template": "chat_template",
    "chat.continue_final_message": "continue_final_message",
    "stopping.include_stop": "include_stop_str_in_output",
    "truncate_prompt.max_tokens": "truncate_prompt_tokens",
    "output.keep_special_tokens": "skip_special_tokens",
}


def model_not_found(model: str) -> AdapterNotFound:
    """One answer for an unknown name, a name that is not well-formed, and another tenant's adapter."""
    shown = (model if len(model) <= 128 else model[:125] + "...").encode(errors="replace").decode()
    return AdapterNotFound(f"The model `{shown}` does not exist.", field="model", resource=shown)


def is_missing_model(error: LoraplexError) -> bool:
    """True when the adapter that `model` names is unknown, forbidden, or not a valid name."""
    is_name = isinstance(error, InvalidAdapterId) and error.field in (None, "adapter_id")
    return is_name or (isinstance(error, AdapterNotFound) and error.field in (None, "adapter_id", "model"))


def naming_model(error: LoraplexError, model: str) -> LoraplexError:
    """The error; where the adapter that was asked for is missing, the one answer that names it as `model`."""
    return model_not_found(model) if is_missing_model(error) else error


def status_of(error: LoraplexError) -> int:
    match error:
        case RequestTimeout():
            return 408
        case MessageTooLarge() | ListingTooLarge():
            return 413
        case _:
            return _BY_CODE.get(error.code, _INTERNAL)[0]


def error_object(error: LoraplexError, params: Mapping[str, str] = PARAMS) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}`, with names of fields as the route's requests have them."""
    _, kind, code = _BY_CODE.get(error.code, _INTERNAL)
    message, param = error.message, error.field
    if isinstance(error, ContextLengthExceeded):
        # Clients look for these words.
        code = "context_length_exceeded"
        message = f"{message} (over this model's maximum context length)"
    elif isinstance(error, MessageTooLarge):
        kind, code = "invalid_request_error", "request_too_large"
    if param is not None:
        name = params.get(param) or _last_part(param)
        message = message.replace(f"`{param}`", f"`{name}`")
        param = name
    content: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    if error.reason not in ("INVALID_ARGUMENT", "UNIMPLEMENTED"):
        content["reason"] = error.reason
    return {"error": content}


def _last_part(param: str) -> str:
    if param.startswith("chat.messages"):
        return "messages"
    is_wire_path = param.startswith(("sampling.", "stopping.", "output."))
    return param.rpartition(".")[2] if is_wire_path else param


def error_headers(error: LoraplexError) -> dict[str, str]:
    """When to try again, and whether clients should do so on their own."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(max(0.0, error.retry_after_s)))
        headers["retry-after-ms"] = str(round(max(0.0, error.retry_after_s) * 1000))
    if status_of(error) == 500:
        headers["x-should-retry"] = "false"
    if error.code is Code.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return headers


# --- LoRAX's and TGI's form -------------------------------------------------------------------------------------------

# Status and error_type. Their clients make ValidationError, GenerationError and OverloadedError of the types, other
# errors of the status.
_NATIVE_BY_CODE: Final[Mapping[Code, tuple[int, str]]] = {
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
_NATIVE_INTERNAL: Final = (424, "generation")

_NATIVE_PARAMS: Final[Mapping[str, str]] = {
    "input": "inputs",
    "text": "inputs",
    "chat.messages": "inputs",
    "model": "adapter_id",
    "n": "best_of",
    "truncate_prompt.max_tokens": "truncate",
    "stopping.max_tokens": "max_new_tokens",
    "stopping.ignore_eos": "ignore_eos_token",
    "output.top_logprobs": "top_n_tokens",
    "output.prompt_logprobs": "decoder_input_details",
    "output.prompt_tokens": "decoder_input_details",
}


def native_error(error: LoraplexError) -> tuple[int, dict[str, str]]:
    """Status and `{"error", "error_type"}`, with names of parameters as LoRAX and TGI have them."""
    status, kind = _NATIVE_BY_CODE.get(error.code, _NATIVE_INTERNAL)
    message = error.message
    match error:
        case RequestTimeout():
            status, kind = 408, "validation"
        case MessageTooLarge() | ListingTooLarge():
            status, kind = 413, "validation"
        case AdapterNotFound() if is_missing_model(error):
            message = f"the adapter `{error.resource or ''}` does not exist"
        case _:
            pass
    if (param := error.field) is not None:
        name = _NATIVE_PARAMS.get(param) or _last_part(param)
        message = message.replace(f"`{param}`", f"`{name}`")
    return status, {"error": message, "error_type": kind}


# --- dialects -------------------------------------------------------------------------------------------------------

_NATIVE_PATHS: Final = frozenset(
    {"/", "/info", "/generate", "/generate_stream", "/chat_tokenize", "/embed", "/classify_batch"}
)
_SHARED_PATHS: Final = frozenset({"/tokenize", "/classify"})


def body_dialect(path: str, body: Any) -> str:
    """The form of a request and its errors, "openai" or "native": by the keys of its body where a path has both.
    SGLang's form of /generate counts as the former."""
    keys: Any = body if isinstance(body, dict) else ()
    if path in _SHARED_PATHS:
        is_native = "inputs" in keys
    else:
        is_native = path in _NATIVE_PATHS and not (path == "/generate" and ("text" in keys or "input_ids" in keys))
    return "native" if is_native else "openai"


def dialect_of(scope: Scope) -> str:
    """As above; the request's state has it once the body has been read."""
    return scope.get("state", {}).get("dialect") or body_dialect(scope["path"], None)
