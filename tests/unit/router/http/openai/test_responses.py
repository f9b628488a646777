"""Translation of the Responses API."""

from __future__ import annotations

import json
from itertools import accumulate
from typing import Any

import pytest

from loraplex_contracts.errors import InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http.openai import requests, responses
from loraplex_router.http.openai.responses import ResponsesRequest

ADD = {"type": "function", "name": "add"}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"input": "hi", **fields})


def job_of(body: ResponsesRequest) -> requests.Job:
    job = requests.chat_job(responses.chat_request(body), ("base",), "rid", 7)
    check_generate(job.requests[0])
    return job


def messages(**fields: Any) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in job_of(request(**fields)).requests[0].chat.messages]


def test_inputs_become_messages() -> None:
    assert messages() == [("user", "hi")]
    assert messages(instructions="brief") == [("system", "brief"), ("user", "hi")]
    assert messages(input=[{"role": "user", "content": "hi", "type": None}]) == [("user", "hi")]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    refusal = [{"type": "refusal", "refusal": "no"}]
    assert messages(input=[{"role": "assistant", "content": refusal}]) == [("assistant", "no")]
    assert messages(input=[{"role": "user", "content": parts}, {"role": "assistant", "content": "c"}]) == [
        ("user", "ab"), ("assistant", "c"),
    ]  # fmt: skip


def test_an_answer_with_a_call_comes_back_as_one_message() -> None:
    items = [
        {"role": "user", "content": "1+1?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "2", "annotations": []}]},
        {"role": "user", "content": "sure?"},
    ]
    found = list(job_of(request(input=items)).requests[0].chat.messages)
    assert [one.role for one in found] == ["user", "assistant", "tool", "assistant", "user"]
    assert (found[1].reasoning, found[1].tool_calls[0].name, found[1].tool_calls[0].id) == ("hm", "add", "c1")
    assert (found[2].tool_call_id, found[2].content) == ("c1", "2")


def test_text_behind_a_call_comes_back_before_the_calls_output() -> None:
    call: dict[str, Any] = {"type": "function_call", "name": "add", "arguments": "{}"}
    items = [
        {"role": "assistant", "content": "earlier"},
        {"role": "assistant", "content": "Sure."},
        {**call, "call_id": "c1"},
        {"role": "assistant", "content": "\nAnd:"},
        {**call, "call_id": "c2"},
        {"role": "assistant", "content": "\nWait."},
        *({"type": "function_call_output", "call_id": one, "output": "2"} for one in ("c1", "c2")),
    ]
    found = list(job_of(request(input=items)).requests[0].chat.messages)
    assert [(one.role, one.content) for one in found] == [
        ("assistant", "earlier"), ("assistant", "Sure.\nAnd:\nWait."), ("tool", "2"), ("tool", "2"),
    ]  # fmt: skip
    assert [one.id for one in found[1].tool_calls] == ["c1", "c2"]


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [
        ("messages", [], {}),
        ("max_completion_tokens", 3, {"max_output_tokens": 4}),
        ("reasoning_effort", "low", {"reasoning": {"effort": "high"}}),
        ("response_format", {"type": "text"}, {"text": {"format": {"type": "json_object"}}}),
        ("truncate_prompt_tokens", 2, {"truncation": "auto"}),
    ],
)
def test_what_is_said_twice_must_agree(name: str, value: Any, own: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=f"`{name}` is said in another way, too") as caught:
        responses.chat_request(request(**{name: value}, **own))
    assert caught.value.field == name


def test_a_chats_own_names_hold_where_nothing_else_says_it() -> None:
    assert job_of(request(max_completion_tokens=3)).requests[0].stopping.max_tokens == 3
    assert job_of(request(max_completion_tokens=3, max_output_tokens=3)).requests[0].stopping.max_tokens == 3
    for fields in ({"verbosity": "low"}, {"text": {"verbosity": "low"}}):
        (one,) = job_of(request(**fields)).requests
        assert json.loads(one.chat.template_kwargs_json) == {"verbosity": "low"}


