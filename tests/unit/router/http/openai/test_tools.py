"""Tools and parsed messages in OpenAI's form."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from pydantic import ValidationError

from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http.openai import answers, requests
from loraplex_router.http.openai.fields import ChatCompletionRequest

CHAT = [{"role": "user", "content": "hi"}]
FN = {"name": "f"}
TOOLS = [{"function": {"strict": True, "name": "f", "parameters": {}}, "type": "function", "x": 1}]


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def chat(*, old_names: bool = False, **fields: Any) -> requests.Job:
    body = ChatCompletionRequest.model_validate({"messages": CHAT, **fields})
    return requests.chat_job(body, ("base",), "rid", 7, old_names=old_names)


def wire(**fields: Any) -> pb.GenerateRequest:
    (request,) = chat(**fields).requests
    check_generate(request)
    return request


def test_tools_reach_the_wire_as_they_came() -> None:
    request = wire(tools=TOOLS, tool_choice="auto", parallel_tool_calls=False)
    assert json.loads(request.chat.tools_json) == TOOLS
    assert request.chat.tool_choice.auto
    assert request.chat.HasField("parallel_tool_calls")
    assert request.output.parse_chat
    plain = wire(tools=[], tool_choice="auto", parallel_tool_calls=True)
    assert plain.chat == wire().chat, "without tools the rest says nothing"
    assert plain.output.parse_chat
    assert wire(tool_choice="none").chat.tool_choice.none


@pytest.mark.parametrize("choice", ["required", "f", {"type": "function", "function": {"name": "f"}}])
def test_demanded_calls(choice: Any) -> None:
    (request,) = chat(tools=TOOLS, tool_choice=choice).requests
    assert request.chat.tool_choice == pb.ToolChoice(**({"required": True} if choice == "required" else {"name": "f"}))
    check_generate(request)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_of_tools_that_are_allowed_the_model_is_told_alone(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("a", "b", "c")]
    asked = {"tools": tools, "parallel_tool_calls": False}
    request = wire(**asked, tool_choice=allowed(mode, "c", "a"))
    assert request == wire(**{**asked, "tools": [tools[0], tools[2]]}, tool_choice=mode)
    schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "f", "schema": {}}}
    request = wire(**asked, tool_choice=allowed(mode, "b"), response_format=schema)
    assert request.HasField("grammar") == (mode == "auto")


def test_allowing_very_many_tools_is_quick() -> None:
    names = [f"f{number}" for number in range(20_000)]
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    body = ChatCompletionRequest.model_validate(
        {"messages": CHAT, "tools": tools, "tool_choice": allowed("auto", *names)}
    )
    start_s = time.process_time()
    requests.chat_job(body, ("base",), "rid", 7)
    assert time.process_time() - start_s < 1.0


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_demanded_call_goes_before_the_format(choice: Any) -> None:
    schema: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "f", "schema": {}}}
    assert not wire(tools=TOOLS, tool_choice=choice, response_format=schema).HasField("grammar")
    for choice_of_the_model in ("auto", "none"):
        assert wire(tools=TOOLS, tool_choice=choice_of_the_model, response_format=schema).HasField("grammar")
    with pytest.raises(InvalidArgument, match="leave `grammar` out"):
        wire(tools=TOOLS, tool_choice=choice, guided_regex="a")
    with pytest.raises(InvalidArgument, match="response_format"):
        chat(tools=TOOLS, tool_choice=choice, response_format=5)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": TOOLS, "tool_choice": "g"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x" * 999}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", "f", "g")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "f")}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": TOOLS, "tool_prompt": "Use them."}, "tool_prompt"),
    ],
)
def test_what_cannot_be_asked_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(LoraplexError) as caught:
        chat(**fields)
    assert isinstance(caught.value, (InvalidArgument, Unimplemented))
    assert caught.value.field == named
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "fields",
    [
        *({"tools": "f"}, {"tools": ["f"]}, {"tool_choice": 5}, {"tool_choice": {"type": "custom"}}),
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [{"function": FN}]}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}}},
    ],
)
def test_wrong_types(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGE = pb.ChatMessage(
    role="assistant",
    content="so",
    reasoning="hm",
    tool_calls=[pb.ToolCall(id="call_1", name="f", arguments_json="{}")],
)


def answered(message: pb.ChatMessage, reason: int = pb.FINISH_REASON_EOS, **fields: Any) -> dict[str, Any]:
    completion = pb.Completion(text="raw", message=message, finish_reason=reason)  # type: ignore[arg-type]
    (choice,) = answers.response_of(chat(**fields), [pb.GenerateResponse(completions=[completion])])["choices"]
    return choice


def test_messages() -> None:
    choice = answered(MESSAGE)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant", "content": "so", "refusal": None, "reasoning": "hm", "tool_calls": [CALL],
    }  # fmt: skip
    assert answered(MESSAGE, pb.FINISH_REASON_LENGTH)["finish_reason"] == "length"
    assert "reasoning" not in answered(MESSAGE, include_reasoning=False)["message"]
    both = answered(MESSAGE, old_names=True)["message"]
    assert both["reasoning"] == both["reasoning_content"] == "hm"
    neither = answered(MESSAGE, old_names=True, include_reasoning=False)["message"]
    assert not {"reasoning", "reasoning_content"} & neither.keys()
    only_calls = pb.ChatMessage(tool_calls=MESSAGE.tool_calls)
    assert answered(only_calls)["message"]["content"] is None
    plain = answered(pb.ChatMessage(content=""))
    assert plain["message"] == {"role": "assistant", "content": "", "refusal": None, "reasoning": None}
    assert plain["finish_reason"] == "stop"


def test_deltas() -> None:
    chunk = pb.GenerateStreamResponse
    call = pb.ToolCallDelta

    def deltas(*parts: pb.ChatDelta, **fields: Any) -> Any:
        found = answers.Answer(chat(stream=True, **fields))
        sent = chunk(text_delta="raw", deltas=parts)
        last = chunk(finish_reason=pb.FINISH_REASON_EOS, message=MESSAGE)
        events = [one for message in (sent, last) for one in found.events(0, message.SerializeToString())]
        first, *middle, end = [json.loads(event[6:])["choices"][0] for event in events]
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")
        return [choice["delta"] for choice in middle]

    assert deltas(pb.ChatDelta(reasoning="a"), pb.ChatDelta(reasoning="b"), pb.ChatDelta(content="c")) == [
        {"reasoning": "ab", "content": "c"}
    ]
    assert deltas(pb.ChatDelta(reasoning="a"), include_reasoning=False) == []
    thoughts = (pb.ChatDelta(reasoning="a"), pb.ChatDelta(reasoning="b"))
    assert deltas(*thoughts, old_names=True) == [{"reasoning": "ab", "reasoning_content": "ab"}]
    assert deltas() == [], "text that is held back is no news"
    assert deltas(pb.ChatDelta(tool_call=call(index=0, id="call_1", name="f", arguments_json="{}"))) == [
        {"tool_calls": [{"index": 0, **CALL}]}
    ]
    assert deltas(pb.ChatDelta(tool_call=call(index=1, arguments_json="}"))) == [
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]}
    ]
    opened, more = call(index=0, id="call_1", name="f"), call(index=0, arguments_json='{"a"')
    others = (call(index=1, id="call_2", name="f"), call(index=1, arguments_json="{}"))
    parts = [pb.ChatDelta(tool_call=one) for one in (opened, more, call(index=0, arguments_json=": 1}"), *others)]
    first, second = deltas(*parts)[0]["tool_calls"]
    assert first == {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert second == {"index": 1, **CALL, "id": "call_2"}
