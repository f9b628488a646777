"""Answers in LoRAX's and TGI's form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.tgi import answers
from loraplex_router.http.tgi.fields import GenerateRequest
from loraplex_router.http.tgi.requests import Job, generate_job

LENGTH, EOS, STOP = pb.FINISH_REASON_LENGTH, pb.FINISH_REASON_EOS, pb.FINISH_REASON_STOP


def job(*, is_streamed: bool = True, **parameters: Any) -> Job:
    body = GenerateRequest.model_validate({"inputs": "hi", "parameters": {"details": True, **parameters}})
    return generate_job(body, ("base",), "rid", is_streamed=is_streamed)


def row(piece: bytes, logprob: float = -1.0, *, is_special: bool = False) -> pb.TokenLogprob:
    text = piece.decode(errors="replace")
    return pb.TokenLogprob(token_id=piece[0], text=text, logprob=logprob, bytes=piece, is_special=is_special)


def message(*pieces: bytes, text: str = "", reason: int = 0, eos: bool = False, **fields: Any) -> bytes:
    rows = [row(piece) for piece in pieces] + ([row(b"</s>", is_special=True)] if eos else [])
    found = pb.GenerateStreamResponse(text_delta=text, logprobs=rows, finish_reason=reason, **fields)  # pyright: ignore[reportArgumentType]
    return found.SerializeToString()


def streamed(asked: Job, *messages: bytes) -> list[list[dict[str, Any]]]:
    """Events by message."""
    events = answers.Answer(asked, {99})
    return [[json.loads(event.removeprefix(b"data: ")) for event in events.events(0, one)] for one in messages]


def test_one_event_for_each_token() -> None:
    usage = pb.Usage(prompt_tokens=2, completion_tokens=3)
    (first,), (second, last) = streamed(
        job(return_full_text=True),
        message(b"a", text="a", seed=7),
        message(b"b", b"c", text="bc", reason=LENGTH, usage=usage),
    )
    assert first == {
        "index": 1,
        "token": {"id": 97, "text": "a", "logprob": -1.0, "special": False, "skipped": False},
        "generated_text": None,
        "details": None,
    }
    assert (second["index"], second["token"]["text"], second["generated_text"]) == (2, "b", None)
    assert (last["index"], last["token"]["text"], last["generated_text"]) == (3, "c", "hiabc")
    assert last["details"] == {
        "finish_reason": "length",
        "prompt_tokens": 2,
        "input_length": 2,
        "generated_tokens": 3,
        "skipped_tokens": 0,
        "seed": 7,
    }


def test_details_only_where_asked() -> None:
    ((last,),) = streamed(job(details=False), message(b"a", text="a", reason=EOS))
    assert (last["generated_text"], last["details"]) == ("a", None)


@pytest.mark.parametrize(("reason", "name"), [(EOS, "eos_token"), (STOP, "stop_sequence"), (LENGTH, "length")])
def test_finish_reasons(reason: int, name: str) -> None:
    ((last,),) = streamed(job(), message(b"a", text="a", reason=reason))
    assert last["details"]["finish_reason"] == name


def test_the_token_of_a_stop_string_waits_for_the_end() -> None:
    """The worker's last message has no token then."""
    first, second, third = streamed(
        job(stop=["bc"]), message(b"a", b"b", text="a"), message(b"cd", text="bc"), message(reason=STOP)
    )
    assert [one["token"]["text"] for one in first] == ["a"]
    assert [one["token"]["text"] for one in second] == ["b"]
    assert [(one["token"]["text"], one["generated_text"]) for one in third] == [("c", "abc")]


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize(
    ("pieces", "texts", "shown"),
    [
        pytest.param([b"a", b"b", b"c", b"d"], ["a", "", "", "b"], ["a", "b", "", ""], id="stop string in a run"),
        pytest.param([b" a", b" b"], ["a", " b"], ["a", " b"], id="first space left out"),
        pytest.param([b" ", b" ", b"b"], ["", "", " b"], [" ", "", "b"], id="first token is a space"),
        pytest.param([b" b", b"n", b" ve", b","], ["b", " n", "ve", ","], ["b", " n", "ve", ","], id="suffixes"),
        pytest.param(
            [b"\xe3", b"\x80", b"\x82", b"\xff", b" a"], ["", "", "", "", "\ufffd" * 4 + " a"],
            ["", "", "\ufffd", "\ufffd", "\ufffd\ufffd a"], id="run of bytes that is not UTF-8",
        ),
        pytest.param([b"\xa9", b"b", b"c"], ["é", "b", "c"], ["é", "b", "c"], id="character that the prompt began"),
    ],
)  # fmt: skip
def test_texts_are_the_workers(pieces: list[bytes], texts: list[str], shown: list[str], is_streamed: bool) -> None:
    text = "".join(texts)
    if is_streamed:
        *found, last = streamed(
            job(), *(message(piece, text=one) for piece, one in zip(pieces, texts, strict=True)), message(reason=EOS)
        )
        sent = [event["token"] for events in (*found, last) for event in events if not event["token"]["special"]]
        so_far = ["".join(one["token"]["text"] for events in found[:n] for one in events) for n in range(len(texts))]
        assert all("".join(texts[:n]).startswith(one) for n, one in enumerate(so_far)), "nothing before the worker"
        assert last[-1]["generated_text"] == text
    else:
        completion = pb.Completion(text=text, logprobs=map(row, pieces), finish_reason=EOS)
        answer = pb.GenerateResponse(completions=[completion])
        sent = answers.response_of(job(is_streamed=False), answer)["details"]["tokens"]
    assert "".join(one["text"] for one in sent) == text
    assert [one["text"] for one in sent] == shown


