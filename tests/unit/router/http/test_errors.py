"""Errors as HTTP answers."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest

from loraplex_contracts import errors
from loraplex_contracts.errors import LoraplexError
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.validate import ModelLimits, check_prompt_length
from loraplex_router.http.errors import (
    error_headers,
    error_object,
    fields_in,
    model_not_found,
    naming_missing,
    note_refusal,
    status_of,
    tgi_error,
    with_names_of,
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.InvalidArgument("x"), 400, "invalid_request_error", "invalid_value"),
        (errors.ContextLengthExceeded("x"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.Unimplemented("x", field="n"), 400, "invalid_request_error", "not_implemented"),
        (errors.Unimplemented("x"), 501, "server_error", "not_implemented"),
        (errors.AdapterInvalid("x"), 400, "invalid_request_error", "failed_precondition"),
        (errors.Unauthenticated("x"), 401, "authentication_error", "invalid_api_key"),
        (errors.PermissionDenied("x"), 403, "permission_error", "permission_denied"),
        (errors.AdapterNotFound("x"), 404, "NotFoundError", "model_not_found"),
        (errors.RequestTimeout("x"), 408, "invalid_request_error", "invalid_value"),
        (errors.MessageTooLarge("x"), 413, "invalid_request_error", "request_too_large"),
        (errors.Overloaded("x"), 429, "rate_limit_error", "overloaded"),
        (errors.quota_exceeded("tokens_per_minute", "x", 1.0), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.Internal("x"), 500, "server_error", "internal_error"),
        (errors.WorkerLost("x"), 503, "service_unavailable_error", "unavailable"),
        (errors.DeadlineExceeded("x"), 504, "timeout_error", "deadline_exceeded"),
    ],
)
def test_the_table(error: LoraplexError, status: int, kind: str, code: str) -> None:
    content = error_object(error)["error"]
    assert (status_of(error), content["type"], content["code"]) == (status, kind, code)


def named(error: LoraplexError, given: Collection[str] = ()) -> LoraplexError:
    return with_names_of(error, {"path": "/v1/completions", "state": {"fields": given}})


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
    content = error_object(named(errors.InvalidArgument(f"`{field}` is wrong", field=field)))["error"]
    assert (content["param"], content["message"]) == (param, f"`{param}` is wrong")


@pytest.mark.parametrize(
    ("field", "given", "param"),
    [
        ("grammar.json_schema", {"guided_json", "prompt"}, "guided_json"),
        ("grammar.json_schema", {"messages"}, "response_format"),
        ("grammar.regex", {"text", "regex"}, "regex"),
        ("grammar.json_schema", fields_in({"input": "x", "text": {"format": {"type": "json_schema"}}}), "text.format"),
        ("grammar.json_schema", fields_in({"text": {"verbosity": "low"}, "guided_json": "{}"}), "guided_json"),
        ("grammar.choice", {"prompt", "guided_choice"}, "guided_choice"),
        ("token_ids", {"tokens"}, "tokens"),
        ("input", {"messages", "documents"}, "messages"),
        ("input", {"input", "text"}, "input"),
        ("chat.tools_json", {"messages", "tools"}, "tools"),
        ("chat.tool_choice.name", {"messages"}, "tool_choice"),
        ("chat.messages[2].role", {"input"}, "input"),
        ("inputs.token_ids.ids", {"query", "documents"}, "documents"),
        ("query.text", {"text_1", "text_2"}, "text_1"),
        ("stopping.max_tokens", {"max_completion_tokens"}, "max_completion_tokens"),
        ("speculation.medusa.adapter_id", {"speculation"}, "speculation.adapter_id"),
        ("grammar.type", {"grammar"}, "grammar.type"),
    ],
)
def test_fields_have_the_name_that_the_request_gave_them(field: str, given: Collection[str], param: str) -> None:
    content = error_object(named(errors.InvalidArgument(f"`{field}` is wrong", field=field), given))["error"]
    assert (content["param"], content["message"]) == (param, f"`{param}` is wrong")


def test_other_fields_in_a_message_are_named_too() -> None:
    error = errors.InvalidArgument("`chat.tool_choice.name` is not in `chat.tools_json`", field="chat.tool_choice.name")
    assert error_object(named(error))["error"]["message"] == "`tool_choice` is not in `tools`"
    error = errors.InvalidArgument("chat.messages.role 'a b' is not a role", field="chat.messages.role")
    assert error_object(named(error))["error"]["message"] == "`messages` 'a b' is not a role"


@pytest.mark.parametrize("field", ["#8", "output.#9", "chat.messages.#7", "method", None])
def test_what_workers_do_not_know_is_no_fault_of_the_request(field: str | None) -> None:
    error = named(errors.Unimplemented(f"`{field}` is not known", field=field, metadata={"request_id": "r"}))
    content = error_object(error)["error"]
    assert (status_of(error), content["param"]) == (501, None)
    assert content["message"].startswith("the workers are of an older version")
    assert error.metadata == {"request_id": "r"}
    assert error_headers(error) == {"x-should-retry": "false"}
    assert tgi_error(error) == (501, {"error": content["message"], "error_type": "generation"})


def test_headers_say_when_to_try_again() -> None:
    assert error_headers(errors.Overloaded("x", retry_after_s=1.2)) == {"retry-after": "2", "retry-after-ms": "1200"}
    assert error_headers(errors.Internal("x")) == {"x-should-retry": "false"}
    assert error_headers(errors.Unauthenticated("x")) == {"www-authenticate": "Bearer"}


def test_long_prompts_are_told_in_words_that_clients_look_for() -> None:
    with pytest.raises(errors.ContextLengthExceeded) as raised:
        check_prompt_length(33, ModelLimits(vocab_size=100, max_context_tokens=32))
    assert error_object(raised.value)["error"]["message"] == (
        "the prompt is too long: this model's maximum context length is 32 tokens, at least one of them new, and the "
        "prompt has 33 tokens; shorten it"
    )
    assert "maximum context length" in error_object(errors.ContextLengthExceeded("x"))["error"]["message"]


@pytest.mark.parametrize(
    ("resource", "adapter_id", "heads", "param"),
    [
        ("h", "", "h", "speculation.adapter_id"),
        ("h", "sql", "h", "speculation.adapter_id"),
        ("h@0123456789abcdef", "sql", "h@01234567", "speculation.adapter_id"),
        ("sql", "sql", "h", "model"),
        ("sql@0123456789abcdef", "sql@01234567", "h", "model"),
        ("both", "both", "both", "model"),
        ("sql", "sql", "", "model"),
    ],
)
def test_the_adapter_that_is_missing_is_named(resource: str, adapter_id: str, heads: str, param: str) -> None:
    request = inference_pb2.GenerateRequest(adapter_id=adapter_id)
    request.speculation.medusa.adapter_id = heads
    error = naming_missing(errors.adapter_not_found(resource), adapter_id, request)
    assert error.field == param
    assert f"`{heads if param != 'model' else adapter_id}`" in error.message


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize(("metadata", "num_noted"), [({"request_id": "r"}, 0), ({}, 1)])
def test_a_call_s_error_is_no_refusal_however_often_it_was_renamed(
    depth: int, metadata: dict[str, str], num_noted: int
) -> None:
    error: LoraplexError = errors.AdapterNotFound("x", metadata=metadata)
    error.__context__ = ValueError("handled before")
    for _ in range(depth):
        outer = model_not_found("sql")
        outer.__cause__, error = error, outer
    noted: list[object] = []
    refusals = SimpleNamespace(note=lambda record, error: noted.append(error))  # pyright: ignore[reportUnknownLambdaType]
    note_refusal(error, {"state": {"refusals": refusals, "record": None}})
    assert len(noted) == num_noted


def test_a_name_that_is_not_unicode_can_be_shown() -> None:
    assert model_not_found("a:\ud800").message == "The model `a:?` does not exist."
