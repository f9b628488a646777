"""Names of the wire's fields over HTTP."""

from __future__ import annotations

from google.protobuf.message import Message
from support.wire import leaves

from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.names import field_name, naming_fields
from loraplex_router.http.openai.fields import ChatCompletionRequest, CompletionRequest
from loraplex_router.http.pooling.fields import ClassifyBody, EmbeddingsRequest, RerankBody, ScoreBody

OPENAI = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, *GRAMMAR_FIELDS}
SPECULATION = {
    f"speculation.{name}"
    for name in ("kind", "max_draft_tokens", "fixed_length", "adapter_id", "name", "min_ngram", "max_ngram")
}
KINDS: dict[type[Message], set[str]] = {
    inference_pb2.GenerateRequest: OPENAI,
    inference_pb2.TokenizeRequest: OPENAI,
    pooling_pb2.EmbedRequest: {*EmbeddingsRequest.model_fields, "messages", *OPENAI},
    pooling_pb2.ClassifyRequest: {*ClassifyBody.model_fields, *OPENAI},
    pooling_pb2.ScoreRequest: {*ScoreBody.model_fields, *RerankBody.model_fields, *OPENAI},
}


def test_no_path_of_the_wire_is_left() -> None:
    for kind, names in KINDS.items():
        for path in set(leaves(kind.DESCRIPTOR)) - {"offsets", "text"}:
            name = field_name(path)
            assert name in SPECULATION or name in {*names, "input", "query"}, (kind, path, name)


def test_speculation_has_its_kind_in_a_field() -> None:
    told = "`speculation.medusa.adapter_id` names a LoRA; name heads, or leave `speculation.medusa` out"
    assert naming_fields(told) == "`speculation.adapter_id` names a LoRA; name heads, or leave `speculation.kind` out"


def test_arguments_of_a_template_have_the_name_that_the_request_gives_them() -> None:
    path = "chat.template_kwargs_json"
    for name in ("reasoning_effort", "reasoning", "verbosity"):
        assert field_name(path, {"messages", name}) == name
    assert field_name(path, {"reasoning_effort", "chat_template_kwargs"}) == "chat_template_kwargs"