def test_a_part_of_a_character_waits_for_the_rest() -> None:
    e = "é".encode()
    first, second = streamed(job(), message(b"a", e[:1], text="a"), message(e[1:], text="é", reason=LENGTH))
    assert [one["token"]["text"] for one in first] == ["a"]
    assert [one["token"]["text"] for one in second] == ["", "é"]
    first, second = streamed(job(), message(e[:1]), message(text="\ufffd", reason=EOS, eos=True))
    assert first == []
    assert [(one["token"]["text"], one["token"]["special"]) for one in second] == [("\ufffd", False), ("</s>", True)]


def test_an_end_without_a_token() -> None:
    _, (last,) = streamed(job(), message(b"a", text="a"), message(reason=EOS))
    assert (last["token"]["id"], last["token"]["special"], last["generated_text"]) == (97, True, "a")


PIECES = st.lists(st.sampled_from([*"é€😀ab".encode(), 0xFF]).map(lambda one: bytes([one])), min_size=1, max_size=12)


@given(pieces=PIECES, sizes=st.lists(st.integers(1, 4), min_size=12, max_size=12), eos=st.booleans())
def test_texts_of_tokens_are_the_text(pieces: list[bytes], sizes: list[int], eos: bool) -> None:
    """Split in any way; streamed and not."""
    whole = b"".join(pieces).decode(errors="replace")
    done, shown, messages = 0, "", list[bytes]()
    for size in sizes:
        part, done = pieces[done : done + size], done + size
        is_end = done >= len(pieces)
        safe = whole if is_end else b"".join(pieces[:done]).decode(errors="ignore")
        safe = safe if whole.startswith(safe) else shown
        text, shown = safe[len(shown) :], max(shown, safe, key=len)
        messages.append(message(*part, text=text, reason=EOS if is_end else 0, eos=eos and is_end))
        if is_end:
            break
    found = [event for events in streamed(job(), *messages) for event in events]
    assert found[-1]["generated_text"] == whole
    assert "".join(one["token"]["text"] for one in found if not one["token"]["special"]) == whole
    assert len(found) == len(pieces) + eos
    rows = [row(piece) for piece in pieces] + ([row(b"</s>", is_special=True)] if eos else [])
    answer = pb.GenerateResponse(completions=[pb.Completion(text=whole, logprobs=rows, finish_reason=EOS)])
    tokens = answers.response_of(job(is_streamed=False), answer)["details"]["tokens"]
    assert "".join(one["text"] for one in tokens if not one["special"]) == whole


