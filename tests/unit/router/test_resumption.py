"""Resumed streams: what the client gets after its worker was lost."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_contracts.errors import WorkerLost
from loraplex_proto.v1 import inference_pb2
from loraplex_router.resumption import Resumption, may_resume
from loraplex_router.upstream import UpstreamFailure

Generate = inference_pb2.GenerateRequest
Chunk = inference_pb2.GenerateStreamResponse
TOKENS = list(range(100, 112))
TEXTS = ["a", "", "bc", "d", "", "", "efg", "h", "i", "", "jk", "l"]  # what each token adds
NO_METADATA = grpc.aio.Metadata()


def loss() -> UpstreamFailure:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, NO_METADATA, NO_METADATA, "Socket closed")
    return UpstreamFailure("w0", error)


def answer(ends: list[int], digest: str = "d", tokens: list[int] = TOKENS) -> list[bytes]:
    """The whole answer, in messages that end at these tokens."""
    messages: list[bytes] = []
    for number, (start, end) in enumerate(zip([0, *ends], [*ends, len(tokens)], strict=True)):
        text = "".join(TEXTS[start:end])
        chunk = Chunk(token_ids=tokens[start:end], text_delta=text)
        chunk.logprobs.extend(inference_pb2.TokenLogprob(token_id=one, logprob=-1.0) for one in tokens[start:end])
        if text:
            chunk.deltas.add(content=text)
        if number == 0:
            chunk.request_id, chunk.adapter_digest, chunk.seed = "r", digest, 7
        if end == len(tokens):
            chunk.finish_reason = inference_pb2.FINISH_REASON_LENGTH
            chunk.usage.completion_tokens = len(tokens)
        messages.append(chunk.SerializeToString())
    return messages


def got(messages: list[bytes]) -> tuple[list[int], list[int], str, str]:
    found = [Chunk.FromString(one) for one in messages]
    return (
        [token for one in found for token in one.token_ids],
        [logprob.token_id for one in found for logprob in one.logprobs],
        "".join(one.text_delta for one in found),
        "".join(delta.content for one in found for delta in one.deltas),
    )


WHOLE = (TOKENS, TOKENS, "".join(TEXTS), "".join(TEXTS))
_ends = st.lists(st.integers(1, len(TOKENS) - 1), unique=True).map(sorted)


@given(_ends, _ends, _ends, st.integers(0, 12), st.integers(0, 12))
def test_the_answer_is_whole_wherever_workers_are_lost(
    first: list[int], second: list[int], third: list[int], num_first: int, num_second: int
) -> None:
    one = Resumption(b"")
    attempts = [answer(first)[:-1][:num_first], answer(second)[:-1][:num_second], answer(third)]
    sent: list[bytes] = []
    for messages in attempts:
        sent += [rest for message in messages if (rest := one.rest_of(message))]
        if sent:
            one.restart(loss())
    assert got(sent) == WHOLE
    chunks = [Chunk.FromString(message) for message in sent]
    assert [bool(chunk.request_id) for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert [bool(chunk.finish_reason) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_what_nobody_lost_passes_as_it_came() -> None:
    one = Resumption(b"")
    messages = answer([3, 5])
    for message in messages:
        assert not one.has_ended
        assert one.rest_of(message) is message
    assert one.has_ended
    assert one.loss is None


def test_the_seed_goes_along() -> None:
    request = Generate(text="x", sampling={"temperature": 1.0, "top_k": 5})
    one = Resumption(request.SerializeToString())
    one.rest_of(answer([3])[0])
    request.sampling.seed = 7
    assert Generate.FromString(one.raw) == request


@pytest.mark.parametrize(
    "messages",
    [
        answer([3], digest="other"),
        answer([3], tokens=[*TOKENS[:4], 1, *TOKENS[5:]]),
        answer([3], tokens=TOKENS[:5]),  # it ends before what the client has
    ],
)
def test_another_answer_is_none(messages: list[bytes]) -> None:
    one = Resumption(b"")
    for message in answer([3, 6])[:2]:
        one.rest_of(message)
    one.restart(loss())
    with pytest.raises(WorkerLost):
        for message in messages:
            assert one.rest_of(message) == b"", "nothing is sent that is not the answer's"


def test_an_end_that_was_lost_is_sent_alone() -> None:
    one = Resumption(b"")
    messages = answer(list(range(1, 12)))
    for message in messages:
        one.rest_of(message)
    one.restart(loss())
    rest = [message for message in map(one.rest_of, messages) if message]
    assert [Chunk.FromString(message).usage.completion_tokens for message in rest] == [12]
    assert got(rest)[0] == []


@pytest.mark.parametrize(
    ("request_", "may"),
    [
        (Generate(text="x"), True),
        (Generate(text="x", n=1, sampling={"temperature": 1.0}), True),
        (Generate(text="x", n=2), False),
        (Generate(text="x", output={"omit_token_ids": True}), False),
        (Generate(chat={"messages": []}, output={"parse_chat": True}), True),
        (Generate(chat={"tools_json": "[{}]"}, output={"parse_chat": True}), False),
    ],
)
def test_which_requests_show_enough(request_: Generate, may: bool) -> None:
    assert may_resume(request_) is may
