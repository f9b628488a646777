"""Errors as HTTP answers."""

from __future__ import annotations

import pytest

from loraplex_contracts import errors
from loraplex_contracts.errors import LoraplexError
from loraplex_router.http.errors import error_headers, error_object, model_not_found, status_of


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidArgument("x"), 400, "invalid_request_error", "invalid_value"),
        (errors.ContextLengthExceeded("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.Unimplemented("x"), 400, "invalid_request_error", "not_implemented"),
        (errors.AdapterInvalid("x"), 400, "invalid_request_error", "failed_precondition"),
        (errors.Unauthenticated("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_error", "permission_denied"),
        (errors.AdapterNotFound("x"), 404, "NotFoundError", "model_not_found"),
        (errors.RequestTimeout("x"), 408, "invalid_request_error", "invalid_value"),
        (errors.MessageTooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (errors.Overloaded("x"), 429, "rate_limit_error", "overloaded"),
        (errors.Internal("x"), 500, "server_error", "internal_error"),
        (errors.WorkerLost("x"), 503, "service_unavailable_error", "unavailable"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded"),
    ],
)
def test_the_table(error: LoraplexError, status: int, kind: str, code: str) -> None:
    content = error_object(error)["error"]
    assert (status_of(error), content["type"], content["code"]) == (status, kind, code)


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.temperature", "temperature"),
        ("stopping.include_stop", "include_stop_str_in_output"),
        ("token_ids.ids", "prompt"),
        ("messages[0].name", "messages[0].name"),
        ("n", "n"),
    ],
)
def test_fields_have_their_names_in_openais_requests(field: str, param: str) -> None:
    content = error_object(errors.InvalidArgument(f"`{field}` is wrong", field=field))["error"]
    assert (content["param"], content["message"]) == (param, f"`{param}` is wrong")


def test_headers_say_when_to_try_again() -> None:
    assert error_headers(errors.Overloaded("x", retry_after_s=1.2)) == {"retry-after": "2", "retry-after-ms": "1200"}
    assert error_headers(errors.Internal("x")) == {"x-should-retry": "false"}
    assert error_headers(errors.Unauthenticated("x")) == {"www-authenticate": "Bearer"}
    assert "maximum context length" in error_object(errors.ContextLengthExceeded("x"))["error"]["message"]


def test_a_name_that_is_not_unicode_can_be_shown() -> None:
    assert model_not_found("a:\ud800").message == "The model `a:?` does not exist."