def test_options() -> None:
    body = request(
        max_output_tokens=9, temperature=0.5, top_p=0.9, truncation="auto", reasoning={"effort": "low"}, model="sql",
        include=["message.output_text.logprobs"], top_logprobs=2, stream=True, speculation="off",
    )  # fmt: skip
    job = job_of(body)
    (one,) = job.requests
    assert (one.stopping.max_tokens, one.sampling.temperature, one.sampling.top_p) == (9, 0.5, 0.9)
    assert (one.adapter_id, one.output.top_logprobs, one.speculation.off, job.is_streamed) == ("sql", 2, True, True)
    assert one.HasField("truncate_prompt")
    assert json.loads(one.chat.template_kwargs_json) == {"reasoning_effort": "low"}


def test_a_demanded_call_goes_before_the_format() -> None:
    schema = {"type": "json_schema", "name": "add", "schema": {"type": "object"}}
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    body = request(text={"format": schema}, tools=[tool], tool_choice={"type": "function", "name": "add"})
    (one,) = job_of(body).requests
    assert (one.chat.tool_choice.name, one.HasField("grammar")) == ("add", False)


def test_tools_that_are_no_functions_are_left_out() -> None:
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    namespace = {"type": "namespace", "name": "my crm", "tools": [{"type": "custom", "name": "patch"}]}
    hosted = [{"type": "web_search"}, namespace, {"type": "web_search"}]
    for choice in (None, "auto", "required", {"type": "function", "name": "add"}):
        body = request(tools=[*hosted, add], tool_choice=choice)
        assert job_of(body).requests == job_of(request(tools=[add], tool_choice=choice)).requests
        assert responses.ignored_parts(body) == ["tools.web_search", "tools.custom"]
    assert job_of(request(tools=hosted, tool_choice="auto")).requests == job_of(request()).requests
    for choice in ("required", {"type": "web_search"}, {"type": "allowed_tools", "mode": "auto", "tools": []}):
        with pytest.raises(Unimplemented, match="takes auto, none, required or a function, or functions") as caught:
            job_of(request(tools=hosted, tool_choice=choice))
        assert caught.value.field == "tool_choice"


def in_namespace(namespace: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]
    return {"type": "namespace", "name": namespace, "description": "x", "tools": tools}


@pytest.mark.parametrize("namespace", ["mcp__files", "mcp__files__"])
def test_functions_of_a_namespace_are_tools(namespace: str) -> None:
    """The model has one name for both. Calls have the two again, there and back."""
    earlier = {"type": "function_call", "call_id": "c0", "namespace": namespace, "name": "read", "arguments": "{}"}
    choice = {"type": "function", "namespace": namespace, "name": "read"}
    body = request(tools=[ADD, in_namespace(namespace, "read", "write")], input=[earlier], tool_choice=choice)
    chat = job_of(body).requests[0].chat
    named = [tool["function"]["name"] for tool in json.loads(chat.tools_json)]
    assert named == ["add", "mcp__files__read", "mcp__files__write"]
    assert chat.messages[0].tool_calls[0].name == chat.tool_choice.name == "mcp__files__read"
    assert responses.ignored_parts(body) == []
    completion = pb.Completion(message=pb.ChatMessage(tool_calls=[
        pb.ToolCall(id="c1", name="mcp__files__write", arguments_json="{}"), pb.ToolCall(id="c2", name="add"),
        pb.ToolCall(id="c3", name="read"),
    ]))  # fmt: skip
    whole = responses.response_of(body, job_of(body), pb.GenerateResponse(completions=[completion]))
    deltas = [call(0, name="mcp__files__write"), call(0, "{}"), call(1, name="add"), call(2, name="read")]
    events = streamed(body, pb.GenerateStreamResponse(deltas=deltas))
    for output in (whole["output"], events[-1]["response"]["output"]):
        told = [(one.get("namespace"), one["name"]) for one in output]
        assert told == [(namespace, "write"), (None, "add"), (namespace, "read")], "the last by its own name"
    added = [one["item"] for one in events if one["type"] == "response.output_item.added"]
    assert [(one.get("namespace"), one["name"]) for one in added] == told


