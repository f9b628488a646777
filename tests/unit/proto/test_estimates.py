"""Estimated tokens of requests."""

from __future__ import annotations

import pytest

from loraplex_proto.estimates import estimated_pooling_tokens, estimated_tokens, estimated_work
from loraplex_proto.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest, Stopping, TokenIds, ToolCall, Truncate
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


@pytest.mark.parametrize(
    ("truncation", "max_tokens", "wanted"),
    [
        (None, 20, (300, 1)),
        (Truncate(max_tokens=40), 20, (40, 20)),
        (Truncate(max_tokens=40), None, (40, 60)),
        (Truncate(max_tokens=400), 20, (300, 1)),
        # As many as fit: the worker cuts so too.
        (Truncate(), 20, (80, 20)),
        (Truncate(), None, (99, 1)),
        (Truncate(), 100, (1, 99)),
    ],
)
def test_the_work_of_a_request_is_that_of_its_prompt_as_it_is_cut(
    truncation: Truncate | None, max_tokens: int | None, wanted: tuple[int, int]
) -> None:
    ids, stopping = TokenIds(ids=range(300)), Stopping(max_tokens=max_tokens)
    request = GenerateRequest(token_ids=ids, truncate_prompt=truncation, stopping=stopping)
    assert estimated_work(request, 100) == wanted


def test_each_input_of_a_score_has_the_query_in_front() -> None:
    inputs = [PoolingInput(text="x" * 400), PoolingInput(token_ids=TokenIds(ids=range(9)))]
    assert estimated_pooling_tokens(inputs) == 110
    assert estimated_pooling_tokens(inputs, PoolingInput(text="y" * 40)) == 132
    assert estimated_pooling_tokens([], PoolingInput(text="y" * 40)) == 0
