"""Translation of LoRAX's and TGI's requests."""

from __future__ import annotations

from typing import Any

import pytest

from loraplex_contracts.errors import AdapterNotFound, InvalidArgument, LoraplexError, Unimplemented
from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_proto.validate import check_generate
from loraplex_router.http.pooling import fields as pooling
from loraplex_router.http.tgi.fields import GenerateRequest, Parameters
from loraplex_router.http.tgi.requests import Job, generate_job

NAMES = ("org/base", "base")


def job(parameters: dict[str, Any] | None = None, *, is_streamed: bool = False, **fields: Any) -> Job:
    body = GenerateRequest.model_validate({"inputs": "hi", "parameters": parameters, **fields})
    return generate_job(body, NAMES, "rid", is_streamed=is_streamed)


def wire(**parameters: Any) -> pb.GenerateRequest:
    request = job(parameters).request
    check_generate(request)
    return request


def test_defaults_are_lorax_s() -> None:
    for parameters in (None, {}, {"do_sample": False}):
        request = job(parameters).request
        check_generate(request)
        assert request == pb.GenerateRequest(
            request_id="rid",
            n=1,
            text="hi",
            sampling=pb.Sampling(temperature=0.0),
            stopping=pb.Stopping(include_stop=True),
        )


def test_null_counts_as_absent() -> None:
    assert job(dict.fromkeys(Parameters.model_fields), stream=None, model=None) == job()


@pytest.mark.parametrize("name", [None, "", "__base_model__", "org/base", "base"])
def test_names_of_the_base_model(name: str | None) -> None:
    assert wire(adapter_id=name).adapter_id == ""


def test_the_adapter() -> None:
    found = job({"adapter_id": "acme/sql", "adapter_source": "local", "api_token": "secret"})
    assert (found.request.adapter_id, found.adapter_name) == ("acme/sql", "acme/sql")
    assert "secret" not in repr(found)
    assert not found.request.HasField("hub")
    with pytest.raises(AdapterNotFound):
        job({"adapter_id": "other:sql"})


def test_the_adapters_origin() -> None:
    found = job({"adapter_id": "org/sql", "adapter_source": "hub", "api_token": "hf_secret", "adapter_revision": "v1"})
    assert (found.request.adapter_id, found.request.hub) == ("org/sql", pb.HubAccess(revision="v1", token="hf_secret"))
    assert "hf_secret" not in repr(found)
    for parameters in (Parameters, pooling.Parameters):
        assert "hf_secret" not in repr(parameters(api_token="hf_secret"))
    assert job({"adapter_id": "org/sql", "adapter_source": "hub"}).request.HasField("hub")
    assert not job({"adapter_source": "hub", "api_token": "hf_secret"}).request.HasField("hub")  # the base model
    for name in ("bucket/sql", "s3://bucket/sql"):
        found = job({"adapter_id": name, "adapter_source": "s3", "api_token": "hf_secret"})
        assert (found.request.adapter_id, found.request.in_bucket) == ("bucket/sql", True)
        assert not found.request.HasField("hub")


def test_places_of_a_mixtures_adapters() -> None:
    merged = {"merged_adapters": {"ids": ["org/sql", "org/terse"]}, "adapter_source": "hub", "api_token": "hf_secret"}
    found = job(merged)
    assert [(one.id, one.hub.token) for one in found.request.adapters] == [
        ("org/sql", "hf_secret"), ("org/terse", "hf_secret"),
    ]  # fmt: skip
    assert not found.request.HasField("hub")
    assert "hf_secret" not in repr(found)
    members = [
        {"id": "org/sql"},
        {"id": "org/other", "adapter_revision": "v2", "api_token": "hf_other"},
        {"id": "bucket/sql", "adapter_source": "s3"},
        {"id": "sql", "adapter_source": "local"},
    ]
    given = {"adapter_source": "hub", "adapter_revision": "v1", "api_token": "hf_secret"}
    on_hub, other, in_bucket, own = job({"adapters": members, **given}).request.adapters
    assert on_hub.hub == pb.HubAccess(revision="v1", token="hf_secret")
    assert other.hub == pb.HubAccess(revision="v2", token="hf_other")
    assert (in_bucket.id, in_bucket.in_bucket, in_bucket.HasField("hub")) == ("bucket/sql", True, False)
    assert (own.in_bucket, own.HasField("hub")) == (False, False)