def test_a_namespace_that_is_listed_twice_is_one() -> None:
    completion = pb.Completion(message=pb.ChatMessage(tool_calls=[pb.ToolCall(id="c1", name="read")]))
    for others, namespace in (([], "files"), ([in_namespace("mails", "read")], None)):
        body = request(tools=[in_namespace("files", "read"), in_namespace("files", "read"), *others])
        (one,) = responses.response_of(body, job_of(body), pb.GenerateResponse(completions=[completion]))["output"]
        assert (one.get("namespace"), one["name"]) == (namespace, "read")


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_are_allowed(mode: str) -> None:
    add, sub = ({"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("add", "sub"))
    tools = [add, {"type": "web_search"}, sub]
    allowed = [{"type": "web_search"}, {"type": "function", "name": "sub"}]
    choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
    body = request(tools=tools, tool_choice=choice)
    assert job_of(body).requests == job_of(request(tools=[sub], tool_choice=mode)).requests


@pytest.mark.parametrize(
    ("kind", "told"),
    [("item_reference", "set `store` to false in the client"), ("computer_call", "send messages, reasoning and calls")],
)
def test_an_item_that_is_not_available_is_told_with_what_to_do(kind: str, told: str) -> None:
    with pytest.raises(Unimplemented, match=rf"`input\[1\]` has the type '{kind}': .*{told}"):
        job_of(request(input=[{"role": "user", "content": "hi"}, {"type": kind, "id": "x"}]))


@pytest.mark.parametrize("name", ["previous_response_id", "conversation"])
def test_fields_that_stand_for_earlier_answers_are_told_with_what_to_do(name: str) -> None:
    with pytest.raises(Unimplemented, match=f"`{name}` is not available: .* set `store` to false in the client"):
        job_of(request(**{name: "x"}))


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"previous_response_id": "x"}, "previous_response_id"), ({"n": 2}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"input": []}, "input"), ({"input": [{"role": "user"}]}, "input[0]"),
        ({"input": [{"content": "x"}]}, "input[0].role"), ({"input": [{"role": 5, "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "\ud800"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"), ({"input": [{"type": ["x"]}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0]"),
        ({"input": [{"type": "function_call", "name": 5}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": 5, "name": "add"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": 5, "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call", "name": "f x"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "a b", "name": "f"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a b", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": None}]}, "tools"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "function": {"name": "add"}}]}, "tools[1].name"),
        ({"tools": [{"type": "web_search"}, {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "add"}], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [ADD]}}, "tool_choice.mode"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "tools": [ADD]}}, "tool_choice.mode"),
        ({"tools": [ADD], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [ADD], "tool_choice": {"name": "add"}}, "tool_choice.type"),
        ({"tools": [], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ADD]}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [in_namespace("a b", "c")]}, "tools[0].name"),
        ({"input": [{"type": "function_call", "name": "f", "namespace": "x y"}]}, "input[0].namespace"),
        (
            {
                "tools": [ADD, in_namespace("a", "b")],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ADD, in_namespace("a", "b")]},
            },
            "tool_choice.tools",
        ),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [3]}]}, "tools[0].tools"),
        ({"tools": [in_namespace("a", "b c")]}, "tools[0].tools[0].name"),
        ({"tools": [in_namespace("a" * 128, "b")]}, "tools[0].tools[0].name"),
        ({"tools": [in_namespace("a", "b"), in_namespace("a__", "b")]}, "tools[1].tools[0].name"),
        ({"tools": [{"type": "function", "name": "a__b"}, in_namespace("a", "b")]}, "tools[1].tools[0].name"),
        ({"metadata": {"a": "\ud800"}}, "metadata"), ({"metadata": {"a": float("nan")}}, "metadata"),
        ({"reasoning": {"effort": "\ud800"}}, "reasoning"), ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"reasoning_effort": 5}, "reasoning_effort"), ({"text": {"verbosity": 5}}, "text.verbosity"),
        ({"text": {"format": "json_object"}}, "text.format"), ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": 3}}}, "text.format"),
        ({"response_format": {}}, "response_format.type"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], name: str) -> None:
    body = request(**fields)
    with pytest.raises((InvalidArgument, Unimplemented)) as caught:
        chat = responses.chat_request(body)
        try:
            check_generate(requests.chat_job(chat, ("base",), "rid", 7).requests[0])
        except LoraplexError as error:  # as the route does
            raise responses.named(error, body) from None
    found = caught.value
    assert (found.field, f"`{name}" in found.message or found.message.startswith(name)) == (name, True)


