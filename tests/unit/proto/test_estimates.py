"""Estimated tokens of prompts."""

from __future__ import annotations

import pytest

from loraplex_proto.estimates import estimated_tokens
from loraplex_proto.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, TokenIds, ToolCall
from loraplex_proto.v1.pooling_pb2 import PoolingInput


@pytest.mark.parametrize("kind", [GenerateRequest, PoolingInput])
def test_ids_are_counted_and_texts_measured(kind: type[GenerateRequest | PoolingInput]) -> None:
    assert estimated_tokens(kind(token_ids=TokenIds(ids=range(9)))) == 9
    assert estimated_tokens(kind(text="x" * 400)) == 101
    assert estimated_tokens(kind(text="語" * 400)) == 301
    assert estimated_tokens(kind(text="")) == 1


def test_all_parts_of_a_chat_count_but_its_template() -> None:
    plain = Chat(messages=[ChatMessage(role="user", content="x" * 400)])
    assert 100 < estimated_tokens(GenerateRequest(chat=plain)) < 110
    calling = ChatMessage(role="assistant", reasoning="y" * 400, tool_calls=[ToolCall(arguments_json="z" * 400)])
    for more in (Chat(messages=[calling]), Chat(tools_json="t" * 400, documents_json="d" * 400)):
        chat = Chat(messages=plain.messages)
        chat.MergeFrom(more)
        assert 300 < estimated_tokens(GenerateRequest(chat=chat)) < 320
        chat.template = "ü" * 4000
        assert 300 < estimated_tokens(GenerateRequest(chat=chat)) < 320
