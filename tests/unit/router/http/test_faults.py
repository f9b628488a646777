"""Names and sentences of what is wrong with a body."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from loraplex_router.http.faults import fault_of
from loraplex_router.http.openai.fields import ChatCompletionRequest, CompletionRequest
from loraplex_router.http.tgi.fields import GenerateRequest

CHAT: list[Any] = [{"role": "user", "content": "hi"}]
CALL: dict[str, Any] = {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}


@pytest.mark.parametrize(
    ("model", "body", "name", "said"),
    [
        (ChatCompletionRequest, {"messages": [*CHAT, {"role": 5}]}, "messages[1].role", "should be a valid string"),
        (ChatCompletionRequest, {"messages": [[]]}, "messages[0]", "should be an object"),
        (ChatCompletionRequest, {"messages": [CALL]}, "messages[0].tool_calls[0].function.name",
         "should be a valid string"),
        (ChatCompletionRequest, {"messages": CHAT, "tools": [1]}, "tools[0]", "should be an object"),
        (ChatCompletionRequest, {"messages": CHAT, "tool_choice": 4}, "tool_choice",
         "should be a valid string or an object"),
        (ChatCompletionRequest, {"messages": CHAT, "tool_choice": {"type": "x"}}, "tool_choice.type",
         "should be 'function' or 'allowed_tools'"),
        (CompletionRequest, {"prompt": "a", "merge": {"strategy": 1}}, "merge.strategy", "should be a valid string"),
        (CompletionRequest, {"prompt": "a", "stop": 5}, "stop", "should be a valid string or a valid list"),
        (CompletionRequest, {"prompt": "a", "stop": ["a", 5]}, "stop[1]", "should be a valid string"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias.5", "should be a valid number"),
        (CompletionRequest, {"prompt": "a", "logit_bias": {"\xe9" + "x" * 99: "x"}},
         f"logit_bias.\\xe9{'x' * 59}", "should be a valid number"),
        (GenerateRequest, {"inputs": "a", "parameters": {"stop": [5]}}, "stop[0]", "should be a valid string"),
        (GenerateRequest, {"inputs": "a", "parameters": []}, "parameters", "should be an object"),
    ],
)  # fmt: skip
def test_a_fault_is_named_where_it_is(model: type[BaseModel], body: dict[str, Any], name: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    fault = fault_of(caught.value.errors(), body)
    assert (fault.field, fault.message) == (name, f"`{name}` is not valid: {said}")


@pytest.mark.parametrize(
    ("body", "name", "said"),
    [
        ({}, "messages", "`messages` is missing"),
        ({"messages": [{"content": "a"}]}, "messages[0].role", "`messages[0].role` is missing"),
        ({"messages": [{"role": "user", "\ud800": 1}]}, "messages[0]", "`messages[0]` is not valid Unicode text"),
        ([], "body", "the body must be a JSON object, sent as application/json"),
        ({"\ud800": 1}, "body", "the body has a name that is no text: half of a surrogate pair"),
    ],
)
def test_what_is_missing_and_what_is_no_text(body: Any, name: str, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatCompletionRequest.model_validate(body)
    fault = fault_of(caught.value.errors(), body)
    assert (fault.field, fault.message) == (name, said)
