"""Translation of the wire's answers into OpenAI's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.openai_jobs import chat, completion

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.openai import answers


def row(token_id: int, text: str, logprob: float, *top: tuple[int, str, float]) -> pb.TokenLogprob:
    alternatives = [
        pb.TopLogprob(token_id=one, text=name, logprob=value, bytes=b"\xc3" if name == "\ufffd" else name.encode())
        for one, name, value in top
    ]
    return pb.TokenLogprob(token_id=token_id, text=text, logprob=logprob, top=alternatives, bytes=text.encode())


USAGE = pb.Usage(
    prompt_tokens=3, completion_tokens=2, cached_tokens=1, drafted_tokens=4, accepted_tokens=2, steps=1,
    proposers=[pb.ProposerUsage(name="medusa", drafted_tokens=4, accepted_tokens=2)],
)  # fmt: skip


def test_usage_of_chats_has_the_tokens_of_the_reasoning() -> None:
    usage = pb.Usage(prompt_tokens=3, completion_tokens=4, reasoning_tokens=2)
    found = answers.response_of(chat(n=2), [pb.GenerateResponse(usage=usage)])["usage"]
    assert found["completion_tokens_details"] == {"reasoning_tokens": 2}
    streamed = answers.Answer(chat(stream=True, stream_options={"include_usage": True}))
    last = pb.GenerateStreamResponse(finish_reason=pb.FINISH_REASON_EOS, usage=usage)
    assert list(streamed.chunks(0, last))
    assert next(streamed.end_chunks())["usage"] == found


def test_an_answer_to_several_prompts() -> None:
    job = completion(prompt=[[7], [1]], n=2, model="sql", return_token_ids=True)
    found = [
        pb.GenerateResponse(
            completions=[
                pb.Completion(index=1, text=f"{name}1", token_ids=[1], finish_reason=pb.FINISH_REASON_LENGTH),
                pb.Completion(
                    index=0, text=f"{name}0", token_ids=[2], finish_reason=pb.FINISH_REASON_STOP, stop_string="END"
                ),
            ],
            prompt_tokens=[pb.PromptToken(token_id=ids)], seed=ids, usage=USAGE, adapter_digest="d" * 64,
            timings=pb.Timings(queue_s=0.5),
        )
        for name, ids in (("a", 7), ("b", 1))
    ]  # fmt: skip
    body = answers.response_of(job, found)
    assert [(one["index"], one["text"]) for one in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
    assert [(one["finish_reason"], one["stop_reason"]) for one in body["choices"][:2]] == [
        ("stop", "END"), ("length", None),
    ]  # fmt: skip
    assert [one["prompt_token_ids"] for one in body["choices"]] == [[7], [7], [1], [1]]
    assert body["usage"] == {
        "prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip
    assert body["loraplex"]["proposers"] == {"medusa": {"drafted_tokens": 8, "accepted_tokens": 4}}
    assert body["loraplex"]["adapter_digest"] == "d" * 64
    assert body["loraplex"]["queue_s"] == 0.5
    assert body["loraplex"]["seed"] == [7, 1]
    assert answers.response_of(completion(), found[:1])["loraplex"]["seed"] == 7
    assert answers.response_of(completion(), [pb.GenerateResponse()])["loraplex"]["seed"] is None
    assert body["system_fingerprint"].endswith("-dddddddddddd")
    assert (body["id"], body["object"], body["model"]) == ("cmpl-rid", "text_completion", "sql")


PROMPT = [
    pb.PromptToken(token_id=9, text="<s>", bytes=b"<s>", is_special=True),
    pb.PromptToken(
        token_id=1, text="one", bytes=b"one", logprob=-2.0, top=[pb.TopLogprob(token_id=5, text="five", logprob=-0.5)]
    ),
    pb.PromptToken(
        token_id=2, text=" two", bytes=b" two", logprob=-1.0, top=[pb.TopLogprob(token_id=2, text=" two", logprob=-1.0)]
    ),
]


def echoed() -> pb.GenerateResponse:
    rows = [row(3, " three", -0.5, (4, " four", -0.25), (5, " five", -0.75))]
    return pb.GenerateResponse(
        completions=[
            pb.Completion(
                text="one two three", token_ids=[3], logprobs=rows, finish_reason=pb.FINISH_REASON_STOP,
                stop_token_id=0, usage=USAGE,
            )
        ],
        prompt_tokens=PROMPT, usage=USAGE,
    )  # fmt: skip


def test_logprobs_with_the_echoed_prompt() -> None:
    found = answers.response_of(completion(echo=True, logprobs=1), [echoed()])["choices"][0]["logprobs"]
    assert found["tokens"] == ["<s>", "one", " two", " three"]
    assert found["token_logprobs"] == [None, -2.0, -1.0, -0.5]
    assert found["top_logprobs"] == [
        None, {"five": -0.5, "one": -2.0}, {" two": -1.0}, {" four": -0.25, " three": -0.5},
    ]  # fmt: skip
    assert found["text_offset"] == [0, 0, 3, 7]
    job = completion(echo=True, logprobs=1, skip_special_tokens=False, return_tokens_as_token_ids=True)
    found = answers.response_of(job, [echoed()])["choices"][0]["logprobs"]
    assert found["text_offset"] == [0, 3, 6, 10]
    assert found["tokens"] == ["token_id:9", "token_id:1", "token_id:2", "token_id:3"]


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        pytest.param(["a", b"\xe4", b"\xbd", b"\xa0", "b"], "a你b", [0, 1, 1, 1, 2], id="parts of a character"),
        pytest.param(["a", b"\xe4", "b", "c"], "a\ufffdbc", [0, 1, 2, 3], id="one that stays unfinished"),
        pytest.param([" a", " b", " c"], "a b c", [0, 1, 3], id="first space left out"),
        pytest.param([" ", " a", " b"], " a b", [0, 0, 2], id="first space left out of two"),
        pytest.param([" a", " b", "c"], " a b", [0, 2, 4], id="first space is there"),
        pytest.param(["  ", "a"], "  a", [0, 2], id="two spaces"),
    ],
)
def test_offsets_in_the_text(pieces: list[str | bytes], text: str, offsets: list[int]) -> None:
    """The same in a stream, whose text may come later than the tokens."""
    raw = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    rows = [pb.TokenLogprob(text=piece.decode(errors="replace"), bytes=piece) for piece in raw]
    answer = pb.GenerateResponse(completions=[pb.Completion(text=text, logprobs=rows)])
    whole = answers.response_of(completion(logprobs=0), [answer])["choices"][0]["logprobs"]
    assert whole["text_offset"] == offsets
    prompt = [pb.PromptToken(text=row.text, bytes=row.bytes) for row in rows]
    echoed_whole = pb.GenerateResponse(completions=[pb.Completion(text=text + "!")], prompt_tokens=prompt)
    echo = answers.response_of(completion(echo=True, logprobs=0), [echoed_whole])["choices"][0]["logprobs"]
    assert echo["text_offset"] == offsets
    chunk = pb.GenerateStreamResponse
    messages = chunk(logprobs=rows[:1]), chunk(logprobs=rows[1:], text_delta=text)
    found = events(answers.Answer(completion(logprobs=0, stream=True)), *((0, one) for one in messages))
    logprobs = [one["choices"][0]["logprobs"] for one in found]
    assert [offset for one in logprobs if one for offset in one["text_offset"]] == offsets


def test_stop_reasons() -> None:
    """The end of sequence has none: it is no stop token of the request's."""
    for reason, expected in ((pb.FINISH_REASON_EOS, None), (pb.FINISH_REASON_STOP, 5)):
        ended = pb.Completion(text="a", finish_reason=reason, stop_token_id=5)
        (choice,) = answers.response_of(completion(), [pb.GenerateResponse(completions=[ended])])["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", expected)


