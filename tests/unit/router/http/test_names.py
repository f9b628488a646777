"""Names of the wire's fields over HTTP."""

from __future__ import annotations

from google.protobuf.message import Message
from support.wire import leaves

from loraplex_proto.v1 import inference_pb2, pooling_pb2
from loraplex_router.http.grammars import GRAMMAR_FIELDS
from loraplex_router.http.names import field_name
from loraplex_router.http.openai.fields import ChatCompletionRequest, CompletionRequest
from loraplex_router.http.pooling.fields import ClassifyBody, EmbeddingsRequest, RerankBody, ScoreBody

OPENAI = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, *GRAMMAR_FIELDS}
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
            assert name.removeprefix("speculation.") == name.rpartition(".")[2], path
            assert name.startswith("speculation.") or name in {*names, "input", "query"}, (kind, path, name)