def test_two_grammars_are_told_by_the_requests_names() -> None:
    body = request(text={"format": {"type": "json_object"}}, guided_json={})
    with pytest.raises(InvalidArgument) as caught:
        job_of(body)
    assert "`text.format` and `guided_json`" in responses.named(caught.value, body).message


def test_an_answer() -> None:
    body = request(instructions="brief", max_output_tokens=5, metadata={"a": "b"})
    job = job_of(body)
    usage = pb.Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1, reasoning_tokens=1)
    completion = pb.Completion(text="hello", finish_reason=pb.FINISH_REASON_LENGTH, usage=usage)
    answer = pb.GenerateResponse(completions=[completion], usage=usage)
    found = responses.response_of(body, job, answer)
    assert (found["id"], found["status"]) == ("resp_rid", "incomplete")
    assert found["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = found["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}]
    assert found["usage"] == {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0}, "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 5,
    }  # fmt: skip
    assert found["parallel_tool_calls"]
    single = request(parallel_tool_calls=False)
    assert not responses.response_of(single, job_of(single), answer)["parallel_tool_calls"]
    assert (found["store"], found["metadata"], found["temperature"]) == (False, {"a": "b"}, 1.0)


def call(index: int, arguments: str = "", name: str = "") -> pb.ChatDelta:
    """The next part of a call; the first one has its name."""
    call_id = f"c{index}" if name else ""
    return pb.ChatDelta(tool_call=pb.ToolCallDelta(index=index, id=call_id, name=name, arguments_json=arguments))


def test_thoughts_calls_and_texts_are_items() -> None:
    output = responses.Output(job_of(request()), {})
    parts = [
        *(pb.ChatDelta(reasoning=text) for text in "hm"), *(pb.ChatDelta(content=text) for text in "ab"),
        call(0, name="add"), call(0, "{}"),
    ]  # fmt: skip
    found = [event["type"].removeprefix("response.") for part in parts for event in output.add([part], [])]
    found += [event["type"].removeprefix("response.") for event in output.close()]
    assert found == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [item["type"] for item in output.items] == ["reasoning", "message", "function_call"]
    assert output.items[1]["content"][0]["text"] == "ab"
    assert output.items[2] == {
        "type": "function_call", "call_id": "c0", "name": "add", "arguments": "{}", "id": "fc_rid_2",
        "status": "completed",
    }  # fmt: skip


def streamed(body: ResponsesRequest, *messages: pb.GenerateStreamResponse) -> list[dict[str, Any]]:
    answer = responses.Answer(job_of(body), body)
    raw = [event for message in messages for event in answer.events(0, message.SerializeToString())]
    return [json.loads(event.split(b"data: ")[1]) for event in (*raw, *answer.end())]


