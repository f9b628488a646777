"""Answers in SGLang's form."""

from __future__ import annotations

import itertools
import json
from typing import Any

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.sglang import answers
from loraplex_router.http.sglang.fields import GenerateRequest
from loraplex_router.http.sglang.requests import Job, generate_job


def job(**fields: Any) -> Job:
    body = GenerateRequest.model_validate({"text": "hi", **fields})
    return generate_job(body, ("org/base",), "rid")


def test_an_answer() -> None:
    asked = job(lora_path="sql", return_logprob=True, logprob_start_len=1, top_logprobs_num=1)
    assert asked.requests[0].output.prompt_logprobs
    row = pb.TokenLogprob(token_id=97, text="a", logprob=-1.0, top=[pb.TopLogprob(token_id=98, text="b", logprob=-0.5)])
    answer = pb.GenerateResponse(
        completions=[
            pb.Completion(
                text="a", token_ids=[97], logprobs=[row], finish_reason=pb.FINISH_REASON_STOP, stop_string="x",
                usage=pb.Usage(completion_tokens=1),
            )
        ],
        usage=pb.Usage(prompt_tokens=2, cached_tokens=1),
        adapter_digest="d" * 64,
        prompt_tokens=[pb.PromptToken(token_id=1), pb.PromptToken(token_id=2, logprob=-2.0)],
    )  # fmt: skip
    assert answers.response_of(asked, [answer], 0.5) == {
        "text": "a",
        "output_ids": [97],
        "meta_info": {
            "id": "rid",
            "weight_version": "d" * 12,
            "input_token_logprobs": [[-2.0, 2, None]],
            "output_token_logprobs": [[-1.0, 97, None]],
            "input_top_logprobs": [None],
            "output_top_logprobs": [[[-0.5, 98, None]]],
            "prompt_tokens": 2,
            "completion_tokens": 1,
            "cached_tokens": 1,
            "finish_reason": {"type": "stop", "matched": "x"},
            "e2e_latency": 0.5,
        },
    }
    assert isinstance(answers.response_of(job(text=["a"]), [answer], 0.5), list)


def test_an_answer_of_the_prompt_alone() -> None:
    """As `select` of SGLang's frontend asks for it."""
    fields = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    prompt = [pb.PromptToken(token_id=1), pb.PromptToken(token_id=2, logprob=-2.0)]
    usage = pb.Usage(prompt_tokens=2, completion_tokens=1)
    end: dict[str, Any] = {"finish_reason": pb.FINISH_REASON_STOP, "stop_token_id": 0, "usage": usage}
    row = pb.TokenLogprob(logprob=-9.0)
    whole = pb.GenerateResponse(
        completions=[pb.Completion(token_ids=[0], logprobs=[row], **end)], usage=usage, prompt_tokens=prompt
    )
    last = pb.GenerateStreamResponse(token_ids=[0], logprobs=[row], prompt_tokens=prompt, **end)
    (event,) = answers.Answer(job(stream=True, **fields)).events(0, last.SerializeToString())
    for found in (answers.response_of(job(**fields), [whole], 0.5), json.loads(event.removeprefix(b"data: "))):
        assert (found["text"], found["output_ids"]) == ("", [])
        meta = found["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 1, None], [-2.0, 2, None]]
        assert (meta["output_token_logprobs"], meta["prompt_tokens"], meta["completion_tokens"]) == ([], 2, 0)
        assert meta["finish_reason"] == {"type": "length", "length": 0}


def test_events_have_the_text_so_far() -> None:
    events = answers.Answer(job(stream=True))
    first = pb.GenerateStreamResponse(text_delta="a", token_ids=[1])
    last = pb.GenerateStreamResponse(text_delta="b", token_ids=[2], finish_reason=pb.FINISH_REASON_LENGTH)
    last.usage.CopyFrom(pb.Usage(prompt_tokens=4, completion_tokens=2))
    found = [
        json.loads(event.removeprefix(b"data: "))
        for one in (first, last)
        for event in events.events(0, one.SerializeToString())
    ]
    assert [(one["text"], one["output_ids"]) for one in found] == [("a", [1]), ("ab", [1, 2])]
    assert found[0]["meta_info"]["finish_reason"] is None
    assert found[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert found[1]["meta_info"]["prompt_tokens"] == 4


def test_events_of_long_texts_come_less_often() -> None:
    events = answers.Answer(job(stream=True))
    found: list[int] = []
    num_bytes, event = 0, b""
    for number in range(4096):
        message = pb.GenerateStreamResponse(text_delta="a", token_ids=[7])
        if number == 4095:
            message.finish_reason = pb.FINISH_REASON_LENGTH
        for event in events.events(0, message.SerializeToString()):
            found.append(len(json.loads(event.removeprefix(b"data: "))["output_ids"]))
            num_bytes += len(event)
    assert found[:64] == list(range(1, 65))
    assert found[-1] == 4096
    assert all(later * 16 <= earlier * 17 + 16 for earlier, later in itertools.pairwise(found))
    assert len(found) < 200
    assert num_bytes < 20 * len(event)


def test_what_the_server_says_of_itself() -> None:
    info = pb.GetInfoResponse(
        model_id="org/base", model_type="llama", version="1.0", max_context_tokens=2048, dtype="bfloat16",
        device="cuda:0", max_lora_rank=64, kv_block_tokens=16, max_device_adapters=8, tasks=["generate", "embed"],
    )  # fmt: skip
    model = answers.model_info_of(info)
    assert (model["model_path"], model["tokenizer_path"], model["is_generation"]) == ("org/base", "org/base", True)
    assert (model["model_type"], model["preferred_sampling_params"], model["weight_version"]) == (
        "llama",
        None,
        "default",
    )
    server = answers.server_info_of("prod", info)
    assert (server["served_model_name"], server["context_length"], server["device"]) == ("prod", 2048, "cuda")
    assert (server["max_lora_rank"], server["max_loras_per_batch"], server["page_size"]) == (64, 8, 16)
    assert not answers.model_info_of(pb.GetInfoResponse(tasks=["embed"]))["is_generation"]
