"""Tools and parsed messages, from OpenAI's form to the wire's and back. Pure.

Workers tell calls and reasoning from the content; what they say is only given another form here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

from loraplex_contracts.adapters import check_id
from loraplex_contracts.errors import InvalidArgument, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.fields import json_text
from loraplex_router.http.openai.fields import ChatCompletionRequest, ToolChoice


def put_tools(request: pb.GenerateRequest, body: ChatCompletionRequest) -> None:
    """Puts tools and their choice into the request. Raises InvalidArgument with the name of OpenAI's field."""
    request.output.parse_chat = True
    chat, tools, choice = request.chat, body.tools or [], body.tool_choice
    names = [_name_of(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    known = frozenset(names)
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        if (allowed := choice.allowed_tools) is None:
            raise _missing("allowed_tools")
        wanted = {_known(one.function.name, known) for one in allowed.tools}
        # A model that is told of no other tool calls none.
        tools = [tool for tool, name in zip(tools, names, strict=True) if name in wanted]
        choice = allowed.mode
    if tools:
        # Tools go on as they came: what one has beside its name is between the client and the chat template.
        chat.tools_json = json_text(tools, "tools")
        if body.parallel_tool_calls is not None:
            chat.parallel_tool_calls = body.parallel_tool_calls
    if choice is None or (choice == "auto" and not tools):
        return
    if isinstance(choice, str) and choice in ("none", "auto", "required"):
        setattr(chat.tool_choice, choice, True)
    elif isinstance(choice, str):
        chat.tool_choice.name = _known(choice, known)
    elif choice.function is None:
        raise _missing("function")
    else:
        chat.tool_choice.name = _known(choice.function.name, known)
    if not tools and choice != "none":
        raise InvalidArgument("`tool_choice` needs `tools`", field="tool_choice")


def _missing(part: str) -> InvalidArgument:
    return InvalidArgument(f"`tool_choice.{part}` is missing", field=f"tool_choice.{part}")


def _known(name: str, names: Collection[str]) -> str:
    """The name, which is a tool's. Raises InvalidArgument for others."""
    if name not in names:
        shown = ascii(name if len(name) <= 60 else name[:57] + "...")
        raise InvalidArgument(f"`tool_choice` names {shown}, which is not one of `tools`", field="tool_choice")
    return name


def _name_of(tool: dict[str, Any], where: str) -> str:
    if tool.get("type", "function") != "function":
        raise Unimplemented(f"`{where}.type` must be function: there are no other tools", field=f"{where}.type")
    function = tool.get("function")
    name: Any = cast("dict[str, Any]", function).get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument(f"`{where}` has no `function` with a `name`", field=f"{where}.function")
    return check_id(name, field=f"{where}.function.name")


def message_of(completion: pb.Completion, reasoning_fields: Sequence[str]) -> dict[str, Any]:
    """A choice's message, its reasoning under these names."""
    message = completion.message if completion.HasField("message") else pb.ChatMessage(content=completion.text)
    found: dict[str, Any] = {"role": "assistant", "content": message.content, "refusal": None}
    found |= dict.fromkeys(reasoning_fields, message.reasoning or None)
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [_call(call.id, call.name, call.arguments_json) for call in message.tool_calls]
    return found


def parts_of(completion: pb.Completion) -> Sequence[pb.ChatDelta]:
    """The parts of a completion's message in their order."""
    if completion.deltas:
        return completion.deltas
    message = completion.message if completion.HasField("message") else pb.ChatMessage(content=completion.text)
    parts = [pb.ChatDelta(reasoning=message.reasoning), pb.ChatDelta(content=message.content)]
    calls = (
        pb.ToolCallDelta(index=index, id=call.id, name=call.name, arguments_json=call.arguments_json)
        for index, call in enumerate(message.tool_calls)
    )
    return [
        *(part for part in parts if part.reasoning or part.content),
        *(pb.ChatDelta(tool_call=call) for call in calls),
    ]


def delta_of(chunk: pb.GenerateStreamResponse, reasoning_fields: Sequence[str]) -> dict[str, Any]:
    """A chunk's delta: all parts that came together."""
    found: dict[str, Any] = {}
    for delta in chunk.deltas:
        match delta.WhichOneof("kind"):
            case "content":
                found["content"] = found.get("content", "") + delta.content
            case "reasoning":
                found |= {name: found.get(name, "") + delta.reasoning for name in reasoning_fields}
            case "tool_call":
                call, calls = delta.tool_call, cast("list[dict[str, Any]]", found.setdefault("tool_calls", []))
                if call.id:
                    calls.append({"index": call.index, **_call(call.id, call.name, call.arguments_json)})
                elif calls and calls[-1]["index"] == call.index:  # clients take one entry for each call of a chunk
                    calls[-1]["function"]["arguments"] += call.arguments_json
                else:
                    calls.append({"index": call.index, "function": {"arguments": call.arguments_json}})
            case _:
                pass
    return found


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
