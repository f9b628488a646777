"""Translation of SGLang's /generate."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http.sglang.fields import REFUSED, GenerateRequest, SamplingParams
from loraplex_router.http.sglang.requests import Job, generate_job

NAMES = ("org/base",)


def job(**fields: Any) -> Job:
    body = GenerateRequest.model_validate({"text": "hi", **fields})
    return generate_job(body, NAMES, "rid")


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
    assert wire(**dict.fromkeys(SamplingParams.model_fields)) == wire()
    names = set(GenerateRequest.model_fields) - {"text"} | set(REFUSED)
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


def test_no_new_token() -> None:
    asked = job(text=["a", "b"], sampling_params={"max_new_tokens": 0, "temperature": 2, "regex": "a", "stop": "x"})
    assert asked.is_prompt_only
    for request in asked.requests:
        check_generate(request)
        assert request.sampling == pb.Sampling(temperature=0, allowed_token_ids=[0])
        assert request.stopping == pb.Stopping(max_tokens=1, stop_token_ids=[0])
        assert not request.HasField("grammar")
    assert not job(sampling_params={"max_new_tokens": 1}).is_prompt_only
    with pytest.raises(InvalidArgument, match="top_p"):
        job(sampling_params={"max_new_tokens": 0, "top_p": 2})


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
