"""Fields that dialects share."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from loraplex_proto.v1 import inference_pb2 as pb
from loraplex_router.http.fields import put_options
from loraplex_router.http.names import field_name
from loraplex_router.http.openai.fields import ChatCompletionRequest, CompletionRequest
from loraplex_router.http.sglang.fields import SamplingParams
from loraplex_router.http.tgi.fields import Parameters


def test_integers_may_be_written_with_a_point() -> None:
    body = CompletionRequest.model_validate(
        {"max_tokens": 4.0, "seed": -2.0, "temperature": 1.0, "length_penalty": 1.0}
    )
    assert (body.max_tokens, body.seed, body.temperature, body.extras()) == (4, -2, 1.0, {"length_penalty": 1})
    for field, wrong in (("max_tokens", 4.5), ("max_tokens", "4"), ("max_tokens", 1e300), ("echo", 1.0)):
        with pytest.raises(ValidationError):
            CompletionRequest.model_validate({field: wrong})
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"stop_token_ids": [5.0]})


def test_openai_s_requests_have_all_options_of_the_wire() -> None:
    options = [f"sampling.{name}" for name in pb.Sampling.DESCRIPTOR.fields_by_name]
    options += [f"stopping.{name}" for name in pb.Stopping.DESCRIPTOR.fields_by_name]
    for model in (CompletionRequest, ChatCompletionRequest):
        assert {field_name(option) for option in options} <= set(model.model_fields)


@pytest.mark.parametrize(
    "given",
    [
        CompletionRequest(max_tokens=3, seed=-1, top_k=-1, stop=["a", ""], min_tokens=2, ignore_eos=True),
        SamplingParams(max_new_tokens=3, sampling_seed=-1, top_k=-1, stop="a", min_new_tokens=2, ignore_eos=True),
        Parameters(max_new_tokens=3, seed=(1 << 64) - 1, top_k=0, stop=["a"], ignore_eos_token=True),
    ],
)
def test_options_have_one_meaning_under_all_names(given: CompletionRequest | SamplingParams | Parameters) -> None:
    request = pb.GenerateRequest()
    put_options(request, given)
    if isinstance(given, Parameters):
        request.stopping.min_tokens = 2  # TGI has no such field
    stopping = pb.Stopping(max_tokens=3, min_tokens=2, stop=["a"], ignore_eos=True)
    assert request == pb.GenerateRequest(sampling=pb.Sampling(seed=(1 << 64) - 1, top_k=0), stopping=stopping)