def shown(response: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Type, text and status of each item."""
    return [
        (one["type"], one["arguments"] if "arguments" in one else one["content"][0]["text"], one["status"])
        for one in response["output"]
    ]


@pytest.mark.parametrize("include_reasoning", [True, False])
@pytest.mark.parametrize("sizes", [(5, 3), (1, 1, 1, 1, 1, 1, 1, 1), (8,)])
def test_items_are_in_the_order_of_the_parts_however_they_come(sizes: tuple[int, ...], include_reasoning: bool) -> None:
    text, thought = (lambda text: pb.ChatDelta(content=text)), (lambda text: pb.ChatDelta(reasoning=text))
    parts = [
        text("a"),
        call(0, name="f"),
        call(0, "{"),
        call(0, "}"),
        text("\nb"),
        thought("h"),
        thought("m"),
        text("\nc"),
    ]
    body = request(stream=True, include_reasoning=include_reasoning)
    end = pb.FINISH_REASON_LENGTH
    chunks: list[pb.GenerateStreamResponse] = []
    for begin, size in zip(accumulate(sizes, initial=0), sizes, strict=False):
        chunks.append(pb.GenerateStreamResponse(deltas=parts[begin : begin + size]))
    last = streamed(body, *chunks, pb.GenerateStreamResponse(finish_reason=end))[-1]
    items = [("message", "a", "completed"), ("function_call", "{}", "completed")]
    if include_reasoning:
        items += [("message", "\nb", "completed"), ("reasoning", "hm", "completed"), ("message", "\nc", "incomplete")]
    else:
        items += [("message", "\nb\nc", "incomplete")]
    assert (last["type"], shown(last["response"])) == ("response.incomplete", items)
    message = pb.ChatMessage(
        content="a\nb\nc", reasoning="hm", tool_calls=[pb.ToolCall(id="c0", name="f", arguments_json="{}")]
    )
    completion = pb.Completion(message=message, deltas=parts, finish_reason=end)
    whole = responses.response_of(body, job_of(body), pb.GenerateResponse(completions=[completion]))
    assert shown(whole) == items


def test_a_whole_answer_in_the_usual_order() -> None:
    """It has no parts."""
    calls = [pb.ToolCall(id=f"c{index}", name="f", arguments_json="{}") for index in range(2)]
    message = pb.ChatMessage(reasoning="hm", content="a", tool_calls=calls)
    body = request()
    answer = pb.GenerateResponse(completions=[pb.Completion(message=message, finish_reason=pb.FINISH_REASON_EOS)])
    found = responses.response_of(body, job_of(body), answer)
    assert [kind for kind, _, _ in shown(found)] == ["reasoning", "message", "function_call", "function_call"]
    assert [one["call_id"] for one in found["output"][2:]] == ["c0", "c1"]


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_messages_have_the_logprobs_of_their_own_tokens(size: int) -> None:
    """Tokens of thoughts and calls have none, nor have those of a call that is dropped within a message. Parts may come
    later than their tokens."""
    text = "Tt-aéé-CbDe$"
    rows = [pb.TokenLogprob(text=one, logprob=-1.0, bytes=one.encode()) for one in text]
    parts = [
        pb.ChatDelta(reasoning="t"), pb.ChatDelta(content="a", first_token=3, end_token=4),
        pb.ChatDelta(content="é", first_token=4, end_token=6), call(0, "{}", "f"),
        pb.ChatDelta(content="\nb", first_token=8, end_token=9),
        pb.ChatDelta(content="\ne", first_token=10, end_token=11),
    ]  # fmt: skip
    body = request(stream=True, include=["message.output_text.logprobs"])
    chunk, end = pb.GenerateStreamResponse, pb.FINISH_REASON_EOS
    messages = [chunk(logprobs=rows[begin : begin + size]) for begin in range(0, len(rows), size)]
    late = [parts[begin : begin + size] for begin in range(0, len(parts), size)]
    for message, part in zip(messages[-len(late) :], late, strict=True):
        message.deltas.extend(part)
    found = streamed(body, *messages, chunk(finish_reason=end))
    completion = pb.Completion(
        message=pb.ChatMessage(content="aé\nb\ne"), deltas=parts, logprobs=rows, finish_reason=end
    )
    whole = responses.response_of(body, job_of(body), pb.GenerateResponse(completions=[completion]))
    for response in (found[-1]["response"], whole):
        texts = [one["content"][0] for one in response["output"] if one["type"] == "message"]
        assert [[row["token"] for row in one["logprobs"]] for one in texts] == [["a", "é", "é"], ["b", "e"]]
    in_events = [row["token"] for one in found if one["type"].endswith("text.delta") for row in one.get("logprobs", ())]
    assert in_events == ["a", "é", "é", "b", "e"]


def test_parts_that_do_not_say_their_tokens_have_the_logprobs_so_far() -> None:
    output = responses.Output(job_of(request()), {})
    for text in "ab":
        assert list(output.add([pb.ChatDelta(content=text)], [text]))[-1]["logprobs"] == [text]


def test_an_error_in_a_stream_is_its_last_event() -> None:
    body = request(stream=True)
    event = responses.Answer(job_of(body), body).error(LoraplexError("x"))
    assert event.startswith(b"event: error\ndata: {")