@pytest.mark.parametrize(
    ("arguments", "stop_string", "reason"),
    [('{"a": 1}', None, "tool_calls"), ('{"a": 1}', "x", "tool_calls"), ('{"a": ', "x", "stop"), ("", "x", "stop")],
)
def test_a_call_that_a_stop_string_cuts_is_not_for_the_client_to_run(
    arguments: str, stop_string: str | None, reason: str
) -> None:
    message = pb.ChatMessage(tool_calls=[pb.ToolCall(id="c", name="f", arguments_json=arguments)])
    end: dict[str, Any] = {"message": message, "finish_reason": pb.FINISH_REASON_STOP, "stop_string": stop_string}
    (choice,) = answers.response_of(chat(), [pb.GenerateResponse(completions=[pb.Completion(**end)])])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop_string)
    *_, last = events(answers.Answer(chat(stream=True)), (0, pb.GenerateStreamResponse(**end)))
    assert last["choices"][0]["finish_reason"] == reason


def test_the_prompt_alone() -> None:
    body = answers.response_of(completion(echo=True, logprobs=1, max_tokens=0, return_token_ids=True), [echoed()])
    (choice,) = body["choices"]
    assert choice["logprobs"]["tokens"] == ["<s>", "one", " two"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("length", None, [])
    assert choice["prompt_token_ids"] == [9, 1, 2]
    assert (body["usage"]["completion_tokens"], body["usage"]["total_tokens"]) == (0, 3)
    job = completion(echo=True, logprobs=1, max_tokens=0, stream=True, stream_options={"include_usage": True})
    message = pb.GenerateStreamResponse(
        text_delta="one two", token_ids=[0], prompt_tokens=PROMPT, logprobs=[row(0, "!", -9.0)], usage=USAGE,
        finish_reason=pb.FINISH_REASON_STOP, stop_token_id=0,
    )  # fmt: skip
    first, last = events(answers.Answer(job), (0, message))
    assert first["choices"][0]["text"] == "one two"
    assert first["choices"][0]["logprobs"]["tokens"] == ["<s>", "one", " two"]
    assert (first["choices"][0]["finish_reason"], first["choices"][0]["stop_reason"]) == ("length", None)
    assert last["usage"]["completion_tokens"] == 0


def test_the_best_of_several() -> None:
    job = completion(n=2, best_of=3)
    assert (job.n, job.requests[0].n, job.requests[0].output.logprobs) == (2, 3, True)
    logprobs = {"a": [-1.0, -1.0], "b": [-0.5], "c": [-0.1, -0.1, -0.4]}
    texts = [
        pb.Completion(index=index, text=text, logprobs=[row(1, text, one) for one in of_text], usage=USAGE)
        for index, (text, of_text) in enumerate(logprobs.items())
    ]
    found = answers.response_of(job, [pb.GenerateResponse(completions=texts)])["choices"]
    assert [(one["index"], one["text"], one["logprobs"]) for one in found] == [(0, "c", None), (1, "b", None)]


def test_logprobs_of_the_prompt() -> None:
    rows: list[Any] = [
        None,
        {
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "five"},
            "1": {"logprob": -2.0, "rank": None, "decoded_token": "one"},
        },
        {"2": {"logprob": -1.0, "rank": 1, "decoded_token": " two"}},
    ]
    body = answers.response_of(completion(prompt_logprobs=1), [echoed()])
    assert body["choices"][0]["prompt_logprobs"] == rows
    body = answers.response_of(chat(prompt_logprobs=1, return_token_ids=True), [echoed()])
    assert (body["prompt_logprobs"], body["prompt_token_ids"]) == (rows, [9, 1, 2])
    assert answers.response_of(completion(), [echoed()])["choices"][0]["prompt_logprobs"] is None
    body = answers.response_of(completion(prompt_logprobs=0), [echoed()])
    assert [len(one or ()) for one in body["choices"][0]["prompt_logprobs"]] == [0, 1, 1]


