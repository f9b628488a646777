"""Messages as records: parsed chats of answers and streams."""

from __future__ import annotations

from typing import Any

from loraplex._answers import ChunkReader, generation
from loraplex._requests import generate_request
from loraplex.types import (
    ChatDelta,
    ToolCallDelta,
)
from loraplex_proto.v1 import inference_pb2


def test_parsed_answers() -> None:
    call = inference_pb2.ToolCall(id="call_1", name="f", arguments_json='{"x": 1}')
    sent = inference_pb2.ChatMessage(role="assistant", content="so", reasoning="hm", tool_calls=[call])
    raw = inference_pb2.GenerateResponse(
        completions=[inference_pb2.Completion(message=sent), inference_pb2.Completion()]
    )
    answer = generation(raw.SerializeToString())
    message: Any = answer.message
    assert message == {
        "role": "assistant",
        "content": "so",
        "reasoning": "hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    }
    assert answer.completions[1].message is None
    assert hash(answer)
    again = generate_request(None, {"messages": [message]})
    assert again.chat.messages[0] == sent, "an answer goes on as a message"

    chunk = inference_pb2.GenerateStreamResponse(
        deltas=[
            inference_pb2.ChatDelta(reasoning="hm"),
            inference_pb2.ChatDelta(content="so"),
            inference_pb2.ChatDelta(
                tool_call=inference_pb2.ToolCallDelta(index=1, id="call_1", name="f", arguments_json="{}")
            ),
        ],
        message=sent,
    )
    read = ChunkReader("r").read(chunk.SerializeToString())
    assert read.deltas == (
        ChatDelta(reasoning="hm"),
        ChatDelta(content="so"),
        ChatDelta(tool_call=ToolCallDelta(1, "{}", "call_1", "f")),
    )
    assert read.message == message