@pytest.mark.parametrize(
    ("parameters", "temperature"),
    [
        ({"do_sample": True}, 1.0), ({"temperature": 0.5}, 0.5), ({"temperature": 1.0}, 1.0), ({"top_k": 5}, 1.0),
        ({"top_p": 0.5}, 1.0), ({"typical_p": 0.5}, 1.0), ({"do_sample": True, "temperature": 0.0}, 0.0),
        ({"repetition_penalty": 1.5, "seed": 3}, 0.0),
    ],
)  # fmt: skip
def test_texts_are_sampled_where_asked(parameters: dict[str, Any], temperature: float) -> None:
    assert wire(**parameters).sampling.temperature == temperature


def test_every_parameter_arrives() -> None:
    request = wire(
        best_of=3, temperature=0.5, top_k=7, top_p=0.5, typical_p=0.25, repetition_penalty=1.5, frequency_penalty=0.5,
        presence_penalty=-0.5, do_sample=True, max_new_tokens=9, ignore_eos_token=True, stop=["a", ""], truncate=6,
        details=True, decoder_input_details=True, return_k_alternatives=2, top_n_tokens=4, seed=(1 << 64) - 1,
        watermark=False, response_format={"type": "text"}, speculation="prompt_lookup",
    )  # fmt: skip
    assert request == pb.GenerateRequest(
        request_id="rid",
        n=3,
        text="hi",
        sampling=pb.Sampling(
            temperature=0.5, top_k=7, top_p=0.5, typical_p=0.25, repetition_penalty=1.5, frequency_penalty=0.5,
            presence_penalty=-0.5, seed=(1 << 64) - 1,
        ),
        stopping=pb.Stopping(max_tokens=9, ignore_eos=True, stop=["a"], include_stop=True),
        truncate_prompt=pb.Truncate(max_tokens=6),
        speculation=pb.Speculation(prompt_lookup=pb.PromptLookupSpeculation()),
        output=pb.Output(
            logprobs=True, token_bytes=True, top_logprobs=4, prompt_tokens=True, prompt_logprobs=True,
        ),
    )  # fmt: skip


def test_the_prompt() -> None:
    assert job({"return_full_text": True}, inputs="héllo").prefix == "héllo"
    assert job({}, inputs="héllo").num_chars == 5
    (message,) = wire(apply_chat_template=True).chat.messages
    assert (message.role, message.content) == ("user", "hi")


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"grammar": {"type": "json", "value": {"type": "object"}}}, pb.Grammar(json_schema='{"type":"object"}')),
        ({"grammar": {"type": "regex", "value": "a+"}}, pb.Grammar(regex="a+")),
        ({"response_format": {"type": "json_object", "schema": {}}}, pb.Grammar(json_schema="{}")),
    ],
)
def test_grammars(parameters: dict[str, Any], expected: pb.Grammar) -> None:
    assert wire(**parameters).grammar == expected


@pytest.mark.parametrize(
    ("parameters", "merge"),
    [
        ({}, pb.AdapterMerge(strategy="linear")),
        (
            {"merge_strategy": "linear", "density": 0.5, "majority_sign_method": "total"},
            pb.AdapterMerge(strategy="linear"),
        ),
        (
            {"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"},
            pb.AdapterMerge(strategy="ties", density=0.5, majority_sign="frequency"),
        ),
        (
            {"merge_strategy": "dare_linear", "density": 0.5, "majority_sign_method": "total"},
            pb.AdapterMerge(strategy="dare_linear", density=0.5),
        ),
        (
            {"merge_strategy": "DARE_TIES", "density": 0.5, "majority_sign_method": "Total"},
            pb.AdapterMerge(strategy="dare_ties", density=0.5, majority_sign="total"),
        ),
    ],
)
def test_merged_adapters_of_lorax(parameters: dict[str, Any], merge: pb.AdapterMerge) -> None:
    made = wire(merged_adapters={"ids": ["a", "b"], "weights": [0.25, -2], **parameters})
    assert [(one.id, one.weight) for one in made.adapters] == [("a", 0.25), ("b", -2.0)]
    assert made.merge == merge
    assert not made.adapter_id


def test_exact_sums_and_weights_of_one() -> None:
    exact = wire(merged_adapters={"ids": ["a", "b"], "merge_strategy": "cat"})
    own = wire(adapters=[{"id": "a"}, {"id": "b", "weight": 1}])
    assert exact.adapters == own.adapters
    assert not exact.HasField("merge")
    assert {one.weight for one in own.adapters} == {1.0}


