"""Translation of SGLang's /generate."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http import sglang

NAMES = ("org/base",)


def job(**fields: Any) -> sglang.Job:
    body = sglang.GenerateRequest.model_validate({"text": "hi", **fields})
    return sglang.generate_job(body, NAMES, "rid")


def wire(**params: Any) -> pb.GenerateRequest:
    (request,) = job(sampling_params=params).requests
    check_generate(request)
    return request


def test_defaults_are_sglang_s() -> None:
    assert wire() == pb.GenerateRequest(
        request_id="rid",
        n=1,
        text="hi",
        sampling=pb.Sampling(temperature=1.0),
        stopping=pb.Stopping(max_tokens=128),
        output=pb.Output(),
    )


def test_null_counts_as_absent() -> None:
    assert wire(**dict.fromkeys(sglang.SamplingParams.model_fields)) == wire()
    names = set(sglang.GenerateRequest.model_fields) - {"text"} | set(sglang.REFUSED)
    assert job(**dict.fromkeys(names)) == job()


def test_every_parameter_arrives() -> None:
    request = wire(
        max_new_tokens=9, min_new_tokens=2, stop=["a", ""], stop_token_ids=[3], temperature=0, top_p=0.5, top_k=-1,
        min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5, repetition_penalty=1.5, n=2, ignore_eos=True,
        skip_special_tokens=False, no_stop_trim=True, logit_bias={"5": 1.5}, sampling_seed=-1,
        speculation="off",
    )  # fmt: skip
    assert request == pb.GenerateRequest(
        request_id="rid",
        n=2,
        text="hi",
        sampling=pb.Sampling(
            temperature=0.0, top_p=0.5, top_k=0, min_p=0.25, frequency_penalty=0.5, presence_penalty=-0.5,
            repetition_penalty=1.5, seed=(1 << 64) - 1, logit_bias={5: 1.5},
        ),
        stopping=pb.Stopping(
            max_tokens=9, min_tokens=2, stop=["a"], stop_token_ids=[3], ignore_eos=True, include_stop=True
        ),
        output=pb.Output(keep_special_tokens=True),
        speculation=pb.Speculation(off=True),
    )  # fmt: skip


def test_grammars() -> None:
    assert wire(regex="a+").grammar == pb.Grammar(regex="a+")
    assert wire(json_schema="{}").grammar == pb.Grammar(json_schema="{}")


def test_prompts_and_their_adapters() -> None:
    asked = job(text=["a", "b"], lora_path=["sql", None], rid="mine")
    assert [(one.text, one.adapter_id, one.request_id) for one in asked.requests] == [
        ("a", "sql", "mine-0"),
        ("b", "", "mine-1"),
    ]
    asked = job(text=None, input_ids=[[1, 2], [3]], lora_path="json")
    assert [(list(one.token_ids.ids), one.adapter_id) for one in asked.requests] == [([1, 2], "json"), ([3], "json")]
    assert job(lora_path="org/base").requests[0].adapter_id == ""
    with pytest.raises(AdapterNotFound):
        job(lora_path="other:sql")


def test_the_adapter_in_other_servers_fields() -> None:
    assert job(model="sql").requests[0].adapter_id == "sql"
    assert job(adapter_id="sql", model="org/base").requests[0].adapter_id == "sql"
    assert [one.adapter_id for one in job(text=["a", "b"], model="sql", lora_path=["sql", None]).requests] == [
        "sql"
    ] * 2
    assert job(model="org/base", parameters={}).requests[0].adapter_id == ""
    with pytest.raises(InvalidArgument, match="two adapters"):
        job(model="sql", lora_path="json")


@pytest.mark.parametrize(
    ("fields", "field", "error"),
    [
        ({"input_ids": [1]}, "text", InvalidArgument),
        ({"text": None}, "text", InvalidArgument),
        ({"text": None, "input_ids": [[]]}, "input_ids", InvalidArgument),
        ({"text": ["a", "b"], "lora_path": ["sql"]}, "lora_path", InvalidArgument),
        ({"return_hidden_states": True}, "return_hidden_states", Unimplemented),
        ({"image_data": "x"}, "image_data", Unimplemented),
        ({"parameters": {"adapter_id": "sql"}}, "parameters", Unimplemented),
        ({"sampling_params": {"stop_regex": "a+"}}, "stop_regex", Unimplemented),
        ({"sampling_params": {"regex": 5}}, "regex", InvalidArgument),
        ({"text": ["a"] * 100, "sampling_params": {"n": 64}}, "n", InvalidArgument),
        ({"rid": "a b"}, "rid", InvalidArgument),
        ({"max_new_tokens": 5}, "max_new_tokens", InvalidArgument),
        ({"max_tokens": 5}, "max_tokens", InvalidArgument),
        ({"lora_name": "sql"}, "lora_name", InvalidArgument),
        ({"inputs": "other"}, "inputs", Unimplemented),
        ({"sampling_params": {"max_tokens": 5}}, "max_tokens", InvalidArgument),
        ({"sampling_params": {"lora_path": "sql"}}, "lora_path", InvalidArgument),
    ],
)
def test_refused_by_name(fields: dict[str, Any], field: str, error: type[LoraplexError]) -> None:
    with pytest.raises(error) as raised:
        job(**fields)
    assert raised.value.field == field


def test_ignored_fields_have_names() -> None:
    assert job(foo=1, sampling_params={"bar": 2}).ignored == ("foo", "sampling_params.bar")
    assert job(user="me", best_of=1, sampling_params={"num_beams": 1, "echo": False}).ignored == ("user",)


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
    assert sglang.response_of(asked, [answer], 0.5) == {
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
    assert isinstance(sglang.response_of(job(text=["a"]), [answer], 0.5), list)


def test_events_have_the_text_so_far() -> None:
    events = sglang.Events(job(stream=True))
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
    events = sglang.Events(job(stream=True))
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
    model = sglang.model_info_of(info)
    assert (model["model_path"], model["tokenizer_path"], model["is_generation"]) == ("org/base", "org/base", True)
    assert (model["model_type"], model["preferred_sampling_params"], model["weight_version"]) == (
        "llama",
        None,
        "default",
    )
    server = sglang.server_info_of("prod", info)
    assert (server["served_model_name"], server["context_length"], server["device"]) == ("prod", 2048, "cuda")
    assert (server["max_lora_rank"], server["max_loras_per_batch"], server["page_size"]) == (64, 8, 16)
    assert not sglang.model_info_of(pb.GetInfoResponse(tasks=["embed"]))["is_generation"]
