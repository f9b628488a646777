"""Conversion between messages and plain data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from loraplex_contracts.request import FinishReason, Request, SamplingParams, SpeculationParams
from loraplex_proto.v1 import inference_pb2
from loraplex_proto.v1.inference_pb2 import GenerateRequest, ProposerUsage, Speculation
from loraplex_proto.validate import check_generate
from loraplex_server.frontend.generation import CompletionSummary, Delta, Drafts
from loraplex_server.grpc import protobuf as convert
from loraplex_server.text.responses import MessagePart


def request_of(message: GenerateRequest) -> Request:
    check_generate(message)
    return convert.to_request(
        message, (1, 2), SamplingParams(), request_id="r/1", tenant="default", room=10, arrival_s=0.0, deadline_s=None
    )


@pytest.mark.parametrize(
    ("speculation", "params"),
    [
        ({}, SpeculationParams()),
        ({"off": True}, SpeculationParams("off")),
        ({"auto": True, "max_draft_tokens": 6}, SpeculationParams("auto", max_draft_tokens=6)),
        ({"medusa": {}}, SpeculationParams("medusa")),
        ({"medusa": {"adapter_id": "heads"}}, SpeculationParams("medusa", medusa_id="heads")),
        ({"prompt_lookup": {}}, SpeculationParams("prompt_lookup")),
        (
            {"prompt_lookup": {"min_ngram": 2, "max_ngram": 5}, "fixed_length": True},
            SpeculationParams("prompt_lookup", min_ngram=2, max_ngram=5, fixed_length=True),
        ),
        ({"draft_model": {}}, SpeculationParams("draft_model")),
        ({"draft_model": {"name": "tiny"}}, SpeculationParams("draft_model", draft_name="tiny")),
        ({"max_draft_tokens": 3}, SpeculationParams(None, max_draft_tokens=3)),
    ],
)
def test_how_a_request_speculates(speculation: Any, params: SpeculationParams) -> None:
    assert request_of(GenerateRequest(text="a", speculation=Speculation(**speculation))).speculation == params


def test_a_request_that_does_not_say() -> None:
    assert request_of(GenerateRequest(text="a")).speculation == SpeculationParams()


def summary(index: int, *drafts: Drafts, num_tokens: int = 4, num_steps: int = 2) -> CompletionSummary:
    return CompletionSummary(index, FinishReason.EOS, None, 0, 3, 1, num_tokens, num_steps, drafts)


def test_usage_of_a_completion() -> None:
    usage = convert.usage_to_pb(summary(0, Drafts("medusa", 5, 3), Drafts("prompt_lookup", 2, 0)))
    assert usage == inference_pb2.Usage(
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=1,
        drafted_tokens=7,
        accepted_tokens=3,
        steps=2,
        proposers=[
            ProposerUsage(name="medusa", drafted_tokens=5, accepted_tokens=3),
            ProposerUsage(name="prompt_lookup", drafted_tokens=2, accepted_tokens=0),
        ],
    )


def test_usage_of_parsed_answers() -> None:
    parsed = [replace(summary(0), num_reasoning_tokens=num) for num in (2, 1)]
    assert [convert.usage_to_pb(one).reasoning_tokens for one in parsed] == [2, 1]
    assert convert.usage_to_pb(*parsed).reasoning_tokens == 3


def test_usage_of_a_request_is_the_sum_by_proposer() -> None:
    first = summary(0, Drafts("prompt_lookup", 2, 1))
    second = summary(1, Drafts("medusa", 5, 3), Drafts("prompt_lookup", 4, 4), num_tokens=9, num_steps=3)
    usage = convert.usage_to_pb(first, second)
    assert (usage.prompt_tokens, usage.cached_tokens) == (3, 1), "one prefill"
    assert (usage.completion_tokens, usage.steps) == (13, 5)
    assert (usage.drafted_tokens, usage.accepted_tokens) == (11, 8)
    assert [(p.name, p.drafted_tokens, p.accepted_tokens) for p in usage.proposers] == [
        ("medusa", 5, 3),
        ("prompt_lookup", 6, 5),
    ]


def test_nothing_drafted() -> None:
    usage = convert.usage_to_pb(summary(0))
    assert not usage.proposers
    assert usage.drafted_tokens == 0


def test_a_chunk_names_its_proposer() -> None:
    delta = Delta(0, "ab", (1, 2), num_drafted=4, num_accepted=1, proposer="medusa")
    chunk = convert.delta_to_pb(delta, with_token_ids=True)
    assert (chunk.drafted_tokens, chunk.accepted_tokens, chunk.proposer) == (4, 1, "medusa")
    last = convert.delta_to_pb(Delta(0, end=summary(0, Drafts("medusa", 4, 1))), with_token_ids=True)
    assert (last.proposer, last.usage.proposers[0].name) == ("", "medusa")


def test_parts_of_a_whole_message_that_are_not_in_the_usual_order() -> None:
    call = [MessagePart("call", id="c", name="f"), MessagePart("arguments", "{"), MessagePart("arguments", "}")]
    begin, end = MessagePart("content", "a"), MessagePart("content", "b")
    thought = MessagePart("reasoning", "hm")

    def parts_in(*parts: MessagePart) -> list[inference_pb2.ChatDelta]:
        deltas = [Delta(0, parts=parts[:2]), Delta(0, parts=parts[2:], end=summary(0))]
        return list(convert.completion_to_pb(summary(0), deltas, prefix="", with_token_ids=False).deltas)

    assert parts_in(thought, begin, end, *call, *(replace(part, index=1) for part in call)) == []
    assert parts_in(begin, end, thought, *call, end) == [
        inference_pb2.ChatDelta(content="ab"),
        inference_pb2.ChatDelta(reasoning="hm"),
        inference_pb2.ChatDelta(tool_call=inference_pb2.ToolCallDelta(id="c", name="f", arguments_json="{}")),
        inference_pb2.ChatDelta(content="b"),
    ]


def test_tokens_of_parts() -> None:
    parts = [MessagePart("reasoning", "hm"), *(MessagePart("content", "a", tokens=(at, at + 1)) for at in (3, 4))]
    (thought, content) = convert.delta_to_pb(Delta(0, parts=tuple(parts)), with_token_ids=True).deltas
    assert thought == inference_pb2.ChatDelta(reasoning="hm")
    assert content == inference_pb2.ChatDelta(content="aa", first_token=3, end_token=5)
    whole = convert.completion_to_pb(summary(0), [Delta(0, parts=tuple(parts))], prefix="", with_token_ids=True)
    assert list(whole.deltas) == [thought, content], "in any order"


def test_what_a_server_can_do() -> None:
    kinds = convert.speculation_kinds(("prompt_lookup", "medusa"), ("tiny", "a:b"))
    assert kinds == ["off", "auto", "prompt_lookup", "medusa", "draft_model:tiny", "draft_model:a:b"]
    assert convert.speculation_kinds((), ()) == ["off"], "nothing to pick from"