def test_logprobs_are_asked_for_where_shown() -> None:
    assert job({"details": True}).request.output.logprobs
    assert job(is_streamed=True).request.output.token_bytes
    assert not job({"top_n_tokens": 2}).request.HasField("output")


@pytest.mark.parametrize(
    ("parameters", "field", "error"),
    [
        ({"merged_adapters": {"ids": ["a", "b"], "weights": [1]}}, "merged_adapters", InvalidArgument),
        ({"merged_adapters": {"ids": []}}, "merged_adapters", InvalidArgument),
        ({"merged_adapters": {"ids": ["a"], "merge_strategy": "slerp"}}, "merged_adapters", InvalidArgument),
        ({"merged_adapters": {"ids": ["a"], "wieghts": [1]}}, "merged_adapters", InvalidArgument),
        ({"merged_adapters": {"ids": ["a"]}, "adapter_id": "b"}, "merged_adapters", InvalidArgument),
        ({"merged_adapters": {"ids": ["a"] * 9}}, "merged_adapters", InvalidArgument),
        ({"schema": '{"type": "integer"}'}, "schema", InvalidArgument),
        ({"adapters": [{"id": "a"}], "merged_adapters": {"ids": ["a"]}}, "merged_adapters", InvalidArgument),
        ({"adapters": [{"id": "a"}], "adapter_id": "b"}, "adapters", InvalidArgument),
        ({"merge": {"strategy": "linear"}}, "merge", InvalidArgument),
        ({"adapter_source": "pbase", "adapter_id": "a/b"}, "adapter_source", Unimplemented),
        ({"adapters": [{"id": "a/b", "adapter_source": "pbase"}]}, "adapter_source", Unimplemented),
        ({"adapters": [{"id": "a/b", "adapter_revision": "v1"}]}, "adapter_revision", InvalidArgument),
        ({"adapter_revision": "v1", "adapter_id": "a/b"}, "adapter_revision", InvalidArgument),
        ({"adapter_source": "hub", "adapter_id": "a/b", "api_token": "\ud800"}, "api_token", InvalidArgument),
        ({"watermark": True}, "watermark", Unimplemented),
        ({"best_of": 2}, "best_of", InvalidArgument),
        ({"grammar": {"type": "magic"}}, "grammar.type", InvalidArgument),
        ({"guided_json": {}}, "guided_json", InvalidArgument),
        ({"stop": ["\ud800"]}, "stop", InvalidArgument),
        ({"adapter_id": "a:\ud800"}, "adapter_id", InvalidArgument),
        ({"max_tokens": 5}, "max_tokens", InvalidArgument),
        ({"tools": [{}]}, "tools", InvalidArgument),
        ({"n": 2}, "n", InvalidArgument),
        ({"speculation": "magic"}, "speculation", InvalidArgument),
        ({"function_to_apply": "softmax"}, "function_to_apply", InvalidArgument),
    ],
)
def test_refused_by_name(parameters: dict[str, Any], field: str, error: type[LoraplexError]) -> None:
    with pytest.raises(error, match=f"`{field}`") as raised:
        job(parameters)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"inputs": ""}, "inputs"), ({"inputs": "\ud800"}, "inputs"), ({"max_new_tokens": 5}, "max_new_tokens"),
        ({"model": "sql"}, "model"), ({"normalize": True}, "normalize"), ({"temperature": 0.5}, "temperature"),
    ],
)  # fmt: skip
def test_fields_beside_the_parameters_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"`{field}`"):
        job(**fields)


@pytest.mark.parametrize("parameters", [{"best_of": 2, "do_sample": True}, {"decoder_input_details": True}])
def test_not_in_streams(parameters: dict[str, Any]) -> None:
    job(parameters)
    with pytest.raises(InvalidArgument):
        job(parameters, is_streamed=True)


def test_ignored_fields_have_names() -> None:
    assert job({"foo": 1, "user": "me"}, bar=2, model="base").ignored == ("bar", "parameters.foo")
    grammar = {"type": "json", "value": {}, "flags": 1}
    assert job({"grammar": grammar}).ignored == ("parameters.grammar.flags",)
    assert job({"response_format": grammar}).ignored == ("parameters.response_format.flags",)


@pytest.mark.parametrize("name", ["lora_id", "lora_request", "adapter"])
def test_an_adapter_in_a_field_of_others_is_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        job({name: "sql"})