def test_logprobs_of_a_chat() -> None:
    rows = [row(3, "é", -0.5, (3, "é", -0.5), (4, "\ufffd", -1.0))]
    answer = pb.GenerateResponse(completions=[pb.Completion(text="é", logprobs=rows)])
    choice = answers.response_of(chat(logprobs=True, top_logprobs=2), [answer])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "é", "refusal": None, "reasoning": None}
    (found,) = choice["logprobs"]["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("é", -0.5, [0xC3, 0xA9])
    assert [one["bytes"] for one in found["top_logprobs"]] == [[0xC3, 0xA9], [0xC3]]
    never = row(1, "x", float("-inf"), (1, "x", float("-inf")))
    cut = pb.GenerateResponse(completions=[pb.Completion(text="x", logprobs=[never])])
    for job in (chat(logprobs=True, top_logprobs=1), completion(logprobs=1)):
        assert "-9999.0" in json.dumps(answers.response_of(job, [cut]), allow_nan=False)
    as_ids = answers.response_of(chat(logprobs=True, return_tokens_as_token_ids=True), [answer])["choices"][0]
    assert as_ids["logprobs"]["content"][0]["token"] == "token_id:3"
    assert answers.response_of(chat(), [answer])["choices"][0]["logprobs"] is None


def events(chunks: answers.Answer, *messages: tuple[int, pb.GenerateStreamResponse]) -> list[dict[str, Any]]:
    raw = [one for prompt, message in messages for one in chunks.events(prompt, message.SerializeToString())]
    raw += chunks.end()
    assert all(one.startswith(b"data: ") and one.endswith(b"\n\n") for one in raw)
    return [json.loads(one[6:]) for one in raw]


def test_a_stream_of_a_chat_opens_all_choices_first() -> None:
    chunk = pb.GenerateStreamResponse
    end = pb.FINISH_REASON_EOS
    job = chat(n=2, stream=True, stream_options={"include_usage": True})
    found = events(
        answers.Answer(job),
        (0, chunk(index=1, deltas=[pb.ChatDelta(content="b")], adapter_digest="e" * 64)),
        (0, chunk(index=0, deltas=[pb.ChatDelta(content="a")], finish_reason=end, usage=USAGE)),
        (0, chunk(index=1, finish_reason=end, usage=USAGE)),
    )
    deltas = [(one["choices"][0]["index"], one["choices"][0]["delta"]) for one in found[:-1]]
    assert deltas == [
        (0, {"role": "assistant", "content": ""}), (1, {"role": "assistant", "content": ""}),
        (1, {"content": "b"}), (0, {"content": "a"}), (1, {}),
    ]  # fmt: skip
    assert [one["choices"][0]["finish_reason"] for one in found[2:-1]] == [None, "stop", "stop"]
    assert found[-1]["choices"] == []
    assert (found[-1]["usage"]["prompt_tokens"], found[-1]["usage"]["completion_tokens"]) == (3, 4)
    assert found[-1]["loraplex"]["accepted_tokens"] == 4
    assert {one["system_fingerprint"] for one in found} == {answers.fingerprint("e" * 64)}


def test_a_stream_of_several_prompts() -> None:
    chunk = pb.GenerateStreamResponse
    job = completion(prompt=["a", "b"], n=2, stream=True, logprobs=0)
    found = events(
        answers.Answer(job),
        (1, chunk(index=1, text_delta="x", logprobs=[row(1, "x", -1.0)])),
        (1, chunk(index=1, text_delta="y", logprobs=[row(2, "y", -2.0)], finish_reason=pb.FINISH_REASON_LENGTH)),
    )
    assert [one["choices"][0]["index"] for one in found] == [3, 3]
    assert [one["choices"][0]["logprobs"]["text_offset"] for one in found] == [[0], [1]]
    assert found[1]["choices"][0]["finish_reason"] == "length"
    assert "usage" not in found[0]


def test_a_stream_with_the_prompts_tokens_and_running_usage() -> None:
    chunk = pb.GenerateStreamResponse
    options = {"include_usage": True, "continuous_usage_stats": True}
    messages = (
        (0, chunk(text_delta="a", token_ids=[5, 6], prompt_tokens=PROMPT)),
        (0, chunk(text_delta="b", token_ids=[7], finish_reason=pb.FINISH_REASON_EOS, usage=USAGE)),
    )
    found = events(answers.Answer(chat(stream=True, stream_options=options, return_token_ids=True)), *messages)
    assert found[0]["prompt_token_ids"] == [9, 1, 2]
    assert [one["usage"]["completion_tokens"] for one in found] == [0, 2, 3, 2]
    assert [one["usage"]["prompt_tokens"] for one in found] == [3, 3, 3, 3]
    assert [one["choices"][0].get("token_ids") for one in found[1:3]] == [[5, 6], [7]]
    found = events(answers.Answer(completion(stream=True, return_token_ids=True)), *messages)
    assert [one["choices"][0].get("prompt_token_ids") for one in found] == [[9, 1, 2], None]
    assert "usage" not in found[0]


def test_a_stream_says_what_was_drafted_since_the_last_chunk() -> None:
    message = pb.GenerateStreamResponse(
        text_delta="a b c", token_ids=[1, 2, 3], drafted_tokens=4, accepted_tokens=2, proposer="medusa"
    )
    (chunk,) = events(answers.Answer(completion(stream=True, return_token_ids=True)), (0, message))
    (choice,) = chunk["choices"]
    assert choice["loraplex"] == {"proposer": "medusa", "drafted_tokens": 4, "accepted_tokens": 2}
    for job, drafted in ((completion(stream=True), 4), (completion(stream=True, return_token_ids=True), 0)):
        message.drafted_tokens = drafted
        (chunk,) = events(answers.Answer(job), (0, message))
        assert "loraplex" not in chunk["choices"][0]