def test_the_best_of_some() -> None:
    answer = pb.GenerateResponse(
        completions=[
            pb.Completion(index=0, text="a", logprobs=[row(b"a", -3.0)], finish_reason=EOS),
            pb.Completion(index=1, text="bb", logprobs=[row(b"b", -2.0), row(b"b", -1.0)], finish_reason=LENGTH),
            pb.Completion(index=2, text="", finish_reason=EOS),  # no text has no likelihood: it is the last
        ],
        usage=pb.Usage(prompt_tokens=4),
        seed=5,
    )
    found = answers.response_of(job(is_streamed=False, best_of=3, do_sample=True), answer)
    assert found["generated_text"] == "bb"
    assert (found["details"]["finish_reason"], found["details"]["seed"]) == ("length", 5)
    other, last = found["details"]["best_of_sequences"]
    assert last["generated_text"] == ""
    assert (other["generated_text"], other["finish_reason"], other["prompt_tokens"]) == ("a", "eos_token", 4)


def test_candidates_and_the_prompt() -> None:
    one = row(b"a")
    one.top.add(token_id=97, text="a", logprob=-1.0)
    one.top.add(token_id=99, text="</s>", logprob=float("-inf"))
    answer = pb.GenerateResponse(
        completions=[pb.Completion(text="a", logprobs=[one], finish_reason=EOS)],
        prompt_tokens=[pb.PromptToken(token_id=1, text="h"), pb.PromptToken(token_id=2, text="i", logprob=-2.0)],
    )
    asked = job(is_streamed=False, top_n_tokens=2, return_k_alternatives=1, decoder_input_details=True)
    details = answers.response_of(asked, answer, {99})["details"]
    assert details["prefill"] == [{"id": 1, "text": "h", "logprob": None}, {"id": 2, "text": "i", "logprob": -2.0}]
    assert details["tokens"][0]["alternative_tokens"] == [{"id": 97, "text": "a", "logprob": -1.0}]
    assert details["top_tokens"] == [
        [
            {"id": 97, "text": "a", "logprob": -1.0, "special": False},
            {"id": 99, "text": "</s>", "logprob": -9999.0, "special": True},
        ]
    ]
    one = pb.TokenLogprob(token_id=97, text="a", bytes=b"a", top=one.top)
    raw = pb.GenerateStreamResponse(logprobs=[one], text_delta="a", finish_reason=EOS).SerializeToString()
    ((event,),) = streamed(job(top_n_tokens=1), raw)
    assert [top["id"] for top in event["top_tokens"]] == [97]


def test_headers() -> None:
    asked = job(adapter_id="sql")
    assert answers.stream_headers(asked, "org/é", "cuda:0") == {
        "x-compute-type": "gpu+optimized",
        "x-compute-characters": "2",
        "x-model-id": "org/?",
        "x-adapter-id": "sql",
        "x-adapter-source": "local",
    }
    answer = pb.GenerateResponse(
        usage=pb.Usage(prompt_tokens=5, completion_tokens=4),
        timings=pb.Timings(queue_s=0.1, time_to_first_token_s=0.3, total_s=0.9),
    )
    found = answers.answer_headers(answer, 1.0)
    assert found["x-total-time"] == found["x-compute-time"] == "1000"
    assert (found["x-validation-time"], found["x-queue-time"], found["x-inference-time"]) == ("100", "100", "800")
    assert (found["x-time-to-first-token"], found["x-time-per-output-token"]) == ("200", "200")
    assert (found["x-total-tokens"], found["x-time-per-token"]) == ("9", "200")
